"""Detection heads as YOLO has them: joined pixels of several levels, distances as means of a softmax, joined boxes and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.image_tokens import ImageTokens

LEVELS = ((8, 4), (4, 2))
PIXELS = 40


def level(n: Net, k: int, channels: int, batch: Any = 1) -> Value:
    return n.conv(n.input(batch, 8, *LEVELS[k], name=f"level{k}"), channels, 3, pads=1, bias=True)


def joined(n: Net, channels: int, batch: Any = 1) -> Value:
    flat = [n.op("Reshape", level(n, k, channels, batch), n.ints(0, channels, -1)) for k in range(2)]
    return n.op("Concat", *flat, attrs=ConcatAttrs(2))


@pytest.mark.parametrize("batch", [1, 3, symbol("N", 1)])
def test_the_channels_of_joined_pixels_are_last(batch: Any) -> None:
    n = Net(np.float64)
    graph = n.done(joined(n, 16, batch))
    left = {"Conv": 2, "Transpose": 3, "Reshape": 2, "Concat": 1}
    sizes = {"N": 3} if batch not in (1, 3) else None
    done, _ = check_pass(ImageTokens(), graph, changes=1, rules={"joined_pixels": 1}, kinds=left, sizes=sizes)
    (concat,) = done.of_kind("Concat")
    assert concat.attrs.axis == 1
    assert concat.outputs[0].type.dims[1:] == (PIXELS, 16)


def test_parts_of_the_channels_stay_in_order() -> None:
    n = Net(np.float64)
    flat = [n.op("Reshape", level(n, k, 12, 2), n.ints(0, 3, 4, -1)) for k in range(2)]
    done, _ = check_pass(ImageTokens(), n.done(n.op("Concat", *flat, attrs=ConcatAttrs(-1))), changes=1)
    assert done.of_kind("Concat")[0].outputs[0].type.dims == (2, PIXELS, 3, 4)


def test_others_are_no_candidates() -> None:
    n = Net(np.float64)
    flat = [n.op("Reshape", level(n, k, 16), n.ints(0, 16, -1)) for k in range(2)]
    check_untouched(ImageTokens(), n.done(n.op("Concat", flat[0], attrs=ConcatAttrs(2))))  # nothing is joined
    n = Net(np.float64)
    flat = [n.op("Reshape", n.conv(n.input(1, 8, 4, 4, name=f"x{k}"), 8), n.ints(0, 8, -1)) for k in range(2)]
    check_untouched(ImageTokens(), n.done(n.op("Concat", *flat, attrs=ConcatAttrs(1))))  # channels are joined
    n = Net(np.float64)
    flat = [n.op("Reshape", n.input(1, 16, *size, name=f"x{k}"), n.ints(0, 16, -1)) for k, size in enumerate(LEVELS)]
    check_untouched(ImageTokens(), n.done(n.op("Concat", *flat, attrs=ConcatAttrs(2))))  # no image


def test_pixels_beside_other_values_stay() -> None:
    n = Net(np.float64)
    flat = n.op("Reshape", level(n, 0, 16), n.ints(0, 16, -1))
    y = n.op("Concat", flat, n.input(1, 16, 5, name="more"), attrs=ConcatAttrs(2))
    check_refused(ImageTokens(), n.done(y), because="not all of its operands are pixels of images")
    n = Net(np.float64)
    flat = [n.op("Reshape", level(n, k, 16), n.ints(0, 16, -1)) for k in range(2)]
    graph = n.done(n.op("Concat", *flat, attrs=ConcatAttrs(2)), n.op("Relu", flat[1]))
    check_refused(ImageTokens(), graph, because="that nothing else reads")


def distances(n: Net, x: Value, bins: int = 16, **attrs: Any) -> Value:
    """The mean bin of each of four distributions over ``bins``, as YOLOv8 writes it."""
    sides = n.op("Transpose", n.op("Reshape", x, n.ints(0, 4, bins, -1)), attrs=TransposeAttrs((0, 2, 1, 3)))
    weight = n.const(np.arange(bins).reshape(1, bins, 1, 1))
    geometry = {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), **attrs}
    mean = n.op("Conv", n.op("Softmax", sides, attrs=SoftmaxAttrs(1)), weight, attrs=ConvAttrs(**geometry))
    return n.op("Reshape", mean, n.ints(0, 4, -1))


def test_a_mean_of_a_softmax_is_a_product_of_rows() -> None:
    n = Net(np.float64)
    graph = n.done(distances(n, n.input(2, 64, 10)))
    left = {"Softmax": 1, "MatMul": 1, "Transpose": 2, "Reshape": 2}
    done, _ = check_pass(ImageTokens(), graph, changes=1, rules={"softmax_mean": 1}, kinds=left)
    assert done.of_kind("Softmax")[0].attrs.axis == -1


def one_level(n: Net) -> Graph:
    """PP-YOLOE's distances: the sides come last, and each level has its own mean."""
    bins = n.op("Transpose", n.op("Reshape", level(n, 0, 68), n.ints(0, 4, 17, -1)), attrs=TransposeAttrs((0, 2, 3, 1)))
    geometry = ConvAttrs(strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1))
    softmax = n.op("Softmax", bins, attrs=SoftmaxAttrs(1))
    return n.done(
        n.op("Squeeze", n.op("Conv", softmax, n.const(np.arange(17).reshape(1, 17, 1, 1)), attrs=geometry), n.ints(1))
    )


