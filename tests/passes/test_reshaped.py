"""Constant targets of Reshape: a 0 copies a dimension, or is a size; a -1 next to a 0 must be defined at every size."""

from __future__ import annotations

import pytest

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import reshape_target, reshaped
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


N, S, EMPTY = symbol("n"), symbol("s", 1, 9), symbol("e", 0, 9)


@pytest.mark.parametrize(
    ("before", "after", "target"),
    [
        ((N, 4, S), (1, N * 4, S), (1, -1, 0)),  # at least one step
        ((S, 4, N), (1, S * 4, N), (1, -1, 0)),  # a size without a range is taken to be positive
        ((S, 4, EMPTY), (1, S * 4, EMPTY), None),
        ((N, 4, S // 2), (1, N * 4, S // 2), None),  # one step has no pair
        ((N, 4, S // 2 + 1), (1, N * 4, S // 2 + 1), (1, -1, 0)),
        ((EMPTY, 4, S), (EMPTY, S, 4), None),
        ((EMPTY, 4, 2), (EMPTY, 8), (0, 8)),  # without a -1 nothing is left open
        ((EMPTY, 4, 2), (EMPTY * 4, 2), (-1, 2)),
    ],
)
def test_a_target_is_defined_at_every_size(
    before: tuple[DimLike, ...], after: tuple[DimLike, ...], target: tuple[int, ...] | None
) -> None:
    assert reshape_target(before, after) == target
