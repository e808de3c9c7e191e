"""Values between QuantizeLinear and DequantizeLinear: their stored integers, scales and zero points."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.requantize import QuantParams
from optdnn.passes.support.facts import operand, scalar
from optdnn.types import is_float

EIGHT_BITS = ("int8", "uint8", "float8_e4m3fn")
FEWER_BITS = ("int4", "uint4", "int2", "uint2")
"""Integers that int8 holds with any zero point of their own."""


def quant_params(graph: Graph, op: Op, stored: Value) -> QuantParams | None:
    """Scale and zero point of a per-tensor Q or DQ op; ``stored`` is its 8-bit value. None for other ops."""
    dtype = graph.type(stored).dtype.name
    scale = scalar(graph, op.inputs[1])
    zero = 0.0 if op.input(2) is None else scalar(graph, op.input(2))
    if dtype not in EIGHT_BITS or op.attrs.block_size or scale is None or zero is None:
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


def quantization(graph: Graph, value: Value) -> tuple[Op, QuantParams] | None:
    """The QuantizeLinear that is the only reader of a value, through casts between floating types."""
    while True:
        user = graph.sole_user(value)
        if user is None:
            return None
        if user.kind == "Cast" and is_float(user.attrs.to):
            value = user.value
            continue
        if user.kind != "QuantizeLinear" or user.inputs[0] != value:
            return None
        found = quant_params(graph, user, user.value)
        return None if found is None else (user, found)
