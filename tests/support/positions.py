"""Families of operators with kernels over coordinates: several operators of a kind in one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ops import create, detect, gather, index, norm, pool, quant, signal, sort
from optdnn.ops.attention import RotaryAttrs, TensorScatterAttrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.farthest import FarthestPointsAttrs
from optdnn.ops.gemm import EinsumAttrs
from optdnn.ops.packed_layout import CODES, PackedGatherAttrs, row_bytes
from optdnn.ops.resized_peaks import ResizedPeaksAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.signal import BitCastAttrs
from optdnn.ops.sinkhorn import SinkhornAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.types import DTYPES, FP32, INT64, NARROW_INTEGERS
from support.forests import CASES, forest
from support.net import Net


def orders(n: Net) -> list[Any]:
    x = n.input(3, 5, 7)
    whole = n.op("Round", x)  # equal elements
    found: list[Any] = []
    for value, attrs in ((x, sort.TopKAttrs()), (whole, sort.TopKAttrs(1, False)), (whole, sort.TopKAttrs(0))):
        found += n.op("TopK", value, n.ints(3), attrs=attrs, outputs=2)
    lengths = n.input(5, name="lengths", dtype=INT64)
    return [
        *found,
        n.op("TopK", x, n.ints(2)),
        n.op("Hardmax", whole, attrs=SoftmaxAttrs(1)),
        n.op("Hardmax", x, attrs=SoftmaxAttrs(-1)),
        n.op("ReverseSequence", x, lengths, attrs=sort.ReverseSequenceAttrs(1, 0)),
        n.op("ReverseSequence", n.op("Transpose", x), lengths, attrs=sort.ReverseSequenceAttrs(1, 0)),
    ]


def triangles(n: Net) -> list[Any]:
    x, k = n.input(2, 4, 6), n.input(name="k", dtype=INT64)
    return [
        n.op("Trilu", x), n.op("Trilu", x, k, attrs=create.TriluAttrs(False)), n.op("Trilu", x, n.const(-2, INT64)),
        n.op("Trilu", n.op("Cast", x, attrs=_to("int32")), k),
    ]  # fmt: skip


def _to(name: str) -> Any:
    return CastAttrs(DTYPES[name])


def sums(n: Net) -> list[Any]:
    x, axis = n.input(3, 6, 5), n.input(name="axis", dtype=INT64)
    one = n.op("Sub", n.op("Min", axis, n.const(1, INT64)), n.const(1, INT64))  # -1 or 0
    i = n.op("Cast", x, attrs=_to("int64"))
    cum = index.CumulativeAttrs
    return [
        n.op("CumSum", x, n.const(1, INT64)), n.op("CumSum", x, n.const(-1, INT64), attrs=cum(True, False)),
        n.op("CumSum", i, n.const(0, INT64), attrs=cum(False, True)), n.op("CumProd", x, n.const(1, INT64), attrs=cum(True, True)),
        n.op("CumSum", x, one), n.op("CumSum", i, one, attrs=cum(True, True)), n.op("CumProd", x, one, attrs=cum(False, True)),
    ]  # fmt: skip


def scatters(n: Net) -> list[Any]:
    x, u = n.input(4, 5, 6), n.input(2, 5, 3, name="u")
    i = n.input(2, 5, 3, name="i", dtype=INT64)
    pairs, rows = n.input(3, 2, 2, name="pairs", dtype=INT64), n.input(3, 2, 6, name="rows")
    apart = n.const(np.array([[[0, 1], [2, 2]], [[1, -1], [3, 0]], [[-2, 3], [0, 4]]]), INT64)
    elements, nd = gather.ScatterElementsAttrs, gather.ScatterNDAttrs
    cache, new, at = n.input(2, 8, 3, name="cache"), n.input(2, 4, 3, name="new"), n.input(2, name="at", dtype=INT64)
    return [
        *(n.op("ScatterElements", x, i, u, attrs=elements(a, r)) for a, r in ((0, "add"), (2, "max"), (1, "mul"))),
        n.op("ScatterElements", x, n.const(np.arange(30).reshape(2, 5, 3) % 2 * 2 - np.arange(2)[:, None, None], INT64), u),
        *(n.op("ScatterND", x, pairs, rows, attrs=nd(r)) for r in ("add", "min")),
        n.op("ScatterND", x, apart, rows),
        n.op("ScatterND", n.op("Transpose", x), n.op("Transpose", pairs), n.input(2, 2, name="more"), attrs=nd("add")),
        n.op("TensorScatter", cache, new, at, attrs=TensorScatterAttrs()),
        n.op("TensorScatter", cache, new, n.op("Mul", at, n.const(3, INT64)), attrs=TensorScatterAttrs(1, "circular")),
    ]  # fmt: skip


def written_updates(n: Net) -> list[Any]:
    """Scatters with so many updates that each update is written to its place."""
    order = n.rng.permutation(8192)[:4096]
    elements, rows = n.const(order - 8192 * (order % 2), INT64), n.const(order.reshape(64, 64, 1), INT64)
    return [
        n.op("ScatterElements", n.input(8192), elements, n.input(4096)),
        n.op("ScatterND", n.input(8192, 6), rows, n.input(64, 64, 6)),
    ]


def choices(n: Net) -> list[Any]:
    i, values = n.input(3, 4, name="i", dtype=INT64), n.input(2, name="values")
    x = n.input(4, 6)
    return [
        n.op("OneHot", i, n.ints(4), values),
        n.op("OneHot", n.op("Sub", i, n.ints(2)), n.ints(5), values, attrs=gather.OneHotAttrs(1)),
        n.op("OneHot", n.op("Cast", i, attrs=_to("fp32")), n.ints(3), n.const([2, 9], INT64), attrs=gather.OneHotAttrs(0)),
        n.op("BitCast", n.op("Cast", x, attrs=_to("int16")), attrs=BitCastAttrs(DTYPES["uint16"])),
        n.op("BitCast", n.op("Transpose", i), attrs=BitCastAttrs(DTYPES["uint64"])),
    ]  # fmt: skip


def grids(n: Net) -> list[Any]:
    x, grid = n.input(2, 3, 5, 6), n.op("Mul", n.input(2, 4, 3, 2, name="grid"), 0.7)
    deep, places = n.input(1, 2, 3, 4, 5, name="deep"), n.op("Mul", n.input(1, 2, 3, 2, 3, name="places"), 0.8)
    attrs = detect.GridSampleAttrs
    found = [n.op("GridSample", x, grid, attrs=attrs(m, p, m == "linear"))
             for m in ("linear", "cubic") for p in ("zeros", "border", "reflection")]  # fmt: skip
    half = n.op(
        "Div", n.op("Floor", n.op("Mul", grid, 3.0)), 4.0
    )  # "nearest" is not continuous: positions keep away from the edges of pixels
    theta, turn = n.input(2, 2, 3, name="theta"), n.input(1, 3, 4, name="turn")
    return [
        *found,
        n.op("AffineGrid", theta, n.ints(2, 3, 4, 5), attrs=detect.AffineGridAttrs(True)),
        n.op("AffineGrid", turn, n.ints(1, 2, 3, 4, 5), attrs=detect.AffineGridAttrs()),
        n.op("GridSample", x, half, attrs=attrs("nearest", "border", True)),
        n.op("GridSample", deep, places, attrs=attrs("linear", "reflection", False)),
    ]


def quantized(n: Net) -> list[Any]:
    x, scale, rows = n.input(4, 6), n.input(name="scale"), n.input(4, name="rows")
    s, per_row = n.op("Add", n.op("Abs", scale), 0.05), n.op("Add", n.op("Abs", rows), 0.05)
    zero = n.const(np.array([3, 0, 7, 250]), np.uint8)
    blocks = n.op("Add", n.op("Abs", n.input(4, 3, name="blocks")), 0.05)
    attrs, back = quant.QuantizeAttrs, quant.DequantizeAttrs
    q = n.op("QuantizeLinear", x, per_row, zero, attrs=attrs(DTYPES["uint8"], axis=0))
    e = n.op("QuantizeLinear", x, s, attrs=attrs(DTYPES["fp8_e4m3"]))
    i = n.op("QuantizeLinear", x, blocks, attrs=attrs(DTYPES["int8"], axis=1, block_size=2))
    w = n.op("QuantizeLinear", n.op("Transpose", x), s, attrs=attrs(DTYPES["int16"]))
    f = n.op("QuantizeLinear", n.op("Mul", x, 1e4), s, attrs=attrs(DTYPES["fp8_e5m2"]))
    dynamic = n.op("DynamicQuantizeLinear", x, outputs=3) + n.op("DynamicQuantizeLinear", n.op("Abs", x), outputs=3)[:2]
    return [
        *dynamic, q, i, w, n.op("DequantizeLinear", q, per_row, zero, attrs=back(axis=0)), n.op("DequantizeLinear", e, s),
        n.op("DequantizeLinear", f, s), n.op("DequantizeLinear", i, blocks, attrs=back(axis=1, block_size=2)),
    ]  # fmt: skip


def bytes_of_floats(n: Net) -> list[Any]:
    x = n.op("Mul", n.input(9, 30), n.const(2.0 ** np.arange(-24, 6)))
    kept = [n.op("Cast", x, attrs=CastAttrs(DTYPES[t], s)) for t in ("fp8_e4m3", "fp8_e5m2") for s in (True, False)]
    kept += [
        n.op("Cast", x, attrs=_to(t)) for t in ("fp8_e4m3fnuz", "fp8_e5m2fnuz", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")
    ]
    wide = n.op("Cast", n.op("Cast", x, attrs=_to("fp64")), attrs=_to("fp8_e4m3"))
    return [n.op("Cast", v, attrs=_to("fp32")) for v in (*kept, wide)]


def parts_of_bytes(n: Net) -> list[Any]:
    i, x, s = n.input(5, 40, dtype=INT64, name="i"), n.op("Mul", n.input(3, 40), 4.0), n.const(0.3)
    found = []
    for dtype in NARROW_INTEGERS:
        found += [n.op("Cast", n.op("Cast", v, attrs=CastAttrs(dtype)), attrs=_to("fp32")) for v in (x, i)]
        found.append(n.op("DequantizeLinear", n.op("QuantizeLinear", x, s, attrs=quant.QuantizeAttrs(dtype)), s))
    return found


def integer_products(n: Net) -> list[Any]:
    a, c = (
        n.op("Cast", n.input(*s, name=m, dtype=INT64), attrs=_to("uint8")) for s, m in (((2, 3, 5), "a"), ((5, 4), "c"))
    )
    d = n.op("Cast", n.op("Sub", n.input(5, 4, name="d", dtype=INT64), n.ints(2)), attrs=_to("int8"))
    per_column = n.const([0.5, 0.25, 1, 2]), n.const(np.array([1, 0, 0, 1]), np.int8)
    z, per_row = n.const(1, np.uint8), n.const(np.array([1, 0, 2]), np.uint8)
    rows = n.const([0.1, 0.2, 0.3])  # with one scale for all rows, Q and DQ replace it
    return [
        n.op("MatMulInteger", a, d, z, n.const(1, np.int8)), n.op("MatMulInteger", a, c), n.op("MatMulInteger", a, c, per_row),
        n.op("QLinearMatMul", a, rows, per_row, d, *per_column, 0.3, n.const(5, np.int8)),
    ]  # fmt: skip


def integer_convolutions(n: Net) -> list[Any]:
    def bytes_of(*shape: int, name: str, dtype: str = "uint8") -> Any:
        return n.op("Cast", n.input(*shape, name=name, dtype=INT64), attrs=_to(dtype))

    x, line = bytes_of(2, 4, 7, 6, name="x"), bytes_of(1, 2, 9, name="line")
    w, grouped = (
        n.const(n.rng.integers(-9, 9, (6, 4, 3, 2)), np.int8),
        n.const(n.rng.integers(0, 9, (6, 2, 3, 3)), np.uint8),
    )
    z, each = n.const(1, np.uint8), n.const(np.arange(6) - 2, np.int8)
    plain = quant.IntegerConvAttrs((1, 1), (0, 0, 0, 0), (1, 1))
    scale = n.op("Add", n.op("Abs", n.input(1, name="scale")), 0.1)  # if it is constant, Q and DQ replace it
    return [
        n.op("ConvInteger", x, w, z, each, attrs=quant.IntegerConvAttrs((2, 1), (1, 0, 2, 1), (1, 2))),
        n.op("ConvInteger", x, w, attrs=plain),
        n.op("ConvInteger", x, grouped, z, z, attrs=quant.IntegerConvAttrs((1, 1), (0,) * 4, (1, 1), 2, "SAME_UPPER")),
        n.op("ConvInteger", line, n.const([[[1, -2, 3]] * 2], np.int8), attrs=quant.IntegerConvAttrs((1,), (1, 1), (1,))),
        n.op("QLinearConv", x, scale, z, w, n.const(0.1 + np.arange(6) / 10), each, 0.3, n.const(5, np.uint8),
             n.const(np.arange(6) * 3, np.int32), attrs=plain),
    ]  # fmt: skip


def contractions(n: Net) -> list[Any]:
    x, y, v = n.input(2, 3, 4), n.input(4, 5, name="y"), n.input(4, name="v")
    square = n.input(3, 3, name="square")
    return [
        n.op("Einsum", *operands, attrs=EinsumAttrs(equation))
        for equation, *operands in (("bij,jk->bki", x, y), ("...j,j->...", x, v), ("ii->i", square), ("ii", square),
                                    ("bij,jk,j->b", x, y, v), ("bij->jb", x), ("iij,jk->ki", n.input(3, 3, 4, name="cube"), y))
    ]  # fmt: skip


def spectra(n: Net) -> list[Any]:
    x, z = n.input(2, 7, 1), n.input(2, 6, 2, name="z")
    attrs = signal.DFTAttrs
    return [
        n.op("DFT", x, attrs=attrs(1)), n.op("DFT", x, attrs=attrs(1, onesided=True)), n.op("DFT", z, attrs=attrs(1, True)),
        n.op("DFT", x, n.const(9, INT64), attrs=attrs(1)), n.op("DFT", z, n.const(4, INT64), attrs=attrs(1)),
        n.op("DFT", n.op("Transpose", n.op("Transpose", z)), attrs=attrs(0)),
        n.op("DFT", n.op("DFT", x, attrs=attrs(1, onesided=True)), n.const(7, INT64), attrs=attrs(1, True, True)),
    ]  # fmt: skip


def statistics(n: Net) -> list[Any]:
    x, c, d = n.input(2, 3, 5, 4), n.input(3, name="c"), n.op("Add", n.op("Abs", n.input(3, name="d")), 0.5)
    row = n.input(5, 4, name="row")
    turned = n.input(2, 4, 6, 8, name="heads"), n.input(2, 6, 4, name="cos"), n.input(2, 6, 4, name="sin")
    short = n.input(2, 6, 2, name="few")
    return [
        n.op("BatchNormalization", x, c, n.op("Neg", c), c, d),
        *n.op("LayerNormalization", x, row, row, attrs=norm.LayerNormAttrs(2), outputs=3),
        *n.op("LayerNormalization", x, n.random(4), attrs=norm.LayerNormAttrs(), outputs=2),
        n.op("RotaryEmbedding", *turned), n.op("RotaryEmbedding", *turned, attrs=RotaryAttrs(True)),
        n.op("RotaryEmbedding", turned[0], short, short, attrs=RotaryAttrs(False, 4)),
        *(n.op("RotaryEmbedding", turned[0], *turned[1:], attrs=RotaryAttrs(k, 4, True)) for k in (False, True)),
        n.op("RotaryEmbedding", turned[0], n.input(1, 6, 4, name="all"), turned[2], attrs=RotaryAttrs(True)),
    ]  # fmt: skip


def regions(n: Net) -> list[Any]:
    x = n.input(2, 4, 7, 8)
    rois = n.op("Add", n.op("Abs", n.input(3, 4, name="rois")), n.const([0.5, 1.0, 4.0, 5.0]))
    which = n.op("Min", n.input(3, name="batch", dtype=INT64), n.const(1, INT64))
    roi = detect.RoiAlignAttrs
    regions = [[0, 1, 1, 5, 6], [1, 0, 2, 7, 3], [1, 3.4, 2.6, 3, 2]]
    whole = n.op("Add", n.const(regions), n.op("Clip", n.input(3, 1, name="shift"), n.const(0.0), n.const(0.4)))
    far = n.op(
        "Mul",
        n.const([[1, -4, -3, 2, 20], [0, 9, 9, 12, 12]]),
        n.op("Ceil", n.op("Sigmoid", n.input(2, 1, name="one"))),
    )
    w, offset, mask = n.random(6, 2, 3, 3), n.input(2, 36, 7, 8, name="offset"), n.input(2, 18, 7, 8, name="mask")
    deform = detect.DeformConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), 2, 2)
    pooled = pool.MaxPoolAttrs((3, 2), (2, 1), (1, 0, 1, 1), (1, 1), indices=True)
    one, two = signal.Col2ImAttrs((1, 1), (0,) * 4, (1, 1)), signal.Col2ImAttrs((2, 2), (1, 0, 0, 1), (2, 1))
    sizes = n.op("Add", n.op("Abs", n.input(2, 2, name="sizes", dtype=INT64)), n.const(9, INT64))
    return [
        *n.op("ResizedPeaks", x, sizes, attrs=ResizedPeaksAttrs("cubic"), outputs=2),
        n.op("RoiAlign", x, rois, which, attrs=roi(2, 3, 2)),
        n.op("RoiAlign", x, rois, which, attrs=roi(3, 2, 0, 0.5, "avg", "output_half_pixel")),
        n.op("RoiAlign", x, rois, which, attrs=roi(2, 2, 2, 1.0, "max")),
        n.op("MaxRoiPool", x, whole, attrs=detect.MaxRoiPoolAttrs((3, 2), 0.75)),
        n.op("MaxRoiPool", x, far, attrs=detect.MaxRoiPoolAttrs((2, 2))),
        n.op("DeformConv", x, w, offset, n.random(6), mask, attrs=deform),
        *n.op("MaxPool", x, attrs=pooled, outputs=2),
        *n.op("MaxPool", n.op("Round", x), attrs=replace(pooled, storage_order=1), outputs=2),
        n.op("Col2Im", n.input(1, 18, 20, name="columns"), n.ints(6, 7), n.ints(3, 3), attrs=one),
        n.op("Col2Im", n.input(1, 8, 12, name="few"), n.ints(6, 7), n.ints(2, 2), attrs=two),
    ]


def packed_tables(n: Net) -> list[Any]:
    """Rows of packed tables of each code, with an incomplete last block, and bytes and floats as zero points."""
    found = []
    indices = n.op("Min", n.input(2, 3, name="rows", dtype=INT64), n.const(1, INT64))
    for code in CODES:
        for K, block in ((40, 16), (21, 21)):
            shape = (5, -(-K // block))
            scales = n.random(*shape)
            drawn = n.rng.integers(0, 4, shape)
            zeros = None
            if code in ("uint4", "uint8"):
                zeros = n.const(drawn, np.uint8) if block == 16 else n.const(drawn + 0.5)
            weights = n.const(n.rng.integers(0, 112, (5, row_bytes(code, K, block))), np.uint8)
            attrs = PackedGatherAttrs(code, K, block, FP32)
            found.append(n.op("PackedGather", weights, indices, scales, zeros, attrs=attrs))
    return found


def joined(n: Net) -> list[Any]:
    """Concatenations of small tensors, which one launch computes."""
    x, y, z = n.input(3, 4, 5), n.input(3, 1, 5, name="y"), n.input(2, 3, 4, name="z")
    turned = n.op("Transpose", z, attrs=TransposeAttrs((1, 2, 0)))
    whole = [n.op("Cast", v, attrs=_to("int64")) for v in (x, y)]
    return [
        n.op("Concat", x, y, x, n.random(3, 2, 5), attrs=index.ConcatAttrs(1)),
        n.op("Concat", turned, x, turned, _column(n, x), attrs=index.ConcatAttrs(2)),
        n.op("Concat", *whole, whole[0], attrs=index.ConcatAttrs(-2)),
        n.op("Concat", *[n.op("Greater", v, n.const(0.0)) for v in (y, x, y)], attrs=index.ConcatAttrs(1)),
    ]


def _column(n: Net, x: Any) -> Any:
    """The first column of rows: a view with gaps."""
    return n.op("Slice", x, n.ints(0), n.ints(1), n.ints(2))


def matrices(n: Net) -> list[Any]:
    """A matrix for all lanes of a warp, for some lanes, and for one; the last one is transposed in memory."""
    found = []
    sizes = ((4, 4, -2, 7), (3, 5, -1, 4), (16, 16, -1, 5), (7, 32, -2, 6), (3, 1, -1, 3))
    for k, (rows, columns, axis, count) in enumerate(sizes):
        x = n.op("Sigmoid", n.input(5, rows, columns, name=f"x{k}"))
        found.append(n.op("Sinkhorn", x, attrs=SinkhornAttrs(axis, count, 1e-3 * k, 0.5 * k)))
    turned = n.op("Transpose", n.op("Sigmoid", n.input(6, 4, 5, name="turned")), attrs=TransposeAttrs((2, 1, 0)))
    return [*found, n.op("Sinkhorn", turned, attrs=SinkhornAttrs(-1, 3))]


def clouds(n: Net) -> list[Any]:
    """Points that are far from each other: a part of a warp, several warps, several points of a thread, coordinates apart."""
    found = []
    for k, (count, size, chosen) in enumerate(((20, 3, 5), (300, 3, 9), (1100, 2, 4))):
        x, near = n.input(2, count, size, name=f"x{k}"), n.const(np.full((2, count), 1e10))
        first = n.const([k, -1 - k], np.int64)
        found.append(n.op("FarthestPoints", x, near, first, attrs=FarthestPointsAttrs(chosen)))
    turned = n.op("Transpose", n.input(1, 3, 40, name="turned"), attrs=TransposeAttrs((0, 2, 1)))
    near = n.op("Neg", n.input(1, 40, name="near"))
    return [*found, n.op("FarthestPoints", turned, near, n.ints(7), attrs=FarthestPointsAttrs(3))]


def forests(n: Net) -> list[Any]:
    x = n.input(5, 6)
    return [forest(n, x, **case) for case in CASES if case.get("depth", 1)]


FAMILIES: dict[str, Callable[[Net], list[Any]]] = {
    f.__name__: f
    for f in (orders, triangles, sums, scatters, written_updates, choices, grids, quantized, bytes_of_floats, parts_of_bytes,
              integer_products, integer_convolutions, contractions, spectra, statistics, regions, packed_tables, joined,
              matrices, clouds, forests)
}  # fmt: skip
