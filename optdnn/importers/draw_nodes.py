"""The nodes that draw: each of ONNX's random operators as a function body of operators that every target has.

A word of 32 random bits is a hash of the element's position: lowbias32 (C. Wellons, "Prospecting for hash
functions", 2018), applied twice, each time after an exclusive or with a key. It needs only products, shifts and exclusive ors of 32
bits (Philox needs products of 64 bits, which no ONNX operator has). The rest is float64 up to one rounding at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optdnn.errors import ModelError

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
INTEGERS = (TensorProto.INT32, TensorProto.INT64)
COLUMNS = 1024
"""Positions per row: a power of two."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""The factors of lowbias32; its shifts are 16, 15 and 16."""


@dataclass
class Nodes:
    """The nodes of a function that draws. ``keys``: three 32-bit words."""

    keys: Sequence[int]
    made: list[onnx.NodeProto] = field(default_factory=list)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The name of the only output of a new node."""
        out = f"{kind}.{len(self.made)}"
        self.made.append(helper.make_node(kind, inputs, [out], name=out, **attributes))
        return out

    def const(self, value: Any, dtype: Any) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def words(self, count: str) -> str:
        """uint32 [rows, COLUMNS]: the random bits of ``count`` positions (an int64 scalar), and of the remainder of the last row.

        A row's first position and a column have no bits in common, so exclusive ors compute their sum and add the first key,
        in the registers of the kernel that hashes it."""
        columns = self.const(COLUMNS, np.int64)
        rows = self.op("Div", self.op("Add", count, self.const(COLUMNS - 1, np.int64)), columns)
        starts = self.op("Mul", self._range(rows), self.const(COLUMNS, np.uint32))
        starts = self.op("Unsqueeze", self._keyed(starts, 0), self.const([1], np.int64))
        positions = self.op("BitwiseXor", starts, self._range(columns))
        return self._hashed(self._keyed(self._hashed(positions), 1))

    def _range(self, count: str) -> str:
        numbers = self.op("Range", self.const(0, np.int64), count, self.const(1, np.int64))
        return self.op("Cast", numbers, to=TensorProto.UINT32)

    def _keyed(self, x: str, number: int) -> str:
        return self.op("BitwiseXor", x, self.const(self.keys[number], np.uint32))

    def _hashed(self, x: str) -> str:
        """lowbias32 of each element."""
        x = self.op("Mul", self._folded(x, 16), self.const(FIRST, np.uint32))
        x = self.op("Mul", self._folded(x, 15), self.const(SECOND, np.uint32))
        return self._folded(x, 16)

    def _folded(self, x: str, by: int) -> str:
        return self.op("BitwiseXor", x, self.op("BitShift", x, self.const(by, np.uint32), direction="RIGHT"))

    def between(self, words: str) -> str:
        """float64 in (0, 1), both ends excluded: the middle of one of 2^32 intervals."""
        x = self.op("Add", self.op("Cast", words, to=TensorProto.DOUBLE), self.const(0.5, np.float64))
        return self.op("Mul", x, self.const(2.0**-32, np.float64))

    def uniform(self, words: str) -> str:
        """float64 in [0, 1), of 24 bits: float32 holds it exactly, and float64 its product with a float32."""
        x = self.op("BitShift", words, self.const(8, np.uint32), direction="RIGHT")
        return self.op("Mul", self.op("Cast", x, to=TensorProto.DOUBLE), self.const(2.0**-24, np.float64))

    def normal(self, words: str) -> str:
        """float64 with mean 0 and variance 1, by the Box-Muller transform."""
        turn = self.op("Cast", self._hashed(self._keyed(words, 2)), to=TensorProto.DOUBLE)
        angle = self.op("Mul", turn, self.const(2 * math.pi * 2.0**-32, np.float64))
        logarithm = self.op("Log", self.between(words))
        radius = self.op("Sqrt", self.op("Mul", logarithm, self.const(-2.0, np.float64)))
        return self.op("Mul", radius, self.op("Cos", angle))

    def scaled(self, x: str, factor: float, offset: float) -> str:
        """``x * factor + offset`` in float64."""
        x = self.op("Mul", x, self.const(factor, np.float64))
        return self.op("Add", x, self.const(offset, np.float64))

    def shaped(self, x: str, count: str, shape: str) -> str:
        """The first ``count`` elements in this shape."""
        flat = self.op("Reshape", x, self.const([-1], np.int64))
        ends = self.op("Unsqueeze", count, self.const([0], np.int64))
        return self.op("Reshape", self.op("Slice", flat, self.const([0], np.int64), ends), shape, allowzero=1)


Attributes = Mapping[str, Any]
Draw = Callable[[Nodes, Sequence[str], Attributes], Sequence[str]]
"""(nodes, names of the operands, attributes) -> the results. An absent operand has the name "". Raises ModelError for attributes
that ONNX does not allow."""


def _distributed(n: Nodes, kind: str, words: str, attrs: Attributes) -> str:
    if kind == "normal":
        return n.scaled(n.normal(words), attrs.get("scale", 1.0), attrs.get("mean", 0.0))
    low, high = np.float32(attrs.get("low", 0.0)), np.float32(attrs.get("high", 1.0))
    return n.scaled(n.uniform(words), float(high - low), float(low))


def _of_shape(kind: str) -> Draw:
    def draw(n: Nodes, operands: Sequence[str], attrs: Attributes) -> Sequence[str]:
        shape = [int(d) for d in attrs["shape"]]
        if min(shape, default=0) < 0:
            raise ModelError(f"attribute 'shape' has a negative dimension: {shape}")
        if math.prod(shape) >= 1 << 63:
            raise ModelError(f"attribute 'shape' has too many elements: {shape}")
        count = n.const(math.prod(shape), np.int64)
        x = n.op("Cast", _distributed(n, kind, n.words(count), attrs), to=_float_type(attrs))
        return (n.shaped(x, count, n.const(shape, np.int64)),)

    return draw


def _like(kind: str) -> Draw:
    def draw(n: Nodes, operands: Sequence[str], attrs: Attributes) -> Sequence[str]:
        (like,) = operands
        count = n.op("Size", like)
        x = _distributed(n, kind, n.words(count), attrs)
        x = n.op("Cast", x, to=_float_type(attrs)) if "dtype" in attrs else n.op("CastLike", x, like)
        return (n.shaped(x, count, n.op("Shape", like)),)

    return draw


def _bernoulli(n: Nodes, operands: Sequence[str], attrs: Attributes) -> Sequence[str]:
    (p,) = operands
    count = n.op("Size", p)
    u = n.shaped(n.between(n.words(count)), count, n.op("Shape", p))
    drawn = n.op("Less", u, n.op("Cast", p, to=TensorProto.DOUBLE))
    return (n.op("Cast", drawn, to=int(attrs["dtype"])) if "dtype" in attrs else n.op("CastLike", drawn, p),)


def _multinomial(n: Nodes, operands: Sequence[str], attrs: Attributes) -> Sequence[str]:
    """The largest element of logits + Gumbel noise: class k with a probability proportional to exp(logits[k])."""
    (logits,) = operands  # [batch, classes]
    samples = n.const([int(attrs.get("sample_size", 1))], np.int64)
    one = n.const([1], np.int64)
    count = n.op("Mul", n.op("Size", logits), n.op("Squeeze", samples))
    shape = n.op("Concat", n.op("Shape", logits, end=1), samples, n.op("Shape", logits, start=1), axis=0)
    noise = n.op("Neg", n.op("Log", n.op("Neg", n.op("Log", n.between(n.words(count))))))
    wide = n.op("Cast", n.op("Unsqueeze", logits, one), to=TensorProto.DOUBLE)
    chosen = n.op("ArgMax", n.op("Add", wide, n.shaped(noise, count, shape)), axis=2, keepdims=0)
    return (n.op("Cast", chosen, to=_element_type(attrs, INTEGERS, TensorProto.INT32)),)


def _dropout(n: Nodes, operands: Sequence[str], attrs: Attributes) -> Sequence[str]:
    """In training mode an element stays with probability 1 - ratio, and is divided by it (Monte Carlo dropout: Gal and Ghahramani,
    2016)."""
    x, ratio, training = operands
    wide = n.op("Cast", ratio, to=TensorProto.DOUBLE) if ratio else n.const(0.5, np.float64)
    count = n.op("Size", x)
    stays = n.op("GreaterOrEqual", n.shaped(n.between(n.words(count)), count, n.op("Shape", x)), wide)
    factor = n.op("CastLike", n.op("Reciprocal", n.op("Sub", n.const(1.0, np.float64), wide)), x)
    dropped = n.op("Where", stays, n.op("Mul", x, factor), n.op("CastLike", n.const(0.0, np.float64), x))
    return n.op("Where", training, dropped, x), n.op("Or", n.op("Not", training), stays)


def _float_type(attrs: Attributes) -> int:
    return _element_type(attrs, FLOATS, TensorProto.FLOAT)


def _element_type(attrs: Attributes, allowed: Sequence[int], default: int) -> int:
    given = int(attrs.get("dtype", default))
    if given not in allowed:
        names = ", ".join(TensorProto.DataType.Name(t) for t in allowed)
        raise ModelError(f"attribute 'dtype' is {given}, which is not one of {names}")
    return given


DRAWS: Mapping[str, Draw] = {
    "Bernoulli": _bernoulli,
    "Dropout": _dropout,
    "Multinomial": _multinomial,
    "RandomNormal": _of_shape("normal"),
    "RandomNormalLike": _like("normal"),
    "RandomUniform": _of_shape("uniform"),
    "RandomUniformLike": _like("uniform"),
}
"""Random operator -> the function that writes its nodes."""
