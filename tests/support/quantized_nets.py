"""Small networks with explicit Q and DQ around their operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.integers import MoveIntegers, ShiftZeroPoints
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName
from optdnn.types import FP16
from support.net import Net

HOPPER = PassContext(target="cuda:sm_90a")


def folded(graph: Graph) -> tuple[Graph, PassReport]:
    """A copy after the pass; the pass changes nothing more, and keeps the network."""
    copy = graph.copy()
    report = FoldQuantized()(copy, HOPPER)
    verify(copy)
    assert FoldQuantized()(copy, HOPPER).changes == 0
    return copy, report


def feeds(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        shape = out.type.static_shape
        offset = rng.standard_normal((*shape[:2], *(1,) * (len(shape) - 2)))
        made[out.name] = (rng.standard_normal(shape) + offset).astype(out.type.dtype)
    return made


def within(graph: Graph, other: Graph, steps: float) -> None:
    """Both give the same, to so many steps of the 8-bit scale; another input changes far more."""
    given, more = feeds(graph), feeds(graph, 1)
    for name, want in evaluate(graph, given).items():
        got = evaluate(other, given)[name]
        spread = np.abs(want - evaluate(graph, more)[name]).max()
        assert np.abs(got - want).max() <= steps < spread / 4, (np.abs(got - want).max(), spread)


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
        """A value, quantized and dequantized."""
        return self.dq(self.q(x, scale, zero, dtype), scale, zero)

    def fake_channels(self, x: Value, scales: Any, zeros: Any = None, *, axis: int = 1, dtype: Any = np.int8) -> Value:
        """A value, quantized and dequantized with a scale for each entry of an axis."""
        more = [self.const(np.float32(scales), np.float32)]
        more += [] if zeros is None else [self.const(np.broadcast_to(zeros, np.shape(scales)).astype(dtype), dtype)]
        stored = self.op("QuantizeLinear", x, *more, attrs=QuantizeAttrs(np.dtype(dtype), axis))
        return self.op("DequantizeLinear", stored, *more, attrs=DequantizeAttrs(axis))

    def weights(self, *shape: int, axis: int = 0, dtype: Any = np.int8) -> Value:
        """Dequantized int8 (or fp8) weights with a scale per entry of an axis; products with them keep the variance."""
        if dtype == np.int8:
            array, spread = self.rng.integers(-127, 128, shape).astype(np.int8), 73.0
        else:
            array, spread = (100 * self.rng.standard_normal(shape)).clip(-448, 448).astype(dtype), 100.0
        fan_in = int(np.prod(shape)) // shape[axis]
        scales = (self.rng.uniform(0.5, 1.5, shape[axis]) / (spread * fan_in**0.5)).astype(np.float32)
        operands = [self.const(array, dtype), self.const(scales, np.float32)]
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
        dtype: Any = np.int8,
        **stages: Any,
    ) -> Value:
        """A float Conv with dequantized weights. ``stages``: attributes such as ``epilogue``, and ``more`` operands for them."""
        c, axes = self.dims(x)[1], len(self.dims(x)) - 2
        assert isinstance(c, int)
        w = self.weights(channels, c // group, *[kernel] * axes, dtype=dtype)
        operands: list[Any] = [x, w, self.random(channels) if bias else None, *stages.pop("more", ())]
        while operands[-1] is None:
            operands.pop()
        dilations = stages.pop("dilations", (1,) * axes)
        pads = stages.pop("pads", tuple(kernel // 2 * d for d in dilations) * 2)
        attrs = ConvAttrs((stride,) * axes, pads, dilations, group, **stages)
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

    def norm(self, x: Value, kind: str = "LayerNormalization") -> Value:
        """A normalization of the last axis with random parameters."""
        size = self.dims(x)[-1]
        assert isinstance(size, int)
        shift = [self.random(size)] if kind == "LayerNormalization" else []
        return self.op(kind, x, self.positive(size), *shift)


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
ADDED = (Stage("Add", (-1, 3)), Stage("Relu", (-2,)))


def norm_network(
    dtype: Any = FP8,
    *,
    kind: str = "LayerNormalization",
    kept: bool = True,
    zero: int | None = None,
    added: bool = False,
) -> Graph:
    """Rows of fp16, normalized and quantized. ``kept``: the float result is read as well. ``added``: the rows are sums, which are
    read as well."""
    n = QNet(np.float16)
    x = n.input(4, 6, 96)
    x = n.op("Add", x, n.input(4, 6, 96, name="b")) if added else x
    y = n.norm(x, kind)
    narrow = n.op("Relu", n.fake(y, 0.02, zero, dtype))
    return n.done(narrow, *(n.op("Relu", v) for v, read in ((y, kept), (x, added)) if read))


def attention_network(dtype: Any = FP8, *, size: int = 32, kept: bool = False, rows: int = 20, keys: int = 20) -> Graph:
    """Two heads of fp16 values, quantized, then rearranged to rows."""
    n = QNet(np.float16)
    q, k, v = (n.input(2, 2, c, size, name=name) for name, c in zip("qkv", (rows, keys, keys), strict=True))
    attrs = AttentionAttrs()
    y = n.op("Attention", q, k, v, attrs=attrs)
    turned = n.op("Transpose", n.q(y, 0.01, None, dtype), attrs=TransposeAttrs((0, 2, 1, 3)))
    out = n.op("Relu", n.dq(n.op("Reshape", turned, n.ints(2, rows, 2 * size)), 0.01))
    return n.done(out, *([n.op("Relu", y)] if kept else []))


def integer_rows(
    dtype: Any = np.int8,
    zero: int | None = None,
    *,
    kind: str = "LayerNormalization",
    size: int = 96,
    kept: bool = True,
) -> Graph:
    """A stream of 8-bit rows: a product, to which its rows are added if they have its size; the sum is normalized for the next one.
    ``kept``: the normalized rows are read in 16 bits as well."""
    n = QNet()
    x = n.fake(n.op("Tanh", n.input(4, 6, 96)), 0.01, zero, dtype)
    y = n.fake(n.qmatmul(x, size), 0.04, zero, dtype)
    stream = n.q(n.op("Add", y, x) if size == 96 else n.op("Relu", y), 0.05, zero, dtype)
    half, parameters = n.op("Cast", n.dq(stream, 0.05, zero), attrs=CastAttrs(FP16)), n.rng.uniform(0.5, 1.5, (2, size))
    given = parameters if kind == "LayerNormalization" else parameters[:1]
    y = n.op(kind, half, *(n.const(row, np.float16) for row in given))
    return n.done(
        n.qmatmul(n.fake(y, 0.03, zero, dtype), 32),
        n.op("Relu", n.dq(stream, 0.05, zero)),
        *([n.op("Relu", y)] if kept else []),
    )


def rounded_attention(
    size: int = 32,
    rows: int = 20,
    zero: int = 5,
    *,
    heads: int = 2,
    stored: bool = False,
    step: float | None = 0.25,
    mask: tuple[int, ...] = (),
) -> Graph:
    """Attention whose weights are rounded to 8 bits, and scores in steps of ``step`` (None: they are not): both products compute on
    floats. ``mask``: the shape of a tensor that is added to the scores. ``stored``: the result is rounded, too, and its heads are
    joined."""
    n = QNet(np.float16)
    q, k, v = (n.input(2, heads, rows, size, name=name) for name in "qkv")
    half = CastAttrs(FP16)
    factor = n.const(np.float16(size**-0.5), np.float16)
    last = n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))
    scores = n.op("MatMul", q, last, factor, attrs=MatMulAttrs(epilogue=(Stage("Mul", (-1, 2)),)))
    scores = n.op("Add", scores, n.input(*mask, name="mask")) if mask else scores
    scores = scores if step is None else n.op("Cast", n.fake(scores, step, zero), attrs=half)
    weights = n.op("Softmax", scores, attrs=SoftmaxAttrs(-1))
    weights = n.op("Cast", n.fake(weights, 1 / 255, 0, np.uint8), attrs=half)
    y = n.op("MatMul", weights, v)
    if not stored:
        return n.done(n.op("Relu", y))
    turned = n.op("Transpose", n.q(y, 0.02, zero), attrs=TransposeAttrs((0, 2, 1, 3)))
    return n.done(n.op("Relu", n.dq(n.op("Reshape", turned, n.ints(2, rows, heads * size)), 0.02, zero)))


NARROWED: dict[str, Callable[[], Graph]] = {
    "a norm to fp8, and in 16 bits": norm_network,
    "a norm to fp8 alone": lambda: norm_network(kept=False),
    "a norm to int8": lambda: norm_network(np.int8),
    "a norm to uint8": lambda: norm_network(np.uint8, zero=120, kind="RMSNormalization"),
    "a sum and its norm to int8": lambda: norm_network(np.int8, kept=False, added=True),
    "a sum and its norm to uint8, and in 16 bits": lambda: norm_network(np.uint8, zero=120, added=True),
    "attention to fp8": attention_network,
    "attention to int8": lambda: attention_network(np.int8, size=64),
}
"""Networks in which float kernels write 8-bit results."""

STREAMS: dict[str, Callable[[], Graph]] = {
    "rows of int8 and their norm": integer_rows,
    "rows of uint8 and their norm, in 8 bits alone": lambda: integer_rows(np.uint8, 120, kept=False),
    "rows of 90 int8 and their norm": lambda: integer_rows(size=90, kind="RMSNormalization", zero=-7),
    "attention with rounded scores": rounded_attention,
    "attention with rounded scores, 197 rows": lambda: rounded_attention(64, 197, -3, stored=True),
    "attention with rounded scores, 700 rows": lambda: rounded_attention(80, 700, stored=True),
    "attention with rounded scores, many heads": lambda: rounded_attention(32, 300, heads=40, step=0.2),
    "attention with rounded weights": lambda: rounded_attention(step=None),
    "attention with rounded weights and a mask": lambda: rounded_attention(
        64, 150, step=None, mask=(2, 1, 1, 150), stored=True
    ),
    "attention with rounded weights and masks of queries": lambda: rounded_attention(
        48, 700, step=None, mask=(1, 2, 700, 700)
    ),
    "attention with rounded weights, many heads": lambda: rounded_attention(64, 300, heads=40, step=None),
    "attention with rounded weights, many rows and heads": lambda: rounded_attention(64, 720, heads=24, step=None),
    "attention with rounded scores, many rows and heads": lambda: rounded_attention(64, 720, heads=24, step=0.2),
    "attention with scores in coarse steps": lambda: rounded_attention(step=0.5),
}
"""Networks in which float kernels read 8-bit values, or round to the grid of one."""


def grouped_fp8(channels: int, group: int, *, narrow: bool = False, **geometry: Any) -> Graph:
    """A grouped convolution of fp8 with a residual; ``narrow``: its result is in fp8, too."""
    n = QNet()
    x = n.fake(n.input(2, channels, 9, 7), 0.01, None, FP8)
    y = n.qconv(x, channels, group=group, dtype=FP8, epilogue=ADDED, more=[x], **geometry)
    return n.done(n.op("Tanh", n.fake(y, 0.01, None, FP8) if narrow else y))


FP8_GROUPS: dict[str, Callable[[], Graph]] = {
    "32 groups of 4": lambda: grouped_fp8(128, 32),
    "8 groups of 24, dilated": lambda: grouped_fp8(192, 8, dilations=(2, 1)),
    "5 groups of 8": lambda: grouped_fp8(40, 5),
    "depthwise": lambda: grouped_fp8(72, 72),
}
"""Grouped fp8 convolutions with float results, which a GPU reproduces approximately."""


def residual_block(n: QNet, x: Value) -> Value:
    a = n.fake(n.qconv(x, 24, epilogue=(Stage("Relu", (-1,)),)), 0.03)
    return n.fake(n.qconv(a, 16, 1, epilogue=ADDED, more=[x]), 0.04)


def grouped(n: QNet, x: Value, channels: int, group: int, **geometry: Any) -> Value:
    """A block of ResNeXt: a grouped convolution between two others, the last with a residual."""
    x = n.fake(n.qconv(x, channels, 1), 0.03, *geometry.pop("zero", ()))
    y = n.qconv(x, geometry.pop("filters", channels), group=group, epilogue=(Stage("Relu", (-1,)),), **geometry)
    y = n.fake(y, 0.03)
    return n.fake(n.qconv(y, 16, 1), 0.05)


def added_in_groups(n: QNet, x: Value, channels: int, group: int, *zero: Any) -> Value:
    """The residual is added by the grouped convolution."""
    x = n.fake(n.qconv(x, channels, 1), 0.03, *zero)
    return n.fake(n.qconv(x, channels, group=group, epilogue=ADDED, more=[x]), 0.05, *zero)


def padded(n: QNet, x: Value, dtype: Any, zero: int | None = None, mode: str = "constant") -> Value:
    """A concatenation of two values of one scale."""
    x = n.fake(n.op("Relu", x) if zero is None else n.qconv(x, 16), 0.04, zero, dtype)
    y = n.op("Pad", x, n.ints(0, 0, 1, 2, 0, 0, 3, 0), attrs=PadAttrs(mode))
    return n.fake(n.op("Tanh", n.fake(y, 0.04, zero, dtype)), 0.01)


def frames(n: QNet, x: Value, *numbers: Any) -> Value:
    """For the taps of a filter of three frames: the padded frames, concatenated."""
    y = n.fake(n.op("Pad", x, n.ints(0, 1, 0, 0, 0, 1, 0, 0), attrs=PadAttrs()), *numbers)
    parts = [n.fake(n.op("Slice", y, n.ints(t), n.ints(t + 5), n.ints(1), n.ints(1)), *numbers) for t in range(3)]
    y = n.op("Reshape", n.fake(n.op("Concat", *parts, attrs=ConcatAttrs(3)), *numbers), n.ints(10, 6, 72))
    return n.fake(n.qmatmul(n.fake(y, *numbers), 32), 0.04)


def shifted_depthwise(n: QNet, x: Value) -> Value:
    y = n.fake(n.qconv(x, 32, group=32), 0.04, -9)
    return n.fake(n.qconv(y, 32, 5, stride=2, group=32), 0.04)


def squeezed(n: QNet, batch: int, size: int, zero: int | None, dtype: Any, to: Any = None) -> tuple[Value, ...]:
    """A depthwise convolution and its mean (of the type ``to``; None: the same type). Both have readers."""
    x = n.fake(n.input(batch, 32, size, size), 0.03)
    y = n.fake(n.qconv(x, 32, group=32, epilogue=(Stage("Relu", (-1,)),)), 0.04, zero, dtype)
    mean = n.op("GlobalAveragePool", y)
    return n.qconv(y, 16, 1), n.fake(mean, 0.01, zero, dtype) if to is None else n.fake(mean, 0.01, -20, to)


def scales_of_channels(n: QNet, x: Value, activation: str, *numbers: Any, **geometry: Any) -> Value:
    """A convolution and a depthwise one, with a scale per channel between them."""
    y = n.qconv(x, 32, epilogue=(Stage(activation, (-1,)),), **geometry)
    y = n.fake_channels(y, 0.02 * (1 + np.arange(32) / 16), *numbers)
    return n.fake(n.qconv(y, 32, group=32), 0.04)


def shifted_block(n: QNet, x: Value) -> Value:
    wide = n.fake(n.qconv(x, 24, 1), 0.03, 121, np.uint8)
    y = n.fake(n.qconv(wide, 16, 3, epilogue=(Stage("Add", (-1, 3)),), more=[x]), 0.04, 140, np.uint8)
    pooled = n.fake(n.pool(y), 0.04, 140, np.uint8)
    return n.fake(n.op("GlobalAveragePool", pooled), 0.02, 133, np.uint8)


NETS: dict[str, Callable[[QNet], tuple[Value, ...]]] = {
    "a residual block": lambda n: (residual_block(n, n.fake(n.input(2, 16, 9, 7), 0.03)),),
    "odd channels": lambda n: (n.fake(n.qconv(n.fake(n.qconv(n.fake(n.input(2, 3, 9, 7), 0.03), 21), 0.04), 5), 0.05),),
    "a strided convolution, float result": lambda n: (n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 24, stride=2),),
    "pools": lambda n: (
        n.fake(
            n.op("GlobalAveragePool", n.fake(n.pool(n.fake(n.qconv(n.fake(n.input(2, 16, 9, 9), 0.03), 32), 0.04)), 0.04)),
            0.02,
        ),
    ),
    "concatenation in place": lambda n: (
        n.qconv(
            n.fake(
                n.op("Concat", *(n.fake(n.qconv(x, c), 0.04) for x in [n.fake(n.input(2, 16, 6, 6), 0.03)] for c in (16, 24)),
                     attrs=ConcatAttrs(1)),
                0.04,
            ),
            16,
        ),
    ),
    "float results, joined": lambda n: (
        n.op("Relu", n.op("Concat", *(n.qconv(x, c) for x in [n.fake(n.input(2, 16, 6, 6), 0.03)] for c in (16, 24)),
                          attrs=ConcatAttrs(1))),
    ),
    "a stem": lambda n: (n.fake(n.pool(n.fake(n.qconv(n.fake(n.input(2, 3, 34, 30), 0.03), 16, 7, stride=2), 0.04)), 0.04),),
    "a stem, zero point": lambda n: (
        n.fake(n.pool(n.fake(n.qconv(n.fake(n.input(2, 3, 33, 29), 0.03, 114, np.uint8), 16, 7, stride=2), 0.04)), 0.04),
    ),
    "depthwise": lambda n: (
        n.fake(n.qconv(n.fake(n.qconv(n.fake(n.input(2, 32, 9, 7), 0.03), 32, group=32), 0.04), 32, 5, stride=2, group=32), 0.04),
    ),
    "a mean alone": lambda n: (n.fake(n.op("GlobalAveragePool", n.fake(n.input(2, 12, 5, 7), 0.03, 9)), 0.02, -3),),
    "a mean between convolutions of 24 channels": lambda n: (
        n.fake(
            n.qconv(
                n.fake(n.op("GlobalAveragePool", n.fake(n.qconv(n.fake(n.input(3, 16, 9, 7), 0.03), 24), 0.04)), 0.02), 20, 1
            ),
            0.03,
        ),
    ),
    "depthwise with its mean": lambda n: squeezed(n, 200, 5, None, np.int8),
    "depthwise with its mean, zero points": lambda n: squeezed(n, 2, 40, 30, np.uint8),
    "depthwise with its mean of another type": lambda n: squeezed(n, 200, 5, None, np.uint8, np.int8),
    "depthwise with its mean of another type, two launches": lambda n: squeezed(n, 2, 40, 30, np.uint8, np.int8),
    "a mean of another type": lambda n: (
        n.fake(n.op("GlobalAveragePool", n.fake(n.op("Relu", n.input(3, 24, 9, 7)), 0.02, 0, np.uint8)), 0.01, -128),
    ),
    "depthwise, float result": lambda n: (
        n.op("Relu", n.op("Cast", n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 16, group=16), attrs=CastAttrs(FP16))),
    ),
    "a perceptron": lambda n: (n.qgemm(n.fake(n.op("Relu", n.qgemm(n.fake(n.input(5, 33), 0.03), 40)), 0.03), 10),),
    "a bias that is added after the rounding": lambda n: (
        n.fake(
            n.op("Relu", n.op("Add", n.fake(n.qmatmul(n.fake(n.input(3, 50, 64), 0.03, 9), 40), 0.04, 9), n.random(40))), 0.05
        ),
    ),
    "rows of three axes": lambda n: (n.fake(n.qmatmul(n.fake(n.input(3, 5, 32), 0.03), 24), 0.04),),
    "addition": lambda n: (
        n.q(n.op("Add", n.fake(n.input(2, 16, 5, 5), 0.03), n.fake(n.input(2, 16, 5, 5, name="b"), 0.05)), 0.06),
    ),
    "uint8": lambda n: (
        n.fake(n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03, 0, np.uint8), 32), 0.04, 100, np.uint8),
    ),
    "zero points": lambda n: (
        n.fake(
            n.qconv(n.fake(n.qconv(n.fake(n.input(2, 3, 9, 7), 0.03, 117, np.uint8), 32, stride=2), 0.04, 90, np.uint8), 20),
            0.04, -3,
        ),
    ),
    "scales of channels": lambda n: (scales_of_channels(n, n.fake(n.input(2, 16, 9, 7), 0.03), "Relu", -20),),
    "scales of channels after a hard swish": lambda n: (
        scales_of_channels(n, n.fake(n.input(2, 16, 9, 7), 0.03), "HardSwish"),
    ),
    "scales of channels of a stem": lambda n: (
        scales_of_channels(n, n.fake(n.input(2, 3, 34, 30), 0.03), "HardSwish", kernel=3, stride=2),
    ),
    "scales of channels between depthwise convolutions": lambda n: (
        scales_of_channels(n, n.fake(n.input(2, 32, 9, 7), 0.03), "HardSwish", group=32),
    ),
    "scales of channels after groups": lambda n: (
        scales_of_channels(n, n.fake(n.input(2, 32, 9, 7), 0.03), "HardSwish", group=4),
    ),
    "a factor of each channel after an activation": lambda n: (
        n.fake(
            n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 24, epilogue=(Stage("HardSwish", (-1,)), Stage("Mul", (-2, 3))),
                    more=[n.random(24, 1, 1)]),
            0.04, -3,
        ),
    ),
    "PReLU": lambda n: (
        n.fake(
            n.qconv(n.fake(n.input(2, 32, 9, 7), 0.03), 32, group=32, epilogue=(Stage("PRelu", (-1, 3)),),
                    more=[n.random(32, 1, 1)]),
            0.04, -3,
        ),
    ),
    "zero points, depthwise": lambda n: (shifted_depthwise(n, n.fake(n.input(2, 32, 9, 7), 0.03, 117, np.uint8)),),
    "depthwise by TMA": lambda n: (n.fake(n.qconv(n.fake(n.input(16, 64, 28, 28), 0.03), 64, 5, group=64), 0.04, 7),),
    "zero points, a perceptron": lambda n: (
        n.qgemm(n.fake(n.op("Relu", n.qgemm(n.fake(n.input(5, 33), 0.03, 80, np.uint8), 40)), 0.03, -128), 10),
    ),
    "zero points, a residual block and pools": lambda n: (shifted_block(n, n.fake(n.input(2, 16, 9, 9), 0.03, 125, np.uint8)),),
    "padding": lambda n: (padded(n, n.fake(n.input(2, 16, 9, 7), 0.03), np.int8),),
    "padding with a zero point": lambda n: (padded(n, n.fake(n.input(2, 16, 9, 7), 0.03), np.uint8, 117),),
    "padding by reflection": lambda n: (padded(n, n.fake(n.input(2, 16, 9, 7), 0.03), np.uint8, 117, mode="reflect"),),
    "padding in fp8": lambda n: (padded(n, n.fake(n.input(2, 16, 9, 7), 0.03, None, FP8), FP8),),
    "frames under taps": lambda n: (frames(n, n.fake(n.input(2, 5, 6, 24), 0.03), 0.03, None, np.int8),),
    "frames under taps, zero point": lambda n: (frames(n, n.fake(n.input(2, 5, 6, 24), 0.03, 99, np.uint8), 0.03, 99, np.uint8),),
    "32 groups of 4": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 128, 32),),
    "32 groups of 8, strided": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 256, 32, stride=2),),
    "3 groups": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 240, 3, kernel=1),),
    "3 groups of 80, 20 filters each": lambda n: (
        grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 240, 3, filters=60, kernel=1),
    ),
    "13 groups of 8": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 104, 13),),
    "8 groups of 24": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 192, 8),),
    "8 groups of 16, dilated": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 128, 8, dilations=(2, 1)),),
    "8 groups of 4, 16 filters each": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 32, 8, filters=128),),
    "groups over one axis": lambda n: (grouped(n, n.fake(n.input(3, 16, 21), 0.03), 128, 8),),
    "groups over one axis, zero points": lambda n: (grouped(n, n.fake(n.input(3, 16, 21), 0.03), 24, 6, zero=(99, np.uint8)),),
    "groups, zero points": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 128, 16, zero=(117, np.uint8)),),
    "groups with a residual": lambda n: (added_in_groups(n, n.fake(n.input(2, 16, 9, 7), 0.03), 192, 48),),
    "groups with a residual, zero points": lambda n: (
        added_in_groups(n, n.fake(n.input(2, 16, 9, 7), 0.03), 40, 5, 131, np.uint8),
    ),
    "groups, float result": lambda n: (n.qconv(n.fake(n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 128, 1), 0.03), 128, group=4),),
    "groups of an image": lambda n: (n.fake(n.qconv(n.fake(n.input(2, 3, 34, 30), 0.03), 48, 7, stride=2, group=3), 0.04),),
    "depthwise, odd channels": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 24, 24),),
    "depthwise, odd channels, zero points": lambda n: (
        grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 72, 72, zero=(117, np.uint8)),
    ),
    "depthwise over one axis": lambda n: (grouped(n, n.fake(n.input(2, 16, 30), 0.03), 64, 64),),
    "depthwise, four filters each": lambda n: (grouped(n, n.fake(n.input(2, 16, 9, 7), 0.03), 32, 32, filters=128),),
}  # fmt: skip
"""8-bit networks of convolutions, products, pools and additions, which are exact to the bit: functions that return their
outputs."""


def launches(graph: Graph, target: str = "cuda:sm_90a") -> tuple[Any, Program]:
    """A context of the network on a GPU, and its program. Float operators keep their precision."""
    from optdnn.runtime.engine import Engine

    for one in (ShiftZeroPoints(), MoveIntegers(), FoldQuantized(), AssignLayout()):
        one(graph, PassContext(target=target))
    program = lower_cuda(graph, BuildOptions(target=target), facts_for(TargetName.parse(target)), {})
    return Engine(program).context(), program
