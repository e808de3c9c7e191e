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


def is_dequantized(graph: Graph, value: Value | None) -> bool:
    """Whether a value is the result of a DequantizeLinear."""
    return value is not None and graph.op(value).kind == "DequantizeLinear"


def is_dequantized_data(graph: Graph, value: Value | None) -> bool:
    """Whether a value is the result of a DequantizeLinear of computed integers."""
    return is_dequantized(graph, value) and graph.constant_value(graph.op(value).inputs[0]) is None  # type: ignore[arg-type]


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


def same_scale(graph: Graph, a: Op, b: Op) -> bool:
    """Whether two Q or DQ ops have equal constants as scale and zero point, and no blocks."""
    if a.attrs.block_size or b.attrs.block_size:
        return False
    return all(same_constant(graph, a.input(i), b.input(i)) for i in (1, 2))


def same_constant(graph: Graph, a: Value | None, b: Value | None) -> bool:
    """Whether two values are equal constants. A missing zero point counts as zero."""
    if a == b:
        return True
    x, y = graph.constant_value(a), graph.constant_value(b)
    if a is None or b is None:
        present = x if x is not None else y
        return present is not None and not present.any()
    return x is not None and y is not None and x.dtype == y.dtype and x.size == y.size and bool((x == y).all())


def zeros_of(graph: Graph, op: Op) -> set[int] | None:
    """The different zero points of a Q or DQ; None where they are not constant."""
    value = op.input(2)
    array = graph.constant_value(value)
    if array is None:
        return {0} if value is None else None
    return set(map(int, array.reshape(-1).tolist()))
