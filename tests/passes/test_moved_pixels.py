"""image_tokens: images whose pixels are permuted stay channels-last."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops import norm, reduce, softmax
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.image_tokens import ImageTokens


def moved(n: Net, x: Value, split: tuple[int, ...], perm: tuple[int, ...], shape: tuple[int, ...]) -> Value:
    turned = n.op("Transpose", n.op("Reshape", x, n.ints(*split)), attrs=TransposeAttrs(perm))
    return n.op("Reshape", turned, n.ints(*shape))


def patches(n: Net, x: Value, channels: int = 16) -> Value:
    """(B, C, 8, 8) -> (B, C, 4 places in a patch, 16 patches)."""
    return moved(n, x, (0, channels, 4, 2, 4, 2), (0, 1, 3, 5, 2, 4), (0, channels, 4, 16))


def image(n: Net, x: Value, channels: int = 16) -> Value:
    """Back."""
    return moved(n, x, (0, channels, 2, 2, 4, 4), (0, 1, 4, 2, 5, 3), (0, channels, 8, 8))


def attended(n: Net, channels: int = 16) -> Graph:
    """A block as in MobileViTv2: separable attention, one score per position."""
    x = patches(n, n.conv(n.input(2, 8, 8, 8), channels, 1, pads=0))
    split = SplitAttrs(1)
    normed = n.op("GroupNormalization", x, n.positive(channels), n.random(channels), attrs=norm.GroupNormAttrs(1))
    query, key, value = n.op(
        "Split", n.conv(normed, 2 * channels + 1, 1, pads=0), n.ints(1, channels, channels), outputs=3, attrs=split
    )
    context = n.op("Mul", key, n.op("Softmax", query, attrs=softmax.SoftmaxAttrs(-1)))
    context = n.op("ReduceSum", context, n.ints(-1), attrs=reduce.ReduceAttrs())
    y = n.op("Add", x, n.conv(n.op("Mul", n.op("Relu", value), context), channels, 1, pads=0))
    return n.done(n.conv(image(n, y, channels), 8, 1, pads=0))


def test_pixels_are_moved_with_all_of_their_channels() -> None:
    after, _ = check_pass(ImageTokens(), attended(Net(np.float64)), changes=2, rules={"moved_pixels": 2})
    perms = Counter(op.attrs.perm for op in after.ops() if op.kind == "Transpose")
    assert perms == {(0, 2, 3, 1): 2, (0, 3, 1, 2): 2, (0, 2, 4, 1, 3, 5): 1, (0, 3, 1, 4, 2, 5): 1}


def test_a_norm_moves_after_the_reshape_that_others_read() -> None:
    n = Net(np.float64)
    split = n.op("Reshape", n.conv(n.input(2, 8, 8, 8), 16, 1, pads=0), n.ints(0, 16, 4, 2, 4, 2))
    turned = n.op("Transpose", split, attrs=TransposeAttrs((0, 1, 3, 5, 2, 4)))
    normed = n.op("GroupNormalization", turned, n.positive(16), n.random(16), attrs=norm.GroupNormAttrs(1))
    x, y = (n.op("Reshape", v, n.ints(0, 16, 4, 16)) for v in (turned, normed))
    rules = {"norm_of_view": 1, "moved_pixels": 1}
    after, _ = check_pass(ImageTokens(), n.done(n.op("Add", x, n.conv(y, 16, 1, pads=0))), changes=2, rules=rules)
    assert [len(op.outputs[0].type.dims) for op in after.ops() if op.kind == "GroupNormalization"] == [4]


def test_a_norm_that_no_other_reshape_stands_beside_stays() -> None:
    n = Net(np.float64)
    normed = n.op("GroupNormalization", n.input(2, 8, 4, 4), n.positive(8), n.random(8), attrs=norm.GroupNormAttrs(1))
    check_untouched(ImageTokens(), n.done(n.op("Relu", n.op("Reshape", normed, n.ints(0, 8, 16)))))


def test_values_that_are_no_image_stay() -> None:
    n = Net(np.float64)
    graph = n.done(patches(n, n.input(2, 16, 8, 8)))
    check_refused(ImageTokens(), graph, because="no operator on images computes it or reads it")


@pytest.mark.parametrize(
    ("split", "perm", "shape"),
    [
        ((0, 4, 4, 8, 8), (0, 2, 1, 3, 4), (0, 16, 8, 8)),  # channels change places
        ((0, 16, 4, 2, 8), (0, 1, 3, 2, 4), (0, 32, 4, 8)),  # positions become channels
    ],
)
def test_channels_that_move_stay(split: tuple[int, ...], perm: tuple[int, ...], shape: tuple[int, ...]) -> None:
    n = Net(np.float64)
    y = moved(n, n.conv(n.input(2, 8, 8, 8), 16, 1, pads=0), split, perm, shape)
    check_untouched(ImageTokens(), n.done(n.conv(y, 8, 1, pads=0)))


def test_on_a_gpu_only_the_pixels_move() -> None:
    program = check_simulated(attended(Net()), "fp16")
    copied = [s.params["reads"][0][2] for s in program.steps if s.params["op"]["kind"] == "Copy"]
    assert sum(math.prod(shape) == 2 * 16 * 64 for shape in copied) == 2, "into patches, and back"
