"""fuse_activation: activations with another formula below zero become one op in each form that exporters write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Value
from optdnn.ops.unary import AlphaAttrs, LeakyReluAttrs, SeluAttrs
from optdnn.passes.fuse_activation import FuseActivation

Form = Callable[[Net, Value, Any], Value]
ALPHA, GAMMA = 1.6732632, 1.050701


def scaled(n: Net, x: Value, slope: Any) -> Value:
    return n.op("Mul", x, slope)


def below_zero(n: Net, x: Value, slope: Any) -> Value:  # ONNX's LeakyRelu and PRelu
    return n.op("Where", n.op("Less", x, 0.0), scaled(n, x, slope), x)


def above_zero(n: Net, x: Value, slope: Any) -> Value:  # PyTorch, TensorFlow
    return n.op("Where", n.op("Greater", x, 0.0), x, scaled(n, x, slope))


def not_above_zero(n: Net, x: Value, slope: Any) -> Value:
    return n.op("Where", n.op("Not", n.op("GreaterOrEqual", x, 0.0)), scaled(n, x, slope), x)


def zero_first(n: Net, x: Value, slope: Any) -> Value:
    return n.op("Where", n.op("LessOrEqual", 0.0, x), x, scaled(n, x, slope))


def two_relus(n: Net, x: Value, slope: Any) -> Value:  # Keras
    return n.op("Sub", n.op("Relu", x), scaled(n, n.op("Relu", n.op("Neg", x)), slope))


def two_parts(n: Net, x: Value, slope: Any) -> Value:
    return n.op("Add", n.op("Max", x, 0.0), scaled(n, n.op("Min", x, 0.0), slope))


def half_of_twice(n: Net, x: Value, slope: Any) -> Value:  # TensorFlow's MTCNN and ArcFace
    return n.op("Add", n.op("Relu", x), n.op("Mul", scaled(n, n.op("Sub", x, n.op("Abs", x)), slope), 0.5))


FORMS = [below_zero, above_zero, not_above_zero, zero_first, two_relus, two_parts, half_of_twice]


@pytest.mark.parametrize("form", FORMS)
def test_one_slope(form: Form) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(FuseActivation(), n.done(form(n, n.input(3, 4), 0.25)), changes=1, kinds={"LeakyRelu": 1})
    assert graph.of_kind("LeakyRelu")[0].attrs == LeakyReluAttrs(0.25)


@pytest.mark.parametrize("form", FORMS)
def test_slopes_of_channels(form: Form) -> None:
    n = Net(np.float64)
    y = form(n, n.input(2, 4, 3, 3), n.random(4, 1, 1))
    check_pass(FuseActivation(), n.done(y), changes=1, kinds={"PRelu": 1})


def test_the_larger_one_of_a_number_and_its_product() -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    y = n.op("Max", n.op("Mul", 0.1, x), x)
    graph, _ = check_pass(FuseActivation(), n.done(y), changes=1, kinds={"LeakyRelu": 1})
    assert graph.of_kind("LeakyRelu")[0].attrs == LeakyReluAttrs(0.1)


@pytest.mark.parametrize("slope", [1.5, -0.5])
def test_the_larger_one_with_another_slope_is_no_leaky_relu(slope: float) -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    check_refused(FuseActivation(), n.done(n.op("Max", n.op("Mul", x, slope), x)), because="with the slope")


def growth(n: Net, x: Value, alpha: float) -> Value:
    return n.op("Mul", n.op("Sub", n.op("Exp", x), 1.0), alpha)


def elu_onnx(n: Net, x: Value, alpha: float) -> Value:
    return n.op("Where", n.op("Less", x, 0.0), growth(n, x, alpha), x)


def elu_jax(n: Net, x: Value, alpha: float) -> Value:
    positive = n.op("Greater", x, 0.0)
    return n.op("Where", positive, x, growth(n, n.op("Where", positive, 0.0, x), alpha))


def elu_of_parts(n: Net, x: Value, alpha: float) -> Value:
    return n.op("Add", n.op("Relu", x), growth(n, n.op("Min", x, 0.0), alpha))


@pytest.mark.parametrize("form", [elu_onnx, elu_jax, elu_of_parts])
@pytest.mark.parametrize("alpha", [1.0, 0.75])
def test_elu(form: Form, alpha: float) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(FuseActivation(), n.done(form(n, n.input(3, 4), alpha)), changes=1, kinds={"Elu": 1})
    assert graph.of_kind("Elu")[0].attrs == AlphaAttrs(alpha)


def test_selu_as_onnx_defines_it() -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    below = n.op("Mul", GAMMA, n.op("Sub", n.op("Mul", ALPHA, n.op("Exp", x)), ALPHA))
    y = n.op("Where", n.op("Less", x, 0.0), below, n.op("Mul", GAMMA, x))
    graph, _ = check_pass(FuseActivation(), n.done(y), changes=1, kinds={"Selu": 1})
    found = graph.of_kind("Selu")[0].attrs
    assert isinstance(found, SeluAttrs)
    assert (found.alpha, found.gamma) == pytest.approx((ALPHA, GAMMA), rel=1e-12)


def test_nan_and_infinity_stay() -> None:
    n = Net()
    x = n.input(5)
    before = n.done(elu_onnx(n, x, 0.5), below_zero(n, x, 0.5))
    after = before.copy()
    assert FuseActivation()(after).changes == 2
    feeds = {"x": np.array([np.nan, -np.inf, np.inf, 0.0, -1.0], np.float32)}
    for name, expected in evaluate(before, feeds).items():
        assert np.allclose(evaluate(after, feeds)[name], expected, equal_nan=True)


def test_other_branches_stay() -> None:
    n = Net(np.float64)
    x, z = n.input(2, 4), n.input(2, 4, name="z")
    found = [
        n.op("Where", n.op("Less", x, 0.5), n.op("Mul", x, 0.1), x),  # another threshold
        n.op("Where", n.op("Less", z, 0.0), n.op("Mul", x, 0.1), x),  # of another tensor
        n.op("Where", n.op("Less", x, 0.0), n.op("Mul", x, z), x),  # a computed slope
        n.op("Where", n.op("Less", x, 0.0), n.op("Sub", n.op("Exp", x), 2.0), x),  # a jump at zero
        n.op("Add", n.op("Relu", x), n.op("Mul", n.op("Min", z, 0.0), 0.1)),
    ]
    check_untouched(FuseActivation(), n.done(*found))


def test_a_branch_with_another_reader_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 4)
    below = n.op("Mul", x, 0.1)
    y = n.op("Where", n.op("Less", x, 0.0), below, x)
    check_refused(FuseActivation(), n.done(y, n.op("Tanh", below)), because="used elsewhere", rule="branches")


def softplus_onnx(n: Net, x: Value) -> Value:
    return n.op("Log", n.op("Add", n.op("Exp", x), 1.0))


def softplus_stable(n: Net, x: Value) -> Value:
    return n.op("Add", n.op("Max", x, 0.0), softplus_onnx(n, n.op("Neg", n.op("Abs", x))))


def test_softplus() -> None:
    n = Net(np.float64)
    check_pass(FuseActivation(), n.done(softplus_onnx(n, n.input(3, 4))), changes=1, kinds={"Softplus": 1})


def test_softplus_that_does_not_overflow() -> None:
    n = Net(np.float64)
    check_pass(FuseActivation(), n.done(softplus_stable(n, n.input(3, 4))), changes=1, kinds={"Softplus": 1})


def test_another_logarithm_is_no_softplus() -> None:
    n = Net(np.float64)
    check_untouched(FuseActivation(), n.done(n.op("Log", n.op("Add", n.op("Exp", n.input(3, 4)), 2.0))))


def test_the_largest_of_three_is_no_slope() -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    check_untouched(FuseActivation(), n.done(n.op("Max", n.op("Mul", x, 0.5), x, n.input(3, 4, name="y"))))
