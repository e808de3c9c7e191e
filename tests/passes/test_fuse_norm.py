"""fuse_norm: each form in which exporters write a normalization becomes one op; other arithmetic stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.fuse_norm import FuseNorm

EPS = 1e-5


def mean(n: Net, x: Value, *axes: int, keepdims: bool = True) -> Value:
    return n.op("ReduceMean", x, n.ints(*axes), attrs=ReduceAttrs(keepdims=keepdims))


def square_by_pow(n: Net, d: Value) -> Value:
    return n.op("Pow", d, 2.0)


def square_by_mul(n: Net, d: Value) -> Value:
    return n.op("Mul", d, d)


def divide_by_sqrt(n: Net, d: Value, v: Value) -> Value:
    return n.op("Div", d, n.op("Sqrt", v))


def times_reciprocal_of_sqrt(n: Net, d: Value, v: Value) -> Value:
    return n.op("Mul", n.op("Reciprocal", n.op("Sqrt", v)), d)


def times_one_over_sqrt(n: Net, d: Value, v: Value) -> Value:
    return n.op("Mul", d, n.op("Div", 1.0, n.op("Sqrt", v)))


def times_power(n: Net, d: Value, v: Value) -> Value:
    return n.op("Mul", d, n.op("Pow", v, -0.5))


def divide_by_power(n: Net, d: Value, v: Value) -> Value:
    return n.op("Div", d, n.op("Pow", v, 0.5))


SQUARES = [square_by_pow, square_by_mul]


ROOTS = [divide_by_sqrt, times_reciprocal_of_sqrt, times_one_over_sqrt, times_power, divide_by_power]


def core(
    n: Net,
    x: Value,
    *axes: int,
    square: Callable[..., Value] = square_by_pow,
    root: Callable[..., Value] = divide_by_sqrt,
    eps: Any = EPS,
) -> Value:
    d = n.op("Sub", x, mean(n, x, *axes))
    return root(n, d, n.op("Add", mean(n, square(n, d), *axes), eps))


def attrs(kind: str, **fields: Any) -> Any:
    return OPDEFS[kind].attrs(**fields)


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
def test_layer_norm_of_torchscript(square: Callable[..., Value], root: Callable[..., Value]) -> None:
    n = Net(np.float64)
    y = core(n, n.input(2, 3, 8), -1, square=square, root=root)
    y = n.op("Add", n.random(8), n.op("Mul", y, n.random(8)))
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})
    (op,) = graph.of_kind("LayerNormalization")
    assert op.attrs == attrs("LayerNormalization", axis=-1, epsilon=EPS)
    assert [graph.type(v).shape for v in op.inputs] == [(2, 3, 8), (8,), (8,)]


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_layer_norm_with_and_without_scale_and_shift(scale: bool, shift: bool) -> None:
    n = Net(np.float64)
    y = core(n, n.input(2, 8), 1)
    y = n.op("Mul", n.random(8), y) if scale else y
    y = n.op("Add", y, n.random(8)) if shift else y
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})
    assert len(graph.of_kind("LayerNormalization")[0].inputs) == 2 + shift


def test_layer_norm_over_two_axes_of_three() -> None:
    n = Net(np.float64)
    y = n.op("Add", n.op("Mul", core(n, n.input(2, 3, 8), 1, 2), n.random(3, 8)), n.random(1, 3, 8))
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})
    assert graph.of_kind("LayerNormalization")[0].attrs.axis == -2


def test_layer_norm_with_a_symbolic_batch() -> None:
    n = Net(np.float64)
    y = n.op("Mul", core(n, n.input(symbol("N"), 3, 8), -1), n.random(8))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})


def test_layer_norm_with_the_scale_on_the_inverse_deviation() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    d = n.op("Sub", x, mean(n, x, -1))
    inv = n.op("Reciprocal", n.op("Sqrt", n.op("Add", mean(n, square_by_mul(n, d), -1), EPS)))
    y = n.op("Add", n.op("Mul", d, n.op("Mul", inv, n.random(8))), n.random(8))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})


def tensorflow(n: Net, x: Value, scale: bool, shift: bool) -> Value:
    """``tf.nn.batch_normalization`` over moments of the last axis: ``x inv + (beta - mean inv)``."""
    m = mean(n, x, -1)
    d = n.op("Sub", x, m)
    inv = n.op("Reciprocal", n.op("Sqrt", n.op("Add", mean(n, n.op("Mul", d, d), -1), EPS)))
    if scale:
        inv = n.op("Mul", inv, n.random(8))
    moved = n.op("Mul", m, inv)
    return n.op("Add", n.op("Mul", x, inv), n.op("Sub", n.random(8), moved) if shift else n.op("Neg", moved))


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_layer_norm_of_tensorflow(scale: bool, shift: bool) -> None:
    n = Net(np.float64)
    y = tensorflow(n, n.input(2, 8), scale, shift)
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})


@pytest.mark.parametrize("clamp", ["none", "max", "relu"])
def test_layer_norm_of_flax(clamp: str) -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    m = mean(n, x, -1)
    v = n.op("Sub", mean(n, n.op("Mul", x, x), -1), n.op("Mul", m, m))
    v = {"none": lambda: v, "max": lambda: n.op("Max", v, 0.0), "relu": lambda: n.op("Relu", v)}[clamp]()
    y = n.op("Mul", n.op("Sub", x, m), n.op("Mul", n.op("Pow", n.op("Add", v, EPS), -0.5), n.random(8)))
    y = n.op("Add", y, n.random(8))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})


def jax(n: Net, x: Value, *, finite: bool = True, axis: int = -1, wide: Any = np.float64) -> Value:
    """jax2onnx's form: deviations of rows of equal numbers are zero, and the mean of squares is taken in float64."""
    m = mean(n, x, -1)
    least, greatest = (
        n.op(kind, x, n.ints(axis), attrs=ReduceAttrs(keepdims=True)) for kind in ("ReduceMin", "ReduceMax")
    )
    equal = n.op("Equal", least, greatest)
    if finite:
        equal = n.op("And", equal, n.op("Equal", n.op("Sub", m, m), n.const(np.float32(0))))
    d = n.op("Where", equal, n.const(np.float32(0)), n.op("Sub", x, m))
    v = n.op(
        "Cast",
        mean(n, n.op("Cast", n.op("Mul", d, d), attrs=CastAttrs(np.dtype(wide))), -1),
        attrs=CastAttrs(np.dtype(np.float32)),
    )
    return n.op("Add", n.op("Mul", n.op("Div", d, n.op("Sqrt", n.op("Add", v, EPS))), n.random(8)), n.random(8))


