"""image_tokens: norms of the channels of several images together keep the channels last."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops import norm
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.image_tokens import ImageTokens

TURN = (0, 2, 1, 3, 4)
ROWS = (0, 3, 4, 2, 1)


def video(
    *,
    videos: int = 2,
    turn: tuple[int, ...] = TURN,
    perm: tuple[int, ...] = ROWS,
    kind: str = "GroupNormalization",
    of_conv: bool = True,
) -> Graph:
    """Six images of eight channels are two videos of three images: normalized together, then rows of three tokens."""
    n = Net(np.float64)
    x = n.input(6, 8, 4, 4)
    x = n.conv(x, 8, 3, pads=1) if of_conv else x
    split = n.op("Reshape", x, n.ints(videos, 6 // videos, 8, 4, 4))
    turned = n.op("Transpose", split, attrs=TransposeAttrs(turn))
    channels = (8, 6 // videos, 8)[turn[1]]
    attrs = norm.GroupNormAttrs(2) if kind == "GroupNormalization" else norm.EpsilonAttrs()
    y = n.op(kind, turned, n.positive(channels), n.random(channels), attrs=attrs)
    return n.done(n.op("Transpose", y, attrs=TransposeAttrs(perm)), n.op("Relu", split))


@pytest.mark.parametrize("videos", [2, 1])
@pytest.mark.parametrize("kind", ["GroupNormalization", "InstanceNormalization"])
@pytest.mark.parametrize("perm", [ROWS, (0, 2, 3, 4, 1), (0, 4, 2, 3, 1)])
def test_norms_of_videos(videos: int, kind: str, perm: tuple[int, ...]) -> None:
    after, _ = check_pass(ImageTokens(), video(videos=videos, kind=kind, perm=perm), changes=1, rules={"video_norm": 1})
    (made,) = [op for op in after.ops() if op.kind == kind]
    assert made.outputs[0].type.dims == (videos, 8, 6 // videos * 16)


def test_any_number_of_images() -> None:
    n = Net(np.float64)
    x = n.conv(n.input(symbol("t"), 8, 4, 4), 8, 3, pads=1)
    turned = n.op("Transpose", n.op("Reshape", x, n.ints(1, -1, 8, 4, 4)), attrs=TransposeAttrs(TURN))
    y = n.op("GroupNormalization", turned, n.positive(8), n.random(8), attrs=norm.GroupNormAttrs(2))
    graph = n.done(n.op("Transpose", y, attrs=TransposeAttrs(ROWS)))
    check_pass(ImageTokens(), graph, changes=1, rules={"video_norm": 1}, sizes={"t": 5})


@pytest.mark.parametrize(
    "graph",
    [
        video(turn=(0, 1, 2, 3, 4), videos=3),  # the images are the channels
        video(perm=(0, 2, 1, 3, 4)),  # the result has no rows of channels
        video(of_conv=False),  # no operator on images computes them
    ],
)
def test_other_norms_stay(graph: Graph) -> None:
    check_untouched(ImageTokens(), graph)


def test_sizes_that_no_constant_target_expresses_are_refused() -> None:
    n = Net(np.float64)
    b, t = symbol("b"), symbol("t")
    shape = n.op("Concat", n.op("Shape", n.input(b)), n.op("Shape", n.input(t, name="t")), n.ints(8, 4, 4))
    x = n.conv(n.input(b * t, 8, 4, 4, name="x"), 8, 3, pads=1)
    turned = n.op("Transpose", n.op("Reshape", x, shape), attrs=TransposeAttrs(TURN))
    y = n.op("GroupNormalization", turned, n.positive(8), n.random(8), attrs=norm.GroupNormAttrs(2))
    graph = n.done(n.op("Transpose", y, attrs=TransposeAttrs(ROWS)))
    check_refused(ImageTokens(), graph, because="no constant target can express its shape")


def test_a_video_in_simulate() -> None:
    n = Net()
    x = n.conv(n.input(8, 16, 8, 8), 32, 3, pads=1)
    turned = n.op("Transpose", n.op("Reshape", x, n.ints(1, 8, 32, 8, 8)), attrs=TransposeAttrs(TURN))
    y = n.op("GroupNormalization", turned, n.positive(32), n.random(32), attrs=norm.GroupNormAttrs(4))
    rows = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs(ROWS)), n.ints(64, 8, 32))
    check_simulated(n.done(n.matmul(rows, 24)))
