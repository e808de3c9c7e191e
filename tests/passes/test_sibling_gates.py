"""sibling_gates: products of one value that meet in pointwise arithmetic, and products that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
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
from optdnn.passes.sibling_gates import GatesOfSiblings

CUDA = PassContext(target="cuda:sm_90a")


def product(
    n: Net, x: Value, out: int = 8, *, kind: str = "Gemm", bias: bool = True, turned: bool = False, weight: Any = None
) -> Value:
    k = int(n.dims(x)[-1])
    w = weight if weight is not None else n.random(*((out, k) if turned else (k, out)), scale=k**-0.5)
    if kind == "Gemm":
        return n.op("Gemm", x, w, *([n.random(out)] if bias else []), attrs=GemmAttrs(transB=turned))
    y = n.op("MatMul", x, w)
    return n.op("Add", y, n.random(out)) if bias else y


def blended(n: Net, a: Value, b: Value, *terms: Value) -> Value:
    """``tanh(a) (1 - g) + tanh(b) g``, where g is the sigmoid of the sum of the terms."""
    total = terms[0]
    for term in terms[1:]:
        total = n.op("Add", total, term)
    g = n.op("Sigmoid", total)
    kept = n.op("Mul", n.op("Tanh", a), n.op("Sub", n.const(1.0), g))
    return n.op("Add", kept, n.op("Mul", n.op("Tanh", b), g))


def cell(n: Net, x: Value, gates: int = 4, **keywords: Any) -> Value:
    return blended(n, *(product(n, x, turned=k % 2 == 1, **keywords) for k in range(gates)))


@pytest.mark.parametrize("gates", [3, 4, 5])
def test_products_of_a_cell(gates: int) -> None:
    n = Net(np.float64)
    graph = n.done(cell(n, n.input(3, 6), gates))
    kinds = {"Gemm": 1, "Split": 1, "Add": gates - 2, "Sigmoid": 1, "Tanh": 2, "Mul": 2, "Sub": 1}
    after, _ = check_pass(GatesOfSiblings(), graph, changes=1, kinds=kinds, context=CUDA)
    assert [o.type.dims for o in after.of_kind("Split")[0].outputs] == [(3, 8)] * gates


@pytest.mark.parametrize("biased", [(True, True, True), (False, True, False), (False, False, False)])
@pytest.mark.parametrize("kind", ["Gemm", "MatMul"])
@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
def test_vectors_that_are_added(batch: Any, kind: str, biased: Sequence[bool]) -> None:
    n = Net(np.float64)
    x = n.input(batch, 6) if kind == "Gemm" else n.input(batch, 5, 6)
    graph = n.done(blended(n, *(product(n, x, kind=kind, bias=bias) for bias in biased)))
    kinds = {
        kind: 1,
        "Split": 1,
        "Add": 1 + (kind == "MatMul" and any(biased)),
        "Sigmoid": 1,
        "Tanh": 2,
        "Mul": 2,
        "Sub": 1,
    }
    check_pass(GatesOfSiblings(), graph, changes=1, kinds=kinds, context=CUDA, sizes=None if batch == 2 else {"N": 2})


def test_other_products_stay() -> None:
    n = Net(np.float64)
    x = n.input(3, 6)
    query = product(n, x)
    graph = n.done(cell(n, x, 3), n.op("MatMul", query, n.input(8, 4, name="k")), n.op("Tanh", product(n, x)))
    after, _ = check_pass(GatesOfSiblings(), graph, changes=1, context=CUDA)
    assert after.kinds()["Gemm"] == 3


def test_a_cell_is_two_launches() -> None:
    n = Net()
    program = check_simulated(n.done(cell(n, n.input(8, 64), out=64)), "fp16")
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds == [
        "Pointwise",
        "Conv",
        "Pointwise",
    ]  # the first one rounds the input; the product is a 1x1 convolution


def refused(graph: Graph, because: str) -> None:
    check_refused(GatesOfSiblings(), graph, because=because, context=CUDA)


def test_products_that_do_not_meet_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(3, 6)
    pair = n.op("Mul", product(n, x), n.op("Sigmoid", product(n, x)))
    refused(n.done(pair, n.op("Tanh", product(n, x))), "fewer than 3 products of this value meet")


def test_products_of_other_types_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(3, 6)
    refused(n.done(blended(n, product(n, x), product(n, x), product(n, x, 1))), "fewer than 3 products")


def test_computed_weights_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(3, 6)
    w = n.input(6, 8, name="w")
    refused(n.done(blended(n, *(product(n, x, weight=w, bias=False) for _ in range(3)))), "fewer than 3 products")


def test_results_that_others_read_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(3, 6)
    a, b, c = (product(n, x) for _ in range(3))
    refused(n.done(blended(n, a, b, c), n.op("Softmax", c)), "fewer than 3 products")


def test_narrow_products_are_refused() -> None:
    n = Net(np.float64)
    refused(n.done(cell(n, n.input(3, 6), out=6)), "no multiple of 8")


def test_large_results_are_refused() -> None:
    n = Net()
    graph = n.done(cell(n, n.input(1 << 15, 8), out=64))
    report = GatesOfSiblings()(graph, CUDA)
    assert report.changes == 0
    assert any("results would be stored" in miss.reason for miss in report.refused)


def test_two_products_are_no_candidates() -> None:
    n = Net(np.float64)
    x = n.input(3, 6)
    graph = n.done(n.op("Mul", product(n, x), n.op("Sigmoid", product(n, x))))
    check_untouched(GatesOfSiblings(), graph, context=CUDA)
