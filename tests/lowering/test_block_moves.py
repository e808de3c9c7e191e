"""Pixel shuffles at the end of a network: one copy changes the order of channels, the pixels and the element type."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import BlockAttrs


def shuffled(kind: str = "DepthToSpace", *, readers: int = 1, after: str = "") -> Graph:
    n = Net(np.float32)
    x = n.conv(n.conv(n.input(1, 8, 16, 16), 16), 16)
    y: Value = n.op(kind, x, attrs=BlockAttrs(2, "CRD" if kind == "DepthToSpace" else "DCR"))
    if after:
        y = n.op(after, y)
    return n.done(y, *(n.op("Tanh", y) for _ in range(readers - 1)))


def last(graph: Graph) -> list[str]:
    """The tactics after the last convolution."""
    names = [s.params["tactic"].split()[0] for s in check_simulated(graph, "fp16").steps]
    return names[max(i for i, t in enumerate(names) if t.startswith("conv")) + 1 :]


@pytest.mark.parametrize("kind", ["DepthToSpace", "SpaceToDepth"])
def test_one_copy_moves_and_converts(kind: str) -> None:
    assert last(shuffled(kind)) == ["copy"]


def test_a_result_that_others_read_is_converted_apart() -> None:
    assert last(shuffled(readers=2)) != ["copy"]


def test_an_activation_after_the_shuffle_is_a_stage_of_the_convolution() -> None:
    assert last(shuffled(after="Tanh")) == ["copy"]


def test_another_small_pointwise_operator_reads_what_the_shuffle_reads() -> None:
    assert last(shuffled(after="Exp")) == ["pointwise"]
