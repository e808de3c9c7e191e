"""fuse_conv_bn, parallel_products: products of one value that are added become one; adapters are added to their matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gemm import GemmAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_conv_bn import FuseConvBn
from optdnn.passes.parallel_convs import parallel_products
from optdnn.types import BF16

FUSE = FuseConvBn()
MERGED = "parallel_products"


def only() -> FuseConvBn:
    one = FuseConvBn()
    one.rules = (parallel_products,)
    return one


def adapter(n: Net, x: Value, units: int, *, inner_bias: bool = False, scale: float | None = 2.0) -> Value:
    small = n.matmul(x, 3)
    y = n.matmul(n.op("Add", small, n.random(3)) if inner_bias else small, units)
    return y if scale is None else n.op("Mul", y, n.const(scale))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("inner_bias", [True, False])
def test_an_adapter_is_added_to_its_matrix(inner_bias: bool, first: bool) -> None:
    """LoRA as peft exports it: ``x W + b + (x A) B * scale``."""
    n = Net(np.float64)
    x = n.input(2, 5, 8)
    terms = [n.op("Add", n.matmul(x, 6), n.random(6)), adapter(n, x, 6, inner_bias=inner_bias)]
    before = n.done(n.op("Add", *(terms if first else terms[::-1])))
    graph, _ = check_pass(FUSE, before, changes=2, rules={"conv_scale_shift": 1, MERGED: 1})
    assert graph.kinds()["MatMul"] == graph.kinds()["Add"] == 1
    (product,) = graph.of_kind("MatMul")
    assert graph.constant_value(product.inputs[1]).shape == (8, 6)


def test_a_bias_after_the_adapter() -> None:
    n = Net(np.float64)
    x = n.input(2, 5, 8)
    before = n.done(n.op("Add", n.op("Add", n.matmul(x, 6), adapter(n, x, 6, scale=None)), n.random(6)))
    graph, _ = check_pass(FUSE, before, changes=1, rules={MERGED: 1})
    assert len(graph.of_kind("MatMul")) == 1


def test_experts_of_one_value_and_another_term() -> None:
    n = Net(np.float64)
    x, z = n.input(symbol("n"), 8), n.input(symbol("n"), 6, name="z")
    y = n.op("Sub", n.op("Add", n.matmul(x, 6), z), n.gemm(x, 6, trans_b=True))
    graph, _ = check_pass(only(), n.done(n.op("Sub", y, n.matmul(x, 6))), changes=1)
    assert {k: v for k, v in graph.kinds().items() if k not in ("Input", "Constant")} == {"MatMul": 1, "Add": 2}


def test_matrices_of_bf16() -> None:
    n = Net(BF16)
    x = n.input(3, 8)
    check_pass(FUSE, n.done(n.op("Add", n.matmul(x, 8), n.matmul(x, 8))), changes=1, rules={MERGED: 1})


def _others(case: str) -> Graph:
    n = Net()
    x, z = n.input(2, 5, 8), n.input(2, 5, 8, name="z")
    y = n.matmul(x, 8)
    outputs: list[Value] = []
    if case == "other inputs":
        other = n.matmul(z, 8)
    elif case == "a residual":
        other = x
    elif case == "read twice":
        other = n.matmul(x, 8)
        outputs = [n.op("Relu", other)]
    elif case == "factors read twice":
        small = n.matmul(x, 3)
        other, outputs = n.matmul(small, 8), [n.op("Relu", small)]
    elif case == "no product of the value itself":
        y, other = adapter(n, x, 8, scale=None), adapter(n, x, 8, scale=None)
    elif case == "an activation":
        other = n.op("Relu", n.matmul(x, 8))
    else:
        other = n.op("MatMul", x, n.input(8, 8, name="w"))
    return n.done(n.op("Add", y, other), *outputs)


@pytest.mark.parametrize(
    "case",
    [
        "other inputs",
        "a residual",
        "read twice",
        "factors read twice",
        "no product of the value itself",
        "an activation",
        "unknown",
    ],
)
def test_others_stay(case: str) -> None:
    check_untouched(only(), _others(case))


def _two(dtype: Any = np.float32, value: float = 1.0) -> Graph:
    n = Net(dtype)
    x = n.input(3, 4)
    matrices = [n.const(np.full((4, 4), value)) for _ in range(2)]
    return n.done(n.op("Add", *(n.op("Gemm", x, m, attrs=GemmAttrs()) for m in matrices)))


@pytest.mark.parametrize("precision", ["fp16", "int8", "w8"])
def test_matrices_are_added_before_they_are_rounded(precision: str) -> None:
    """Unlike branches of RepVGG, an adapter changes the range of its matrix little."""
    check_pass(FUSE, _two(), changes=1, context=PassContext(precision=precision))


def test_a_sum_that_overflows_stays() -> None:
    check_refused(FUSE, _two(np.float16, 6e4), because="would overflow", rule=MERGED)


def test_a_product_with_an_adapter_is_one_launch() -> None:
    n = Net()
    x = n.input(1, 64, 64)
    y = n.op("Add", n.op("Add", n.matmul(x, 64), n.random(64)), adapter(n, x, 64))
    program = check_simulated(n.done(y), precision="fp16")
    launches = [s for s in program.steps if s.executor == "cuda"]
    assert len([s for s in launches if str(s.params["tactic"]).startswith("gemm")]) == 1
