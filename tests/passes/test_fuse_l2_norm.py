"""fuse_l2_norm: PyTorch's normalize and TensorFlow's l2_normalize from their written-out forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import lowered, simulate

from optdnn.config import BuildOptions
from optdnn.ir.graph import Value
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.optimize import optimize
from optdnn.passes.fuse_l2_norm import FuseL2Norm


def length(n: Net, x: Value, *axes: int, keepdims: bool = True) -> Value:
    return n.op("ReduceL2", x, n.ints(*axes), attrs=ReduceAttrs(keepdims))


def root_of_squares(n: Net, x: Value, axis: int) -> Value:
    return n.op("Sqrt", n.op("ReduceSum", n.op("Mul", x, x), n.ints(axis), attrs=ReduceAttrs()))


def root_of_sum_square(n: Net, x: Value, axis: int) -> Value:
    return n.op("Sqrt", n.op("ReduceSumSquare", x, n.ints(axis), attrs=ReduceAttrs()))


@pytest.mark.parametrize("norm", [length, root_of_squares, root_of_sum_square])
@pytest.mark.parametrize("bound", ["Clip", "Max"])
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("axis", [1, -1])
def test_normalize(norm: Callable[[Net, Value, int], Value], bound: str, expanded: bool, axis: int) -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    least = n.op(bound, norm(n, x, axis), np.float64(1e-3))
    least = n.op("Expand", least, n.ints(2, 3, 4)) if expanded else least
    graph, _ = check_pass(FuseL2Norm(), n.done(n.op("Div", x, least)), changes=1, kinds={"LpNormalization": 1})
    assert graph.of_kind("LpNormalization")[0].attrs == LpNormAttrs(axis % 3, 2, 1e-3)


@pytest.mark.parametrize("bound", ["Clip", "Max"])
@pytest.mark.parametrize("sums", ["ReduceSum", "ReduceSumSquare"])
def test_a_bound_of_the_squares(sums: str, bound: str) -> None:
    """TensorFlow: ``x rsqrt(max(sum(x^2), epsilon))``."""
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    terms = n.op("Mul", x, x) if sums == "ReduceSum" else x
    least = n.op(bound, n.op(sums, terms, n.ints(-1), attrs=ReduceAttrs()), np.float64(1e-6))
    y = n.op("Mul", x, n.op("Reciprocal", n.op("Sqrt", least)))
    graph, _ = check_pass(FuseL2Norm(), n.done(y), changes=1, kinds={"LpNormalization": 1})
    assert graph.of_kind("LpNormalization")[0].attrs == LpNormAttrs(2, 2, 1e-3)


@pytest.mark.parametrize("squared", [0.0, -1.0])
def test_a_bound_of_the_squares_that_is_not_positive_is_refused(squared: float) -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    least = n.op("Max", n.op("ReduceSumSquare", x, n.ints(-1), attrs=ReduceAttrs()), np.float64(squared))
    check_refused(FuseL2Norm(), n.done(n.op("Div", x, n.op("Sqrt", least))), because="must be positive")


@pytest.mark.parametrize("bound", ["Clip", "Max"])
def test_a_factor_of_the_length_scales_the_result(bound: str) -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 16)
    least = n.op(bound, n.op("Mul", length(n, x, -1), 0.25), np.float64(1e-3))
    graph, _ = check_pass(
        FuseL2Norm(), n.done(n.op("Div", x, least)), changes=1, kinds={"LpNormalization": 1, "Mul": 1}
    )
    assert graph.of_kind("LpNormalization")[0].attrs == LpNormAttrs(2, 2, 4e-3)


def test_two_axes_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    graph = n.done(n.op("Div", x, n.op("Max", length(n, x, 1, 2), np.float64(1e-3))))
    check_refused(FuseL2Norm(), graph, because=r"has one axis, but the norm runs over \(1, 2\)")


@pytest.mark.parametrize(
    ("rows", "elements", "fuses"), [(16384, 60, False), (16383, 60, True), (16384, 64, True), (16384, 65, True)]
)
def test_many_short_rows_stay_arithmetic(rows: int, elements: int, fuses: bool) -> None:
    n = Net(np.float32)
    x = n.input(rows, elements)
    graph = n.done(n.op("Div", x, n.op("Max", length(n, x, 1), 1e-3)))
    if fuses:
        assert FuseL2Norm()(graph).changes == 1
    else:
        check_refused(FuseL2Norm(), graph, because="16384 rows of 60 elements")


def scores(n: Net, rows: int, elements: int, keys: str) -> Value:
    """A reader of normalized rows: a product that sums over them, or another operator."""
    x = n.input(rows // 64, 64, elements)
    y = n.op("Div", x, n.op("Max", length(n, x, 2), 1e-3))
    other = n.input(rows // 64, 64, elements, name="other")
    if keys == "queries":
        return n.op("MatMul", y, n.op("Transpose", other, attrs=TransposeAttrs((0, 2, 1))))
    if keys == "values":
        return n.op("MatMul", n.input(rows // 64, 8, 64, name="weights"), y)
    turned = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1) if keys == "keys" else (1, 0, 2)))
    return n.op("MatMul", other, turned) if keys == "keys" else n.op("Softmax", turned)


@pytest.mark.parametrize(
    ("elements", "keys", "fuses"),
    [
        (30, "queries", True), (30, "keys", True), (30, "values", False), (30, "turned", False),
        (36, "queries", False), (12, "queries", True), (24, "queries", False),
    ],
)  # fmt: skip
def test_heads_that_are_padded_share_lanes_evenly(elements: int, keys: str, fuses: bool) -> None:
    """After pad_heads, heads of 30 features have 32, and heads of 36 features have 40."""
    n = Net(np.float32)
    graph = n.done(scores(n, 16384, elements, keys))
    if fuses:
        assert FuseL2Norm()(graph).changes == 1
    else:
        check_refused(FuseL2Norm(), graph, because=f"16384 rows of {elements} elements")


def test_padded_heads_are_normalized_by_one_operator() -> None:
    """Cosine attention of heads of 30 features, as Swin2SR has it: one joint product, and attention of 32 features."""
    n = Net()
    x = n.input(256, 64, 24)
    heads = []
    for _ in range(3):
        y = n.op("Reshape", n.matmul(x, 60), n.ints(256, 64, 2, 30))
        heads.append(n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))))
    q, k = (
        n.op("Div", y, n.op("Expand", n.op("Clip", length(n, y, 3), 1e-6), n.ints(256, 2, 64, 30))) for y in heads[:2]
    )
    weights = n.op("Softmax", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))))
    y = n.op("Transpose", n.op("MatMul", weights, heads[2]), attrs=TransposeAttrs((0, 2, 1, 3)))
    graph = n.done(n.matmul(n.op("Reshape", y, n.ints(256, 64, 60)), 24))
    optimize(graph, BuildOptions(target="simulate", precision="fp16"), "simulate")
    kinds = graph.kinds()
    assert kinds["LpNormalization"] == 2
    assert kinds["Attention"] == 1
    assert graph.type(graph.of_kind("Attention")[0].inputs[0]).static_shape[-1] == 32  # type: ignore[arg-type]
    assert "ReduceL2" not in kinds


def test_rows_of_zeros_are_zeros_in_fp16() -> None:
    """The epsilon, which fp16 cannot hold, is an fp32 number in the kernel."""
    n = Net()
    x = n.input(4, 24)
    graph = n.done(n.op("Div", x, n.op("Max", length(n, x, 1), 1e-12)))
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)}
    feeds["x"][2] = 0
    optimize(graph, BuildOptions(target="simulate", precision="fp16"), "simulate")
    assert graph.kinds().get("LpNormalization") == 1
    (got,) = simulate(lowered(graph), feeds).values()
    want = feeds["x"] / np.maximum(np.linalg.norm(feeds["x"], axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_a_bound_that_is_not_positive_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 3)
    graph = n.done(n.op("Div", x, n.op("Max", length(n, x, 1), np.float64(0.0))))
    check_refused(FuseL2Norm(), graph, because="its epsilon is 0 and its factor 1, which must be positive")


def test_a_norm_with_another_reader_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 3)
    least = n.op("Max", length(n, x, 1), np.float64(1e-3))
    check_refused(FuseL2Norm(), n.done(n.op("Div", x, least), least), because="an inner value is an output")


def test_other_arithmetic_stays() -> None:
    n = Net(np.float64)
    x, y = n.input(2, 3), n.input(2, 3, name="y")
    other = n.op("Div", y, n.op("Max", length(n, x, 1), np.float64(1e-3)))  # another tensor's norm
    above = n.op("Div", x, n.op("Clip", length(n, x, 1), np.float64(1e-3), np.float64(2.0)))  # bounded above as well
    unbounded = n.op("Div", x, length(n, x, 1))  # NaN where the norm is zero
    check_untouched(FuseL2Norm(), n.done(other, above, unbounded))
