"""Families of operators with generated kernels, each as one network of many cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support import draws, scan_cases, segment_cases
from support.net import Net
from support.pictures import resized
from support.positions import FAMILIES as POSITIONS

from optdnn.ir.graph import Graph
from optdnn.ops import gather, index, norm, pool, reduce, resize, shape, softmax, unary
from optdnn.ops.binary import CastAttrs
from optdnn.types import DTYPES, FP32, INT64


def softmaxes(n: Net) -> list[Any]:
    x = n.input(3, 5, 40)
    return [n.op("Softmax", x, attrs=softmax.SoftmaxAttrs(a)) for a in (-1, 1)] + [
        n.op("LogSoftmax", x, attrs=softmax.SoftmaxAttrs(0)), n.op("Softmax", n.input(2, 700, name="wide"))]  # fmt: skip


def norms(n: Net) -> list[Any]:
    x = n.input(2, 12, 5, 3)
    row, channel = (n.random(3), n.random(3)), (n.positive(12), n.random(12))
    return [
        n.op("LayerNormalization", x, *row),
        n.op("LayerNormalization", x, n.random(5, 3), attrs=norm.LayerNormAttrs(2, 1e-3)),
        n.op("RMSNormalization", x, row[0]),
        n.op("InstanceNormalization", x, *channel),
        n.op("GroupNormalization", x, *channel, attrs=norm.GroupNormAttrs(4)),
        n.op("LpNormalization", x, attrs=norm.LpNormAttrs(1, 1)),
        n.op("LpNormalization", x, attrs=norm.LpNormAttrs(1, 2)),
        n.op("LpNormalization", x, attrs=norm.LpNormAttrs(-1, 2, 1.5)),
        n.op("MeanVarianceNormalization", x),
        n.op("DeviationNormalization", x, *row, attrs=norm.DeviationNormAttrs(-1, 0.0, 0.2)),
        n.op("DeviationNormalization", x, n.random(5, 3), attrs=norm.DeviationNormAttrs(-2, 0.1, 0.0, True, False)),
        n.op("DeviationNormalization", x, row[0], attrs=norm.DeviationNormAttrs(-1, 0.0, 0.3, False, False)),
        n.op("LRN", x, attrs=norm.LRNAttrs(5, 0.3, 0.75, 2.0)),
        n.bn(x),
    ]


def reductions(n: Net) -> list[Any]:
    x = n.op("Abs", n.op("Add", n.input(3, 4, 17), 0.1))
    kinds = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    found = [n.op(f"Reduce{k}", x, n.ints(2), attrs=reduce.ReduceAttrs()) for k in kinds]
    return [
        *found,
        n.op("ReduceSum", x, n.ints(0, 2), attrs=reduce.ReduceAttrs(False)),
        n.op("ReduceMax", x, n.ints(0)),
        *(
            n.op(f"Reduce{k}", x, n.ints(), attrs=reduce.ReduceAttrs(True, True))
            for k in ("SumSquare", "LogSum", "Sum")
        ),
    ]


def extremes(n: Net) -> list[Any]:
    x = n.input(3, 5, 7)
    whole = n.op("Round", x)  # equal elements
    return [
        n.op("ArgMax", x, attrs=reduce.ArgAttrs(1)),
        n.op("ArgMin", x, attrs=reduce.ArgAttrs(-1, keepdims=False)),
        n.op("ArgMax", whole, attrs=reduce.ArgAttrs(2, select_last_index=True)),
        n.op("ArgMin", whole, attrs=reduce.ArgAttrs(0)),
    ]


def long_positions(n: Net) -> list[Any]:
    x = n.input(2, 1500, 3)
    whole = n.op("Round", x)  # equal elements
    return [
        n.op("ArgMax", x, attrs=reduce.ArgAttrs(1)),
        n.op(
            "ArgMin",
            n.op("Transpose", x, attrs=shape.TransposeAttrs((0, 2, 1))),
            attrs=reduce.ArgAttrs(-1, keepdims=False),
        ),
        n.op("ArgMax", whole, attrs=reduce.ArgAttrs(1, select_last_index=True)),
        n.op("ArgMin", whole, attrs=reduce.ArgAttrs(1)),
        n.op("ArgMin", n.op("Log", x), attrs=reduce.ArgAttrs(1)),  # NaNs
        n.op("ArgMax", n.op("Log", x), attrs=reduce.ArgAttrs(1, select_last_index=True)),
        n.op("ArgMax", n.input(1, 40000, name="wide"), attrs=reduce.ArgAttrs(1)),
    ]


def integer_reductions(n: Net) -> list[Any]:
    x = n.input(3, 40, dtype=INT64)
    return [n.op(f"Reduce{k}", x, n.ints(1)) for k in ("Sum", "Max", "Min", "Prod", "L1")]


def pools(n: Net) -> list[Any]:
    x = n.input(2, 8, 9, 7)
    lp = pool.LpPoolAttrs((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), p=2)
    return [
        n.max_pool(x), n.max_pool(x, pads=1, ceil_mode=True), n.average_pool(x, pads=1), n.average_pool(x, pads=1, include_pad=True),
        n.op("LpPool", x, attrs=lp), n.op("GlobalAveragePool", x), n.op("GlobalMaxPool", x), n.max_pool(n.input(2, 3, 9, name="one")),
        n.average_pool(x, 5, pads=2), n.max_pool(n.input(2, 3, 24, name="long"), 11, strides=1), mixed(n, x),
    ]  # fmt: skip


def mixed(n: Net, x: Any) -> Any:
    """The token mixing of PoolFormer: a pool, and pointwise operators after it that also read its operand."""
    return n.op("Add", n.op("Mul", n.op("Sub", n.average_pool(x, pads=1, strides=1), x), n.random(8, 1, 1)), x)


def convolutions(n: Net) -> list[Any]:
    x = n.input(2, 8, 7, 9)
    deep, odd = n.conv(x, 8, group=8, bias=True), n.input(2, 5, 7, 9, name="odd")
    return [
        deep, n.op("Swish", n.conv(x, 8, 5, pads=2, strides=2, group=8), attrs=unary.AlphaAttrs(1.0)),
        n.op("Add", n.op("Relu", n.conv(x, 12, group=4, dilations=2, pads=2, bias=True)), n.random(12, 1, 1)),
        n.conv(n.input(1, 2, 4, 5, 6, name="volume"), 3), n.conv_transpose(x, 6, bias=True), n.conv_transpose(x, 8, 2, group=4, pads=1),
        n.conv(n.input(2, 6, 11, name="line"), 6, group=6), n.conv(n.input(1, 8, 4, 5, 6, name="deep"), 8, group=8),
        n.op("Mul", n.conv(x, 16, group=8), n.op("Sigmoid", n.conv(x, 16, group=2))), n.op("Add", n.conv(odd, 5, group=5, bias=True), odd),
        n.op("Relu", n.conv_transpose(deep, 8, 3, group=8, pads=1)),
    ]  # fmt: skip


def products(n: Net) -> list[Any]:
    a, b = n.input(2, 3, 20, 33), n.input(3, 33, 70, name="b")
    v = n.input(33, name="v")
    square = n.op("Slice", a, n.ints(0, 0), n.ints(1, 1), n.ints(0, 1))
    flat = n.op("Reshape", square, n.ints(20, 33))
    return [
        n.op("MatMul", a, b), n.op("MatMul", a, v), n.op("MatMul", n.op("Reshape", v, n.ints(33)), n.op("Transpose", flat)),
        n.op("Relu", n.op("Gemm", flat, n.op("Transpose", flat), n.random(20), attrs=_gemm(0.5, 2.0))), n.op("MatMul", v, v),
        n.op("Gemm", flat, flat, attrs=_gemm(1.0, 1.0, True, False)),
    ]  # fmt: skip


def _gemm(alpha: float, beta: float, a: bool = False, b: bool = False) -> Any:
    from optdnn.ops.gemm import GemmAttrs

    return GemmAttrs(alpha, beta, a, b)


def resizes(n: Net) -> list[Any]:
    x = n.input(2, 3, 6, 7)
    sizes, scales = n.ints(2, 3, 11, 5), n.const([1, 1, 2, 2.5], np.float32)
    found = [n.op("Resize", x, None, None, sizes, attrs=resize.ResizeAttrs(m, c)) for m, c in (
        ("linear", "half_pixel"), ("linear", "align_corners"), ("cubic", "half_pixel"), ("nearest", "asymmetric"))]  # fmt: skip
    return [
        *found,
        n.op("Resize", x, None, scales),
        n.op("Resize", x, None, None, sizes, attrs=resize.ResizeAttrs("linear", antialias=True)),
    ]


def pictures(n: Net) -> list[Any]:
    return [*resized(n), *resized(n, channels=1, crop=False, name="gray")]


def paddings(n: Net) -> list[Any]:
    x = n.input(2, 3, 5, 6)
    pads = n.ints(0, 1, 2, 1, 0, 0, 3, 2)
    found = [n.op("Pad", x, pads, n.const(0.5), attrs=index.PadAttrs(m)) for m in ("constant", "edge")]
    inner = n.ints(0, 1, 2, 1, 0, 0, 3, 2)
    return [
        *found,
        n.op("Pad", x, inner, attrs=index.PadAttrs("reflect")),
        n.op("Pad", x, n.ints(0, 0, -1, 1, 0, 0, 0, -2)),
    ]


def gathers(n: Net) -> list[Any]:
    x, i = n.input(5, 6, 7), n.input(2, 3, name="i", dtype=INT64)
    three = n.op("Reshape", i, n.ints(3, 2))
    elements = n.op("Expand", n.op("Reshape", i, n.ints(1, 6, 1)), n.ints(2, 6, 7))
    return [
        n.op("Gather", x, i, attrs=gather.GatherAttrs(1)), n.op("Gather", x, i), n.op("GatherND", x, three),
        n.op("GatherElements", x, elements, attrs=gather.GatherAttrs(0)),
    ]  # fmt: skip


def movements(n: Net) -> list[Any]:
    x = n.input(2, 8, 4, 6)
    turned = n.op("Transpose", x, attrs=shape.TransposeAttrs((2, 0, 3, 1)))
    nine = n.op("Transpose", n.input(2, 3, 2, 3, 2, 2, 3, 2, 2), attrs=shape.TransposeAttrs(tuple(range(8, -1, -1))))
    return [
        n.op("Reshape", turned, n.ints(4, -1)), n.op("DepthToSpace", x, attrs=index.BlockAttrs(2)), n.op("Tile", x, n.ints(1, 2, 1, 3)),
        n.op("DepthToSpace", x, attrs=index.BlockAttrs(2, "CRD")), n.op("SpaceToDepth", x, attrs=index.BlockAttrs(2)), n.op("SpaceToDepth", x, attrs=index.BlockAttrs(2, "CRD")),
        n.op("Slice", x, n.ints(7, -1), n.ints(0, -100), n.ints(1, 3), n.ints(-3, -1)),
        n.op("Concat", x, turned_back(n, turned), attrs=index.ConcatAttrs(2)),
        *n.op("Split", x, n.ints(3, 5), attrs=index.SplitAttrs(1), outputs=2), nine,
    ]  # fmt: skip


def running_sums(n: Net) -> list[Any]:
    """Along lines that warps share (70 and 40 elements, few lines), along three elements, and along lines of several tiles of a block."""
    x = n.input(3, 70, 40)
    small = n.op("Cast", n.op("Round", x), attrs=CastAttrs(INT64))
    found = [n.op("CumSum", small, n.ints(1)), n.op("CumSum", x, n.ints(0))]
    long = n.op("Exp", n.input(2, 4500, 2, name="long"))
    found.append(n.op("CumSum", n.op("Cast", n.op("Round", long), attrs=CastAttrs(INT64)), n.ints(1)))
    found += [
        n.op("CumSum", long, n.ints(1), attrs=index.CumulativeAttrs(exclusive, reverse))
        for exclusive in (False, True)
        for reverse in (False, True)
    ]
    for exclusive in (False, True):
        for reverse in (False, True):
            attrs = index.CumulativeAttrs(exclusive, reverse)
            found += [n.op("CumSum", x, n.ints(2), attrs=attrs), n.op("CumProd", x, n.ints(1), attrs=attrs)]
    return found


def turned_back(n: Net, x: Any) -> Any:
    return n.op("Transpose", x, attrs=shape.TransposeAttrs((1, 3, 0, 2)))


UNARY = [
    "Relu",
    "Elu",
    "Selu",
    "Celu",
    "Sigmoid",
    "HardSigmoid",
    "HardSwish",
    "Tanh",
    "Softplus",
    "Softsign",
    "Mish",
    "Gelu",
    "Neg",
    "Abs",
    "Sign",
    "Ceil",
    "Floor",
    "Round",
    "Erf",
    "Sin",
    "Cos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Exp",
    "ThresholdedRelu",
    "LeakyRelu",
    "Swish",
    "Shrink",
]


def unaries(n: Net) -> list[Any]:
    x = n.input(3, 37)
    positive = n.op("Add", n.op("Abs", x), 0.5)
    small = n.op("Mul", n.op("Tanh", x), 0.9)
    found = [n.op(k, x) for k in UNARY]
    found += [n.op(k, positive) for k in ("Sqrt", "Log", "Reciprocal")]
    found += [n.op(k, small) for k in ("Asin", "Acos", "Atanh", "Tan")] + [n.op("Acosh", n.op("Add", positive, 0.6))]
    return [*found, n.op("Gelu", x, attrs=unary.GeluAttrs("tanh"))]


def binaries(n: Net) -> list[Any]:
    x, y = n.input(3, 1, 16), n.input(5, 16, name="y")
    positive = n.op("Add", n.op("Abs", x), 0.5)
    found = [n.op(k, x, y) for k in ("Add", "Sub", "Mul", "Min", "Max", "Sum", "Mean")] + [
        n.op("PRelu", y, n.random(16)),
        n.op("Snake", y, n.positive(16), n.random(1, 16)),
    ]
    test = n.op("Less", x, y)
    return [
        *found, n.op("Div", y, positive), n.op("Pow", positive, y), n.op("Mod", y, positive, attrs=_fmod()),
        n.op("Mod", y, n.op("Sub", x, 0.1)), n.op("Mod", n.op("Floor", y), n.const([np.inf, -np.inf, 2, -2] * 4)), n.op("Where", test, x, y),
        n.op("Clip", x, -0.5, 0.25), n.op("Clip", x, None, 0.25), test, n.op("GreaterOrEqual", x, y), n.op("And", test, n.op("Not", test)),
    ]  # fmt: skip


def _fmod() -> Any:
    from optdnn.ops.binary import ModAttrs

    return ModAttrs(True)


def integers(n: Net) -> list[Any]:
    x, y = n.input(4, 9, dtype=INT64), n.input(9, name="y", dtype=INT64)
    one = n.op("Add", y, n.const([1], np.int64))
    small = n.op("Cast", x, attrs=CastAttrs(DTYPES["int8"]))
    return [
        n.op("Add", x, y), n.op("Div", n.op("Neg", x), one), n.op("Mod", n.op("Neg", x), one), n.op("Pow", x, y), n.op("Equal", x, y),
        n.op("BitwiseAnd", x, y), n.op("BitwiseXor", x, y), n.op("BitwiseNot", x), small, n.op("Cast", x, attrs=CastAttrs(DTYPES["bool"])),
        n.op("Max", x, y), n.op("Cast", x, attrs=CastAttrs(FP32)), n.op("Where", n.op("Equal", x, y), x, y),
    ]  # fmt: skip


def scans(n: Net) -> list[Any]:
    return [*scan_cases.weighted(n), *scan_cases.gated(n, backward=True, other=True), *scan_cases.spiking(n)]


def segments(n: Net) -> list[Any]:
    return segment_cases.attention(n)


_NETS: dict[str, Callable[[Net], list[Any]]] = {
    f.__name__: f
    for f in (
        softmaxes,
        norms,
        reductions,
        extremes,
        long_positions,
        integer_reductions,
        pools,
        convolutions,
        products,
        resizes,
        pictures,
        paddings,
        gathers,
        movements,
        running_sums,
        scans,
        segments,
        unaries,
        binaries,
        integers,
    )
} | POSITIONS
_IMPORTED: dict[str, Callable[[], Graph]] = {"draws": draws.family}
FAMILIES = (*_NETS, *_IMPORTED)


def graph_of(family: str) -> Graph:
    if family in _IMPORTED:
        return _IMPORTED[family]()
    n = Net(seed=5)
    return n.done(*_NETS[family](n))
