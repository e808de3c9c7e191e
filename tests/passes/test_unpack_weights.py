"""Packed weights that no kernel reads become floats at run time; other packed weights stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, same, structure
from support.net import Net

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.ops.base import Stage
from optdnn.ops.packed_layout import PackedMatMulAttrs, row_bytes
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.facts import operand
from optdnn.passes.unpack_weights import UnpackWeights, why_unpacked
from optdnn.types import BF16, FP16, FP32, Array, tensor

CUDA = PassContext(target="cuda:sm_90a")
N = 8


def product(
    dtype: Any = FP32,
    dims: tuple[int, ...] = (3,),
    code: str = "uint4",
    K: int = 64,
    block: int = 32,
    rows: int = 1,
    zeros: Array | None = None,
    computed: bool = False,
    rounded: bool = False,
    scales: Array | None = None,
    **stages: Any,
) -> Graph:
    """A product of ``dims`` x K with 8 outputs; ``stages`` read a bias, operand 4, and a residual, operand 5."""
    n = Net(dtype)
    x = n.input(*dims, K)
    shape, width = (-(-N // rows), -(-K // block)), row_bytes(code, K, block)
    drawn = n.rng.integers(0, 112, (N, width)).astype(np.uint8)
    packed = n.graph.add_input("w", tensor(np.uint8, N, width)) if computed else n.const(drawn, np.uint8)
    steps = n.random(*shape) if scales is None else n.const(scales, scales.dtype)
    operands = [x, packed, steps, None if zeros is None else n.const(zeros, np.uint8)]
    if stages:
        operands += [n.random(N), n.input(*dims, N, name="residual")]
    attrs = PackedMatMulAttrs(code, K, block, rows, rounded, **stages)
    return n.done(n.op("PackedMatMul", *operands, attrs=attrs))


ADDED = (Stage("Add", (-1, 4)), Stage("Relu", (-2,)), Stage("Add", (-3, 5)))


@pytest.mark.parametrize("dims", [(3,), (2, 3), ()])
def test_products_with_their_epilogues(dims: tuple[int, ...]) -> None:
    zeros = np.arange(2 * N, dtype=np.uint8).reshape(N, 2) % 16
    kinds = {"PackedGather": 1, **({"Gemm": 1} if len(dims) == 1 else {"MatMul": 1, "Transpose": 1})}
    check_pass(UnpackWeights(), product(dims=dims, zeros=zeros, epilogue=ADDED), changes=1, kinds=kinds, context=CUDA)


@pytest.mark.parametrize("dims", [(3,), (2, 3)])
def test_factors_of_tf32(dims: tuple[int, ...]) -> None:
    graph = product(dims=dims)
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", precision="tf32"))
    UnpackWeights()(graph, CUDA)
    (op,) = graph.of_kind("Gemm", "MatMul")
    assert op.attrs.factors == "tf32"


def test_rows_that_may_be_rounded_are_not() -> None:
    graph, plain = product(rounded=True), product()
    for one in (graph, plain):
        UnpackWeights()(one, CUDA)
    assert structure(graph) == structure(plain)
    feeds = random_feeds(graph, 1)
    same(evaluate(graph, feeds), evaluate(plain, feeds), 0)


def test_rows_that_share_scales() -> None:
    graph = product(code="fp8_e5m2", rows=4)
    after, _ = check_pass(UnpackWeights(), graph, changes=1, kinds={"PackedGather": 1, "Gemm": 1}, context=CUDA)
    (op,) = after.of_kind("PackedGather")
    assert after.type(operand(op, 2)).shape == (N, 2)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("K", "block", "rows"), [(64, 32, 1), (80, 32, 4), (37, 37, 1)])
def test_fp4_becomes_integers_of_8_bits(K: int, block: int, rows: int, dtype: Any) -> None:
    graph = product(dtype, code="fp4_e2m1", K=K, block=block, rows=rows, epilogue=ADDED)
    after, _ = check_pass(UnpackWeights(), graph, changes=1, kinds={"PackedMatMul": 1}, context=CUDA)
    (op,) = after.of_kind("PackedMatMul")
    assert (op.attrs.code, op.attrs.block_rows) == ("uint8", 1)
    assert after.type(operand(op, 2)).shape == (N, -(-K // block))


def test_fp4_is_unpacked_where_no_kernel_takes_the_product() -> None:
    check_pass(
        UnpackWeights(), product(FP32, code="fp4_e2m1"), changes=1, kinds={"PackedGather": 1, "Gemm": 1}, context=CUDA
    )


def test_fp4_is_unpacked_where_half_of_a_scale_is_not_exact() -> None:
    tiny = np.full((N, 2), np.finfo(np.float16).smallest_subnormal, np.float16)
    graph = product(FP16, code="fp4_e2m1", scales=tiny)
    check_pass(UnpackWeights(), graph, changes=1, kinds={"PackedGather": 1, "Gemm": 1}, context=CUDA)


def test_weights_that_kernels_read_stay() -> None:
    for code in ("uint2", "uint4", "uint8", "fp8_e4m3"):
        check_untouched(UnpackWeights(), product(FP16, code=code), CUDA)
    check_untouched(UnpackWeights(), product(), PassContext(target="cpu"))


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({"dtype": FP32}, "simulate", "not fp32"),
        ({"dims": ()}, "simulate", "not a product of rows"),
        ({"code": "fp8_e5m2"}, "simulate", "no kernel reads packed fp8_e5m2"),
        ({"code": "fp8_e4m3"}, "cuda:sm_86", "sm_86 has no conversion"),
        ({"K": 8, "block": 8}, "simulate", "only 8 numbers"),
        ({"computed": True}, "simulate", "not constant"),
        ({"zeros": np.full((N, 2), 16, np.uint8)}, "simulate", "no numbers of type uint4"),
    ],
)
def test_why(changes: dict[str, Any], target: str, reason: str) -> None:
    graph = product(**{"dtype": FP16, **changes})
    (op,) = graph.of_kind("PackedMatMul")
    assert reason in (why_unpacked(graph, op, target) or "")


def test_stages_before_the_product_stay() -> None:
    graph = product(prologue=(Stage("Relu", (-1,)),))
    check_refused(UnpackWeights(), graph, because="stages before the product", context=CUDA)
