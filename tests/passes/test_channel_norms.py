"""channel_norms: normalizations over axis 1 become one op between transpositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated
from support.sweep import all_pairs

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.norm import LayerNormAttrs, LpNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.channel_norms import ChannelNorms
from optdnn.passes.support.facts import operand

EPSILON = 1e-3
LAYER, RMS = {"layer_norm_of_channels": 1}, {"rms_norm_of_channels": 1}


def mean(n: Net, x: Value, axis: int = 1) -> Value:
    return n.op("ReduceMean", x, n.ints(axis), attrs=ReduceAttrs())


def layer_norm(n: Net, x: Value, *scale_and_shift: Value, axis: int = 1) -> Value:
    """As Segment Anything writes it."""
    centered = n.op("Sub", x, mean(n, x, axis))
    variance = mean(n, n.op("Pow", centered, 2.0), axis)
    y = n.op("Div", centered, n.op("Sqrt", n.op("Add", variance, EPSILON)))
    for kind, value in zip(("Mul", "Add"), scale_and_shift, strict=False):
        y = n.op(kind, y, value)
    return y


def rms_norm(n: Net, x: Value, axis: int = 1) -> Value:
    """As timm writes it."""
    squares = mean(n, n.op("Mul", x, x), axis)
    return n.op("Mul", x, n.op("Reciprocal", n.op("Sqrt", n.op("Add", squares, EPSILON))))


@pytest.mark.parametrize("shape", [(2, 8, 4, 5), (symbol("N", 1), 8, 5), (2, 8, 3, 4, 5)])
def test_layer_norm_of_channels(shape: tuple[Any, ...]) -> None:
    n = Net(np.float64)
    own = (8, *(1 for _ in shape[2:]))
    y = layer_norm(n, n.input(*shape), n.random(*own), n.random(1, *own))
    sizes = None if isinstance(shape[0], int) else {"N": 2}
    kinds = {"Transpose": 2, "LayerNormalization": 1}
    check_pass(ChannelNorms(), n.done(y), changes=1, rules=LAYER, kinds=kinds, sizes=sizes)


def test_rms_norm_of_channels() -> None:
    n = Net(np.float64)
    y = n.op("Mul", rms_norm(n, n.input(2, 8, 4, 5)), n.random(8, 1, 1))
    check_pass(ChannelNorms(), n.done(y), changes=1, rules=RMS, kinds={"Transpose": 2, "RMSNormalization": 1})


@pytest.mark.parametrize("axis", [1, -2])
def test_l2_norm_of_channels(axis: int) -> None:
    n = Net(np.float64)
    y = n.op("LpNormalization", n.input(2, 8, 5), attrs=LpNormAttrs(axis, 2, EPSILON))
    kinds = {"Transpose": 2, "LpNormalization": 1}
    result, _ = check_pass(ChannelNorms(), n.done(y), changes=1, rules={"l2_norm_of_channels": 1}, kinds=kinds)
    assert result.of_kind("LpNormalization")[0].attrs == LpNormAttrs(2, 2, EPSILON)


def test_l2_norms_over_other_axes_stay() -> None:
    n = Net(np.float64)
    x = n.input(2, 8, 4, 5)
    ys = [n.op("LpNormalization", x, attrs=LpNormAttrs(axis)) for axis in (0, 2, -1)]
    check_untouched(ChannelNorms(), n.done(*ys, n.op("LpNormalization", n.input(4, 8, name="y"), attrs=LpNormAttrs(1))))


def images(n: Net, kind: str) -> Graph:
    """Convolutions with norms of channels between them, and an addition."""
    x = n.conv(n.input(1, 8, 6, 6), 16)
    y = layer_norm(n, x, n.random(16, 1, 1), n.random(16, 1, 1)) if kind == "layer" else rms_norm(n, x)
    return n.done(n.conv(n.op("Add", x, rms_norm(n, n.conv(n.op("Relu", y), 16))), 8))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_on_a_gpu_nothing_moves_between_convolutions_and_norms(kind: str, precision: str) -> None:
    program = check_simulated(images(Net(), kind), precision)
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert not any(k.startswith("Reduce") for k in kinds)
    assert kinds.count("Copy") <= 2  # into and out of the layout of convolutions


BEHIND = {"rms_norm_of_channels": 1, "stage_after_channel_norm": 1}


@pytest.mark.parametrize("activation", ["Gelu", "Clip"])
def test_activations_move_next_to_norms(activation: str) -> None:
    n = Net(np.float64)
    y = n.op(activation, rms_norm(n, n.input(2, 8, 4, 5)), *([-0.5, 0.5] if activation == "Clip" else []))
    result, _ = check_pass(ChannelNorms(), n.done(y), changes=2, rules=BEHIND)
    (one,) = result.of_kind(activation)
    assert result.op(operand(one)).kind == "RMSNormalization"


def of_one_pixel(
    n: Net, *inputs: Any, activation: str = "Relu", axes: tuple[int, ...] = (2, 8, 1, 1), kept: bool = False
) -> Graph:
    """Channels of one pixel, normalized as rows, and an activation of the image that they become."""
    rows = n.op("LayerNormalization", n.input(2, 1, 1, 8), n.random(8), n.random(8), attrs=LayerNormAttrs(-1, EPSILON))
    y = n.op("Reshape", rows, n.ints(*axes))
    return n.done(n.op(activation, y, *inputs), *([y] if kept else []))


@pytest.mark.parametrize(("activation", "inputs"), [("Relu", ()), ("Clip", (-0.5, 0.5))])
def test_activations_of_one_pixel_move_next_to_norms(activation: str, inputs: tuple[float, ...]) -> None:
    graph = of_one_pixel(Net(np.float64), *inputs, activation=activation)
    result, _ = check_pass(ChannelNorms(), graph, changes=1, rules={"activation_after_pixel_norm": 1})
    (one,) = result.of_kind(activation)
    assert result.op(operand(one)).kind == "LayerNormalization"


def test_operators_that_stay_after_the_reshape() -> None:
    n = Net(np.float64)
    check_untouched(ChannelNorms(), of_one_pixel(n, n.random(8, 1, 1), activation="PRelu"))
    check_untouched(ChannelNorms(), of_one_pixel(Net(np.float64), kept=True))


@pytest.mark.parametrize("first", [True, False])
def test_additions_move_next_to_norms(first: bool) -> None:
    n = Net(np.float64)
    x, y = n.input(2, 8, 4, 5), n.input(2, 8, 4, 5, name="y")
    normed = rms_norm(n, x)
    graph = n.done(n.op("Add", *((normed, y) if first else (y, normed))))
    result, _ = check_pass(ChannelNorms(), graph, changes=2, rules=BEHIND)
    (add,) = result.of_kind("Add")
    assert {result.op(v).kind for v in add.inputs if v is not None} == {"RMSNormalization", "Transpose"}


def residual_block(
    n: Net, x: Value, norm: Callable[[Net, Value], Value], *, scale: bool = True, plain: bool = False
) -> Value:
    """As denoising-diffusion-pytorch has it: a norm of channels, a factor and a shift of each image, an activation, a shortcut."""
    channels: Any = n.dims(x)[1]
    y = norm(n, x)
    y = n.op("Mul", y, n.random(1, channels, 1, 1)) if scale else y
    if not plain:
        time = n.input(2, 6)
        products = (n.matmul(time, channels) for _ in range(2))
        factor, shift = (n.op("Reshape", v, n.ints(2, channels, 1, 1)) for v in products)
        y = n.op("Add", n.op("Mul", y, n.op("Add", factor, 1.0)), shift)
    return n.op("Add", n.op("Swish", y), x)


def l2_norm(n: Net, x: Value) -> Value:
    return n.op("LpNormalization", x, attrs=LpNormAttrs(1, 2, 1e-12))


def test_factors_of_images_move_next_to_norms() -> None:
    n = Net(np.float64)
    y = residual_block(n, n.input(2, 8, 4, 5), l2_norm)
    rules = {"l2_norm_of_channels": 1, "stage_after_channel_norm": 5}
    result, _ = check_pass(ChannelNorms(), n.done(y), changes=6, rules=rules)
    (last,) = result.of_kind("Swish")
    assert result.type(last.value).static_shape == (2, 4, 5, 8)
    assert all(len(op.outputs[0].type.dims) == 4 for op in result.of_kind("Add"))


def test_a_constant_factor_stays_in_front_of_a_convolution() -> None:
    n = Net(np.float64)
    y = n.op("Mul", l2_norm(n, n.input(2, 8, 4, 5)), n.random(8, 1, 1))
    check_pass(ChannelNorms(), n.done(n.conv(y, 8)), changes=1, rules={"l2_norm_of_channels": 1})


@all_pairs(
    {
        "scale": [False, True],
        "plain": [False, True],
        "norm": [l2_norm, rms_norm],
        "precision": ["fp16", "fp32"],
    }
)
def test_a_gpu_runs_norm_factors_activation_and_shortcut_together(
    norm: Callable[[Net, Value], Value], plain: bool, scale: bool, precision: str
) -> None:
    n = Net()
    y = residual_block(n, n.conv(n.input(2, 8, 6, 6), 16), norm, plain=plain, scale=scale)
    program = check_simulated(n.done(n.conv(y, 8)), precision)
    assert "rows_modulated" in {t["tactic"] for t in program.meta["tactics"]}
    assert not {"LpNormalization", "RMSNormalization"} & {s.params["op"]["kind"] for s in program.steps}


@pytest.mark.parametrize("form", ["two readers", "a product", "a smaller image", "slopes", "another shape"])
def test_operators_that_stay_after_the_transposition(form: str) -> None:
    n = Net(np.float64)
    x = n.input(2, 8, 4, 5)
    y = rms_norm(n, x)
    made = {
        "two readers": lambda: n.op("Add", n.op("Relu", y), n.op("Sigmoid", y)),
        "a product": lambda: n.op("Mul", y, x),
        "a smaller image": lambda: n.op("Add", y, n.input(2, 1, 4, 5, name="y")),
        "slopes": lambda: n.op("PRelu", y, n.positive(8, 1, 1)),
        "another shape": lambda: n.op("Relu", n.op("Reshape", y, n.ints(2, 8, 20))),
    }[form]()
    check_pass(ChannelNorms(), n.done(made), changes=1, rules=RMS)


def test_a_gpu_runs_norm_and_activation_together() -> None:
    n = Net()
    x = n.conv(n.input(1, 8, 6, 6), 16)
    y = n.op("Add", x, rms_norm(n, n.conv(n.op("Gelu", rms_norm(n, x)), 16)))
    program = check_simulated(n.done(n.conv(y, 8)), "fp16")
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds.count("ActivatedNorm") == 2
    assert "Pointwise" not in kinds[:-1], "only the network's output changes its order and type"


def test_refused() -> None:
    for of, because in (("image", "multiplies with another image"), ("pixels", "has not one element per channel")):
        n = Net(np.float64)
        rows = n.op("RMSNormalization", n.input(2, 4, 5, 8), n.positive(8))
        y = n.op("Transpose", rows, attrs=TransposeAttrs((0, 3, 1, 2)))
        other = n.input(2, 8 if of == "image" else 1, 4, 5, name="y")
        check_refused(ChannelNorms(), n.done(n.op("Mul", y, other)), because=because)
    n = Net(np.float64)
    check_refused(
        ChannelNorms(), n.done(rms_norm(n, n.input(2, symbol("c"), 5))), because="number of channels is not known"
    )
    n = Net(np.float64)
    x = n.input(2, 8, 5)
    scale = n.input(8, 1, name="scale")
    centered = n.op("Sub", x, mean(n, x))
    root = n.op("Sqrt", n.op("Add", mean(n, n.op("Mul", centered, centered)), EPSILON))
    scaled = n.op("Mul", centered, n.op("Div", scale, root))
    check_refused(ChannelNorms(), n.done(scaled), because="not a constant for each channel")


def test_others_are_no_candidates() -> None:
    for shape, axis in (((2, 8), 1), ((2, 4, 8), 2), ((2, 4, 5, 8), 2)):
        n = Net(np.float64)
        check_untouched(ChannelNorms(), n.done(layer_norm(n, n.input(*shape), axis=axis)))


def response_norm(n: Net, x: Value, pool: bool) -> Value:
    """A filter response norm with its threshold."""
    square, channels = n.op("Mul", x, x), n.dims(x)[1]
    squares = (
        n.op("GlobalAveragePool", square) if pool else n.op("ReduceMean", square, n.ints(2, 3), attrs=ReduceAttrs())
    )
    y = n.op("Div", x, n.op("Sqrt", n.op("Add", squares, EPSILON)))
    assert isinstance(channels, int)
    scale, shift, least = (n.random(1, channels, 1, 1) for _ in range(3))
    return n.op("Max", n.op("Add", n.op("Mul", y, scale), shift), least)


@pytest.mark.parametrize("pool", [False, True])
def test_mean_squares_of_images_are_norms(pool: bool) -> None:
    n = Net(np.float64)
    y = response_norm(n, n.input(2, 8, 4, 5), pool)
    kinds = {"Add": 2, "Div": 1, "Max": 1, "Mul": 3, "ReduceL2": 1, "Sqrt": 1}
    check_pass(ChannelNorms(), n.done(y), changes=1, rules={"mean_square_of_channels": 1}, kinds=kinds)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_on_a_gpu_response_norms_leave_images_in_their_order(precision: str) -> None:
    n = Net()
    y = response_norm(n, n.conv(n.input(1, 16, 12, 12), 32), pool=False)
    program = check_simulated(n.done(n.conv(y, 16)), precision, tolerance=1e-2 if precision == "fp16" else None)
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds.count("ReduceL2") == 1
    assert kinds.count("Copy") <= 2


def test_other_mean_squares_stay() -> None:
    n = Net()
    x, other = n.input(2, 8, 4, 5), n.input(2, 8, 4, 5, name="y")
    product, square = n.op("Mul", x, other), n.op("Mul", x, x)
    rows = n.op("ReduceMean", n.op("Mul", other, other), n.ints(3), attrs=ReduceAttrs())
    check_untouched(
        ChannelNorms(), n.done(n.op("GlobalAveragePool", product), n.op("GlobalAveragePool", square), square, rows)
    )
