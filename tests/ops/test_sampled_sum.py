"""SampledSum: inference, its errors, cost, and export as GridSamples and a sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_export
from support.net import call_of
from support.sampled_cases import graph_of

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Op
from optdnn.passes.sampled_sums import SampledSums
from optdnn.types import FP16, FP32, TensorType


def summed(name: str) -> tuple[Graph, Op]:
    graph = graph_of(name)
    SampledSums()(graph)
    return graph, graph.of_kind("SampledSum")[-1]


@pytest.mark.parametrize(
    "name",
    ["levels", "joined", "one_level", "plain_sum", "border", "deformed", "offset_groups", "pictures", "pictures_plain"],
)
def test_export(name: str) -> None:
    check_export(summed(name)[0], rtol=1e-4)


def test_it_is_the_sum_of_weighted_samples() -> None:
    """One sample between two pixels, and one outside of the image."""
    x = np.arange(12, dtype=np.float64).reshape(1, 2, 2, 3)
    places = np.array([[[[[-0.5, -1], [3, 3]]]]], np.float64)
    _, op = summed("levels")
    (y,) = op.definition.kernel(x, places, np.array([[[[2.0, 1.0]]]]), align_corners=True, mode="linear")
    np.testing.assert_allclose(y, [[[1.0], [13.0]]])
    (y,) = op.definition.kernel(x, np.concatenate([places, places], 1), align_corners=True)
    np.testing.assert_allclose(y, [[[0.5], [6.5]]])


@pytest.mark.parametrize(
    ("types", "changes", "because"),
    [
        ({0: TensorType(np.dtype(np.int32), (2, 8, 6, 5))}, {}, "SampledSum of int32"),
        ({}, {"mode": "quintic"}, "mode 'quintic'"),
        ({0: TensorType(FP32, (2, 8, 6))}, {}, "image 0 must have 4 dimensions"),
        ({1: TensorType(FP32, (2, 10, 4, 2))}, {}, "places 0 must have 5 dimensions"),
        ({2: TensorType(FP16, (2, 8, 3, 3))}, {}, "image 1 of a SampledSum is fp16"),
        ({2: TensorType(FP32, (2, 4, 3, 3))}, {}, "image 1 of a SampledSum is fp32"),
        ({1: TensorType(FP32, (3, 1, 10, 4, 2))}, {}, "SampledSum places"),
        ({3: TensorType(FP32, (2, 1, 9, 4, 2))}, {}, "SampledSum places"),
        ({3: TensorType(FP32, (2, 2, 10, 4, 2))}, {}, "SampledSum places"),
        ({3: TensorType(FP32, (2, 1, 10, 4, 3))}, {}, "need two coordinates"),
        ({4: TensorType(FP32, (2, 8, 10, 8))}, {}, "no factors of 8 points of 10 results"),
        ({4: TensorType(FP32, (8,))}, {}, "no factors"),
    ],
)
def test_contradictions(types: dict[int, TensorType], changes: dict[str, Any], because: str) -> None:
    graph, total = summed("levels")
    with pytest.raises(ShapeError, match=because):
        total.definition.infer(call_of(graph, total, types, **changes))


def test_groups_divide_the_channels() -> None:
    graph, total = summed("levels")
    places = TensorType(FP32, (2, 3, 10, 4, 2))
    with pytest.raises(ShapeError, match="3 groups do not divide 8 channels"):
        total.definition.infer(call_of(graph, total, {1: places, 3: places}))


def test_cost_counts_every_tap() -> None:
    graph, total = summed("levels")
    call = call_of(graph, total)
    assert total.definition.cost is not None
    assert total.definition.cost(call, total.definition.infer(call)).flops == 2 * 4 * 8 * 2 * 8 * 10
