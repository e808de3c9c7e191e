"""Reductions over the axis of stacked tensors become arithmetic of these tensors, so that no stack is written.

Selective kernels (Li et al., 2019) stack the results of several convolutions. They sum over the new axis twice: without weights,
and with the weights of a softmax over this axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.unary import IsInfAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import (
    in_shape,
    ints,
    operand,
    producer,
    reshape_target,
    shape_of,
    sizes_of,
    split_along,
)
from optdnn.types import Shape, is_float, normalize_axis, show_shape

JOINED_BY = {
    "ReduceLogSumExp": "Add",
    "ReduceMax": "Max",
    "ReduceMean": "Add",
    "ReduceMin": "Min",
    "ReduceProd": "Mul",
    "ReduceSum": "Add",
}
"""Reduction -> the operator that combines two tensors (ReduceLogSumExp: their exponentials)."""
SUMS = frozenset({"ReduceSum", "ReduceMean"})
MOST_ELEMENTS = 1 << 20
"""Most elements of a tensor that is written and read again in less time than a launch takes."""
MOST_PARTS = 8
"""Most tensors of a stack. For more, one kernel of a reduction is better than a long chain of operators."""


@rule("reduced_stack", frozenset(JOINED_BY))
def reduced_stack(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``sum(stack(a, b))`` becomes ``a + b``, and ``sum(stack(a, b) * w)`` becomes ``a * w[0] + b * w[1]``.

    The same holds for means, products, maxima and minima, and on GPUs for ReduceLogSumExp: the recursions of CTC (Graves et al.,
    2006) and of soft dynamic time warping (Cuturi and Blondel, 2017) stack two or three neighbors in each step."""
    scaled = producer(graph, op.inputs[0], {"Mul"}, alone=True)
    sources = op.inputs[:1] if scaled is None else scaled.inputs
    stack, negated = _stack(graph, sources)
    axes, before, after = ints(graph, op.input(1)), shape_of(graph, op.inputs[0]), op.outputs[0].type.shape
    if stack is None or before is None or after is None or axes is None or len(axes) != 1:
        return None
    axis = normalize_axis(axes[0], len(before)) - len(before)  # counted from the end, as in broadcasting
    parts = [operand(stack, i) for i in range(len(stack.inputs))]
    rank = len(stack.outputs[0].type.dims)
    if normalize_axis(stack.attrs.axis, rank) - rank != axis or any(graph.type(p).dims[axis] != 1 for p in parts):
        return None
    held = stack.value if negated is None else negated.value
    weights = None if scaled is None else next((v for v in scaled.inputs if v != held), held)
    whole = _without(before, axis)
    moves = [(own, _without(own, axis)) for v in (*parts, weights) if (own := shape_of(graph, v)) is not None]
    if len(parts) > MOST_PARTS:
        return Miss(f"{len(parts)} tensors are stacked")
    if (why := _unlike(op, context)) is not None:
        return Miss(why)
    if weights is not None and not _fits(graph, weights, axis, len(parts)):
        return Miss("the factor of the stack is neither one tensor nor one tensor for each part")
    if any(reshape_target(*move) is None for move in (*moves, (whole, after))):
        return Miss("no constant target can express a shape without the axis")

    def build(patch: Patch) -> Value:
        terms = [_squeezed(patch, p, axis) for p in parts]
        terms = terms if negated is None else [patch.add("Neg", [t]) for t in terms]
        if weights is not None:
            own = _weights(patch, weights, axis, len(parts))
            terms = [patch.add("Mul", [t, w]) for t, w in zip(terms, own, strict=True)]
        y = _reduced(patch, op, terms)
        return y if whole == after else in_shape(patch, y, after)

    return Match((op, *(o for o in (scaled, negated) if o is not None)), build)


