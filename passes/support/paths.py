"""Paths of operators, each of which reads the result of the one before as its operand 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import RESHAPES, operand

Members = Collection[str] | Callable[[Op], bool]
"""Which operators a path may have: their kinds, or a function that is True for them."""


def path_to(graph: Graph, value: Value, of: Members, *, alone: bool = False, most: int | None = None) -> list[Op]:
    """The longest path that ends in ``value``, its last operator first. ``alone``: each result has one reader. ``most``: the
    greatest number of operators."""
    path = list[Op]()
    while len(path) != most and _is_in(of, op := graph.op(value)) and (not alone or graph.sole_user(value) is not None):
        path.append(op)
        value = operand(op)
    return path


def reshapes_before(graph: Graph, value: Value) -> list[Op]:
    """The Reshapes that end in ``value``, the last one first, and the operator before them."""
    path = path_to(graph, value, RESHAPES)
    return [*path, graph.op(operand(path[-1]) if path else value)]


def path_from(graph: Graph, value: Value, of: Members) -> list[Op]:
    """The longest path that begins with the only reader of ``value``, its first operator first. Each has one reader."""
    path = list[Op]()
    while (op := graph.sole_user(value)) is not None and op.inputs[0] == value and _is_in(of, op):
        path.append(op)
        value = op.value
    return path


def value_before(graph: Graph, value: Value, of: Members, *, alone: bool = False) -> Value:
    """The value that the longest path to ``value`` reads: ``value`` itself if there is no path."""
    path = path_to(graph, value, of, alone=alone)
    return operand(path[-1]) if path else value


def reader_after(graph: Graph, value: Value, of: Members) -> Op | None:
    """The only reader of ``value``, or of the result of the longest path from it."""
    path = path_from(graph, value, of)
    return graph.sole_user(path[-1].value if path else value)


def repeated(patch: Patch, x: Value, path: Sequence[Op]) -> Value:
    """Add the operators of a path once more, its first one last, on ``x``."""
    for op in reversed(path):
        x = patch.add(op.kind, [x, *op.inputs[1:]], op.attrs, src=op.src)
    return x


def _is_in(of: Members, op: Op) -> bool:
    return of(op) if callable(of) else op.kind in of
