"""Our own kinds of 8-bit arithmetic: a GPU's pipeline makes them from DequantizeLinear, an operator, QuantizeLinear.

A product of 8-bit values is accumulated exactly. Its channel's scale converts it to fp32, and the stages follow, named as in
:data:`optdnn.runtime.cuda.compile.render.STAGES`. Then it is rounded half to even, shifted and saturated to 8 bits, or stays a
float.

Operands: data, weights, per-channel values, a residual, scales of rows, scale and zero point of the data. The last two belong to
data that were quantized in the same run: then the per-channel values are the scale of the weights, the bias, and the sum of the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, Attrs, Call, Result, Traits
from optdnn.ops.checks import agree, agree_all, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import not_written
from optdnn.ops.fused import product_cost
from optdnn.runtime.reference.window import output_sizes
from optdnn.types import FP32, INT8, DType, TensorType


@dataclass(frozen=True)
class RequantizeAttrs(Attrs):
    """The scalars of the epilogue. Results are clipped to ``low`` and ``high`` before the zero point ``zero`` is added."""

    stages: tuple[tuple[str | float, ...], ...] = (("bias",),)
    residual_scale: float = 1.0
    residual_zero: int = 0
    low: float = -128.0
    high: float = 127.0
    zero: int = 0
    output_dtype: DType = INT8


@dataclass(frozen=True)
class QuantizedConvAttrs(RequantizeAttrs):
    """Geometry as in Conv, without ``auto_pad``. Padding has the value ``input_zero``."""

    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    group: int = 1
    input_zero: int = 0


@dataclass(frozen=True)
class QuantizedMeanAttrs(Attrs):
    """Mean over all spatial axes: the sum minus the zero points, times ``factor``, clipped, rounded, shifted by ``zero``."""

    factor: float
    input_zero: int = 0
    low: float = -128.0
    high: float = 127.0
    zero: int = 0
    output_dtype: DType = INT8


def _operands(call: Call) -> tuple[TensorType, TensorType]:
    """Operands 0 and 1. Launches may view the output channels of weights as three axes."""
    x, w = call.type(0), call.type(1)
    for t in (x, w):
        if t.dtype.itemsize != 1:
            raise ShapeError(f"{call.kind} of {x} and weights {w}: both must be of 8 bits")
    if len(w.dims) == 6:
        filters = w.dims[3:] if call.kind == "QuantizedConv" else x.dims[-1:]
        w = w.with_shape((call.type(2).dims[0], *filters))
    return x, w


def _finished(call: Call, x: TensorType, channels: DimLike, shape: tuple[Any, ...]) -> Result:
    """The result's type, with the channels' constants and the residual checked against it."""
    channel = call.type(2)
    require_rank(channel, 2, f"{call.kind} scales and biases")
    agree(channel.dims[0], channels, f"{call.kind} scales and biases {channel} do not fit the weights")
    if call.has(3):
        residual = call.type(3)
        require_rank(residual, len(shape), f"{call.kind} residual")
        agree_all(residual.dims, shape, f"{call.kind} residual {residual} is not of the result's shape")
    for i, wanted in ((5, FP32), (6, x.dtype)):
        if call.has(i) and (call.type(i).dtype != wanted or call.type(i).dims not in ((), (1,))):
            raise ShapeError(f"{call.kind} operand {i} is {call.type(i)}; it must be one number of {wanted}")
    return Result((TensorType(call.attrs.output_dtype, shape),))


def _infer_conv(call: Call) -> Result:
    x, w = _operands(call)
    a: QuantizedConvAttrs = call.attrs
    require_rank(x, len(w.dims), f"QuantizedConv input (its weights are {w})")
    agree(x.dims[1], w.dims[1] * a.group, f"QuantizedConv input {x} does not have the channels of weights {w}")
    sizes = output_sizes("NOTSET", a.pads, x.dims[2:], w.dims[2:], a.strides, a.dilations)
    return _finished(call, x, w.dims[0], (x.dims[0], w.dims[0], *sizes))


def _infer_matmul(call: Call) -> Result:
    x, w = _operands(call)
    require_rank(w, 2, "QuantizedMatMul weights")
    agree(x.dims[-1], w.dims[1], f"QuantizedMatMul rows {x} do not fit weights {w}")
    if call.has(4):
        scales = call.type(4)
        require_rank(scales, 1, "QuantizedMatMul scales of rows")
        agree(scales.dims[0], x.dims[0], f"QuantizedMatMul scales {scales} are not of rows {x}")
    return _finished(call, x, w.dims[0], (*x.dims[:-1], w.dims[0]))


def _infer_mean(call: Call) -> Result:
    x = call.type(0)
    return Result((TensorType(call.attrs.output_dtype, (*x.dims[:2], *[1] * (len(x.dims) - 2))),))


_NO_ONNX = not_written("an operator of a GPU's pipeline has no ONNX form")
_quantized = partial(OpDef, onnx={}, to_onnx=_NO_ONNX, tol=EXACT, traits=Traits(own_precision=True))

DEFS: tuple[OpDef, ...] = (
    _quantized("QuantizedConv", _infer_conv, QuantizedConvAttrs, cost=product_cost, arity=3),
    _quantized("QuantizedMatMul", _infer_matmul, RequantizeAttrs, cost=product_cost, arity=3),
    _quantized("QuantizedMean", _infer_mean, QuantizedMeanAttrs),
)
