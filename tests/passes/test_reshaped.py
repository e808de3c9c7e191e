"""``reshaped``: a 0 of a constant target copies a dimension, or is a size."""

from __future__ import annotations

import pytest

from optdnn.ir.graph import Graph
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import reshaped
from optdnn.types import FP32, TensorType


@pytest.mark.parametrize(
    ("given", "target", "result"),
    [
        ((2, 3, 4), (0, 12), (2, 12)),
        ((0, 3, 4), (0, 12), (0, 12)),
        ((0, 3, 4), (0, -1, 4), (0, 3, 4)),
        ((1, 0, 2), (0, 2), (0, 2)),  # copied, the first dimension would be 1
        ((0, 5), (1, 1, 0, 5), (1, 1, 0, 5)),  # there is no dimension to copy
        ((0, 4, 8), (1, 0, 4, 8), (1, 0, 4, 8)),
        ((2, 0), (0, 3, 0), (0, 3, 0)),
    ],
)
def test_a_0_in_a_target(given: tuple[int, ...], target: tuple[int, ...], result: tuple[int, ...]) -> None:
    graph = Graph()
    patch = Patch(graph, ())
    made = reshaped(patch, graph.add_input("x", TensorType(FP32, given)), target)
    assert patch.type(made).shape == result
