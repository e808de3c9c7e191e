"""product_chains: products of products with constant matrices become products with one matrix, as do sums of equal layers."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.passes.product_chains import ProductChains
from optdnn.types import BF16

PASS = ProductChains()


def chain(
    inner: int = 8, middle: int = 8, columns: int = 8, *, bias: bool = False, read: bool = True, rows: object = 6
) -> Graph:
    """A product, and a product of its result. ``read``: the first result has another reader."""
    n = Net(np.float64)
    x = n.input(2, rows, inner)
    y = n.matmul(x, middle)
    y = n.op("Add", y, n.random(middle)) if bias else y
    z = n.matmul(y, columns)
    return n.done(n.op("Add", z, n.random(columns)) if bias else z, *([n.op("Tanh", y)] if read else []))


@pytest.mark.parametrize("bias", [False, True])
def test_both_read_the_same_rows(bias: bool) -> None:
    graph, _ = check_pass(PASS, chain(bias=bias), changes=1)
    products = graph.of_kind("MatMul")
    assert len(products) == 2
    assert {graph.op(p.inputs[0]).kind for p in products} == {"Input"}  # type: ignore[arg-type]
    assert len(graph.of_kind("Add")) == bias * 3


def test_gemms_with_biases() -> None:
    n = Net(np.float64)
    y = n.op("Gemm", n.input(5, 8), n.random(6, 8), n.random(6), attrs=GemmAttrs(transB=True))
    z = n.op("Gemm", y, n.random(6, 4), n.random(4), attrs=GemmAttrs())
    check_pass(PASS, n.done(z, n.op("Tanh", y)), changes=1, kinds={"Gemm": 1, "MatMul": 1, "Add": 1, "Tanh": 1})


def test_matrices_of_bf16_are_multiplied() -> None:
    n = Net(BF16)
    y = n.matmul(n.input(3, 8), 8)
    check_pass(PASS, n.done(n.matmul(y, 8), n.op("Tanh", y)), changes=1, kinds={"MatMul": 2, "Tanh": 1})


def test_factors_of_a_matrix_stay() -> None:
    check_untouched(PASS, chain(read=False))


@pytest.mark.parametrize("readers", [2, 3])
def test_the_last_reader_does_not_keep_the_first_product(readers: int) -> None:
    """StyleGAN2 and GFPGAN: the modulations of all layers read one style vector."""
    n = Net(np.float64)
    y = n.op("Add", n.matmul(n.input(2, 8), 8), n.random(8))
    graph = n.done(*(n.op("Tanh", n.matmul(y, 4)) for _ in range(readers)))
    after, _ = check_pass(PASS, graph, changes=readers - 1)
    products = after.of_kind("MatMul")
    assert len(products) == readers
    assert {after.op(p.inputs[0]).kind for p in products} == {"Input"}  # type: ignore[arg-type]


def test_the_last_reader_may_stay() -> None:
    n = Net(np.float64)
    y = n.matmul(n.input(6, 1200), 8)
    graph = n.done(n.matmul(y, 1200), n.matmul(y, 4))
    after, _ = check_pass(PASS, graph, changes=1, kinds={"MatMul": 3})
    assert sum(after.op(p.inputs[0]).kind == "MatMul" for p in after.of_kind("MatMul")) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (chain(2048, 16, 2048), "many more elements"),
        (chain(256, 8, 256, rows=4096), "many more multiplications"),
        (chain(64, 16, 64, rows=symbol("N")), "many more multiplications"),
        (chain(64, 60, 64, rows=1 << 15), "many more multiplications"),
    ],
    ids=["a matrix of low rank", "many rows", "an unknown number of rows", "the first product is needed as well"],
)
def test_a_longer_product_is_refused(graph: Graph, because: str) -> None:
    check_refused(PASS, graph, because=because)


def test_rows_of_an_unknown_number_where_one_product_is_shorter() -> None:
    check_pass(PASS, chain(8, 32, 8, rows=symbol("N")), changes=1, kinds={"MatMul": 2, "Tanh": 1})


def test_others_stay() -> None:
    n = Net(np.float64)
    x = n.input(4, 8)
    active = n.matmul(n.op("Tanh", n.matmul(x, 8)), 8)
    computed = n.op("MatMul", n.matmul(x, 8), n.input(8, 4, name="w"))
    rows = n.matmul(n.op("Add", n.matmul(x, 8), n.random(4, 8)), 8)
    check_untouched(PASS, n.done(active, computed, rows))


def test_a_gate_of_a_projection_is_one_launch() -> None:
    """Context gating: ``y * sigmoid(y B + b)`` with ``y = x A + a``; the factors are two products of x."""
    n = Net()
    y = n.op("Add", n.matmul(n.input(256, 64), 64), n.random(64))
    gate = n.op("Sigmoid", n.op("Add", n.matmul(y, 64), n.random(64)))
    program = check_simulated(n.done(n.op("Mul", y, gate)))
    assert [tactic for s in program.steps if (tactic := str(s.params["tactic"]).split()[0]) != "pointwise"] == [
        "gemm_paired_sm90"
    ]
    assert len(program.steps) == 3  # with the casts from and to fp32


# ---------------------------------------------------------------- sums of layers with the same weights


def equal_layers(kind: str, op: str = "Add", *, bias: bool = True, read: bool = False, size: int = 4) -> Graph:
    """``layer(tanh x) + layer(y)``. ``read``: the first result has another reader; ``size``: pixels of a side."""
    n = Net(np.float64)
    if kind == "Conv":
        shape, weights, attrs = (2, 6, size, size), [n.random(4, 6, 3, 3)], ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    elif kind == "Gemm":
        shape, weights, attrs = (3, 6), [n.random(4, 6)], GemmAttrs(transB=True, alpha=0.5, beta=3.0)
    else:
        shape, weights, attrs = (2, 3, 6), [n.random(6, 4)], MatMulAttrs()
    if bias and kind != "MatMul":
        weights.append(n.random(4))
    x, y = (n.input(*shape, name=name) for name in "xy")
    first, second = (n.op(kind, v, *weights, attrs=attrs) for v in (n.op("Tanh", x), y))
    return n.done(n.op(op, first, second), *([n.op("Exp", first)] if read else []))


@pytest.mark.parametrize("kind", ["Conv", "Gemm", "MatMul"])
@pytest.mark.parametrize("op", ["Add", "Sub"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_of_equal_layers_is_one_layer(kind: str, op: str, bias: bool) -> None:
    kinds = {kind: 1, op: 1, "Tanh": 1}
    graph, _ = check_pass(
        PASS, equal_layers(kind, op, bias=bias), changes=1, rules={"sum_of_equal_layers": 1}, kinds=kinds
    )
    (layer,) = graph.of_kind(kind)
    assert (layer.input(2) is not None) == (bias and op == "Add" and kind != "MatMul")


def equal_stages() -> Graph:
    n = Net(np.float64)
    w, attrs = n.random(6, 4), MatMulAttrs(epilogue=(Stage("Relu", (-1,)),))
    first, second = (n.op("MatMul", n.input(3, 6, name=name), w, attrs=attrs) for name in "xy")
    return n.done(n.op("Add", first, second))


def difference_of_attentions() -> Graph:
    """``(softmax a) v - (softmax b) v``, as in differential attention (Ye et al., 2024)."""
    n = Net(np.float64)
    v = n.input(2, 6, 4, name="v")
    parts = [n.op("MatMul", n.op("Softmax", n.input(2, 5, 6, name=name)), v, attrs=MatMulAttrs()) for name in "ab"]
    return n.done(n.op("Sub", *parts))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (difference_of_attentions(), "attention whose weights are not added is one launch"),
        (equal_layers("Gemm", read=True), "one of the results is read elsewhere"),
        (equal_layers("Conv", size=300), "the sum of the operands would be larger"),
        (equal_stages(), "has stages"),
    ],
)
def test_sums_of_equal_layers_that_are_refused(graph: Graph, because: str) -> None:
    check_refused(PASS, graph, because=because)


def test_sums_of_other_layers_stay() -> None:
    n = Net(np.float64)
    x, y, w = n.input(3, 6, name="x"), n.input(3, 6, name="y"), n.random(6, 4)
    check_untouched(PASS, n.done(n.op("Add", n.op("MatMul", x, w), n.op("MatMul", y, n.random(6, 4)))))
    z = n.op("MatMul", x, w)
    check_untouched(PASS, n.done(n.op("Add", z, z)))
