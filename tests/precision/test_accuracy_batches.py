"""Samples per call in the search for precisions: the engine's own batch, or within the range that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import optdnn
from optdnn.errors import UsageError
from optdnn.precision.accuracy import outputs
from optdnn.precision.samples import Samples

NET = """<ir_version: 8, opset_import: ["": 17]> g (float[N, S] x) => (float[N, S] y) { y = Relu(x) }"""


def engine(shapes: Any) -> optdnn.Engine:
    return optdnn.build(onnx.parser.parse_model(NET), target="reference", shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "count", "batches"),
    [
        ({}, 70, [32, 32, 6]),
        ({"x": "8x3"}, 19, [8, 8]),
        ({"x": "1..4..6x3"}, 14, [6, 6, 2]),
        ({"x": "0..4..6x3"}, 7, [6, 1]),
        ({"x": "4..4..6x3"}, 14, [6, 6]),  # two samples remain, too few for a run
        ({"x": "40..50..60x3"}, 90, [40, 40]),
        ({"x": "1..4..100x1..2..3"}, 40, [32, 8]),
        ([{"x": "1..4..8x1..2..2"}, {"x": "1..2..5x1..2..3"}], 12, [5, 5, 2]),  # the first profile takes no 3
    ],
)
def test_batches_are_within_the_range_of_the_engine(shapes: Any, count: int, batches: list[int]) -> None:
    samples = Samples({"x": np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)})
    found = [y["y"] for y in outputs(engine(shapes), samples)]
    assert [len(y) for y in found] == batches
    np.testing.assert_array_equal(np.concatenate(found), np.maximum(samples.feeds["x"], 0)[: sum(batches)])


def test_too_few_samples_for_the_smallest_batch_are_refused() -> None:
    samples = Samples({"x": np.zeros((3, 3), np.float32)})
    ranged = engine({"x": "4..4..6x3"})
    with pytest.raises(UsageError, match="the network's batch is 4, and one part of the data has 3 samples"):
        list(outputs(ranged, samples))
