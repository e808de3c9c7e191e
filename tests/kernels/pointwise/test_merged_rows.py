"""Pointwise results whose last axes are a row of a product: the rows begin at multiples of 16 bytes, so that nothing copies them."""

from __future__ import annotations

import pytest
from support.net import Net
from support.on_gpu import checked_program
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.shape import TransposeAttrs


def patches(size: int = 14, images: int = 2, *, shared: bool = False, side: int = 16) -> Graph:
    """An image cut into patches of ``size`` x ``size`` pixels, and a product of each patch. ``shared``: others read the patches."""
    n = Net()
    x = n.op("Reshape", n.input(images, 3, side * size, side * size), n.ints(images, 3, side, size, side, size))
    x = n.op("Relu", n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 4, 1, 3, 5))))
    y = n.matmul(n.op("Reshape", x, n.ints(images, side * side, 3 * size * size)), 32)
    return n.done(y, n.op("Tanh", x)) if shared else n.done(y)


def padded(graph: Graph, size: int) -> bool:
    """Whether the rows of the product have gaps between them."""
    program = lowered(graph, "fp16")
    (product,) = [s for s in program.steps if s.params["op"]["kind"] == "Conv"]
    (_, _, shape, strides), *_ = product.params["reads"]
    assert shape[1] == 3 * size * size
    return bool(strides[0] != shape[1])


@pytest.mark.parametrize("shared", [False, True])
def test_patches_of_an_odd_number_of_features_are_not_copied(shared: bool) -> None:
    graph = patches(shared=shared)
    assert "Copy" not in kinds(check_simulated(graph))
    assert padded(graph, 14)


def test_patches_of_whole_accesses_have_no_gaps() -> None:
    graph = patches(16)
    assert "Copy" not in kinds(check_simulated(graph))
    assert not padded(graph, 16)


def test_a_part_of_a_row_is_no_row() -> None:
    """The product reads features that begin inside of an axis."""
    n = Net()
    x = n.op("Relu", n.input(4, 64, 3, 14 * 14, name="x"))
    y = n.matmul(n.op("Reshape", x, n.ints(4, 128, 294)), 32)
    check_simulated(n.done(y))


@pytest.mark.hopper
@pytest.mark.parametrize("shared", [False, True])
def test_every_launch_agrees_with_its_meaning(shared: bool) -> None:
    graph = patches(shared=shared)
    checked_program(lowered(graph, "fp16", target="cuda:sm_90a"), feeds_of(graph), 4e-3)
