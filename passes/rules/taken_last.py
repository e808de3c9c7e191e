"""Kept boxes are taken last: ``f(x[i])`` becomes ``f(x)[i]``, where ``i`` are the boxes that a suppression keeps.

Detectors scale these boxes to the size of the picture. That takes a dozen small operators, and their number of rows depends on
data. If all boxes are scaled, only one Gather depends on data.
"""

from __future__ import annotations

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import VIEWS, operand
from optdnn.passes.support.rows import RowOp, Rows, by_number, copy_of, elements_with, row_op
from optdnn.passes.support.selected_rows import count_of
from optdnn.types import normalize_axis

MOST_ELEMENTS = 1 << 20
"""Most elements of a result for all rows: computing more of them takes longer than a few rows on the CPU."""
_CHEAP = frozenset({"Concat", "Expand", "Slice", "Split", *VIEWS})
"""Kinds that are computed for all rows, besides pointwise ones."""


@rule("taken_last", ())
def taken_last(graph: Graph, op: Op) -> Match | None:
    """The last pointwise operator or view of taken rows."""
    count = None if op.outputs[0].type.is_static else count_of(graph, op.value)
    if count is None or len(op.outputs) > 1 or _is_leaf(graph, op, count):
        return None
    readers = [u for u in graph.users(op.value) if u.kind != "Shape"]
    if all(u.kind != "Output" and row_op(graph, u, count) is not None for u in readers):
        return None
    found = _region(graph, op, count)
    if found is None:
        return None
    inside, leaves = found
    index, rows = operand(leaves[0], 1), _rows_of(graph, leaves[0])
    if any(operand(leaf, 1) != index or _rows_of(graph, leaf) != rows for leaf in leaves):
        return None
    if not isinstance(rows, int) or not _is_kept(graph, index):
        return None
    out = inside[-1].result_rows[0]
    if out is None or out.per != 1 or any(elements_with(r.op, r.result_rows, rows) > MOST_ELEMENTS for r in inside):
        return None

    def build(patch: Patch, out: Rows = out) -> Value:
        new = {leaf.value: operand(leaf) for leaf in leaves}
        for r in inside:
            made = copy_of(patch, r, new, rows)
            new.update({Value(r.op.id, i): Value(made.id, i) for i in range(len(made.outputs))})
        return patch.add("Gather", [new[op.value], index], type(leaves[0].attrs)(out.axis))

    return Match((op, *(r.op for r in inside[:-1]), *leaves), build)


def _region(graph: Graph, end: Op, count: DimLike) -> tuple[list[RowOp], list[Op]] | None:
    """The operators from Gathers of rows to ``end``, in order, and these Gathers; None if another operator is among them."""
    inside: dict[int, RowOp] = {}
    leaves: dict[int, Op] = {}
    left = [end]
    while left:
        op = left.pop()
        if op.id in inside or op.id in leaves:
            continue
        if _is_leaf(graph, op, count):
            leaves[op.id] = op
            continue
        found = row_op(graph, op, count) if op.pointwise or op.kind in _CHEAP else None
        if found is None or by_number(found):
            return None
        inside[op.id] = found
        given = [v for v, rows in zip(op.inputs, found.operand_rows, strict=True) if v is not None and rows is None]
        if op.kind != "Expand" and not all(graph.type(v).is_static for v in given):
            return None
        left += [graph.op(operand(op, i)) for i, rows in enumerate(found.operand_rows) if rows is not None]
    if not leaves:
        return None
    return [inside[op.id] for op in graph.order() if op.id in inside], [leaves[i] for i in sorted(leaves)]


def _is_kept(graph: Graph, index: Value) -> bool:
    """Whether an index is a part of a suppression's result."""
    op = graph.op(index)
    while op.kind in ("Gather", "Slice", *VIEWS):
        op = graph.op(operand(op))
    return op.kind == "NonMaxSuppression"


def _is_leaf(graph: Graph, op: Op, count: DimLike) -> bool:
    """Whether an operator takes ``count`` rows of a tensor of known sizes."""
    return op.kind == "Gather" and graph.type(operand(op)).is_static and graph.type(operand(op, 1)).dims == (count,)


def _rows_of(graph: Graph, leaf: Op) -> DimLike:
    """The number of rows from which a Gather takes some."""
    dims = graph.type(operand(leaf)).dims
    return dims[normalize_axis(leaf.attrs.axis, len(dims))]