@pytest.mark.parametrize("finite", [True, False])
def test_layer_norm_of_jax2onnx(finite: bool) -> None:
    n = Net()
    y = jax(n, n.input(2, 4, 8), finite=finite)
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1})
    assert graph.of_kind("LayerNormalization")[0].attrs.axis == -1


def test_rows_compared_along_another_axis_are_refused() -> None:
    n = Net()
    y = jax(n, n.input(2, 8, 8), axis=1)
    check_refused(FuseNorm(), n.done(y), because=r"the least runs over axes \(1,\), the variance over \(2,\)")


def test_squares_in_a_narrow_dtype_are_refused() -> None:
    n = Net()
    y = jax(n, n.input(2, 8, 8), wide=np.float16)
    check_refused(FuseNorm(), n.done(y), because="the squares are converted to float16")


def test_a_residual_added_to_a_layer_norm_is_no_shift() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    y = n.op("Add", n.op("Mul", core(n, x, -1), n.random(8)), x)
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"Add": 1, "LayerNormalization": 1})


def test_a_scale_for_each_row_stays() -> None:
    n = Net(np.float64)
    y = n.op("Mul", core(n, n.input(2, 8), -1), n.random(2, 1))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"LayerNormalization": 1, "Mul": 1})


def test_a_computed_scale_is_taken_when_it_has_the_normalized_shape() -> None:
    n = Net(np.float64)
    y = n.op("Mul", core(n, n.input(2, 8), -1), n.op("Exp", n.input(8, name="g")))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"Exp": 1, "LayerNormalization": 1})


def test_a_result_used_twice_keeps_its_scales_apart() -> None:
    n = Net(np.float64)
    y = core(n, n.input(2, 8), -1)
    graph = n.done(n.op("Mul", y, n.random(8)), n.op("Mul", y, n.random(8)))
    check_pass(FuseNorm(), graph, changes=1, kinds={"LayerNormalization": 1, "Mul": 2})


