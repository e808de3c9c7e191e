"""Layers with the same mask share the copy that their kernel reads."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.attention import AttentionAttrs

ROWS, HEADS, SIZE = 72, 2, 16


def layers(*, hides: bool) -> Graph:
    """Three layers with one mask: of bools, or numbers with the heads last."""
    n = Net()
    x = n.input(2, HEADS, ROWS, SIZE)
    mask = n.input(1, 1, ROWS, ROWS, name="m", dtype=np.bool_) if hides else None
    if mask is None:
        mask = n.transposed(n.input(1, ROWS, ROWS, HEADS, name="m"), 0, 3, 1, 2)
    else:
        mask = n.op("Or", mask, n.const(np.eye(ROWS), np.bool_))  # each query sees itself
    for _ in range(3):
        x = n.op("Attention", x, x, x, mask, attrs=AttentionAttrs())
    return n.done(x)


@pytest.mark.parametrize("hides", [False, True])
def test_one_launch_prepares_the_mask_of_all_layers(hides: bool) -> None:
    """Beside the one that converts the inputs, or computes the bools."""
    graph = layers(hides=hides)
    program = lowered(graph, "fp16")
    found = kinds(program)
    assert found.count("Attention") == 3
    assert len(found) == 5, found
    check_simulated(graph, "fp16")
