"""Weights that would be subnormal in fp16 are enlarged by a power of two, and a stage makes the result small again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import evaluate, random_feeds
from support.net import Net, built
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.passes.support.small_weights import ENLARGED, enlarged, exponent
from optdnn.types import FP16, FP32

GAMMA = 1e-6
"""A factor of weights whose largest elements are 1 to 3."""


def image(n: Net, *, bias: bool = True) -> Value:
    return n.conv(n.input(1, 4, 6, 6), 8, bias=bias)


def stages_of_rows(n: Net) -> Value:
    return n.op("Relu", n.op("Mul", n.op("Add", n.matmul(n.input(5, 8), 6), n.random(6)), n.random(6)))


PRODUCTS: dict[str, tuple[Callable[[Net], Value], int]] = {
    "Conv": (lambda n: image(n, bias=False), 1),
    "Conv with a bias": (image, 2),
    "ConvTranspose": (lambda n: n.conv_transpose(n.input(1, 4, 6, 6), 8, bias=True), 2),
    "Gemm": (lambda n: n.gemm(n.input(5, 8), 6), 2),
    "MatMul": (lambda n: n.matmul(n.input(5, 8), 6), 1),
    "MatMul with a bias": (lambda n: n.op("Add", n.matmul(n.input(5, 8), 6), n.random(6)), 2),
    "MatMul of a matrix": (lambda n: n.op("MatMul", n.random(6, 5), n.input(5, 8)), 1),
    "Conv with stages": (
        lambda n: n.op("Mul", n.op("Sigmoid", x := n.op("Relu", image(n))), x),
        2,
    ),
    "MatMul with stages": (stages_of_rows, 2),
    "a bias that is read twice": (
        lambda n: n.op("Mul", n.op("Add", n.matmul(n.input(5, 8), 6), b := n.random(6)), b),
        1,
    ),
}  # fmt: skip
"""Networks with one product, and how many of its constants are enlarged."""


def small(name: str, gamma: float = GAMMA) -> Graph:
    """The network with all constants times ``gamma``, and its stages fused."""
    graph = built(PRODUCTS[name][0])
    FuseEpilogue()(graph, PassContext(target="cuda:sm_90a"))
    for op in graph.of_kind("Constant"):
        value = graph.add_constant((op.attrs.value * gamma).astype(np.float32), op.outputs[0].name, op.src)
        graph.replace_uses(op.value, value)
    graph.remove_dead([op.id for op in graph.of_kind("Constant")])
    return graph


def product(graph: Graph) -> Op:
    (found,) = [op for op in graph.ops() if op.kind in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
    return found


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_stay_exactly_the_same(name: str) -> None:
    graph = small(name)
    op = product(graph)
    more = exponent(graph, op)
    changed = graph.copy()
    made, constants = enlarged(changed, op, more)
    changed.set_op(made)
    verify(changed)
    *larger, inverse = (changed.constant_value(v) for v in constants)
    assert len(larger) == PRODUCTS[name][1]
    assert larger[0] is not None
    assert ENLARGED / 2 <= np.abs(larger[0]).max() <= ENLARGED
    assert inverse == 2.0**-more
    assert [s.kind for s in made.attrs.epilogue].count("Mul") == 1 + [s.kind for s in op.attrs.epilogue].count("Mul")
    assert made.src == op.src
    feeds = random_feeds(graph, 0, {})
    want, found = (next(iter(evaluate(g, feeds).values())) for g in (graph, changed))
    np.testing.assert_array_equal(found, want)
    assert exponent(changed, made) == 0


@pytest.mark.parametrize(("gamma", "large"), [(1e-3, True), (1e-5, False), (0.0, True)])
def test_only_weights_below_a_bound_are_enlarged(gamma: float, large: bool) -> None:
    graph = small("Conv", gamma)
    assert (exponent(graph, product(graph)) == 0) == large


def test_the_factor_is_a_number_of_fp16() -> None:
    graph = small("Conv", 1e-12)
    assert exponent(graph, product(graph)) == 24


@pytest.mark.parametrize("kind", ["computed weights", "a computed bias", "a large bias", "no product"])
def test_other_operators_stay(kind: str) -> None:
    n = Net()
    x = n.input(5, 8)
    if kind == "computed weights":
        y = n.op("MatMul", x, n.input(8, 6, name="w"))
    elif kind == "no product":
        y = n.op("Mul", x, n.random(8, scale=1e-6))
    else:
        bias = n.input(6, name="b") if kind == "a computed bias" else n.const(np.full(6, 40000.0))
        y = n.op("Gemm", x, n.random(8, 6, scale=1e-6), bias)
    graph = n.done(y)
    assert exponent(graph, graph.op(graph.op(graph.outputs[0]).inputs[0])) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "target", "fires"),
    [("fp16", "cuda:sm_90a", 1), ("bf16", "cuda:sm_90a", 0), ("fp32", "cuda:sm_90a", 0), ("fp16", "cpu", 0)],
)
def test_only_fp16_on_gpus_needs_it(precision: str, target: str, fires: int) -> None:
    graph, log = small("Conv with a bias"), PrecisionLog()
    context = PassContext(target=target, precision=precision, precision_log=log)
    report = AssignPrecision()(graph, context)
    verify(graph)
    assert [f.rule for f in report.fired].count("enlarge") == fires
    weights, bias, *factor = (graph.constant_value(v) for v in product(graph).inputs[1:])
    assert weights is not None
    assert bias is not None
    assert bias.dtype == FP32
    assert len(factor) == fires
    assert (weights.dtype == FP16) == (precision == "fp16" and target != "cpu")
    assert bool([r for r in log.risks if "of the constant" in r.what]) == (target == "cpu")
    assert AssignPrecision()(graph, context).changes == 0


def test_an_engine_keeps_the_accuracy_of_small_weights() -> None:
    """Without the pass, the largest error is between 0.5 and 1 %."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 9, 9), 32, bias=True))
    y = n.op("Mul", n.conv(x, 16, 1, pads=0, bias=True), n.const(np.full((1, 16, 1, 1), 1e-5)))
    check_simulated(n.done(n.op("Mul", n.op("Tanh", y), 3e4)), tolerance=1e-3)