def test_instance_norm_of_an_image() -> None:
    n = Net(np.float64)
    y = core(n, n.input(2, 3, 4, 5), 2, 3)
    y = n.op("Add", n.op("Mul", y, n.random(3, 1, 1)), n.random(1, 3, 1, 1))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"InstanceNormalization": 1})


@pytest.mark.parametrize("inside", [False, True])
def test_a_norm_of_all_channels_with_a_scale_for_each(inside: bool) -> None:
    """Conv-TasNet's global layer norm: a group norm of one group."""
    n = Net(np.float64)
    x, scale = n.input(2, 8, 5), n.random(1, 8, 1)
    d = n.op("Sub", x, mean(n, x, 1, 2))
    root = n.op("Pow", n.op("Add", mean(n, n.op("Mul", d, d), 1, 2), EPS), 0.5)
    y = n.op("Div", n.op("Mul", scale, d), root) if inside else n.op("Mul", n.op("Div", d, root), scale)
    graph, _ = check_pass(
        FuseNorm(), n.done(n.op("Add", y, n.random(8, 1))), changes=1, kinds={"GroupNormalization": 1}
    )
    assert graph.of_kind("GroupNormalization")[0].attrs == attrs("GroupNormalization", num_groups=1, epsilon=EPS)


def test_a_plain_norm_of_all_channels_is_a_layer_norm() -> None:
    n = Net(np.float64)
    check_pass(FuseNorm(), n.done(core(n, n.input(2, 8, 5), 1, 2)), changes=1, kinds={"LayerNormalization": 1})


def test_the_batch_axis_of_one_image_may_be_reduced_as_well() -> None:
    """MeanVarianceNormalization reduces the batch and the positions."""
    n = Net(np.float64)
    y = core(n, n.input(1, 3, 4, 5), 0, 2, 3)
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"InstanceNormalization": 1})


def test_axes_that_are_not_the_last_are_refused() -> None:
    n = Net(np.float64)
    check_refused(FuseNorm(), n.done(core(n, n.input(2, 8, 4), 1)), because=r"axes are not the last ones: \(1,\) of 3")


def test_different_axes_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 8, 8)
    d = n.op("Sub", x, mean(n, x, -1))
    y = n.op("Div", d, n.op("Sqrt", n.op("Add", mean(n, n.op("Mul", d, d), 1), EPS)))
    check_refused(FuseNorm(), n.done(y), because=r"the mean runs over axes \(2,\), the variance over \(1,\)")


def test_dropped_axes_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(8, 8)
    d = n.op("Sub", x, mean(n, x, -1))
    y = n.op("Div", d, n.op("Sqrt", n.op("Add", mean(n, n.op("Mul", d, d), -1, keepdims=False), EPS)))
    check_refused(FuseNorm(), n.done(y), because="ReduceMean_4 drops the reduced axes")


def test_an_epsilon_for_each_row_is_refused() -> None:
    n = Net(np.float64)
    y = core(n, n.input(2, 8), -1, eps=n.const([[1e-5], [1e-3]]))
    check_refused(FuseNorm(), n.done(y), because="epsilon is not a scalar")


def test_a_computed_epsilon_is_refused() -> None:
    n = Net(np.float64)
    e = n.op("Exp", n.input(1, name="e"))
    check_refused(FuseNorm(), n.done(core(n, n.input(2, 8), -1, eps=e)), because="epsilon is not a scalar")


def unbiased(n: Net, x: Value, count: int) -> Value:
    d = n.op("Sub", x, mean(n, x, -1))
    v = n.op("Div", n.op("Mul", mean(n, n.op("Mul", d, d), -1), float(count)), float(count - 1))
    return divide_by_sqrt(n, d, n.op("Add", v, EPS))


@pytest.mark.parametrize("scaled", ["constant", "computed", "no scale"])
def test_bessels_correction_is_a_factor_of_the_scale(scaled: str) -> None:
    n = Net(np.float64)
    y = unbiased(n, n.input(2, 3, 8), 8)
    if scaled != "no scale":
        y = n.op("Mul", y, n.random(8) if scaled == "constant" else n.input(8, name="scale"))
    kinds = {"LayerNormalization": 1} | ({"Mul": 1} if scaled == "computed" else {})
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds=kinds)
    (op,) = graph.of_kind("LayerNormalization")
    assert op.attrs.epsilon == pytest.approx(EPS * 7 / 8)
    if scaled == "no scale":
        np.testing.assert_allclose(graph.constant_value(op.inputs[1]), np.full(8, (7 / 8) ** 0.5))  # type: ignore[arg-type]


