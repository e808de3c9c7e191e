"""Arrays with exactly the inputs' shapes, without a common axis of samples, are one feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optdnn.calibration.data import open_data
from optdnn.errors import InputError
from optdnn.types import FP32, TensorSpec

SHAPES: dict[str, tuple[int, ...]] = {"nodes": (5, 4), "edges": (2, 9)}
INPUTS = [TensorSpec(name, FP32, shape) for name, shape in SHAPES.items()]


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("stored", [False, True])
def test_one_feed(stored: bool, tmp_path: Path) -> None:
    """The nodes and the edges of a graph."""
    feed = arrays()
    if stored:
        np.savez(tmp_path / "feed.npz", **feed)
    data = open_data(tmp_path / "feed.npz" if stored else feed, INPUTS)
    assert data.count == 1
    (batch,) = data.batches()
    assert batch.keys() == feed.keys()
    for name, array in feed.items():
        np.testing.assert_array_equal(batch[name], array)


def test_other_shapes_are_samples() -> None:
    """With an axis of samples, their numbers of samples must agree."""
    feed = arrays()
    with pytest.raises(InputError, match="different numbers of samples"):
        open_data(feed | {"nodes": np.concatenate([feed["nodes"]] * 2)}, INPUTS)
