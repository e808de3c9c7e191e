"""Rows that each select a matrix are multiplied with all matrices, and each row keeps the result of its matrix.

A mixture of experts is exported as ``weights[expert of each row] @ row``: the matrix of its expert is copied for each row, and
each row is a product by itself. GPUs have kernels that read the matrices in place. They take rows that are repeated for each of
their experts once: ``W[experts (T, times)] @ x (T, 1, K, 1)``.

Without these kernels, and if there are no more matrices than rows, the product of all rows with all matrices is faster: it reads
each weight once, and a gather picks the results.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, reshaped, shape_of
from optdnn.passes.support.selected_matrices import Selection, read_in_place, selection

MOST = 128
"""Most matrices for which one product with all of them is faster than a copy of one per row. The arithmetic grows with their
number, the copies do not. Copying an element takes as long as some 500 multiplications."""
SHORT = 1 << 27
"""Multiply-adds of a product with all matrices that takes no longer than its launch. Kernels that read matrices in place first
collect the rows of each matrix (H200: 7.4 us, where the product and the gather take 5.7)."""


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
    once, times, between = _repeated(graph, rows, size)
    short = many <= count and context.counted(count // times * many * width * size) <= SHORT
    if read_in_place(graph, found, context) and not short:
        if times == 1:
            return Miss("one launch reads the matrices of all rows in place")
        return Match((op, pick, *between), partial(_read_once, found=found, count=count, once=once, times=times))
    if context.counted(count) < many:
        return Miss(f"there are more matrices ({many}) than rows ({count})")
    if many > min(MOST, size):
        return Miss(f"products of each row with all {many} matrices would take longer than copying one matrix per row")
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


def _read_once(patch: Patch, found: Selection, count: int, once: Value, times: int) -> Value:
    """Add the product of rows that select ``times`` matrices each."""
    size, width, axis = found.size, found.width, found.slot - 2
    experts = reshaped(patch, operand(found.pick, 1), (count // times, times))
    own = patch.add("Gather", [operand(found.pick), experts], GatherAttrs(0))
    rows = reshaped(patch, once, (count // times, 1, *((size, 1) if axis == -2 else (1, size))))
    made = patch.add("MatMul", [own, rows] if axis == -2 else [rows, own], MatMulAttrs())
    return reshaped(patch, made, (count, width, 1) if axis == -2 else (count, 1, width))


def _repeated(graph: Graph, rows: Value, size: int) -> tuple[Value, int, tuple[Op, ...]]:
    """The rows of ``size`` elements without repetitions, how often each occurs consecutively, and those ops that repeat them for
    this product alone."""
    value, between, alone = rows, list[Op](), True
    while (op := producer(graph, value, RESHAPES | {"Expand"})) is not None:
        alone = alone and graph.sole_user(value) is not None
        between += [op] if alone else []
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