def test_a_negative_correction_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    d = n.op("Sub", x, mean(n, x, -1))
    y = divide_by_sqrt(n, d, n.op("Add", n.op("Mul", mean(n, n.op("Mul", d, d), -1), -2.0), EPS))
    check_refused(FuseNorm(), n.done(y), because="the variance is multiplied by -2")


def test_a_negative_epsilon_is_refused() -> None:
    n = Net(np.float64)
    check_refused(FuseNorm(), n.done(core(n, n.input(2, 8), -1, eps=-1e-5)), because="epsilon is negative: -1e-05")


def test_a_used_deviation_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    d = n.op("Sub", x, mean(n, x, -1))
    v = n.op("Add", mean(n, n.op("Mul", d, d), -1), EPS)
    graph = n.done(n.op("Div", d, n.op("Sqrt", v)), n.op("Log", v))
    check_refused(FuseNorm(), graph, because="an inner value is used elsewhere: Add_5, by Log_8")


def test_axes_of_unknown_size_are_refused() -> None:
    n = Net(np.float64)
    check_refused(
        FuseNorm(), n.done(core(n, n.input(2, symbol("C")), -1)), because="the size of the normalized axes is not known"
    )


def test_computed_axes_are_refused() -> None:
    n = Net(np.float64)
    x, axes = n.input(2, 8), n.input(1, name="axes", dtype=np.int64)
    d = n.op("Sub", x, n.op("ReduceMean", x, axes, attrs=ReduceAttrs()))
    v = n.op("ReduceMean", n.op("Mul", d, d), axes, attrs=ReduceAttrs())
    check_refused(
        FuseNorm(), n.done(n.op("Div", d, n.op("Sqrt", n.op("Add", v, EPS)))), because="the axes are not constant"
    )


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
def test_rms_norm(square: Callable[..., Value], root: Callable[..., Value]) -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 8)
    y = root(n, x, n.op("Add", EPS, mean(n, square(n, x), -1)))
    graph, _ = check_pass(FuseNorm(), n.done(n.op("Mul", n.random(8), y)), changes=1, kinds={"RMSNormalization": 1})
    assert graph.of_kind("RMSNormalization")[0].attrs == attrs("RMSNormalization", axis=-1, epsilon=EPS)


def test_rms_norm_takes_no_shift() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    y = n.op("Add", divide_by_sqrt(n, x, n.op("Add", mean(n, n.op("Mul", x, x), -1), EPS)), n.random(8))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"Add": 1, "RMSNormalization": 1})


def test_rms_norm_of_each_channel_of_an_image_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 8, 4, 5)
    y = n.op("Div", x, n.op("Sqrt", n.op("Add", mean(n, n.op("Mul", x, x), 2, 3), EPS)))
    check_refused(FuseNorm(), n.done(y), because="it normalizes each channel of an image")


def test_rms_norm_with_a_scale_for_each_position_of_an_image() -> None:
    n = Net(np.float64)
    x = n.input(2, 8, 4, 5)
    y = n.op("Div", x, n.op("Sqrt", n.op("Add", mean(n, n.op("Mul", x, x), 2, 3), EPS)))
    check_pass(FuseNorm(), n.done(n.op("Mul", y, n.random(4, 5))), changes=1, kinds={"RMSNormalization": 1})


def test_rms_norm_over_the_first_axis_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(8, 2)
    y = divide_by_sqrt(n, x, n.op("Add", mean(n, n.op("Mul", x, x), 0), EPS))
    check_refused(FuseNorm(), n.done(y), because=r"axes are not the last ones: \(0,\) of 2")


def test_a_mean_of_another_value_is_no_rms_norm() -> None:
    n = Net(np.float64)
    x, z = n.input(2, 8), n.input(2, 8, name="z")
    check_untouched(FuseNorm(), n.done(divide_by_sqrt(n, x, n.op("Add", mean(n, n.op("Mul", z, z), -1), EPS))))
