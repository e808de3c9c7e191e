"""fuse_activation: each form in which exporters write an activation becomes one op; similar arithmetic does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Value
from optdnn.ops.unary import AlphaAttrs, GeluAttrs, HardSigmoidAttrs
from optdnn.passes.fuse_activation import FuseActivation

ROOT2, C = math.sqrt(2), math.sqrt(2 / math.pi)
Form = Callable[[Net, Value], Value]


def erf_torch(n: Net, x: Value) -> Value:  # TorchScript: x * (1 + erf(x / sqrt 2)) * 0.5
    return n.op("Mul", n.op("Mul", x, n.op("Add", n.op("Erf", n.op("Div", x, ROOT2)), 1.0)), 0.5)


def erf_half_first(n: Net, x: Value) -> Value:
    return n.op("Mul", n.op("Mul", 0.5, x), n.op("Add", 1.0, n.op("Erf", n.op("Mul", x, 1 / ROOT2))))


def erf_half_inside(n: Net, x: Value) -> Value:
    return n.op("Mul", n.op("Mul", n.op("Add", n.op("Erf", n.op("Mul", 1 / ROOT2, x)), 1.0), 0.5), x)


def erf_cdf(n: Net, x: Value) -> Value:  # x * (0.5 + 0.5 erf)
    return n.op("Mul", x, n.op("Add", 0.5, n.op("Mul", 0.5, n.op("Erf", n.op("Div", x, ROOT2)))))


def erf_half_by_division(n: Net, x: Value) -> Value:
    return n.op("Div", n.op("Mul", n.op("Add", n.op("Erf", n.op("Div", x, ROOT2)), 1.0), x), 2.0)


def erf_complement(n: Net, x: Value) -> Value:  # TensorFlow: 0.5 x erfc(-x / sqrt 2), erfc = 1 - erf
    inner = n.op("Mul", n.op("Neg", x), 1 / ROOT2)
    return n.op("Mul", n.op("Mul", 0.5, x), n.op("Sub", 1.0, n.op("Erf", inner)))


def tanh_torch(n: Net, x: Value) -> Value:  # transformers' NewGELU
    cube = n.op("Mul", n.op("Pow", x, 3.0), 0.044715)
    gate = n.op("Add", n.op("Tanh", n.op("Mul", n.op("Add", x, cube), C)), 1.0)
    return n.op("Mul", n.op("Mul", x, 0.5), gate)


def tanh_cube_by_products(n: Net, x: Value) -> Value:
    cube = n.op("Mul", 0.044715, n.op("Mul", n.op("Mul", x, x), x))
    gate = n.op("Add", 1.0, n.op("Tanh", n.op("Mul", C, n.op("Add", x, cube))))
    return n.op("Mul", n.op("Mul", 0.5, gate), x)


def tanh_factored(n: Net, x: Value) -> Value:  # "fast gelu": tanh(x c (1 + 0.044715 x x))
    inner = n.op("Add", 1.0, n.op("Mul", n.op("Mul", 0.044715, x), x))
    gate = n.op("Tanh", n.op("Mul", n.op("Mul", x, C), inner))
    return n.op("Mul", n.op("Mul", 0.5, x), n.op("Add", 1.0, gate))


def tanh_multiplied_out(n: Net, x: Value) -> Value:
    inner = n.op("Add", n.op("Mul", C, x), n.op("Mul", C * 0.044715, n.op("Pow", x, 3.0)))
    return n.op("Mul", x, n.op("Add", 0.5, n.op("Mul", n.op("Tanh", inner), 0.5)))


ERF = [erf_torch, erf_half_first, erf_half_inside, erf_cdf, erf_half_by_division, erf_complement]
TANH = [tanh_torch, tanh_cube_by_products, tanh_factored, tanh_multiplied_out]


@pytest.mark.parametrize("form", ERF)
def test_gelu_by_erf(form: Form) -> None:
    n = Net(np.float64)
    x = n.input(2, 5)
    graph, _ = check_pass(FuseActivation(), n.done(form(n, x)), changes=1, kinds={"Gelu": 1})
    assert graph.of_kind("Gelu")[0].attrs == GeluAttrs("none")


@pytest.mark.parametrize("form", TANH)
def test_gelu_by_tanh(form: Form) -> None:
    n = Net(np.float64)
    x = n.input(2, 5)
    graph, _ = check_pass(FuseActivation(), n.done(form(n, x)), changes=1, kinds={"Gelu": 1})
    assert graph.of_kind("Gelu")[0].attrs == GeluAttrs("tanh")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", [*ERF, *TANH])
def test_gelu_whose_constants_are_rounded(form: Form, dtype: Any) -> None:
    n = Net(dtype)
    x = n.input(2, 5)
    # As float64 numbers the rounded constants are no longer those of a GELU, so nothing is fused in the promoted graph.
    check_pass(FuseActivation(), n.done(form(n, x)), changes=1, kinds={"Gelu": 1}, promoted_changes=0)


def test_gelu_of_a_product_keeps_the_product() -> None:
    n = Net(np.float64)
    x = n.op("Mul", n.input(2, 5), n.random(5))
    check_pass(FuseActivation(), n.done(erf_torch(n, x)), changes=1, kinds={"Gelu": 1, "Mul": 1})


def test_two_gelus_in_a_row() -> None:
    n = Net(np.float64)
    check_pass(FuseActivation(), n.done(erf_torch(n, tanh_torch(n, n.input(7)))), changes=2, kinds={"Gelu": 2})


@pytest.mark.parametrize("wrong", [1.41, 2.0, -ROOT2])
def test_gelu_needs_the_right_constant(wrong: float) -> None:
    n = Net(np.float32)
    x = n.input(2, 5)
    y = n.op("Mul", n.op("Mul", x, n.op("Add", n.op("Erf", n.op("Div", x, wrong)), 1.0)), 0.5)
    check_untouched(FuseActivation(), n.done(y))


def test_gelu_of_two_different_values_is_none() -> None:
    n = Net(np.float64)
    x, z = n.input(2, 5), n.input(2, 5, name="z")
    y = n.op("Mul", n.op("Mul", z, n.op("Add", n.op("Erf", n.op("Div", x, ROOT2)), 1.0)), 0.5)
    check_untouched(FuseActivation(), n.done(y))


def test_gelu_is_refused_when_an_inner_value_is_used_elsewhere() -> None:
    n = Net(np.float64)
    x = n.input(2, 5)
    e = n.op("Erf", n.op("Div", x, ROOT2))
    y = n.op("Mul", n.op("Mul", x, n.op("Add", e, 1.0)), 0.5)
    check_refused(
        FuseActivation(), n.done(y, n.op("Relu", e)), because="an inner value is used elsewhere: Erf_2, by Relu_6"
    )


def test_gelu_is_refused_when_an_inner_value_is_an_output() -> None:
    n = Net(np.float64)
    x = n.input(2, 5)
    e = n.op("Erf", n.op("Div", x, ROOT2))
    y = n.op("Mul", n.op("Mul", x, n.op("Add", e, 1.0)), 0.5)
    check_refused(FuseActivation(), n.done(y, e), because="an inner value is an output of the network: Erf_2")


def test_a_result_of_higher_rank_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(5)
    y = n.op("Mul", n.op("Mul", x, n.op("Add", n.op("Erf", n.op("Div", x, ROOT2)), n.const([[1.0]]))), 0.5)
    check_refused(FuseActivation(), n.done(y), because=r"the result is fp64\[1, 5\], its operand is fp64\[5\]")


def silu(n: Net, x: Value) -> Value:
    return n.op("Mul", x, n.op("Sigmoid", x))


def silu_swapped(n: Net, x: Value) -> Value:
    return n.op("Mul", n.op("Sigmoid", x), x)


def silu_written_out(n: Net, x: Value) -> Value:
    return n.op("Div", x, n.op("Add", n.op("Exp", n.op("Neg", x)), 1.0))


def silu_by_reciprocal(n: Net, x: Value) -> Value:
    return n.op("Mul", n.op("Reciprocal", n.op("Add", 1.0, n.op("Exp", n.op("Mul", x, -1.0)))), x)


@pytest.mark.parametrize("form", [silu, silu_swapped, silu_written_out, silu_by_reciprocal])
def test_swish(form: Form) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(FuseActivation(), n.done(form(n, n.input(3, 4))), changes=1, kinds={"Swish": 1})
    assert graph.of_kind("Swish")[0].attrs == AlphaAttrs(1.0)


def test_quick_gelu_is_a_swish_with_a_slope() -> None:
    n = Net(np.float32)
    x = n.input(3, 4)
    y = n.op("Mul", x, n.op("Sigmoid", n.op("Mul", 1.702, x)))
    graph, _ = check_pass(FuseActivation(), n.done(y), changes=1, kinds={"Swish": 1})
    assert graph.of_kind("Swish")[0].attrs == AlphaAttrs(float(np.float32(1.702)))


def test_a_gate_of_another_value_is_no_swish() -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    check_untouched(FuseActivation(), n.done(n.op("Mul", x, n.op("Sigmoid", n.input(3, 4, name="z")))))


def test_swish_is_refused_when_the_sigmoid_is_used_elsewhere() -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    s = n.op("Sigmoid", x)
    check_refused(
        FuseActivation(), n.done(n.op("Mul", x, s), n.op("Neg", s)), because="an inner value is used elsewhere"
    )


def relu6_clip(n: Net, v: Value) -> Value:
    return n.op("Clip", v, 0.0, 6.0)


def relu6_relu_min(n: Net, v: Value) -> Value:
    return n.op("Min", n.op("Relu", v), 6.0)


def relu6_min_max(n: Net, v: Value) -> Value:
    return n.op("Max", 0.0, n.op("Min", v, 6.0))


def relu6_max_min(n: Net, v: Value) -> Value:
    return n.op("Min", 6.0, n.op("Max", v, 0.0))


def relu6_relu_clip(n: Net, v: Value) -> Value:
    return n.op("Clip", n.op("Relu", v), None, 6.0)


RELU6 = [relu6_clip, relu6_relu_min, relu6_min_max, relu6_max_min, relu6_relu_clip]


@pytest.mark.parametrize("relu6", RELU6)
def test_hard_sigmoid(relu6: Form) -> None:
    n = Net(np.float64)
    y = n.op("Div", relu6(n, n.op("Add", n.input(3, 4), 3.0)), 6.0)
    graph, _ = check_pass(FuseActivation(), n.done(y), changes=1, kinds={"HardSigmoid": 1})
    assert graph.of_kind("HardSigmoid")[0].attrs == HardSigmoidAttrs(1 / 6, 0.5)


def test_hard_sigmoid_of_keras() -> None:
    n = Net(np.float64)
    y = n.op("Clip", n.op("Add", n.op("Mul", n.input(3, 4), 0.2), 0.5), 0.0, 1.0)
    graph, _ = check_pass(FuseActivation(), n.done(y), changes=1, kinds={"HardSigmoid": 1})
    assert graph.of_kind("HardSigmoid")[0].attrs == HardSigmoidAttrs(0.2, 0.5)


def test_a_clip_to_another_height_is_no_hard_sigmoid() -> None:
    n = Net(np.float64)
    check_untouched(FuseActivation(), n.done(n.op("Div", n.op("Clip", n.op("Add", n.input(3), 3.0), 0.0, 5.0), 6.0)))


def test_a_plain_clip_stays() -> None:
    n = Net(np.float64)
    check_untouched(FuseActivation(), n.done(n.op("Clip", n.input(3), 0.0, 1.0)))


def test_a_falling_slope_is_no_hard_sigmoid() -> None:
    n = Net(np.float64)
    y = n.op("Clip", n.op("Sub", 0.5, n.op("Mul", n.input(3, 4), 0.2)), 0.0, 1.0)
    check_untouched(FuseActivation(), n.done(y))


@pytest.mark.parametrize("relu6", RELU6)
@pytest.mark.parametrize("order", ["divide_last", "divide_gate", "by_sixth", "x_scaled"])
def test_hard_swish(relu6: Form, order: str) -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    gate = relu6(n, n.op("Add", x, 3.0))
    y = {
        "divide_last": lambda: n.op("Div", n.op("Mul", x, gate), 6.0),
        "divide_gate": lambda: n.op("Mul", x, n.op("Div", gate, 6.0)),
        "by_sixth": lambda: n.op("Mul", n.op("Mul", 1 / 6, gate), x),
        "x_scaled": lambda: n.op("Mul", n.op("Mul", x, 1 / 6), gate),
    }[order]()
    check_pass(FuseActivation(), n.done(y), changes=1, kinds={"HardSwish": 1})


@pytest.mark.parametrize("slope", [1 / 6, float(np.float32(1 / 6))])
def test_hard_swish_from_a_hard_sigmoid(slope: float) -> None:
    n = Net(np.float32)
    x = n.input(3, 4)
    before = n.done(n.op("Mul", n.op("HardSigmoid", x, attrs=HardSigmoidAttrs(slope, 0.5)), x))
    after = before.copy()
    assert FuseActivation()(after).changes == 1
    assert after.kinds() == {"HardSwish": 1}
    feeds = random_feeds(before, seed=5)
    assert np.allclose(evaluate(after, feeds)["y0"], evaluate(before, feeds)["y0"], rtol=1e-6, atol=1e-7)


def test_hard_swish_needs_the_slope_of_one_sixth() -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    check_untouched(FuseActivation(), n.done(n.op("Mul", n.op("HardSigmoid", x, attrs=HardSigmoidAttrs(0.2, 0.5)), x)))


@pytest.mark.parametrize("decomposed", [False, True])
def test_mish(decomposed: bool) -> None:
    n = Net(np.float64)
    x = n.input(3, 4)
    soft = n.op("Log", n.op("Add", n.op("Exp", x), 1.0)) if decomposed else n.op("Softplus", x)
    check_pass(FuseActivation(), n.done(n.op("Mul", x, n.op("Tanh", soft))), changes=1, kinds={"Mish": 1})


def test_integers_are_left_alone() -> None:
    n = Net(np.int64)
    x = n.input(3, 4)
    check_untouched(FuseActivation(), n.done(n.op("Mul", x, n.op("Add", x, 1))))


def softplus(n: Net, x: Value, beta: float = 1.0, threshold: float = 20.0, divided: bool = False) -> Value:
    """As PyTorch's dynamo exporter writes it."""
    scaled = x if beta == 1 else n.op("Mul", x, beta)
    y = n.op("Softplus", scaled)
    y = y if beta == 1 else n.op("Div", y, beta) if divided else n.op("Mul", y, 1 / beta)
    return n.op("Where", n.op("Greater", scaled, threshold), x, y)


