"""fuse_l2_norm: PyTorch's normalize from its written-out forms."""

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


def test_two_axes_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    graph = n.done(n.op("Div", x, n.op("Max", length(n, x, 1, 2), np.float64(1e-3))))
    check_refused(FuseL2Norm(), graph, because=r"over one axis, the norm runs over \(1, 2\)")


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


def test_rows_of_zeros_are_zeros_in_fp16() -> None:
    """The least norm, which fp16 cannot hold, is the kernel's own fp32 number."""
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
    check_refused(FuseL2Norm(), graph, because="the least norm is 0")


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
