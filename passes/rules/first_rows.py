"""The first rows of a tensor: the end of the Slice is their number, and a Pad that fills them up is a selection."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import operand
from optdnn.passes.support.filled_rows import filled_up, fills_up
from optdnn.passes.support.rows import Rows
from optdnn.passes.support.selected_rows import first_rows
from optdnn.types import normalize_axis


@rule("first_rows_count", {"Shape"})
def first_rows_count(graph: Graph, op: Op) -> Match | None:
    """The number of the first rows."""
    cut = graph.op(operand(op))
    part, rank = first_rows(graph, cut), len(graph.type(cut.value).dims)
    if part is None or part.per != 1:
        return None
    begin = normalize_axis(op.attrs.start, rank)
    end = rank if op.attrs.end is None else min(op.attrs.end + rank * (op.attrs.end < 0), rank)
    if (begin, end) != (_axis(graph, cut), _axis(graph, cut) + 1):
        return None
    return Match((op,), lambda patch: operand(cut, 2))


@rule("first_rows_filled", {"Pad"})
def first_rows_filled(graph: Graph, op: Op) -> Match | None:
    """A Pad of the first rows up to a known number."""
    cut = graph.op(operand(op))
    if first_rows(graph, cut) is None or not fills_up(graph, op):
        return None

    def build(patch: Patch) -> Value:
        return filled_up(patch, op, operand(cut), operand(cut, 2), Rows(_axis(graph, cut), 1))

    return Match((op, cut), build)


def _axis(graph: Graph, cut: Op) -> int:
    """The axis along which a tensor has more elements than its first rows."""
    whole, taken = graph.type(operand(cut)).dims, graph.type(cut.value).dims
    return next(k for k, (a, b) in enumerate(zip(whole, taken, strict=True)) if a != b)