@pytest.mark.parametrize(("beta", "divided"), [(1.0, False), (2.0, False), (100.0, True)])
def test_softplus_loses_its_threshold(beta: float, divided: bool) -> None:
    n = Net()
    graph, _ = check_pass(
        FuseActivation(), n.done(softplus(n, n.op("Mul", n.input(8, 16), 30.0), beta, divided=divided)), changes=1
    )
    assert not graph.of_kind("Where", "Greater")
    assert len(graph.of_kind("Softplus")) == 1


def test_other_selections_stay() -> None:
    n = Net()
    check_refused(
        FuseActivation(), n.done(softplus(n, n.input(8, 16), threshold=5.0)), because="softplus is no line yet"
    )
    n = Net()
    x, z = n.input(8, 16), n.input(8, 16, name="z")
    y = n.op("Softplus", x)
    found = [
        n.op("Where", n.op("Greater", x, 20.0), z, y),
        n.op("Where", n.op("Greater", z, 20.0), x, y),
        n.op("Where", n.op("Less", x, 20.0), x, y),
        n.op("Where", n.op("Greater", x, 20.0), x, n.op("Mul", y, 2.0)),
        n.op("Where", n.op("Greater", x, z), x, y),
    ]
    check_untouched(FuseActivation(), n.done(*found))


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1)])
def test_equal_slopes_are_one(shape: tuple[int, ...]) -> None:
    n = Net()
    y = n.op("PRelu", n.input(2, 4, 3, 3), n.const(np.full(shape, 0.25)))
    graph, _ = check_pass(FuseActivation(), n.done(y), changes=1, kinds={"LeakyRelu": 1})
    assert graph.of_kind("LeakyRelu")[0].attrs.alpha == 0.25


def test_slopes_that_differ_or_are_computed_stay() -> None:
    n = Net()
    x = n.input(2, 4, 3, 3)
    check_untouched(
        FuseActivation(), n.done(n.op("PRelu", x, n.random(4, 1, 1)), n.op("PRelu", x, n.input(1, name="s")))
    )


def test_softsign() -> None:
    n = Net()
    x = n.input(8, 16)
    y = n.op("Div", x, n.op("Add", n.op("Abs", x), 1.0))
    check_pass(FuseActivation(), n.done(y), changes=1, kinds={"Softsign": 1})
    n = Net()
    x = n.input(8, 16)
    check_untouched(FuseActivation(), n.done(n.op("Div", x, n.op("Add", n.op("Abs", x), 2.0))))
