"""lerp and scaled_residual: sums of a scaled tensor and a linear op, in the forms that weights and epilogues compute."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_conv_bn import FuseConvBn
from optdnn.passes.support.facts import operand

GPU = PassContext(target="cuda:sm_90a")
C = 8


def mixed(
    *, shared: bool = False, dtype: type = np.float64, linear: bool = True, other: bool = False, swapped: bool = False
) -> Graph:
    """``x + w (y - x)`` of an image and a convolution. ``shared``: y is read elsewhere; ``other``: another tensor is subtracted."""
    n = Net(dtype)
    x = n.op("Exp", n.input(1, C, 6, 6))
    y = n.conv(n.op("Tanh", x), C) if linear else n.op("Tanh", x)
    w = n.const(np.linspace(0.1, 0.9, C).reshape(C, 1, 1))
    scaled = n.op("Mul", n.op("Sub", y, n.op("Sin", x) if other else x), w)
    z = n.op("Add", scaled, x) if swapped else n.op("Add", x, scaled)
    return n.done(n.op("Tanh", z), *([n.op("Sin", y)] if shared else []))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_mixture_is_a_sum(swapped: bool) -> None:
    graph, _ = check_pass(FuseConvBn(), mixed(swapped=swapped), changes=2, rules={"lerp": 1, "conv_scale_shift": 1})
    assert "Sub" not in graph.kinds()
    assert graph.kinds()["Mul"] == 1


@pytest.mark.parametrize(
    "graph",
    [mixed(shared=True), mixed(linear=False), mixed(other=True)],
    ids=["y is read elsewhere", "y is no linear op", "another tensor is subtracted"],
)
def test_other_mixtures_stay(graph: Graph) -> None:
    check_untouched(FuseConvBn(), graph)


def test_a_mixture_with_a_depthwise_convolution_is_one_convolution() -> None:
    n = Net(np.float64)
    x = n.op("Exp", n.input(1, C, 6, 6))
    y = n.conv(x, C, group=C)
    w = n.const(np.linspace(0.1, 0.9, C).reshape(C, 1, 1))
    graph, _ = check_pass(FuseConvBn(), n.done(n.op("Add", x, n.op("Mul", n.op("Sub", y, x), w))), changes=3)
    assert dict(graph.kinds()) == {"Exp": 1, "Conv": 1}


def residual(factor: np.ndarray | float, *, product: bool = False, both: bool = False) -> Graph:
    """``x c + y W + b``. ``both``: x is a linear op's result too, which absorbs its factor."""
    n = Net(np.float64)
    if product:
        x = n.op("Exp", n.input(2, 5, C))
        y = n.op("Add", n.matmul(n.op("Tanh", x), C), n.random(C))
    else:
        x = n.op("Exp", n.input(1, C, 6, 6))
        y = n.conv(n.op("Tanh", x), C, 1, pads=0, bias=True)
    x = n.conv(x, C, 1, pads=0) if both else x
    c = n.const(np.asarray(factor)) if isinstance(factor, np.ndarray) else factor
    return n.done(n.op("Tanh", n.op("Add", n.op("Mul", x, c), y)))


FACTORS = np.linspace(-1.5, 1.75, C)


@pytest.mark.parametrize("factor", [FACTORS.reshape(C, 1, 1), 0.5], ids=["channels", "number"])
def test_the_sum_is_scaled(factor: np.ndarray | float) -> None:
    graph, _ = check_pass(FuseConvBn(), residual(factor), context=GPU, changes=2)
    (scaled,) = graph.of_kind("Mul")
    assert graph.op(operand(scaled)).kind == "Add"
    assert [u.kind for u in graph.users(scaled.value)] == ["Tanh"]


def test_a_product_leaves_the_sum_to_norms() -> None:
    _, report = check_pass(FuseConvBn(), residual(FACTORS, product=True), context=GPU, changes=0)
    assert {r.rule for r in report.refused} == {"conv_scale_shift"}


def test_small_factors_are_refused() -> None:
    small = np.where(np.arange(C) == 3, 1e-3, 1.0).reshape(C, 1, 1)
    check_refused(FuseConvBn(), residual(small), because="not all between 1/64 and 64", context=GPU)


def test_a_factor_of_positions_is_refused() -> None:
    rows = np.linspace(0.5, 1.5, 6).reshape(6, 1)
    check_refused(FuseConvBn(), residual(rows), because="is not one value per channel", context=GPU)


def test_other_targets_keep_the_factor() -> None:
    check_untouched(FuseConvBn(), residual(FACTORS.reshape(C, 1, 1)))


def test_a_linear_op_absorbs_its_own_factor() -> None:
    graph, _ = check_pass(FuseConvBn(), residual(FACTORS.reshape(C, 1, 1), both=True), context=GPU, changes=1)
    assert "Mul" not in graph.kinds()


def test_the_convolution_adds_and_scales_in_its_launch() -> None:
    n = Net()
    x = n.op("Sin", n.conv(n.input(1, 64, 14, 14), 64, 1, pads=0))
    y = n.conv(n.op("Relu", n.conv(x, 64, 1, pads=0)), 64, 1, pads=0)
    z = n.op("Add", n.op("Mul", x, n.const(np.linspace(0.5, 1.5, 64).reshape(64, 1, 1))), y)
    program = check_simulated(n.done(n.conv(n.op("Sigmoid", n.op("Sin", z)), 64, 3)))
    convs = [s.params["op"]["attrs"]["epilogue"] for s in program.steps if s.params["op"]["kind"] == "Conv"]
    assert len(convs) == 4
    assert [e["stage"][0] for e in convs[2]] == ["Add", "Mul", "Sin", "Sigmoid"]
    assert [s.params["op"]["kind"] for s in program.steps].count("Pointwise") == 1  # the last cast
