"""pixel_shuffles: the filters before a pixel shuffle are ordered by their pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import BlockAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.pixel_shuffles import PixelShuffles


def shuffled(n: Net, x: Value, mode: str = "CRD") -> Value:
    return n.op("DepthToSpace", x, attrs=BlockAttrs(2, mode))


def image(n: Net) -> Value:
    return n.input(2, 8, 5, 6)


def modes(graph: Graph) -> list[str]:
    return [op.attrs.mode for op in graph.of_kind("DepthToSpace")]


def test_a_convolution_before_a_shuffle() -> None:
    n = Net(np.float64)
    before = n.done(shuffled(n, n.conv(image(n), 12, bias=True)))
    graph, _ = check_pass(PixelShuffles(), before, changes=1, kinds={"Conv": 1, "DepthToSpace": 1})
    assert modes(graph) == ["DCR"]
    (one,), (other,) = (g.of_kind("Conv") for g in (before, graph))
    old, new = (g.constant_value(c.inputs[1]) for g, c in ((before, one), (graph, other)))
    assert old is not None
    assert new is not None
    np.testing.assert_array_equal(new[[0, 3, 6, 9]], old[:4])
    assert other.src == one.src


def test_activations_between_them_stay() -> None:
    n = Net(np.float64)
    y = n.op("Sigmoid", n.op("Relu", n.conv(image(n), 8, 1, pads=0)))
    kinds = {"Conv": 1, "Relu": 1, "Sigmoid": 1, "DepthToSpace": 1}
    check_pass(PixelShuffles(), n.done(shuffled(n, y)), changes=1, kinds=kinds)


def test_refusals() -> None:
    n = Net(np.float64)
    check_refused(PixelShuffles(), n.done(shuffled(n, n.conv(image(n), 8, group=2))), because="has groups")
    n = Net(np.float64)
    y = n.conv(image(n), 8)
    check_refused(PixelShuffles(), n.done(shuffled(n, y), n.op("Relu", y)), because="also read in their own order")
    n = Net(np.float64)
    bias = n.op("Relu", n.input(8, name="b"))
    y = n.op("Conv", image(n), n.random(8, 8, 1, 1), bias, attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1)))
    check_refused(PixelShuffles(), n.done(shuffled(n, y)), because="bias .* is not constant")


def test_a_convolution_with_stages() -> None:
    from optdnn.passes.fuse_epilogue import FuseEpilogue

    n = Net(np.float64)
    graph = n.done(shuffled(n, n.op("Relu", n.conv(image(n), 8))))
    FuseEpilogue()(graph)
    check_refused(PixelShuffles(), graph, because="has stages")


def test_networks_without_a_candidate() -> None:
    n = Net(np.float64)
    check_untouched(PixelShuffles(), n.done(shuffled(n, n.conv(image(n), 8), "DCR")))
    n = Net(np.float64)
    check_untouched(PixelShuffles(), n.done(shuffled(n, n.op("Relu", image(n)))))


def test_a_network_on_the_gpu() -> None:
    n = Net()
    y = shuffled(n, n.op("Relu", n.conv(image(n), 16, bias=True)))  # with 32 channels, no copy is needed
    graph = n.done(n.conv(y, 8))
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    moves = [s.params for s in program.steps if s.params.get("tactic") == "copy"]
    (move,) = [m for m in moves if len(m["reads"][0][2]) == 6]
    assert move["reads"][0][3][1] == move["writes"][0][3][1] == 1, "channels are neighbors before and after"
    check_simulated(graph, "fp16")


def written(n: Net, x: Value, mode: str = "DCR", sizes: tuple[int, int] = (2, 2)) -> Value:
    """A pixel shuffle as Reshape, Transpose, Reshape."""
    batch, channels, height, width = n.graph.type(x).static_shape
    c = channels // (sizes[0] * sizes[1])
    split = (*sizes, c) if mode == "DCR" else (c, *sizes)
    y = n.op("Reshape", x, n.ints(batch, *split, height, width))
    perm = (0, 3, 4, 1, 5, 2) if mode == "DCR" else (0, 1, 4, 2, 5, 3)
    return n.op(
        "Reshape",
        n.op("Transpose", y, attrs=TransposeAttrs(perm)),
        n.ints(batch, c, height * sizes[0], width * sizes[1]),
    )


def repeated(n: Net, x: Value, times: int) -> Value:
    """Each channel ``times`` times in a row, as PyTorch's ``repeat_interleave`` is exported."""
    batch, channels, height, width = n.graph.type(x).static_shape
    y = n.op("Expand", n.op("Unsqueeze", x, n.ints(2)), n.ints(batch, channels, times, height, width))
    return n.op("Reshape", y, n.ints(batch, channels * times, height, width))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_a_shuffle_that_is_written_out(mode: str) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(
        PixelShuffles(),
        n.done(written(n, image(n), mode)),
        changes=1,
        kinds={"DepthToSpace": 1},
        rules={"written_shuffle": 1},
    )
    assert graph.of_kind("DepthToSpace")[0].attrs == BlockAttrs(2, mode)


