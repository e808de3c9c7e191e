"""fuse_norm: an InstanceNormalization, or its arithmetic, between two Reshapes is a GroupNormalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from test_fuse_norm import attrs, core

from optdnn.ir.graph import Value
from optdnn.ops.norm import EpsilonAttrs
from optdnn.passes.fuse_norm import FuseNorm


def group(
    n: Net, x: Value, shape: tuple[int, ...], groups: int, *, scale: Any = None, bias: Any = None, back: Any = None
) -> Value:
    split = n.reshaped(x, 0, groups, -1)
    one = n.const(np.ones(groups) if scale is None else scale)
    zero = n.const(np.zeros(groups) if bias is None else bias)
    y = n.op("InstanceNormalization", split, one, zero, attrs=EpsilonAttrs(1e-3))
    return n.reshaped(y, *(back or shape))


@pytest.mark.parametrize("affine", ["none", "scale", "both"])
def test_group_norm_of_torch(affine: str) -> None:
    n = Net(np.float64)
    shape = (2, 6, 4, 5)
    y = group(n, n.input(*shape), shape, 3)
    if affine != "none":
        y = n.op("Mul", y, n.random(6, 1, 1))
    if affine == "both":
        y = n.op("Add", y, n.random(6, 1, 1))
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"GroupNormalization": 1})
    (op,) = graph.of_kind("GroupNormalization")
    assert op.attrs == attrs("GroupNormalization", epsilon=1e-3, num_groups=3)
    assert [graph.type(v).shape for v in op.inputs] == [shape, (6,), (6,)]


def test_group_norm_takes_the_inner_scale_along() -> None:
    n = Net(np.float64)
    shape = (2, 6, 10)
    y = group(n, n.input(*shape), shape, 2, scale=[2.0, 3.0], bias=[-1.0, 0.5])
    y = n.op("Add", n.op("Mul", y, n.random(1, 6, 1)), n.random(6, 1))
    check_pass(FuseNorm(), n.done(y), changes=1, kinds={"GroupNormalization": 1})


def test_group_norm_that_is_wholly_written_out() -> None:
    n = Net(np.float64)
    shape = (2, 6, 4, 5)
    split = n.reshaped(n.input(*shape), 2, 3, 40)
    y = n.reshaped(core(n, split, -1), *shape)
    y = n.op("Add", n.op("Mul", y, n.random(6, 1, 1)), n.random(6, 1, 1))
    check_pass(FuseNorm(), n.done(y), changes=2, kinds={"GroupNormalization": 1})


def test_group_norm_whose_positions_become_a_sequence_is_of_the_image() -> None:
    n = Net(np.float64)
    y = n.op("Mul", group(n, n.input(2, 6, 4, 5), (2, 6, 20), 3), n.random(6, 1))
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"GroupNormalization": 1, "Reshape": 1})
    (op,) = graph.of_kind("GroupNormalization")
    assert op.outputs[0].type.shape == (2, 6, 4, 5)


@pytest.mark.parametrize("kept", [True, False])
def test_group_norm_of_images_that_are_views_of_a_video(kept: bool) -> None:
    """One Reshape makes groups of the video; the images are another view of it, if a shortcut reads them."""
    n = Net(np.float64)
    video = n.input(2, 3, 6, 4, 5)
    split = n.reshaped(video, 6, 3, -1)
    y = n.op("InstanceNormalization", split, n.const(np.ones(3)), n.const(np.zeros(3)), attrs=EpsilonAttrs(1e-3))
    y = n.op("Mul", n.reshaped(y, 6, 6, 4, 5), n.random(6, 1, 1))
    if not kept:
        check_untouched(FuseNorm(), n.done(y))
        return
    images = n.reshaped(video, 6, 6, 4, 5)
    kinds = {"GroupNormalization": 1, "Reshape": 1, "Add": 1}
    graph, _ = check_pass(FuseNorm(), n.done(n.op("Add", y, images)), changes=1, kinds=kinds)
    (op,) = graph.of_kind("GroupNormalization")
    assert op.outputs[0].type.shape == (6, 6, 4, 5)


@pytest.mark.parametrize("back", [(2, 12, 10), (2, 1, 120), (2, 120), (240,)])
def test_a_norm_of_one_group_before_any_reshape(back: tuple[int, ...]) -> None:
    n = Net(np.float64)
    y = group(n, n.input(2, 6, 4, 5), back, 1)
    graph, _ = check_pass(FuseNorm(), n.done(y), changes=1, kinds={"GroupNormalization": 1, "Reshape": 1})
    (op,) = graph.of_kind("GroupNormalization")
    assert (op.attrs.num_groups, op.outputs[0].type.shape) == (1, (2, 6, 4, 5))


@pytest.mark.parametrize("back", [(2, 3, 40), (2, 12, 10), (2, 120)])
def test_group_norm_with_other_channels_after_it_is_refused(back: tuple[int, ...]) -> None:
    n = Net(np.float64)
    y = group(n, n.input(2, 6, 4, 5), back, 3)
    check_refused(FuseNorm(), n.done(y), because=r"not the shape fp64\[2, 6, 4, 5\] back")


def test_group_norm_with_a_computed_scale_is_refused() -> None:
    n = Net(np.float64)
    x, s = n.input(2, 6, 20), n.input(3, name="s")
    split = n.reshaped(x, 2, 3, -1)
    y = n.op("InstanceNormalization", split, s, s, attrs=EpsilonAttrs())
    y = n.reshaped(y, 2, 6, 20)
    check_refused(FuseNorm(), n.done(y), because="its own scale and shift are not constants for each group")


def test_an_instance_norm_between_other_reshapes_stays() -> None:
    n = Net(np.float64)
    split = n.reshaped(n.input(4, 6, 20), 2, 3, -1)
    y = n.op("InstanceNormalization", split, n.random(3), n.random(3), attrs=EpsilonAttrs())
    check_untouched(FuseNorm(), n.done(n.reshaped(y, 4, 6, 20)))
