"""The terms of a sum of tensors of one shape, which exporters write as a tree of additions."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.facts import producer
from optdnn.types import Shape


def sum_terms(graph: Graph, op: Op) -> tuple[list[Op], list[Value]] | None:
    """The additions of a sum, its last one (``op``) first, and its terms in order. None if ``op`` is no such addition, or is a
    part of a larger sum."""
    shape = op.outputs[0].type.shape
    if shape is None or not _adds(graph, op, shape):
        return None
    user = graph.sole_user(op.value)
    return None if user is not None and _adds(graph, user, shape) else _tree(graph, op, shape)


def _adds(graph: Graph, op: Op, shape: Shape) -> bool:
    """Whether ``op`` adds two different tensors of this shape and neither repeats."""
    values = [v for v in op.inputs if v is not None and graph.type(v).shape == shape]
    return op.kind == "Add" and len(set(values)) == 2 and all(graph.constant_value(v) is None for v in values)


def _inner(graph: Graph, value: Value, shape: Shape) -> Op | None:
    """The sum that computes a term, if only the sum around it reads it."""
    op = producer(graph, value, {"Add"}, alone=True)
    return op if op is not None and _adds(graph, op, shape) else None


def _tree(graph: Graph, op: Op, shape: Shape) -> tuple[list[Op], list[Value]]:
    """The additions of a sum, its own first, and its terms in order. A sum may have thousands of terms."""
    sums, terms, left = [op], list[Value](), [v for v in reversed(op.inputs) if v is not None]
    while left:
        value = left.pop()
        inner = _inner(graph, value, shape)
        if inner is None:
            terms.append(value)
        else:
            sums.append(inner)
            left += [v for v in reversed(inner.inputs) if v is not None]
    return sums, terms
