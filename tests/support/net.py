"""A builder of small graphs for tests: every op has its own provenance name; weights and statistics are random."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.verify import verify
from optdnn.ops.base import Attrs, Call
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.norm import EpsilonAttrs
from optdnn.ops.pool import AveragePoolAttrs, MaxPoolAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import TensorType, is_float


class Net:
    """Builds a graph. Operands that are numbers or float arrays become constants of ``dtype``; integers and booleans keep their
    type."""

    def __init__(self, dtype: Any = np.float32, seed: int = 0):
        self.graph, self.dtype, self.count = Graph("test"), np.dtype(dtype), 0
        self.rng = np.random.default_rng(seed)

    def input(self, *shape: DimLike, name: str = "x", dtype: Any = None) -> Value:
        return self.graph.add_input(name, TensorType(np.dtype(dtype or self.dtype), tuple(shape)))

    def const(self, value: Any, dtype: Any = None) -> Value:
        return self.graph.add_constant(np.asarray(value, dtype=dtype or self.dtype))

    def ints(self, *values: int) -> Value:
        return self.const(values, np.int64)

    def transposed(self, x: Value, *perm: int) -> Value:
        made: Value = self.op("Transpose", x, attrs=TransposeAttrs(perm))
        return made

    def reshaped(self, x: Value, *shape: int) -> Value:
        made: Value = self.op("Reshape", x, self.ints(*shape))
        return made

    def sliced(self, x: Value, begin: int, end: int, axis: int) -> Value:
        made: Value = self.op("Slice", x, self.ints(begin), self.ints(end), self.ints(axis))
        return made

    def random(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> Value:
        return self.const(scale * self.rng.standard_normal(shape) + offset)

    def positive(self, *shape: int) -> Value:
        """Positive numbers, uniform in 0.5 .. 2: divisors and variances."""
        return self.const(self.rng.uniform(0.5, 2.0, shape))

    def dims(self, value: Value) -> tuple[DimLike, ...]:
        return self.graph.type(value).dims

    def op(self, kind: str, *inputs: Any, attrs: Attrs | None = None, outputs: int = 1, name: str = "") -> Any:
        """Add one op and return its value (a list of values for several outputs). It comes from an ONNX node ``KIND_k``."""
        self.count += 1
        name = name or f"{kind}_{self.count}"
        values = [v if isinstance(v, Value) or v is None else self._operand(v) for v in inputs]
        attrs = attrs if attrs is not None else OPDEFS[kind].attrs()
        op = self.graph.add(kind, values, attrs, names=[name], outputs=outputs, src=[name])
        return op.value if outputs == 1 else [Value(op.id, i) for i in range(outputs)]

    def _operand(self, value: Any) -> Value:
        array = np.asarray(value)
        return self.const(array, array.dtype if array.ndim and not is_float(array.dtype) else None)

    def conv(
        self,
        x: Value,
        channels: int,
        kernel: int | Sequence[int] = 3,
        *,
        pads: int | Sequence[int] = 1,
        strides: int | Sequence[int] = 1,
        dilations: int = 1,
        group: int = 1,
        bias: bool = False,
        auto_pad: str = "NOTSET",
    ) -> Value:
        """A convolution whose random weights keep the variance; ``pads``: one number for all sides, or begins then ends."""
        rank = len(self.dims(x)) - 2
        k = (kernel,) * rank if isinstance(kernel, int) else tuple(kernel)
        p = (pads,) * (2 * rank) if isinstance(pads, int) else tuple(pads)
        c = self.dims(x)[1]
        assert isinstance(c, int)
        fan_in = c // group * math.prod(k)
        w = self.random(channels, c // group, *k, scale=1 / math.sqrt(fan_in))
        more = [self.random(channels)] if bias else []
        steps = (strides,) * rank if isinstance(strides, int) else tuple(strides)
        attrs = ConvAttrs(steps, p, (dilations,) * rank, group, auto_pad)
        return self.op("Conv", x, w, *more, attrs=attrs)

    def conv_transpose(
        self,
        x: Value,
        channels: int,
        kernel: int = 3,
        *,
        pads: int = 0,
        strides: int = 2,
        group: int = 1,
        bias: bool = False,
    ) -> Value:
        rank = len(self.dims(x)) - 2
        c = self.dims(x)[1]
        assert isinstance(c, int)
        w = self.random(c, channels // group, *(kernel,) * rank, scale=1 / math.sqrt(c // group * kernel))
        more = [self.random(channels)] if bias else []
        attrs = ConvTransposeAttrs((strides,) * rank, (pads,) * (2 * rank), (1,) * rank, (0,) * rank, group)
        return self.op("ConvTranspose", x, w, *more, attrs=attrs)

    def bn(self, x: Value, epsilon: float = 1e-3) -> Value:
        """A BatchNormalization with random statistics."""
        c = self.dims(x)[1]
        assert isinstance(c, int)
        stats = (self.random(c, offset=1.0), self.random(c), self.random(c), self.positive(c))
        return self.op("BatchNormalization", x, *stats, attrs=EpsilonAttrs(epsilon))

    def gemm(self, x: Value, units: int, *, bias: bool = True, trans_b: bool = False, **attrs: float) -> Value:
        k = self.dims(x)[1]
        assert isinstance(k, int)
        w = self.random(*((units, k) if trans_b else (k, units)), scale=1 / math.sqrt(k))
        more = [self.random(units)] if bias else []
        return self.op("Gemm", x, w, *more, attrs=GemmAttrs(transB=trans_b, **attrs))

    def matmul(self, x: Value, units: int) -> Value:
        k = self.dims(x)[-1]
        assert isinstance(k, int)
        return self.op("MatMul", x, self.random(k, units, scale=1 / math.sqrt(k)), attrs=MatMulAttrs())

    def max_pool(self, x: Value, kernel: int = 3, *, pads: int = 0, strides: int = 2, ceil_mode: bool = False) -> Value:
        rank = len(self.dims(x)) - 2
        attrs = MaxPoolAttrs((kernel,) * rank, (strides,) * rank, (pads,) * (2 * rank), (1,) * rank, ceil_mode)
        return self.op("MaxPool", x, attrs=attrs)

    def average_pool(
        self,
        x: Value,
        kernel: int = 3,
        *,
        pads: int = 0,
        strides: int = 2,
        include_pad: bool = False,
        ceil_mode: bool = False,
    ) -> Value:
        rank = len(self.dims(x)) - 2
        window = ((kernel,) * rank, (strides,) * rank, (pads,) * (2 * rank), (1,) * rank, ceil_mode)
        return self.op("AveragePool", x, attrs=AveragePoolAttrs(*window, count_include_pad=include_pad))

    def done(self, *outputs: Value) -> Graph:
        """The graph with these outputs (called y0, y1, …), verified."""
        for i, v in enumerate(outputs):
            self.graph.add_output(v, f"y{i}")
        verify(self.graph)
        return self.graph


Build = Callable[[Net], list[Value]]
"""Adds the operators of a network, and returns its outputs."""


def built(build: Callable[..., Value | Iterable[Value]], *args: Any, **options: Any) -> Graph:
    """The graph of the network that ``build(net, *args, **options)`` adds, with the returned values as outputs."""
    n = Net()
    made = build(n, *args, **options)
    return n.done(*([made] if isinstance(made, Value) else made))


def call_of(graph: Graph, op: Op, types: Mapping[int, TensorType | None] | None = None, **changes: Any) -> Call:
    """The call for the inference of an operator, with other operand types (by slot) and other attributes."""
    given = {i: None if v is None else graph.type(v) for i, v in enumerate(op.inputs)} | dict(types or {})
    return Call(
        op.kind, replace(op.attrs, **changes), tuple(given.values()), (None,) * len(given), 1, graph.fresh_symbol
    )
