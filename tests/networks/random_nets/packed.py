"""Networks with packed weights, as in language models: MatMulNBits, and products with weights after DequantizeLinear."""

from __future__ import annotations

import math

import numpy as np

from random_nets.blocks import activation, arithmetic, combined, fits, row_norm, softmax
from random_nets.draw import F32, Array, Draw, Value

BLOCKED = 21
"""The first opset with blocks in DequantizeLinear."""
WIDTHS = (16, 17, 24, 32, 40, 48, 64, 80, 130)
CONTRIB = "com.microsoft"


def _width(x: Value) -> int:
    width = x.dims[-1]
    assert isinstance(width, int)
    return width


def _scales(d: Draw, shape: tuple[int, ...], bits: int, depth: int) -> Value:
    """Scales of either sign, for which results are about as large as the rows."""
    spread = 1.0 / (0.29 * (1 << bits) * math.sqrt(depth))
    return d.const(d.random.array(np.float32, shape, 0.5 * spread, 1.5 * spread) * _signs(d, shape))


def _signs(d: Draw, shape: tuple[int, ...]) -> Array:
    return np.where(d.random.array(np.bool_, shape, 0, 1), np.float32(1), np.float32(-1))


def _bytes(d: Draw, *shape: int) -> Value:
    return d.const(d.random.array(np.uint8, shape, 0, 255))


def n_bits(d: Draw, x: Value) -> Value:
    """MatMulNBits, with or without zero points and a bias."""
    r, depth = d.random, _width(x)
    bits, block, units = r.choice([4, 4, 4, 8]), r.choice([16, 32, 32, 64, 128]), r.choice(WIDTHS)
    blocks = -(-depth // block)
    inputs: list[Value | None] = [
        x,
        _bytes(d, units, blocks, block * bits // 8),
        _scales(d, (units, blocks), bits, depth),
    ]
    if r.chance(0.5):
        inputs.append(_bytes(d, units, -(-blocks * bits // 8)))
    if r.chance(0.4):
        inputs += [None] * (5 - len(inputs)) + [d.weights(units, fan_in=4)]
    attrs = {"K": depth, "N": units, "bits": bits, "block_size": block}
    return d.typed("MatMulNBits", inputs, [(F32, (*x.dims[:-1], units))], domain=CONTRIB, **attrs)[0]


def dequantized(d: Draw, x: Value) -> Value:
    """MatMul with 8-bit weights after DequantizeLinear: by column, or from opset 21 on in blocks."""
    r, depth, units = d.random, _width(x), d.random.choice(WIDTHS)
    signed = r.chance(0.5)
    low, high = (-127, 127) if signed else (0, 255)
    kind = np.int8 if signed else np.uint8
    weights = d.const(r.array(kind, (depth, units), low, high))
    block = r.choice([16, 32]) if d.opset >= BLOCKED and r.chance(0.5) else 0
    shape = (-(-depth // block), units) if block else (units,)
    scales = _scales(d, shape, 8, depth)
    zeros = d.const(np.zeros(shape, np.int8) if signed else r.array(np.uint8, shape, 100, 150))
    attrs = {"axis": 0, "block_size": block} if block else {"axis": 1}
    return d.op("MatMul", x, d.op("DequantizeLinear", weights, scales, zeros, **attrs))


def gated(d: Draw, x: Value) -> Value:
    """Two products of equal width, one of them after an activation, and the product of both."""
    first = n_bits(d, x)
    depth, units, block = _width(x), _width(first), d.random.choice([16, 32])
    blocks = -(-depth // block)
    inputs = [x, _bytes(d, units, blocks, block // 2), _scales(d, (units, blocks), 4, depth)]
    attrs = {"K": depth, "N": units, "bits": 4, "block_size": block}
    (second,) = d.typed("MatMulNBits", inputs, [(F32, (*x.dims[:-1], units))], domain=CONTRIB, **attrs)
    return d.op("Mul", d.op("Mul", first, d.op("Sigmoid", first)), second)


STEPS = (n_bits, n_bits, n_bits, dequantized, gated, activation, arithmetic, combined, row_norm, softmax)


def draw(d: Draw) -> None:
    """Rows of one to three axes, and a chain of products with packed weights and other operators between them."""
    r = d.random
    dims = [r.choice([1, 1, 2, 3, 5, 9, 13, 17]) for _ in range(r.choice([1, 1, 2]))]
    d.keep(n_bits(d, d.input((*dims, r.choice(WIDTHS)))))
    for _ in range(r.between(1, 6)):
        x = d.pick(lambda v: v.is_float and v.rank == len(dims) + 1 and fits(v))
        if x is None:
            return
        y = r.choice(STEPS)(d, x)
        if y is not None and y.size <= 30000:
            d.keep(y)
