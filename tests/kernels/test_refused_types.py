"""Operators whose types, sizes or attributes a tactic does not support, each with the tactic's reason."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv.direct import DepthwiseTranspose
from optdnn.kernels.index import regions
from optdnn.kernels.index.roi_align import RoiChannels
from optdnn.kernels.packed.tactics import PackedGemm
from optdnn.kernels.quantized.hopper import HopperQuantizedMatMul
from optdnn.kernels.quantized.pools import Int8MaxPool, Int8Mean
from optdnn.kernels.tactic import Tactic
from optdnn.ops.conv import ConvTransposeAttrs
from optdnn.ops.detect import DeformConvAttrs, RoiAlignAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.quantized import QuantizedMeanAttrs, RequantizeAttrs
from optdnn.ops.signal import Col2ImAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP64, INT8, INT32, INT64

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def product(
    n: Net, attrs: RequantizeAttrs | None = None, *, dtype: np.dtype = INT8, rows: int = 8, residual: bool = False
) -> Value:  # fmt: skip
    weights, channel = n.const(np.ones((16, 32)), dtype), n.const(np.ones((16, 2)), np.float32)
    more = [n.input(rows, 16, name="r", dtype=np.float32)] if residual else []
    return n.op(
        "QuantizedMatMul", n.input(rows, 32, dtype=dtype), weights, channel, *more, attrs=attrs or RequantizeAttrs()
    )


def computed(n: Net) -> Value:
    weights, channel = n.input(16, 32, name="w", dtype=INT8), n.const(np.ones((16, 2)), np.float32)
    return n.op("QuantizedMatMul", n.input(8, 32, dtype=INT8), weights, channel, attrs=RequantizeAttrs())


def max_pool(n: Net, pads: int) -> Value:
    return n.op("MaxPool", n.input(1, 16, 8, 8, dtype=INT8), attrs=MaxPoolAttrs((2, 2), (2, 2), (pads,) * 4, (1, 1)))


def deformed(n: Net) -> Value:
    operands = [
        n.input(1, 2, 4, 4, dtype=INT32),
        n.const(np.ones((2, 2, 1, 1)), np.int32),
        n.const(np.ones((1, 2, 4, 4)), np.int32),
    ]
    return n.op("DeformConv", *operands, attrs=DeformConvAttrs((1, 1), (0,) * 4, (1, 1)))


def regions_of_integers(n: Net) -> Value:
    x, rois = n.input(1, 8, 4, 4, dtype=INT32), n.input(3, 4, name="rois")
    return n.op("RoiAlign", x, rois, n.const(np.zeros(3), np.int64), attrs=RoiAlignAttrs())


def pixels_of_columns(n: Net) -> Value:
    attrs = Col2ImAttrs((1, 1), (0,) * 4, (1, 1))
    return n.op("Col2Im", n.input(1, 4, 9), n.input(2, name="size", dtype=INT64), n.ints(2, 2), attrs=attrs)


def transposed(n: Net) -> Value:
    attrs = ConvTransposeAttrs((2, 2), (0,) * 4, (1, 1), (0, 0), group=4)
    return n.op("ConvTranspose", n.input(1, 4, 8, 8, dtype=FP64), n.const(np.ones((4, 1, 2, 2)), FP64), attrs=attrs)


def packed(n: Net) -> Value:
    attrs = PackedMatMulAttrs("uint4", 32, 32)
    return n.op("PackedMatMul", n.input(32), n.const(np.zeros((8, 16)), np.uint8), n.random(8, 1), attrs=attrs)


CASES: dict[str, tuple[Tactic, Callable[[Net], Value]]] = {
    "the tensor cores of sm_80 do not multiply fp8": (HopperQuantizedMatMul(), lambda n: product(n, dtype=FP8)),
    "its weights and scales are not constant": (HopperQuantizedMatMul(), computed),
    "no kernel gives results of float64": (HopperQuantizedMatMul(), lambda n: product(n, RequantizeAttrs(output_dtype=FP64))),
    "it is empty": (HopperQuantizedMatMul(), lambda n: product(n, rows=0)),
    "no kernel turns float8_e4m3fn into int8": (HopperQuantizedMatMul(), lambda n: product(n, dtype=FP8)),
    "the kernel does not support its stages: unknown": (
        HopperQuantizedMatMul(), lambda n: product(n, RequantizeAttrs((("bias",), ("unknown",)))),
    ),
    "its residual is float32, its result int8": (HopperQuantizedMatMul(), lambda n: product(n, residual=True)),
    "its result is not channels-last": (Int8MaxPool(), lambda n: max_pool(n, 0)),
    "it is for int8 or uint8 operands and results": (
        Int8Mean(), lambda n: n.op("QuantizedMean", n.input(1, 8, 4, 4), attrs=QuantizedMeanAttrs(1.0)),
    ),
    "it does not interpolate int32": (RoiChannels(), regions_of_integers),
    "it does not interpolate int32 (deformed)": (regions.TACTIC, deformed),
    "its image and block are not known when the engine is built": (regions.TACTIC, pixels_of_columns),
    "it is of float64": (DepthwiseTranspose(), transposed),
    "it is not a product of rows with a matrix": (PackedGemm(), packed),
}  # fmt: skip


@pytest.mark.parametrize("because", CASES)
def test_what_a_tactic_does_not_take(because: str) -> None:
    tactic, build = CASES[because]
    n = Net()
    y = build(n)
    graph = n.done(y)
    builder = Builder(graph, of_arch("sm_80" if "sm_80" in because else "sm_90a"))
    for op in graph.order():
        if op.kind == "Input":
            builder.target(op.value)
    assert tactic.refuse(builder, graph.op(y)) == because.removesuffix(" (deformed)")