@rule("product_of_stack", {"MatMul"})
def product_of_stack(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``stack(a, b) @ w`` becomes ``a * w[0] + b * w[1]`` on GPUs, if each part is one column. So does ``w @ stack(a, b)`` with
    rows.

    Mixtures of experts weigh the stacked results of few experts (MMoE: Ma et al., 2018; DCN-v2: Wang et al., 2021)."""
    if not context.on_gpu or len(op.inputs) != 2 or op.attrs.prologue or op.attrs.epilogue:
        return None
    found = next(((s, c) for s in (0, 1) if (c := producer(graph, op.inputs[s], {"Concat"})) is not None), None)
    if found is None:
        return None
    slot, stack = found
    axis, weights = -1 - slot, operand(op, 1 - slot)
    parts, own = [operand(stack, k) for k in range(len(stack.inputs))], shape_of(graph, weights)
    rank = len(stack.outputs[0].type.dims)
    if own is None or len(own) < 2 or rank < 2 or normalize_axis(stack.attrs.axis, rank) - rank != axis:
        return None
    if own[axis] != 1 or any(graph.type(part).dims[axis] != 1 for part in parts):
        return None
    if len(parts) > MOST_PARTS:
        return Miss(f"{len(parts)} tensors are stacked")
    if any(user.kind != "MatMul" or user.inputs[slot] != stack.value for user in graph.users(stack.value)):
        return Miss(f"{stack.name} has other readers, and is written in any case")

    def build(patch: Patch) -> Value:
        factors = split_along(patch, weights, len(own) - 2 + slot, [1] * len(parts))
        terms = [patch.add("Mul", [part, factor]) for part, factor in zip(parts, factors, strict=True)]
        return reduce(lambda a, b: patch.add("Add", [a, b]), terms)

    return Match((op,), build)


def _stack(graph: Graph, sources: Sequence[Value | None]) -> tuple[Op | None, Op | None]:
    """The Concat that computes one of the values, and the Neg between both, if there is one."""
    if (stack := next((s for v in sources if (s := producer(graph, v, {"Concat"})) is not None), None)) is not None:
        return stack, None
    negated = next((n for v in sources if (n := producer(graph, v, {"Neg"}, alone=True)) is not None), None)
    return (None, None) if negated is None else (producer(graph, negated.inputs[0], {"Concat"}), negated)


def _unlike(op: Op, context: PassContext) -> str | None:
    """Why arithmetic of the parts would not be this reduction, or not be faster; None if it is."""
    if op.kind == "ReduceMean" and not is_float(op.outputs[0].type.dtype):
        return "a mean of integers is rounded"
    if op.kind == "ReduceLogSumExp" and not is_float(op.outputs[0].type.dtype):
        return "integers have no exponential of their own type"
    if op.kind == "ReduceLogSumExp" and not context.on_gpu:
        return "only on GPUs do all of its terms stay in registers"
    return None


def _reduced(patch: Patch, op: Op, terms: list[Value]) -> Value:
    """The reduction of the terms, which have the shape of its result without the axis."""

    def joined(values: list[Value]) -> Value:
        return reduce(lambda a, b: patch.add(JOINED_BY[op.kind], [a, b]), values)

    dtype = op.outputs[0].type.dtype
    if op.kind == "ReduceMean":
        return patch.add("Mul", [joined(terms), patch.constant(np.asarray(1 / len(terms), dtype), "share")])
    if op.kind != "ReduceLogSumExp":
        return joined(terms)
    top = reduce(lambda a, b: patch.add("Max", [a, b]), terms)
    infinite, zero = patch.add("IsInf", [top], IsInfAttrs()), patch.constant(np.asarray(0, dtype), "zero")
    top = patch.add("Where", [infinite, zero, top])  # the difference of two infinities is not a number
    total = joined([patch.add("Exp", [patch.add("Sub", [t, top])]) for t in terms])
    return patch.add("Add", [patch.add("Log", [total]), top])


def _fits(graph: Graph, weights: Value, axis: int, count: int) -> bool:
    """Whether a factor of a stack of ``count`` parts has 1 or ``count`` elements along the stack's axis, or lacks this axis."""
    shape = shape_of(graph, weights)
    return shape is not None and (-axis > len(shape) or shape[axis] in (1, count))


def _without(shape: Shape, axis: int) -> Shape:
    """``shape`` without ``axis``, which is counted from the end."""
    return tuple(n for i, n in enumerate(shape) if i - len(shape) != axis)


def _squeezed(patch: Patch, value: Value, axis: int) -> Value:
    return in_shape(patch, value, _without(patch.type(value).dims, axis))


def _weights(patch: Patch, weights: Value, axis: int, count: int) -> list[Value]:
    """The factor of each of ``count`` parts, without the axis of the stack."""
    shape = patch.type(weights).dims
    if -axis > len(shape):
        return [weights] * count
    if shape[axis] == 1:
        return [_squeezed(patch, weights, axis)] * count
    return [_squeezed(patch, part, axis) for part in split_along(patch, weights, axis % len(shape), [1] * count)]


@rule("sum_of_sums", {"Add", "Sub"})
def sum_of_sums(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``sum(a) + sum(b)`` over the same axes becomes ``sum(a + b)``: one launch instead of three (terms of a flow's density)."""
    a, b = (producer(graph, v, SUMS, alone=True) for v in op.inputs)
    if a is None or b is None or a is b or (a.kind, a.attrs) != (b.kind, b.attrs):
        return None
    shape, axes = sizes_of(graph, operand(a)), ints(graph, a.input(1))
    if graph.type(operand(a)) != graph.type(operand(b)) or axes is None or ints(graph, b.input(1)) != axes:
        return None
    if shape is None or not is_float(op.outputs[0].type.dtype):
        return None
    if context.counted(math.prod(shape)) > MOST_ELEMENTS:
        return Miss(f"the sums are over tensors of {show_shape(shape)}, which would be written and read again")

    def build(patch: Patch) -> Value:
        return patch.add(a.kind, [patch.add(op.kind, [operand(a), operand(b)]), *a.inputs[1:]], a.attrs)

    return Match((op, a, b), build)
