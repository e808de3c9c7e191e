"""Gates (one factor for all pixels of an image's channel) are applied by the convolution that reads the gated image."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.checks import elements
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import channels_from_last, channels_to_last, operand, producer, shape_of

LEAST = 1 << 20
"""Least number of elements of an image. In a smaller image, a launch multiplies all pixels as fast as a convolution does."""
_STEPS = 6
"""Most factors and constants between a value and its sum with itself."""


@rule("gated_residual", {"Add"})
def gated_residual(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``x * g * h + c + x`` becomes ``x * (g * h + 1) + c`` if a 1x1 convolution or a product can apply the gate.

    ConvNeXt V2 writes its global response norm in this form (Woo et al., 2023).
    """
    for x, other in (op.inputs, op.inputs[::-1]):
        if x is not None and other is not None and (found := _factors(graph, x, other)) is not None:
            break
    else:
        return None
    factors, shifts, ops = found
    user, shape = graph.sole_user(op.value), shape_of(graph, x)
    channels = None if user is None or user.inputs[0] != op.value else _channels(graph, user)
    if channels is None:
        return Miss("its only reader is no 1x1 convolution and no product of an image's pixels")
    if op.outputs[0].type.shape != shape or not all(_is_gate(graph, f, channels) for f in factors):
        return Miss("its factors are not one number for all pixels of a channel")
    if context.counted(int(elements(graph.type(x)))) < LEAST:
        return Miss(f"its image has fewer than {LEAST} elements, which a launch multiplies as fast as a convolution")

    def build(patch: Patch) -> Value:
        gate = factors[-1]
        for factor in factors[-2::-1]:
            gate = patch.add("Mul", [gate, factor])
        gate = patch.add("Add", [gate, patch.constant(np.ones((), graph.type(x).dtype), "one")])
        y = patch.add("Mul", [x, gate])
        for shift in shifts[::-1]:
            y = patch.add("Add", [y, shift])
        return y

    return Match((op, *ops), build)


@rule("gated_rows", {"MatMul"})
def gated_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """The product of gated pixels (B, H, W, C) with a matrix becomes a 1x1 convolution, whose prologue applies the gate."""
    gated, weight = producer(graph, operand(op), {"Mul"}), graph.constant_value(operand(op, 1))
    if gated is None or weight is None or op.attrs.prologue or op.attrs.epilogue:
        return None
    for x, gate in (gated.inputs, gated.inputs[::-1]):
        shape, one = shape_of(graph, x), shape_of(graph, gate)
        if x is None or gate is None or shape is None or one is None or graph.constant_value(gate) is not None:
            continue
        if len(shape) == 4 and one == (shape[0], 1, 1, shape[3]) and weight.shape[:-1] == (shape[3],):
            break
    else:
        return None
    if graph.sole_user(gated.value) is None:
        return Miss(f"the result of {gated.name} is used {graph.use_count(gated.value)} times")
    if shape[1] == shape[2] == 1:
        return Miss("its images have one pixel, so the gate is as large as the image")
    add = graph.sole_user(op.value)
    shift = (
        None if add is None or add.kind != "Add" or add.inputs[0] != op.value else graph.constant_value(add.inputs[1])
    )
    biased = add is not None and shift is not None and shift.shape == weight.shape[1:]
    to_image, to_pixels = TransposeAttrs(channels_from_last(4)), TransposeAttrs(channels_to_last(4))

    def build(patch: Patch) -> Value:
        image, factor = (patch.add("Transpose", [v], to_image) for v in (x, gate))
        matrix = patch.constant(np.ascontiguousarray(weight.T)[..., None, None], "weight")
        bias = add.inputs[1] if biased and add is not None else None
        attrs = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 1, prologue=(Stage("Mul", (~0, 3)),))
        y = patch.add("Conv", [image, matrix, bias, factor], attrs)
        return patch.add("Transpose", [y], to_pixels)

    return Match((*([add] if biased and add is not None else []), op, gated), build)


def _factors(graph: Graph, x: Value, value: Value) -> tuple[list[Value], list[Value], list[Op]] | None:
    """The factors, the constants added after them, and the operators that compute ``value`` from ``x``, each from last to first."""
    factors, shifts, ops = list[Value](), list[Value](), list[Op]()
    while len(ops) < _STEPS and (step := producer(graph, value, {"Add", "Mul"}, alone=True)) is not None:
        ops.append(step)
        a, b = operand(step), operand(step, 1)
        if step.kind == "Add":
            if factors or graph.constant_value(b) is None:
                return None
            shifts.append(b)
            value = a
            continue
        if x in (a, b):
            return [*factors, b if a == x else a], shifts, ops
        value, factor = (a, b) if shape_of(graph, a) == shape_of(graph, x) else (b, a)
        factors.append(factor)
    return None


def _channels(graph: Graph, reader: Op) -> int | None:
    """The channel axis of an image that ``reader`` reads, if it is a 1x1 convolution or a product of pixels; else None."""
    rank = graph.type(operand(reader)).rank
    if reader.kind == "MatMul":
        return 3 if rank == 4 and graph.constant_value(operand(reader, 1)) is not None else None
    weight = shape_of(graph, operand(reader, 1)) if reader.kind == "Conv" else None
    return 1 if weight is not None and all(n == 1 for n in weight[2:]) and reader.attrs.group == 1 else None


def _is_gate(graph: Graph, factor: Value, channels: int) -> bool:
    """Whether ``factor`` has one number for all pixels of a channel of an image with four axes."""
    shape = shape_of(graph, factor)
    padded = None if shape is None else (*(1,) * (4 - len(shape)), *shape)
    return padded is not None and all(n == 1 for axis, n in enumerate(padded) if axis not in (0, channels))
