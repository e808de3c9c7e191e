"""Dequantized weights of products and tables stay packed; refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.check import check_pass, check_refused

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.pack_weights import PackWeights
from optdnn.types import DTYPES, FP32, INT8, INT64, Array, DType, is_float, tensor

F = np.float32
K, N = 64, 8


def drawn(rng: np.random.Generator, dtype: DType, shape: Any) -> Array:
    if is_float(dtype):
        return rng.standard_normal(shape).astype(dtype)
    info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)


class Net:
    """``x`` [3, K], and dequantized weights of shape ``dims`` with scales along or in blocks of ``axis``."""

    def __init__(
        self, name: str, dims: tuple[int, int], axis: int, block: int = 0, zeros: bool = False, scale: Any = None
    ):
        rng, dtype = np.random.default_rng(5), DTYPES[name]
        shape: Any = [-(-d // block) if i == axis else d for i, d in enumerate(dims)] if block else (dims[axis],)
        self.graph = Graph()
        self.x = self.graph.add_input("x", tensor(FP32, 3, K))
        self.scale = rng.uniform(0.1, 0.9, shape).astype(F) if scale is None else scale
        self.weights = self.graph.add_constant(drawn(rng, dtype, dims), "w")
        zero = self.graph.add_constant(drawn(rng, dtype, shape)) if zeros else None
        operands = [self.weights, self.graph.add_constant(self.scale), zero]
        self.w = self.add("DequantizeLinear", operands, DequantizeAttrs(axis, block))

    def add(self, kind: str, inputs: list[Value | None], attrs: Any = None) -> Value:
        attrs = MatMulAttrs() if kind == "MatMul" else attrs
        return self.graph.add(kind, inputs, attrs, src={f"{kind}{sum(self.graph.kinds().values())}"}).value

    def out(self, *values: Value) -> Graph:
        for i, v in enumerate(values):
            self.graph.add_output(v, f"y{i}")
        return self.graph


@pytest.mark.parametrize(
    ("name", "axis", "block", "zeros"),
    [
        ("int4", 0, 32, False),
        ("uint4", 0, 16, True),
        ("int4", 1, 0, True),
        ("int8", 1, 0, True),
        ("uint8", 0, 32, True),
        ("fp8_e4m3", 0, 32, False),
        ("int2", 0, 16, False),
    ],
)
def test_products(name: str, axis: int, block: int, zeros: bool) -> None:
    net = Net(name, (K, N), axis, block, zeros)
    # Promotion makes floats of 8 bits plain ones, which nothing packs.
    wide = 0 if name.startswith("fp8") else 1
    before = net.out(net.add("MatMul", [net.x, net.w]))
    graph, _ = check_pass(PackWeights(), before, changes=1, kinds={"PackedMatMul": 1}, promoted_changes=wide)
    (op,) = graph.of_kind("PackedMatMul")
    code = name if is_float(DTYPES[name]) else f"uint{name[-1]}"
    assert (op.attrs.code, op.attrs.K, op.attrs.block_size) == (code, K, block or K)
    assert FoldConstants()(net.graph).changes == 0


def test_a_transpose_and_a_bias() -> None:
    net = Net("uint4", (N, K), 1, 16, True)
    turned = net.add("Transpose", [net.w], TransposeAttrs((1, 0)))
    bias = net.graph.add_constant(np.ones(N, F))
    y = net.add("MatMul", [net.x, turned])
    z = net.add("Gemm", [net.x, turned, bias], GemmAttrs())
    graph, _ = check_pass(PackWeights(), net.out(y, z), changes=1, kinds={"PackedMatMul": 2, "Add": 1})
    one, other = graph.of_kind("PackedMatMul")
    assert one.inputs[1:] == other.inputs[1:]


def test_a_table_that_is_the_head_too() -> None:
    net = Net("int4", (40, K), 1, 32)
    ids = net.graph.add_input("ids", tensor(INT64, 3))
    rows = net.add("Gather", [net.w, ids], GatherAttrs(0))
    logits = net.add("Gemm", [net.x, net.w, None], GemmAttrs(transB=True))
    graph, _ = check_pass(PackWeights(), net.out(rows, logits), changes=1, kinds={"PackedGather": 1, "PackedMatMul": 1})
    assert graph.of_kind("PackedGather")[0].inputs[0] == graph.of_kind("PackedMatMul")[0].inputs[1]


def test_rows_of_fp8_that_share_scales() -> None:
    shared = np.repeat(np.array([[0.5, 0.25], [1.0, 2.0]], F), 128, axis=0)
    net = Net("fp8_e4m3", (256, K), 1, 32, scale=shared)
    turned = net.add("Transpose", [net.w], TransposeAttrs((1, 0)))
    graph, _ = check_pass(PackWeights(), net.out(net.add("MatMul", [net.x, turned])), changes=1, promoted_changes=0)
    (op,) = graph.of_kind("PackedMatMul")
    assert op.attrs.block_rows == 128
    assert graph.type(op.inputs[2]).shape == (2, 2)  # type: ignore[arg-type]


def refused(net: Net, *values: Value, because: str) -> None:
    check_refused(PackWeights(), net.out(*values), because=because)


def test_weights_that_are_needed_as_floats() -> None:
    net = Net("int4", (K, N), 0, 32)
    refused(net, net.add("MatMul", [net.x, net.w]), net.add("Relu", [net.w]), because="needs the weights as floats")
    net = Net("int4", (3, K), 1, 32)
    refused(
        net,
        net.add("MatMul", [net.w, net.add("Transpose", [net.x], TransposeAttrs((1, 0)))]),
        because="needs the weights as floats",
    )
    net = Net("int4", (K, K), 0, 32)
    first = net.add("MatMul", [net.x, net.w])
    refused(net, first, net.add("Gemm", [net.x, net.w, None], GemmAttrs(transB=True)), because="along different axes")


def test_blocks_that_do_not_fit() -> None:
    net = Net("int4", (K, N), 1, 4)
    refused(net, net.add("MatMul", [net.x, net.w]), because="blocks lie along the other axis")
    net = Net("int4", (K, N), 0, 24)
    refused(net, net.add("MatMul", [net.x, net.w]), because="a block size of 24 is not a power of two")
    net = Net("int8", (K, N), 0)
    refused(net, net.add("MatMul", [net.x, net.w]), because="its own scale")


def test_products_that_do_more() -> None:
    net = Net("int8", (K, N), 1)
    refused(net, net.add("Gemm", [net.x, net.w, None], GemmAttrs(alpha=2.0)), because="a Gemm with alpha")
    net = Net("int8", (K, N), 1)
    scale = net.graph.add_constant(F(0.1))
    integers = net.add("QuantizeLinear", [net.x, scale, None], QuantizeAttrs(INT8, 0))
    data = net.add("DequantizeLinear", [integers, scale, None], DequantizeAttrs(0))
    refused(net, net.add("MatMul", [data, net.w]), because="a product of integers")


def test_scales_that_are_computed() -> None:
    net = Net("int8", (K, N), 1)
    given = net.graph.add_input("s", tensor(FP32, N))
    w = net.add("DequantizeLinear", [net.weights, given, None], DequantizeAttrs(1))
    refused(net, net.add("MatMul", [net.x, w]), because="not constant")
