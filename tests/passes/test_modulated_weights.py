"""modulated_weights: factors of a convolution's weights move to its pixels and its results."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.modulated_weights import ModulatedWeights


def conv(n: Net, x: Value, w: Value, *more: Value, rank: int = 2, group: int = 1, pads: int = 1) -> Value:
    attrs = ConvAttrs(strides=(1,) * rank, pads=(pads,) * 2 * rank, dilations=(1,) * rank, group=group)
    result: Value = n.op("Conv", x, w, *more, attrs=attrs)
    return result


def modulated(
    pictures: int, inner: int = 4, outer: int = 6, size: int = 3, *, norm: bool = True, side: int = 5
) -> Graph:
    """A layer of StyleGAN2, its batch written as groups: filters times a style, divided by their norms."""
    n = Net()
    style = n.op("Reshape", n.input(pictures, inner, name="s"), n.ints(pictures, 1, inner, 1, 1))
    w = n.op("Mul", n.random(1, outer, inner, size, size), style)
    if norm:
        total = n.op("ReduceSum", n.op("Mul", w, w), n.ints(2, 3, 4))
        w = n.op("Div", w, n.op("Sqrt", n.op("Add", total, 1e-3)))
    w = n.op("Reshape", w, n.ints(pictures * outer, inner, size, size))
    x = n.op("Reshape", n.input(pictures, inner, side, side), n.ints(1, pictures * inner, side, side))
    bias = [n.random(pictures * outer)] if norm else []
    return n.done(conv(n, x, w, *bias, group=pictures, pads=size // 2))


@pytest.mark.parametrize("graph", [modulated(1), modulated(1, size=1, norm=False), modulated(3)])
def test_layers_of_stylegan(graph: Graph) -> None:
    norms = len(list(graph.of_kind("ReduceSum")))
    rules = {"modulated_weights": 1, **({"norms_of_filters": 1} if norms else {})}
    result, _ = check_pass(ModulatedWeights(), graph, changes=1 + norms, rules=rules)
    (found,) = (op for op in result.ops() if op.kind == "Conv")
    assert found.attrs.group == 1


def upsampled(
    pictures: int,
    *,
    turned: bool = True,
    norm: bool = True,
    perm: tuple[int, ...] = (0, 2, 1, 3, 4),
    inner: int = 4,
    outer: int = 6,
) -> Graph:
    """A layer of StyleGAN2 that doubles its images: the filters are transposed for the transposed convolution."""
    n = Net()
    style = n.op(
        "Exp",
        n.op(
            "Reshape",
            n.input(pictures, inner, name="s"),
            n.ints(pictures, *((1, inner) if turned else (inner, 1)), 1, 1),
        ),
    )
    w = n.op("Mul", n.random(1, *((outer, inner) if turned else (inner, outer)), 3, 3), style)
    if norm:
        total = n.op("ReduceSum", n.op("Mul", w, w), n.ints(2 if turned else 1, 3, 4))
        w = n.op("Div", w, n.op("Sqrt", n.op("Add", total, 1e-3)))
    if turned:
        w = n.op("Transpose", w, attrs=TransposeAttrs(perm))
    w = n.op("Reshape", w, n.ints(pictures * inner, outer, 3, 3))
    x = n.op("Reshape", n.input(pictures, inner, 5, 5), n.ints(1, pictures * inner, 5, 5))
    attrs = ConvTransposeAttrs((2, 2), (0, 0, 0, 0), (1, 1), (0, 0), pictures)
    return n.done(n.op("ConvTranspose", x, w, n.random(pictures * outer), attrs=attrs))


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("sizes", [(4, 6), (5, 5)])
@pytest.mark.parametrize("pictures", [1, 3])
def test_transposed_convolutions(pictures: int, sizes: tuple[int, int], turned: bool) -> None:
    graph = upsampled(pictures, turned=turned, inner=sizes[0], outer=sizes[1])
    result, _ = check_pass(ModulatedWeights(), graph, changes=2, rules={"modulated_weights": 1, "norms_of_filters": 1})
    (found,) = result.of_kind("ConvTranspose")
    assert found.attrs.group == 1


def test_filters_that_are_transposed_before_they_are_flat() -> None:
    n = Net()
    w = n.op("Mul", n.random(6, 4, 3, 3), n.input(1, 4, 1, 1, name="s"))
    w = n.op("Transpose", w, attrs=TransposeAttrs((1, 0, 2, 3)))
    attrs = ConvTransposeAttrs((2, 2), (0, 0, 0, 0), (1, 1), (0, 0))
    graph = n.done(n.op("ConvTranspose", n.input(2, 4, 5, 5), w, attrs=attrs))
    check_pass(ModulatedWeights(), graph, changes=1)


def test_transposed_taps() -> None:
    graph = upsampled(3, perm=(0, 2, 1, 4, 3), norm=False)
    check_refused(ModulatedWeights(), graph, because="not only by factors per channel")


def test_any_rank_and_factors_without_a_style_axis() -> None:
    """Filters (outer, inner, taps) times a factor per filter and a common factor: without Reshape, and with many pictures."""
    n = Net()
    w = n.op("Mul", n.op("Div", n.random(6, 4, 3), n.op("Exp", n.input(6, 1, 1, name="d"))), n.input(1, name="one"))
    graph = n.done(conv(n, n.input(2, 4, 9), w, n.input(6, name="b"), rank=1))
    check_pass(ModulatedWeights(), graph, changes=1)


def test_it_leaves_constant_filters() -> None:
    n = Net()
    check_untouched(ModulatedWeights(), n.done(conv(n, n.input(1, 4, 5, 5), n.op("Exp", n.random(6, 4, 3, 3)))))


@pytest.mark.parametrize("by", [(6, 4, 3, 3), (1, 1, 3, 3), (6, 4, 1, 1)])
def test_factors_of_single_weights(by: tuple[int, ...]) -> None:
    n = Net()
    graph = n.done(conv(n, n.input(1, 4, 5, 5), n.op("Mul", n.random(6, 4, 3, 3), n.input(*by, name="s"))))
    check_refused(ModulatedWeights(), graph, because="not only by factors per channel")


def test_filters_without_a_constant() -> None:
    n = Net()
    shape = (6, 4, 3, 3)
    graph = n.done(conv(n, n.input(1, 4, 5, 5), n.op("Add", n.random(*shape), n.input(*shape, name="s"))))
    check_refused(ModulatedWeights(), graph, because="not only by factors per channel")
    n = Net()
    w = n.op("Mul", n.input(6, 1, 1, 1, name="a"), n.input(1, 4, 1, 1, name="b"))
    check_refused(
        ModulatedWeights(), n.done(conv(n, n.input(1, 4, 5, 5), w, pads=0)), because="products of 0 full tensors"
    )


def test_groups_of_a_batch() -> None:
    """Groups that are no pictures: their filters differ."""
    n = Net()
    w = n.op("Mul", n.random(6, 2, 3, 3), n.input(6, 1, 1, 1, name="s"))
    check_refused(ModulatedWeights(), n.done(conv(n, n.input(1, 4, 5, 5), w, group=2)), because="factors per channel")
    n = Net()
    w = n.op("Mul", n.random(6, 2, 3, 3), n.input(6, 1, 1, 1, name="s"))
    graph = n.done(conv(n, n.input(2, 4, 5, 5), w, group=2))
    check_refused(ModulatedWeights(), graph, because="they are not the images of a batch")


@pytest.mark.parametrize("pictures", [1, 2])
def test_they_run_as_constant_filters(pictures: int) -> None:
    """The demodulation and the bias are stages of the convolution."""
    program = check_simulated(modulated(pictures, 32, 64, side=16), "fp16")
    tactics = [str(s.params.get("tactic", "")).split(" ")[0] for s in program.steps]
    assert {"conv_sm90", "conv_narrow_sm90"} & {*tactics}
    assert "matmul_sm90" not in tactics
    assert "taps" not in tactics


def test_transposed_convolutions_run_with_constant_filters() -> None:
    program = check_simulated(upsampled(2, inner=32, outer=32), "fp16")
    tactics = [str(s.params.get("tactic", "")).split(" ")[0] for s in program.steps]
    assert "matmul_sm90" not in tactics
    assert "taps" not in tactics


def squares(n: Net, w: Value, *axes: int, keepdims: bool = True) -> Graph:
    total = n.op("ReduceSum", n.op("Mul", w, w), n.ints(*axes), attrs=ReduceAttrs(keepdims))
    return n.done(n.op("Sqrt", n.op("Add", total, 1e-3)))


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("pictures", [1, 3])
def test_norms_are_products_of_squares(pictures: int, keepdims: bool) -> None:
    n = Net(np.float64)
    w = n.op("Mul", n.op("Exp", n.input(pictures, 1, 4, 1, 1, name="s")), n.random(1, 6, 4, 3, 3))
    kinds = {"Exp": 1, "Reshape": 2, "Mul": 2, "MatMul": 1, "Add": 1, "Sqrt": 1}
    check_pass(ModulatedWeights(), squares(n, w, 2, 3, 4, keepdims=keepdims), changes=1, kinds=kinds)


def test_filters_whose_read_channels_come_first() -> None:
    n = Net(np.float64)
    w = n.op("Mul", n.random(1, 4, 6, 3), n.op("Exp", n.input(2, 4, 1, 1, name="s")))
    check_pass(ModulatedWeights(), squares(n, w, 1, -1), changes=1)


def test_small_filters_keep_their_norms_in_16_bits() -> None:
    n = Net()
    w = n.op("Mul", n.op("Exp", n.input(1, 1, 16, 1, 1, name="s")), n.random(1, 8, 16, 3, 3, scale=1e-3))
    total = n.op("ReduceSum", n.op("Mul", w, w), n.ints(2, 3, 4))
    check_simulated(n.done(n.op("Reciprocal", n.op("Sqrt", n.op("Add", total, 1e-8)))), "fp16")


def test_norms_of_other_factors() -> None:
    n = Net(np.float64)
    w = n.op("Mul", n.random(1, 6, 4, 3, 3), n.op("Exp", n.input(1, 1, 4, 3, 1, name="s")))
    check_refused(ModulatedWeights(), squares(n, w, 2, 3, 4), because="do not vary along exactly one summed axis")
    n = Net(np.float64)
    w = n.op("Mul", n.random(1, 6, 4, 3, 3), n.op("Exp", n.input(1, 6, 1, 1, 1, name="s")))
    check_refused(ModulatedWeights(), squares(n, w, 2, 3, 4), because="do not vary along exactly one summed axis")
