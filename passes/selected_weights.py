"""Rows that each select a matrix are multiplied with all matrices, and each row keeps the result of its matrix.

A mixture of experts is exported as ``weights[expert of each row] @ row``: the matrix of its expert is copied for each row, and
each row is a product by itself. If there are no more matrices than rows, the product of all rows with all matrices is faster: it
reads each weight once and runs on tensor cores, and a gather picks the results. Rows that are repeated for each of their experts
are multiplied once.

At 16 bits, GPUs have a kernel that reads the matrix of each row in place. It is faster as long as the matrices of all rows are read
in less time than the gather's launch takes.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherNDAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.support.facts import RESHAPES, operand, producer, reshaped, shape_of
from optdnn.passes.support.selected_matrices import read_in_place, selection

MOST = 128
"""Most matrices for which one product with all of them is faster than a copy of one per row. The arithmetic grows with their
number, the copies do not. Copying an element takes as long as some 500 multiplications."""


@rule("selected_weights", {"MatMul"})
def selected_weights(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``W[index of row] @ row`` or ``row @ W[index of row]``, with a constant stack of matrices W: a product and a GatherND."""
    found = selection(graph, op)
    if found is None or len(op.inputs) != 2 or op.attrs.prologue or op.attrs.epilogue:
        return None
    slot, pick, many, count = found.slot, found.pick, found.many, found.rows
    width, size, rows = found.width, found.size, operand(op, 1 - found.slot)
    if not isinstance(count, int):
        return Miss("the number of rows is not known")
    if context.counted(count) < many:
        return Miss(f"there are more matrices ({many}) than rows ({count})")
    if many > min(MOST, size):
        return Miss(f"products of each row with all {many} matrices would take longer than copying one matrix per row")
    if read_in_place(found, context) and context.counted(2 * count * width * size) <= LAUNCH_BYTES:
        return Miss("one launch reads the matrices of all rows in place")
    once, times, between = _repeated(graph, rows, size)
    different = count // times

    def build(patch: Patch) -> Value:
        perm = (2, 0, 1) if slot == 0 else (1, 0, 2)
        stack = patch.add("Transpose", [operand(pick)], TransposeAttrs(perm))
        line = reshaped(patch, stack, (size, many * width))
        products = patch.add("MatMul", [reshaped(patch, once, (different, size)), line], MatMulAttrs())
        index = reshaped(patch, operand(pick, 1), (different, times, 1))
        own = patch.add("GatherND", [reshaped(patch, products, (different, many, width)), index], GatherNDAttrs(1))
        return reshaped(patch, own, (count, width, 1) if slot == 0 else (count, 1, width))

    return Match((op, pick, *between), build)


def _repeated(graph: Graph, rows: Value, size: int) -> tuple[Value, int, tuple[Op, ...]]:
    """The rows of ``size`` elements without repetitions, how often each occurs consecutively, and the ops that repeat them."""
    value, between = rows, list[Op]()
    while (op := producer(graph, value, RESHAPES | {"Expand"}, alone=True)) is not None:
        between.append(op)
        before, after, value = shape_of(graph, operand(op)), shape_of(graph, value), operand(op)
        if op.kind == "Expand":
            times = after[1] if after is not None and len(after) == 3 else None
            if before is None or after is None or not isinstance(times, int) or before != (after[0], 1, size):
                break
            return value, times, tuple(between)
    return rows, 1, ()


class SelectedWeights(RulePass):
    name = "selected_weights"
    rules = (selected_weights,)
