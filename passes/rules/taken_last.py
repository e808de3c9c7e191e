"""Rows are taken last: ``f(x[i])`` is ``f(x)[i]``, where ``i`` are the boxes that a suppression keeps, or the first ``n`` rows.

Detectors scale these boxes to the size of the picture. That takes a dozen small operators, and their number of rows depends on
data. If all boxes are scaled, only one Gather or Slice depends on data.
"""

from __future__ import annotations

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import VIEWS, integers, operand
from optdnn.passes.support.rows import RowOp, by_number, copy_of, elements_with, row_op
from optdnn.passes.support.selected_rows import count_of, first_rows, reads_elsewhere
from optdnn.types import normalize_axis

MOST_ELEMENTS = 1 << 20
"""Most elements of a result for all rows: computing more of them takes longer than a few rows on the CPU."""
_CHEAP = frozenset({"Concat", "Expand", "Gather", "Slice", "Split", *VIEWS})
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
    taken = {_taken(graph, leaf) for leaf in leaves}
    out = inside[-1].result_rows[0]
    if len(taken) > 1 or out is None or out.per != 1:
        return None
    ((rows, index),) = taken
    if not isinstance(rows, int) or any(elements_with(r.op, r.result_rows, rows) > MOST_ELEMENTS for r in inside):
        return None
    if _steps(inside) + sum(_is_alone(graph, leaf, inside) for leaf in leaves) < 2:
        return None  # the Gather of the result is a step, too
    axis = out.axis

    def build(patch: Patch) -> Value:
        new = {leaf.value: operand(leaf) for leaf in leaves}
        for r in inside:
            made = copy_of(patch, r, new, rows)
            new.update({Value(r.op.id, i): Value(made.id, i) for i in range(len(made.outputs))})
        if leaves[0].kind == "Gather":
            return patch.add("Gather", [new[op.value], index], GatherAttrs(axis))
        return patch.add(
            "Slice", [new[op.value], integers(patch, [0], "start"), index, integers(patch, [axis], "axis")]
        )

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
        if found is None or by_number(found) or reads_elsewhere(found):
            return None
        inside[op.id] = found
        given = [v for v, rows in zip(op.inputs, found.operand_rows, strict=True) if v is not None and rows is None]
        if op.kind != "Expand" and not all(graph.type(v).is_static for v in given):
            return None
        left += [graph.op(operand(op, i)) for i, rows in enumerate(found.operand_rows) if rows is not None]
    if not leaves:
        return None
    return [inside[op.id] for op in graph.order() if op.id in inside], [leaves[i] for i in sorted(leaves)]


def _steps(inside: list[RowOp]) -> int:
    """The number of steps of these operators on the CPU: neighboring pointwise operators are one."""
    return sum(not r.op.pointwise for r in inside) + any(r.op.pointwise for r in inside)


def _is_alone(graph: Graph, leaf: Op, inside: list[RowOp]) -> bool:
    """Whether these operators are the only readers of a Gather."""
    ids = {r.op.id for r in inside}
    return all(user.id in ids or user.kind == "Shape" for user in graph.users(leaf.value))


def _is_kept(graph: Graph, index: Value) -> bool:
    """Whether an index is a part of a suppression's result."""
    op = graph.op(index)
    while op.kind in ("Gather", "Slice", *VIEWS):
        op = graph.op(operand(op))
    return op.kind == "NonMaxSuppression"


def _is_leaf(graph: Graph, op: Op, count: DimLike) -> bool:
    """Whether an operator takes ``count`` rows of a tensor of known sizes."""
    if op.kind == "Slice":
        part = first_rows(graph, op)
        return part is not None and part.per == 1 and part.first == count
    if op.kind != "Gather" or not graph.type(operand(op)).is_static:
        return False
    return graph.type(operand(op, 1)).dims == (count,) and _is_kept(graph, operand(op, 1))


def _taken(graph: Graph, leaf: Op) -> tuple[DimLike, Value]:
    """The number of rows from which ``leaf`` takes some, and their indices or their number."""
    dims = graph.type(operand(leaf)).dims
    if leaf.kind == "Gather":
        return dims[normalize_axis(leaf.attrs.axis, len(dims))], operand(leaf, 1)
    part = first_rows(graph, leaf)
    assert part is not None
    return part.rows, operand(leaf, 2)
