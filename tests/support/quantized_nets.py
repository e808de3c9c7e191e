"""Small networks with explicit Q and DQ around their operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from support.net import Net


class QNet(Net):
    """Adds quantized values: ``q`` (float to 8 bits), ``dq`` (back), and products whose weights are dequantized int8."""

    def q(self, x: Value, scale: float, zero: int | None = None, dtype: Any = np.int8) -> Value:
        more = [] if zero is None else [np.array(zero, dtype)]
        operands = [self.const(np.float32(scale), np.float32), *(self.const(m, dtype) for m in more)]
        return self.op("QuantizeLinear", x, *operands, attrs=QuantizeAttrs(np.dtype(dtype), 0))

    def dq(self, x: Value, scale: float, zero: int | None = None) -> Value:
        dtype = self.graph.type(x).dtype
        more = [] if zero is None else [self.const(np.array(zero, dtype), dtype)]
        return self.op(
            "DequantizeLinear", x, self.const(np.float32(scale), np.float32), *more, attrs=DequantizeAttrs(0)
        )

    def fake(self, x: Value, scale: float, zero: int | None = None, dtype: Any = np.int8) -> Value:
        """Quantized and back."""
        return self.dq(self.q(x, scale, zero, dtype), scale, zero)

    def weights(self, *shape: int, axis: int = 0) -> Value:
        """Dequantized int8 weights with a scale per entry of an axis, such that products keep the variance."""
        array = self.rng.integers(-127, 128, shape).astype(np.int8)
        fan_in = int(np.prod(shape)) // shape[axis]
        scales = (self.rng.uniform(0.5, 1.5, shape[axis]) / (73.0 * fan_in**0.5)).astype(np.float32)
        operands = [self.const(array, np.int8), self.const(scales, np.float32)]
        return self.op("DequantizeLinear", *operands, attrs=DequantizeAttrs(axis))

    def qconv(
        self,
        x: Value,
        channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        group: int = 1,
        bias: bool = True,
        **stages: Any,
    ) -> Value:
        """A float Conv of dequantized weights; ``stages``: attributes such as ``epilogue``, and ``more`` operands for them."""
        c = self.dims(x)[1]
        assert isinstance(c, int)
        w = self.weights(channels, c // group, kernel, kernel)
        operands: list[Any] = [x, w, self.random(channels) if bias else None, *stages.pop("more", ())]
        while operands[-1] is None:
            operands.pop()
        attrs = ConvAttrs((stride, stride), (kernel // 2,) * 4, (1, 1), group, **stages)
        return self.op("Conv", *operands, attrs=attrs)

    def qgemm(self, x: Value, units: int, *, trans_b: bool = True, alpha: float = 1.0) -> Value:
        k = self.dims(x)[1]
        assert isinstance(k, int)
        w = self.weights(units, k) if trans_b else self.weights(k, units, axis=1)
        return self.op("Gemm", x, w, self.random(units), attrs=GemmAttrs(transB=trans_b, alpha=alpha))

    def qmatmul(self, x: Value, units: int) -> Value:
        k = self.dims(x)[-1]
        assert isinstance(k, int)
        return self.op("MatMul", x, self.weights(k, units, axis=1), attrs=MatMulAttrs())

    def pool(self, x: Value) -> Value:
        return self.op("MaxPool", x, attrs=MaxPoolAttrs((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), False))