def test_a_mean_of_a_softmax_of_one_level() -> None:
    rules = {"softmax_mean": 1, "image_to_tokens": 1}
    done, _ = check_pass(ImageTokens(), one_level(Net(np.float64)), changes=2, rules=rules)
    assert (0, 2, 3, 1) in [op.attrs.perm for op in done.of_kind("Transpose")]
    assert kinds(check_simulated(one_level(Net()), "fp16")).count("SoftmaxMean") == 1


def test_other_convolutions_after_a_softmax_stay() -> None:
    def refused(because: str, weight: tuple[int, ...] = (1, 8, 1, 1), bias: bool = False, **attrs: Any) -> None:
        n = Net(np.float64)
        softmax = n.op("Softmax", n.input(2, 8, 4, 5), attrs=SoftmaxAttrs(1))
        geometry = {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), **attrs}
        given = [n.random(*weight), *([n.random(weight[0])] if bias else [])]
        check_refused(
            ImageTokens(), n.done(n.op("Conv", softmax, *given, attrs=ConvAttrs(**geometry))), because=because
        )

    refused("one constant 1x1 filter", (2, 8, 1, 1))
    refused("one constant 1x1 filter", (1, 8, 3, 3))
    refused("without bias", bias=True)
    refused("padding, strides or stages", strides=(2, 1))
    refused("padding, strides or stages", pads=(1, 0, 1, 0))
    n = Net(np.float64)
    softmax = n.op("Softmax", n.input(2, 8, 4, 5), attrs=SoftmaxAttrs(1))
    check_refused(
        ImageTokens(), n.done(n.conv(softmax, 1, 1, pads=0), softmax), because="the softmax is read elsewhere"
    )
    n = Net(np.float64)
    check_untouched(
        ImageTokens(), n.done(n.conv(n.op("Softmax", n.input(2, 8, 4, 5), attrs=SoftmaxAttrs(3)), 1, 1, pads=0))
    )


def head(n: Net, batch: int = 1) -> Graph:
    """Boxes and scores of two levels: centers and sizes in pixels, from distances to the sides."""
    sides = distances(n, joined(n, 32, batch), 8)
    low, high = (n.op("Slice", sides, n.ints(k), n.ints(k + 2), n.ints(1)) for k in (0, 2))
    anchors, steps = n.const(n.rng.random((1, 2, PIXELS)) * 8), n.const(8.0 * (1 + n.rng.integers(0, 2, (1, PIXELS))))
    first, last = n.op("Sub", anchors, low), n.op("Add", anchors, high)
    center = n.op("Div", n.op("Add", first, last), n.const(np.array(2.0)))
    boxes = n.op("Concat", center, n.op("Sub", last, first), attrs=ConcatAttrs(1))
    flat = [
        n.op("Reshape", n.conv(n.input(batch, 8, *LEVELS[k], name=f"score{k}"), 24), n.ints(0, 24, -1))
        for k in range(2)
    ]
    scores = n.op("Sigmoid", n.op("Concat", *flat, attrs=ConcatAttrs(2)))
    return n.done(n.op("Concat", n.op("Mul", boxes, steps), scores, attrs=ConcatAttrs(1)))


def test_the_launches_of_a_head() -> None:
    program = check_simulated(head(Net()), "fp16")
    assert sorted(kinds(program)) == sorted(["Copies", *["Conv"] * 4, "SoftmaxMean", "JointPointwise"])


def keypoints(n: Net) -> Graph:
    """One score, and three points with a visibility, per pixel (YOLOv8's poses)."""
    levels = [level(n, k, 16) for k in range(2)]
    wide = [[n.conv(n.conv(x, 16), c, 1, pads=0, bias=True) for x in levels] for c in (1, 9)]
    flat = [[n.op("Reshape", x, n.ints(1, c, -1)) for x in own] for c, own in zip((1, 9), wide, strict=True)]
    scores, points = (n.op("Concat", *own, attrs=ConcatAttrs(2)) for own in flat)
    points = n.op("Reshape", points, n.ints(1, 3, 3, -1))
    places, seen = (n.op("Slice", points, n.ints(k), n.ints(k + m), n.ints(2)) for k, m in ((0, 2), (2, 1)))
    places = n.op("Mul", n.op("Add", places, n.random(2, PIXELS)), n.const(8.0 * (1 + n.rng.integers(0, 2, PIXELS))))
    points = n.op("Reshape", n.op("Concat", places, n.op("Sigmoid", seen), attrs=ConcatAttrs(2)), n.ints(1, 9, -1))
    return n.done(n.op("Concat", n.op("Sigmoid", scores), points, attrs=ConcatAttrs(1)))


def test_the_launches_of_scores_and_points() -> None:
    program = check_simulated(keypoints(Net()), "fp16")
    assert sorted(kinds(program)) == sorted(["Copies", *["Conv"] * 8, "JointPointwise"])


def test_pixels_of_one_channel() -> None:
    n = Net(np.float64)
    done, _ = check_pass(ImageTokens(), n.done(joined(n, 1)), changes=1, rules={"joined_pixels": 1})
    assert done.of_kind("Concat")[0].outputs[0].type.dims == (1, PIXELS, 1)


def test_a_head_of_several_images() -> None:
    check_simulated(head(Net(), 3), "fp16")
