"""Quantized networks: QuantizeLinear and DequantizeLinear around products and windows, and ONNX's integer operators."""

from __future__ import annotations

import math

import numpy as np

from random_nets.blocks import activation, arithmetic, breadth, combined, fits, linear, reduce, softmax
from random_nets.convolution import conv as float_conv
from random_nets.convolution import image, pool
from random_nets.draw import Array, Draw, Value

INT8, UINT8, INT32 = np.dtype("int8"), np.dtype("uint8"), np.dtype("int32")


def _scale(d: Draw, reach: float = 2.5) -> Value:
    return d.scalar(reach * d.random.uniform(0.7, 1.4) / 127)


def _zero(d: Draw, dtype: np.dtype[np.generic]) -> Value:
    if dtype == UINT8:
        return d.const(d.random.between(90, 160), dtype)
    return d.const(0 if d.random.chance(0.5) else d.random.between(-30, 30), dtype)


def quantize(d: Draw, x: Value) -> tuple[Value, Value, Value]:
    """x as 8-bit integers, with its scale and zero point. Scales are no powers of two, so exact ties are rare."""
    scale, zero = _scale(d), _zero(d, d.random.choice([INT8, UINT8]))
    return d.op("QuantizeLinear", x, scale, zero), scale, zero


def chain(d: Draw, x: Value) -> Value:
    """Q, then DQ; sometimes the quantized value is also an output."""
    q, scale, zero = quantize(d, x)
    if d.random.chance(0.15):
        d.keep(q)
    return d.op("DequantizeLinear", q, scale, zero)


def _weights(d: Draw, w: Array, axis: int) -> Value:
    """Constant weights through DQ, per tensor or per channel."""
    kept = d.random.chance(0.6)
    if kept:
        others = tuple(i for i in range(w.ndim) if i != axis)
        scale = (np.abs(w).max(axis=others) / 127 + 1e-6).astype(np.float32)
        shape = [-1 if i == axis else 1 for i in range(w.ndim)]
        q = np.clip(np.rint(w / scale.reshape(shape)), -127, 127).astype(np.int8)
        zero = d.const(np.zeros(len(scale), np.int8))
        return d.op(
            "DequantizeLinear", d.const(q), d.const(scale), *([zero] if d.random.chance(0.7) else []), axis=axis
        )
    scale = np.float32(np.abs(w).max() / 127 + 1e-6)
    if d.random.chance(0.2):
        middle = d.random.between(100, 150)
        q = np.clip(np.rint(w / scale) + middle, 0, 255).astype(np.uint8)
        return d.op("DequantizeLinear", d.const(q), d.const(scale), d.const(middle, np.uint8))
    q = np.clip(np.rint(w / scale), -127, 127).astype(np.int8)
    return d.op("DequantizeLinear", d.const(q), d.const(scale), d.const(np.int8(0)))


def _uniform(d: Draw, *shape: int, fan_in: int) -> Array:
    high = math.sqrt(3 / fan_in)
    return d.random.array(np.float32, shape, -high, high)


