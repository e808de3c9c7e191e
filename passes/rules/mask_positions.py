"""Assignments by a mask, as PyTorch's exporters write them: the number of the mask's positions is one symbol.

The exporters write ``y[mask] = f(x[mask])`` with NonZero. They repeat the mask along the last axes of ``y``. The exporter of
TorchScript cuts the values to the number of positions; that of torch.export expands them to the sum of the mask.
"""

from __future__ import annotations

from collections.abc import Iterator

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import ShapeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, ints, operand, producer, same_shape
from optdnn.types import BOOL, INT64, product


@rule("positions_count", {"NonZero"})
def positions_count(graph: Graph, op: Op) -> Match | Miss | None:
    """The sum of a mask, to which values are expanded, is the number of the mask's positions."""
    if graph.type(operand(op)).dtype != BOOL:
        return None
    for total in _sums(graph, operand(op)):

        def build(patch: Patch, total: Op = total) -> Value:
            return in_shape(patch, patch.add("Shape", [op.value], ShapeAttrs(1)), total.outputs[0].type.dims)

        return Match((total,), build)
    return None


@rule("expand_to_positions", {"Expand"})
def expand_to_positions(graph: Graph, op: Op) -> Match | Miss | None:
    """An Expand to the number of positions that its operand has. It is known to do nothing when :func:`positions_count` has run."""
    return (
        Match((op,), lambda patch: operand(op)) if same_shape(graph, op) and not op.outputs[0].type.is_static else None
    )


def _sums(graph: Graph, mask: Value) -> Iterator[Op]:
    """The sums over all elements of a mask, as integers, that only give the shape of an Expand."""
    left = [*graph.users(mask)]
    while left:
        op = left.pop()
        if op.kind in RESHAPES or (op.kind == "Cast" and op.attrs.to == INT64):
            left += graph.users(op.value)
        elif op.kind == "ReduceSum" and product(op.outputs[0].type.dims) == 1 and _is_size(graph, op.value):
            yield op


def _is_size(graph: Graph, value: Value) -> bool:
    """Whether a value only gives the shape of an Expand, alone or as a part."""
    return all(
        (u.kind == "Expand" and u.input(0) != value) or (u.kind in ("Concat", *RESHAPES) and _is_size(graph, u.value))
        for u in graph.users(value)
    )


def unrepeated(graph: Graph, mask: Value) -> Value:
    """The mask without an Expand that repeats it along its last axes, and without these axes."""
    expand = producer(graph, mask, {"Expand"})
    if expand is None:
        return mask
    dims, own = graph.type(mask).dims, graph.type(operand(expand)).dims
    view = producer(graph, operand(expand), RESHAPES)
    if view is None or len(own) != len(dims):
        return mask
    kept = graph.type(operand(view)).dims
    ones = (1,) * (len(dims) - len(kept))
    return operand(view) if own == (*kept, *ones) and dims[: len(kept)] == kept else mask


def uncut(graph: Graph, updates: Value) -> Value:
    """The rows that a ScatterND writes, without a Slice or Expand to their number: it needs exactly as many rows as positions."""
    op = producer(graph, updates, {"Slice", "Expand"})
    if op is None:
        return updates
    dims, own = graph.type(updates).dims, graph.type(operand(op)).dims
    if op.kind == "Expand":
        aligned = own[-len(dims) :] if len(own) >= len(dims) else (1,) * (len(dims) - len(own)) + own
        return operand(op) if aligned[1:] == dims[1:] or all(d == 1 for d in own) else updates
    steps = op.input(4)
    first = ints(graph, op.input(1)) == (0,) and ints(graph, op.input(3)) == (0,)
    return operand(op) if first and (steps is None or ints(graph, steps) == (1,)) else updates
