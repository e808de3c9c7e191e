"""Calibration of a network with a range of batches: each run is within the range."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import optdnn
from optdnn.calibration import calibrate
from optdnn.calibration.data import batch_of, open_data
from optdnn.errors import InputError
from optdnn.importers.onnx import import_model
from optdnn.ranges import DimRange, Profile, input_shapes
from optdnn.types import TensorSpec

X, Y = (TensorSpec(name, np.dtype(np.float32), ("N", *rest)) for name, rest in (("x", ("S",)), ("y", (3,))))
SMALL = {"N": DimRange(1, 2, 4), "S": DimRange(1, 2, 2)}
LARGE = {"N": DimRange(3, 4, 6), "S": DimRange(3, 3, 8)}
NET = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { y = MatMul(x, w) }"""


@pytest.mark.parametrize(
    ("profiles", "given", "wanted"),
    [
        ((), {"x": (50, 2)}, (1, 8)),
        ((SMALL, LARGE), {"x": (50, 2), "y": (50, 3)}, (1, 4)),
        ((SMALL, LARGE), {"x": (50, 5)}, (3, 6)),
        ((SMALL, LARGE), {}, (1, 4)),
        ((SMALL, LARGE), {"x": (50, 9)}, (1, 8)),  # no profile takes it: the run will say so
        (({"N": DimRange(0, 1, 100)},), {"x": (50, 2)}, (1, 8)),
        (({"N": DimRange(20, 30, 100)},), {"x": (50, 2)}, (20, 20)),
        (({"S": DimRange(1, 2, 3)},), {"x": (50, 2)}, (1, 8)),  # the batch has no range
    ],
)
def test_the_batch_is_within_the_range(
    profiles: tuple[Profile, ...], given: dict[str, tuple[int, ...]], wanted: tuple[int, int]
) -> None:
    assert batch_of([X, Y], profiles, 8, given) == wanted


def test_a_fixed_batch_counts_before_ranges() -> None:
    fixed = TensorSpec("z", np.dtype(np.float32), (5, 2))
    assert batch_of([X, fixed], (SMALL,), 8, {}) == (5, 5)


@pytest.mark.parametrize(("count", "sizes"), [(9, [4, 4, 1]), (8, [4, 4]), (3, [3])])
def test_arrays_are_cut_into_batches_of_the_range(count: int, sizes: list[int]) -> None:
    x = np.random.default_rng(0).standard_normal((count, 2)).astype(np.float32)
    data = open_data({"x": x}, [X], profiles=(SMALL,))
    assert [len(feeds["x"]) for feeds in data.batches()] == sizes
    assert data.samples == count


def test_the_last_samples_are_left_out_if_they_are_too_few() -> None:
    x = np.random.default_rng(0).standard_normal((14, 4)).astype(np.float32)
    data = open_data({"x": x}, [X], profiles=(LARGE,))
    assert [len(feeds["x"]) for feeds in data.batches()] == [6, 6]
    assert (data.samples, data.count) == (12, 2)
    with pytest.raises(InputError, match="has 2 samples, a batch of the network is 3"):
        open_data({"x": x[:2]}, [X], profiles=(LARGE,))


def test_calibration_runs_within_the_range_and_gives_the_same_ranges() -> None:
    model = onnx.parser.parse_model(NET)
    data = {"x": np.random.default_rng(0).standard_normal((19, 4)).astype(np.float32)}
    ranged = calibrate(import_model(model, shapes=input_shapes({"x": "1..2..3x4"})), data, "minmax")
    assert ranged.ranges == calibrate(import_model(model), data, "minmax").ranges


def test_an_int8_build_for_a_small_range_of_batches() -> None:
    data: dict[str, Any] = {"x": np.random.default_rng(0).standard_normal((19, 4)).astype(np.float32)}
    options: dict[str, Any] = {"target": "cpu", "threads": 1, "precision": "int8", "calib": data}
    engine = optdnn.build(onnx.parser.parse_model(NET), shapes={"x": "1..2..3x4"}, **options)
    assert engine.run({"x": data["x"][:3]})["y"].shape == (3, 3)