def conv(d: Draw, x: Value) -> Value | None:
    """A convolution with quantized weights and, sometimes, a bias in int32."""
    c, r = x.dims[1], d.random
    assert isinstance(c, int)
    axes = x.rank - 2
    k = r.choice([1, 1, 2, 3, 3, 5])
    if any(isinstance(n, int) and n < k for n in x.dims[2:]):
        return None
    out = breadth(d, [1, 3, 4, 5, 8, 8, 12, 16, 17, 32])
    group = 1
    if r.chance(0.25):
        group = r.choice([g for g in range(1, c + 1) if c % g == 0])
        out = group * r.choice([1, 2])
    per = c // group * k**axes
    w = _weights(d, _uniform(d, out, c // group, *(k,) * axes, fan_in=per), 0)
    bias: list[Value] = []
    if r.chance(0.5):
        if r.chance(0.5):
            q = d.const(r.array(np.int32, (out,), -4000, 4000))
            bias = [d.op("DequantizeLinear", q, d.scalar(1.3e-4), d.const(np.int32(0)))]
        else:
            bias = [d.weights(out, fan_in=4)]
    pads = [r.choice([0, k // 2])] * (2 * axes)
    strides = [r.choice([1, 1, 2, 3])] * axes
    dilations = [r.choice([1, 1, 1, 2])] * axes
    reach = (k - 1) * dilations[0] + 1
    if any(isinstance(n, int) and n + 2 * pads[0] < reach for n in x.dims[2:]):
        return None
    return d.op("Conv", x, w, *bias, group=group, pads=pads, strides=strides, dilations=dilations)


def product(d: Draw, x: Value) -> Value | None:
    """MatMul or Gemm with quantized weights."""
    k = x.dims[-1]
    if not isinstance(k, int):
        return None
    units = breadth(d, [1, 3, 5, 8, 12, 16, 17])
    if x.rank == 2 and d.random.chance(0.5):
        trans = d.random.below(2)
        w = _uniform(d, *((units, k) if trans else (k, units)), fan_in=k)
        bias = [d.weights(units, fan_in=4)] if d.random.chance(0.5) else []
        return d.op("Gemm", x, _weights(d, w, 0 if trans else 1), *bias, transB=trans)
    y = d.op("MatMul", x, _weights(d, _uniform(d, k, units, fan_in=k), 1))
    return d.op("Add", y, d.weights(units, fan_in=4)) if d.random.chance(0.5) else y


def pair(d: Draw, x: Value) -> Value | None:
    """A product of two quantized activations."""
    if x.rank < 2 or not x.static:
        return None
    perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    return d.op("Mul", d.op("MatMul", x, d.op("Transpose", x, perm=perm)), d.scalar(1 / x.shape[-1]))


def integer_conv(d: Draw, x: Value) -> Value | None:
    """QLinearConv or ConvInteger."""
    c, r = x.dims[1], d.random
    assert isinstance(c, int)
    if x.rank != 4 or any(isinstance(n, int) and n < 3 for n in x.dims[2:]):
        return None
    k, out = r.choice([1, 3]), r.choice([1, 3, 5, 8, 16])
    q, scale, zero = quantize(d, x)
    kind = INT8 if q.dtype == INT8 else r.choice([INT8, UINT8])
    w = d.const(r.array(kind, (out, c, k, k), 0 if kind == UINT8 else -127, 250 if kind == UINT8 else 127))
    wz = d.const(0 if kind == INT8 else r.between(100, 140), kind)
    attrs = {"pads": [k // 2] * 4, "strides": [r.choice([1, 2])] * 2}
    ws = 1 / (74 * math.sqrt(c * k * k))
    if r.chance(0.5):
        y = d.op("ConvInteger", q, w, zero, wz, **attrs)
        # the scale of the activations is left out: a constant near it replaces it
        return d.op("Mul", d.op("Cast", y, to=1), d.scalar(ws * 0.02))
    per_channel = kind == INT8 and r.chance(0.5)
    shape = (out,) if per_channel else ()
    weight_scale = d.const(r.array(np.float32, shape, ws * 0.7, ws * 1.3))
    if per_channel:
        wz = d.const(np.zeros(out, np.int8))
    out_scale, out_zero = _scale(d), _zero(d, q.dtype)
    bias = [d.const(r.array(np.int32, (out,), -500, 500))] if r.chance(0.5) else []
    y = d.op("QLinearConv", q, scale, zero, w, weight_scale, wz, out_scale, out_zero, *bias, **attrs)
    return d.op("DequantizeLinear", y, out_scale, out_zero)


def integer_product(d: Draw, x: Value) -> Value | None:
    """QLinearMatMul, MatMulInteger, or the form of dynamic quantization."""
    k, r = x.dims[-1], d.random
    if not isinstance(k, int) or x.rank < 2:
        return None
    units = r.choice([1, 3, 8, 16])
    ws, form = 1 / (74 * math.sqrt(k)), r.below(3)
    if form == 0:
        q, scale, zero = d.ops("DynamicQuantizeLinear", x, outputs=3)
        w = d.const(r.array(np.int8, (k, units), -127, 127))
        y = d.op("Cast", d.op("MatMulInteger", q, w, zero, d.const(np.int8(0))), to=1)
        return d.op("Mul", y, d.op("Mul", scale, d.scalar(ws)))
    q, scale, zero = quantize(d, x)
    kind = INT8 if q.dtype == INT8 else r.choice([INT8, UINT8])
    w = d.const(r.array(kind, (k, units), 0 if kind == UINT8 else -127, 250 if kind == UINT8 else 127))
    wz = d.const(0 if kind == INT8 else r.between(100, 140), kind)
    if form == 1:
        y = d.op("MatMulInteger", q, w, zero, wz)
        return d.op("Mul", d.op("Cast", y, to=1), d.scalar(ws * 0.02))
    out_scale, out_zero = _scale(d), _zero(d, q.dtype)
    y = d.op("QLinearMatMul", q, scale, zero, w, d.scalar(ws), wz, out_scale, out_zero)
    return d.op("DequantizeLinear", y, out_scale, out_zero)


def requantized(d: Draw, x: Value) -> Value:
    """Q, DQ and Q again with another scale, with a pool, a reshape or nothing between them."""
    y = chain(d, x)
    if x.rank > 3 and x.static and min(x.shape[2:]) > 2 and d.random.chance(0.4):
        y = d.op("MaxPool", y, kernel_shape=[2] * (x.rank - 2))
    elif d.random.chance(0.3):
        y = d.op("Transpose", y, perm=d.random.shuffled(range(x.rank)))
    elif d.random.chance(0.3):
        y = d.op("Relu", y)
    return chain(d, y)


def joined(d: Draw, x: Value) -> Value | None:
    other = d.pick(lambda v: v.rank == x.rank and v.is_float and v.dims[:1] + v.dims[2:] == x.dims[:1] + x.dims[2:])
    return None if other is None else chain(d, d.op("Concat", *d.random.shuffled([x, other]), axis=1))


def added(d: Draw, x: Value) -> Value | None:
    y = combined(d, x)
    return None if y is None else chain(d, y)


def averaged(d: Draw, x: Value) -> Value | None:
    if x.rank < 3:
        return None
    y = d.op("GlobalAveragePool", x) if d.random.chance(0.5) else reduce(d, "ReduceMean", x, list(range(2, x.rank)))
    return chain(d, y)


WINDOWED = (
    conv,
    conv,
    conv,
    conv,
    conv,
    pool,
    activation,
    added,
    added,
    joined,
    integer_conv,
    requantized,
    averaged,
    arithmetic,
)
ROWS = (
    product,
    product,
    product,
    product,
    pair,
    activation,
    added,
    joined,
    integer_product,
    integer_product,
    requantized,
    softmax,
)


def draw(d: Draw) -> None:
    """A quantized network over pictures or rows."""
    r = d.random
    if r.chance(0.6):
        axes = r.choice([1, 2, 2, 2, 2, 3])
        x, steps = image(d, axes), list(WINDOWED)
        if r.chance(0.2):
            d.keep(float_conv(d, x))
    else:
        dims = [r.choice([1, 2, 3, 5, 8, 13]) for _ in range(r.choice([1, 1, 2]))]
        x, steps = d.input((*dims, r.choice([3, 5, 8, 16, 17, 32]))), list(ROWS)
    x = chain(d, x) if r.chance(0.9) else x
    d.keep(x)
    rank = x.rank
    for _ in range(r.between(2, 8)):
        x = d.pick(lambda v: v.is_float and v.rank == rank and fits(v)) or x
        y = r.choice(steps)(d, x)
        if y is None or y.size > 30000:
            continue
        d.keep(chain(d, y) if y.is_float and r.chance(0.7) else y)
    if r.chance(0.3) and d.values[-1].rank > 2 and d.values[-1].is_float:
        y = d.op("Flatten", d.op("GlobalAveragePool", d.values[-1]), axis=1)
        d.keep(product(d, chain(d, y)) if r.chance(0.7) else linear(d, y, 5))
