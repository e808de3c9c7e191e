"""fuse_siblings: convolutions of several kernel sizes that a Concat joins become one, with taps of zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs
from optdnn.passes import fuse_siblings
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import FuseSiblings
from optdnn.passes.support.common_kernel import common_kernel

CUDA = PassContext(target="cuda:sm_90a", precision="fp16")


def joined(n: Net, *values: Value) -> Value:
    return n.op("Concat", *values, attrs=ConcatAttrs(1))


def branches(*kernels: Any, batch: Any = 2, **options: Any) -> Graph:
    """Convolutions of one sequence, padded to one length, and a Concat."""
    n = Net()
    x = n.input(batch, 6, 20)
    made = [n.conv(x, 3 + k % 2, k, pads=((k - 1) // 2, k // 2), bias=True, **options) for k in kernels]
    return n.done(joined(n, *made))


@pytest.mark.parametrize("kernels", [(1, 2, 5), (9, 4, 4, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("strides", [1, 2, 3])
def test_kernels_of_several_sizes_become_one(kernels: tuple[int, ...], strides: int) -> None:
    done, _ = check_pass(
        FuseSiblings(), branches(*kernels, strides=strides), changes=1, kinds={"Conv": 1}, context=CUDA
    )
    (conv,) = done.of_kind("Conv")
    assert done.constant_value(conv.inputs[1]).shape[2] == max(kernels)
    assert len(conv.src) >= len(kernels)


def test_images_and_padding_that_is_not_even() -> None:
    n = Net()
    x = n.input(1, 4, 9, 7)
    y = joined(
        n, n.conv(x, 3, (1, 3), pads=(0, 2, 0, 0)), n.conv(x, 5, (3, 1), pads=(1, 0, 1, 0)), n.conv(x, 2, 1, pads=0)
    )
    done, _ = check_pass(FuseSiblings(), n.done(y), changes=1, kinds={"Conv": 1}, context=CUDA)
    (conv,) = done.of_kind("Conv")
    assert done.constant_value(conv.inputs[1]).shape == (10, 4, 3, 3)
    assert conv.attrs.pads == (1, 2, 1, 0)


def test_only_neighbors_in_the_concat_are_merged() -> None:
    n = Net()
    x = n.input(1, 4, 20)
    pooled = n.op("Relu", n.conv(x, 4, 1, pads=0))
    done, _ = check_pass(
        FuseSiblings(), n.done(joined(n, n.conv(x, 3), n.conv(x, 4, 5, pads=2), pooled, n.conv(x, 2, 7, pads=3))), changes=1,
        kinds={"Conv": 3, "Concat": 1, "Relu": 1}, context=CUDA,
    )  # fmt: skip
    assert len(done.of_kind("Concat")[0].inputs) == 3


def test_zeros_that_cost_more_than_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    because = "no other Conv on .* has the same geometry"
    monkeypatch.setattr(fuse_siblings, "LAUNCH_PRODUCTS", {True: 6 * 4 * 4 * 40.0 - 1, False: 1e9})
    check_refused(FuseSiblings(), branches(1, 5), because=because, context=CUDA)
    check_pass(FuseSiblings(), branches(1, 5), changes=1, context=PassContext(target="cuda:sm_90a", precision="fp32"))


def test_networks_that_keep_their_kernels() -> None:
    because = "no other Conv on .* has the same geometry"
    n = Net()
    x = n.input(1, 4, 20)
    dilated = n.done(joined(n, n.conv(x, 3), n.conv(x, 4, 3, pads=2, dilations=2)))
    n = Net()
    x = n.input(1, 4, 20)
    both = n.conv(x, 3)
    read_twice = n.done(joined(n, both, n.conv(x, 4, 5, pads=2)), both)
    for graph in (dilated, read_twice, branches(1, 5, batch=symbol("n"))):
        check_refused(FuseSiblings(), graph, because=because, context=CUDA)
    check_refused(FuseSiblings(), branches(1, 5), because=because, context=PassContext(target="cpu"))


def test_padding_that_is_not_known() -> None:
    n = Net()
    x = n.input(1, 4, 20)
    same = n.op("Relu", n.conv(x, 3, auto_pad="SAME_UPPER"))
    (conv,) = n.done(same).of_kind("Conv")
    assert common_kernel([(conv.attrs, np.zeros((3, 4, 3)))]) is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_program_computes_all_branches_in_one_launch(precision: str) -> None:
    program = check_simulated(branches(1, 2, 3, 5), precision)
    assert sum("Conv" in str(s.params.get("op", {}).get("kind")) for s in program.steps) == 1
