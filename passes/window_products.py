"""A product over the windows of a sequence or an image reads the windows in place.

A dynamic convolution (Wu et al., 2019; ConvBERT: Jiang et al., 2020) multiplies the positions under a window by weights that are
computed for each position. Exporters write the windows as an im2col: Gathers with overlapping indices, views, and a product of
each window with a vector. All operators before the product are views if the axes have the order in memory that the product needs.
So this pass transposes the tensor first, and takes the windows from the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, producer, reshaped, shape_of
from optdnn.types import Array, normalize_axis

MOST_TERMS = 64
"""Most terms of a window's product: with more terms, tensor cores on copied windows are faster."""
MOST_ELEMENTS = 1 << 22
"""Most elements of all windows: the pass computes the position of each."""
MOST_LOOPS = 8
"""Most axes of the windows."""


@dataclass(frozen=True)
class Loop:
    """``count`` positions along ``axis`` of a tensor, ``step`` apart."""

    count: int
    step: int
    axis: int


@rule("product_of_windows", {"MatMul"})
def product_of_windows(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``windows(x) @ v`` reads the windows of a transposed ``x``, from which they are views."""
    left, right = (shape_of(graph, v) for v in op.inputs[:2])
    if left is None or right is None or len(right) < 2 or right[-1] != 1 or not isinstance(left[-1], int):
        return None
    chain = _chain(graph, operand(op))
    if chain is None:
        return None
    source, ops = chain
    if left[-1] > MOST_TERMS:
        return Miss(f"its windows have {left[-1]} positions, more than {MOST_TERMS}")
    shape = graph.type(operand(op)).static_shape
    if context.counted(math.prod(shape)) > MOST_ELEMENTS:
        return Miss(f"its windows have more than {MOST_ELEMENTS} elements")
    if any(len(graph.uses(x.value)) > 1 for x in ops):
        return Miss("its windows have other readers")
    before = graph.type(source).static_shape
    loops = _loops(_positions(graph, source, ops), before)
    if loops is None:
        return Miss("its windows do not begin at equal distances")
    order = tuple(dict.fromkeys(loop.axis for loop in loops))
    perm = (*(a for a in range(len(before)) if a not in order), *order)
    if any(before[a] != 1 for a in perm[: len(perm) - len(order)]):
        return Miss("its windows leave positions out")
    if perm == tuple(range(len(before))) or (ops[-1].kind == "Transpose" and ops[-1].attrs.perm == perm):
        return None  # the axes have this order already

    def build(patch: Patch) -> Value:
        windows = _taken(patch, _transposed(graph, patch, source, perm), order, loops, before)
        return patch.add("MatMul", [reshaped(patch, windows, shape), *op.inputs[1:]], op.attrs)

    pad = producer(graph, source, {"Pad"}, alone=True)
    return Match((op, *ops, *([] if pad is None else [pad])), build)


def _chain(graph: Graph, value: Value) -> tuple[Value, list[Op]] | None:
    """The tensor with overlapping windows, and the operators that take the windows, last one first; None without windows."""
    ops: list[Op] = []
    while True:
        op = graph.op(value)
        index = graph.constant_value(op.inputs[1]) if op.kind == "Gather" else None
        if not (op.kind in RESHAPES | {"Transpose"} or index is not None) or not graph.type(operand(op)).is_static:
            break
        ops.append(op)
        value = operand(op)
    overlapping = any(x.kind == "Gather" and graph.type(operand(x, 1)).rank == 2 for x in ops)
    return (value, ops) if overlapping and graph.type(value).is_static else None


def _positions(graph: Graph, source: Value, ops: Sequence[Op]) -> Array:
    """For each element of the windows, its position in the flattened tensor."""
    shape = graph.type(source).static_shape
    at = np.arange(math.prod(shape)).reshape(shape)
    for op in reversed(ops):
        if op.kind == "Transpose":
            at = at.transpose(op.attrs.perm)
        elif op.kind == "Gather":
            index = graph.constant_value(operand(op, 1))
            assert index is not None
            at = at.take(index, normalize_axis(op.attrs.axis, at.ndim))
        else:
            at = at.reshape(op.outputs[0].type.static_shape)
    return at.reshape(-1)


def _loops(positions: Array, shape: Sequence[int]) -> list[Loop] | None:
    """Positions in a tensor of this shape as nested loops from its first element, outermost loop first; None if they are not."""
    if positions[0] != 0:
        return None
    found: list[tuple[int, int]] = []  # innermost loop first
    rest = positions
    while rest.size > 1:
        step = int(rest[1] - rest[0])
        ends = np.flatnonzero(np.diff(rest) != step)
        count = rest.size if not ends.size else int(ends[0]) + 1
        if step <= 0 or rest.size % count or len(found) == MOST_LOOPS:
            return None
        table = rest.reshape(-1, count)
        if (table != table[:, :1] + step * np.arange(count)).any():
            return None
        found.append((count, step))
        rest = table[:, 0]
    strides = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
    loops: list[Loop] = []
    for count, step in found:
        while count > 1:
            axis = next(a for a in range(len(shape)) if strides[a] <= step and shape[a] > 1)
            inside = min(count, shape[axis] * strides[axis] // step)  # the loop continues along the axis before
            if step % strides[axis] or inside < 2 or count % inside:
                return None
            loops.insert(0, Loop(inside, step // strides[axis], axis))
            count, step = count // inside, step * inside
    reach = [1 + sum((k.count - 1) * k.step for k in loops if k.axis == a) for a in range(len(shape))]
    return loops if all(r <= n for r, n in zip(reach, shape, strict=True)) else None


def _transposed(graph: Graph, patch: Patch, source: Value, perm: tuple[int, ...]) -> Value:
    """The tensor with its axes in another order. If a Pad computes the tensor, the operand of the Pad is transposed instead."""
    pad = producer(graph, source, {"Pad"}, alone=True)
    pads = None if pad is None or pad.input(3) is not None else ints(graph, pad.input(1))
    if pad is None or pads is None:
        return patch.add("Transpose", [source], TransposeAttrs(perm))
    rank = len(perm)
    around = integers(patch, [pads[p + end] for end in (0, rank) for p in perm], "pads")
    return patch.add(
        "Pad", [patch.add("Transpose", [operand(pad)], TransposeAttrs(perm)), around, *pad.inputs[2:]], pad.attrs
    )


def _taken(patch: Patch, x: Value, order: Sequence[int], loops: Sequence[Loop], shape: Sequence[int]) -> Value:
    """The windows of the transposed tensor ``x``, with one axis per loop, in the order of the loops."""
    x = reshaped(patch, x, tuple(shape[a] for a in order))
    axes: list[int] = []
    for axis in order:
        along = [n for n, k in enumerate(loops) if k.axis == axis]
        positions = np.indices([loops[n].count for n in along])
        index = np.asarray(
            sum(loops[n].step * position for n, position in zip(along, positions, strict=True)), np.int64
        )
        x = patch.add("Gather", [x, patch.constant(index, "places")], GatherAttrs(axis=len(axes)))
        axes += along
    return patch.add("Transpose", [x], TransposeAttrs(tuple(axes.index(n) for n in range(len(loops)))))


class WindowProducts(RulePass):
    name = "window_products"
    rules = (product_of_windows,)