def test_other_moves_of_pixels_stay() -> None:
    n = Net(np.float64)
    check_untouched(PixelShuffles(), n.done(written(n, image(n), sizes=(2, 4))))  # blocks that are not square
    n = Net(np.float64)
    y = n.op("Reshape", image(n), n.ints(2, 2, 2, 2, 5, 6))
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 3, 4, 1, 5, 2)))
    check_untouched(PixelShuffles(), n.done(n.op("Reshape", y, n.ints(2, 20, 12))))
    n = Net(np.float64)
    empty = ReshapeAttrs(allowzero=True)
    y = n.op("Reshape", n.input(2, 0, 5, 6), n.ints(2, 3, 0, 0, 5, 6), attrs=empty)
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 4, 2, 5, 3)))
    check_untouched(PixelShuffles(), n.done(n.op("Reshape", y, n.ints(2, 3, 0, 0), attrs=empty)))  # blocks of no pixels


def test_patches_side_by_side_are_no_image() -> None:
    """MobileViTv2: (batch, channels, 4 pixels, patches) becomes an image of patches of 2 x 2 pixels."""
    n = Net(np.float64)
    y = n.op("Reshape", n.op("Relu", n.input(2, 8, 4, 30)), n.ints(2, 8, 2, 2, 5, 6))
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 4, 2, 5, 3)))
    graph = n.done(n.conv(n.op("Reshape", y, n.ints(2, 8, 10, 12)), 4))
    check_refused(PixelShuffles(), graph, because="its operand is no image of 5 x 6 pixels", rule="written_shuffle")


@pytest.mark.parametrize("second", [shuffled, lambda n, x: written(n, x, "CRD")])
def test_a_sum_of_shuffled_images_goes_first(second: Callable[[Net, Value], Value]) -> None:
    n = Net(np.float64)
    y = n.op("Add", shuffled(n, n.conv(image(n), 8, 3, pads=1)), second(n, n.input(2, 8, 5, 6, name="b")))
    graph, _ = check_pass(PixelShuffles(), n.done(y), changes=2 - (second is shuffled))
    assert graph.kinds() == {"Conv": 1, "Add": 1, "DepthToSpace": 1}


def test_sums_of_shuffled_images() -> None:
    n = Net(np.float64)
    y = n.op("Add", shuffled(n, n.op("Relu", image(n)), "DCR"), shuffled(n, n.input(2, 8, 5, 6, name="b"), "DCR"))
    kinds = {"Relu": 1, "Add": 1, "DepthToSpace": 1}
    check_pass(PixelShuffles(), n.done(y), changes=1, kinds=kinds, rules={"shuffled_sum": 1})
    n = Net(np.float64)
    x = n.op("Relu", image(n))
    y = n.op("Add", shuffled(n, x, "DCR"), shuffled(n, x, "CRD"))
    check_untouched(PixelShuffles(), n.done(y))


@pytest.mark.parametrize("first", [True, False])
def test_repeated_channels_are_weights(first: bool) -> None:
    """HunyuanImage's upsampling: a convolution and its operand with repeated channels are added, and shuffled."""
    n = Net(np.float64)
    x = image(n)
    terms = [n.conv(x, 16, 3, pads=1, bias=True), repeated(n, x, 2)]
    y = n.op("Add", *(terms if first else terms[::-1]))
    check_pass(PixelShuffles(), n.done(y), changes=1, kinds={"Conv": 1}, rules={"repeated_channels": 1})


def test_a_block_of_an_autoencoder_is_one_launch() -> None:
    n = Net()
    x = n.op("Relu", n.conv(image(n), 16, 3, pads=1))
    y = n.op("Add", written(n, n.conv(x, 32, 3, pads=1)), written(n, repeated(n, x, 2)))
    steps = [
        s.params["op"]["kind"] for s in check_simulated(n.done(n.conv(n.op("Relu", y), 8, 1, pads=0)), "fp16").steps
    ]
    assert not {"Add", "DepthToSpace", "Copy", "Pointwise", "Copies"} & set(steps[1:-1]), steps


def test_repeated_channels_that_weights_cannot_add() -> None:
    because = "its weights are not constant, or it has groups or stages, or its pixels"
    n = Net(np.float64)
    x = image(n)
    check_refused(
        PixelShuffles(), n.done(n.op("Add", n.conv(x, 16, 3, pads=1, group=2), repeated(n, x, 2))), because=because
    )
    n = Net(np.float64)
    x = image(n)
    y = n.op("Conv", x, n.random(16, 8, 2, 2), attrs=ConvAttrs((1, 1), (0, 0, 1, 1), (1, 1)))
    check_refused(PixelShuffles(), n.done(n.op("Add", y, repeated(n, x, 2))), because=because)
    n = Net(np.float64)
    x, other = image(n), n.input(2, 8, 5, 6, name="other")
    check_untouched(PixelShuffles(), n.done(n.op("Add", n.conv(x, 16, 3, pads=1), repeated(n, other, 2))))
    n = Net(np.float64)
    x = image(n)
    y = n.op("Expand", n.op("Unsqueeze", x, n.ints(1)), n.ints(2, 2, 8, 5, 6))  # all channels, then all again
    tiled = n.op("Reshape", y, n.ints(2, 16, 5, 6))
    check_untouched(PixelShuffles(), n.done(n.op("Add", n.conv(x, 16, 3, pads=1), tiled)))
