"""Values between QuantizeLinear and DequantizeLinear: their stored integers, scales and zero points."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.requantize import QuantParams
from optdnn.passes.support.facts import operand, scalar
from optdnn.types import Array, is_float

EIGHT_BITS = ("int8", "uint8", "float8_e4m3fn")
SIXTEEN_BITS = ("int16", "uint16")
FEWER_BITS = ("int4", "uint4", "int2", "uint2")
"""Integers that int8 holds with any zero point of their own."""


def quant_params(graph: Graph, op: Op, stored: Value, kinds: Collection[str] = EIGHT_BITS) -> QuantParams | None:
    """Scale and zero point of a per-tensor Q or DQ op; ``stored`` is its value, of a type in ``kinds``. None for other ops."""
    dtype = graph.type(stored).dtype.name
    scale = scalar(graph, op.inputs[1])
    zero = 0.0 if op.input(2) is None else scalar(graph, op.input(2))
    if dtype not in kinds or op.attrs.block_size or scale is None or zero is None:
        return None
    return QuantParams(dtype, scale, int(zero)) if np.isfinite(scale) and scale > 0 else None


def source(graph: Graph, value: Value | None) -> Op | None:
    """The DequantizeLinear that a value comes from, through casts between floating types."""
    while value is not None:
        op = graph.op(value)
        if op.kind == "DequantizeLinear":
            return op
        if op.kind != "Cast" or not is_float(graph.type(operand(op)).dtype):
            return None
        value = operand(op)
    return None


def dequantized(graph: Graph, value: Value | None) -> tuple[Value, QuantParams] | None:
    """The 8-bit value behind a dequantized value, with its scale and zero point."""
    op = source(graph, value)
    found = None if op is None else quant_params(graph, op, operand(op))
    return None if op is None or found is None else (operand(op), found)


def channel_params(graph: Graph, op: Op, stored: Value, axis: int) -> tuple[QuantParams, Array] | None:
    """Parameters of a Q or DQ op with a scale for each entry of ``axis`` and one zero point, and these scales (float64).

    The parameters have the scale 1: they are those of the data divided by the scales. None for other ops, and for fp8."""
    type_, at = graph.type(stored), op.attrs.axis
    if op.attrs.block_size or not type_.is_static or type_.dtype.name not in ("int8", "uint8"):
        return None
    rank, scales = len(type_.dims), graph.constant_value(op.inputs[1])
    zeros = np.zeros(1, np.int64) if op.input(2) is None else graph.constant_value(op.input(2))
    if (
        scales is None
        or zeros is None
        or scales.ndim != 1
        or at % rank != axis % rank
        or (zeros != zeros.flat[0]).any()
    ):
        return None
    usable = np.isfinite(scales).all() and (scales > 0).all()
    return (QuantParams(type_.dtype.name, 1.0, int(zeros.flat[0])), scales.astype(np.float64)) if usable else None


def dequantized_channels(graph: Graph, value: Value | None, axis: int) -> tuple[Value, QuantParams, Array] | None:
    """The 8-bit value behind a value that is dequantized with a scale for each entry of ``axis``: see :func:`channel_params`."""
    op = source(graph, value)
    found = None if op is None else channel_params(graph, op, operand(op), axis)
    return None if op is None or found is None else (operand(op), *found)


def quantization_of_channels(graph: Graph, value: Value, axis: int) -> tuple[Op, QuantParams, Array] | None:
    """The QuantizeLinear with a scale for each entry of ``axis`` that is the only reader of a value."""
    user = quantizer(graph, value)
    found = None if user is None else channel_params(graph, user, user.value, axis)
    return None if user is None or found is None else (user, *found)


def quantization(graph: Graph, value: Value) -> tuple[Op, QuantParams] | None:
    """The QuantizeLinear that is the only reader of a value, through casts between floating types."""
    user = quantizer(graph, value)
    found = None if user is None else quant_params(graph, user, user.value)
    return None if user is None or found is None else (user, found)


def quantizer(graph: Graph, value: Value) -> Op | None:
    """The QuantizeLinear of any parameters that is the only reader of a value, through casts between floating types."""
    while True:
        user = graph.sole_user(value)
        if user is None:
            return None
        if user.kind == "Cast" and is_float(user.attrs.to):
            value = user.value
            continue
        return user if user.kind == "QuantizeLinear" and user.inputs[0] == value else None
