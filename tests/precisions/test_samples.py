"""The user's data: labels found, samples counted, and a split that keeps the two parts apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optdnn.errors import InputError, OptdnnError, UsageError
from optdnn.precision.samples import Samples, load, split
from optdnn.types import TensorSpec

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.repeat(np.arange(4), 5)
SPEC = [TensorSpec("x", np.dtype(np.float32), ("N", 2))]


def test_the_parts_share_no_sample_and_split_each_class_alike() -> None:
    seen, unseen = split(Samples({"x": X}, Y))
    rows = [{tuple(r) for r in part.feeds["x"]} for part in (seen, unseen)]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 20
    assert len(seen) == len(unseen) == 10
    assert unseen.labels is not None
    assert max(np.bincount(unseen.labels)) - min(np.bincount(unseen.labels)) <= 1
    again = split(Samples({"x": X}, Y))
    assert np.array_equal(again[1].feeds["x"], unseen.feeds["x"])
    for part in (seen, unseen):  # labels stay with their samples
        assert part.labels is not None
        assert np.array_equal(part.labels, part.feeds["x"][:, 0] // 10)


def test_two_samples_are_one_for_each_part_and_one_is_too_few() -> None:
    seen, unseen = split(Samples({"x": X[:2]}))
    assert (len(seen), len(unseen)) == (1, 1)
    with pytest.raises(UsageError, match="at least 2 samples"):
        split(Samples({"x": X[:1]}))


@pytest.mark.parametrize("name", ["labels", "label", "y"])
def test_labels_lie_in_the_npz_or_the_mapping(name: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"x": X, name: Y}
    np.savez(tmp_path / "data.npz", **arrays)
    for source in (str(tmp_path / "data.npz"), arrays):
        samples = load(source, SPEC)
        assert samples.labels is not None
        assert np.array_equal(samples.labels, Y)
        assert np.array_equal(samples.feeds["x"], X)


def test_an_input_called_y_is_no_label() -> None:
    specs = [*SPEC, TensorSpec("y", np.dtype(np.float32), ("N", 2))]
    assert load({"x": X, "y": X}, specs).labels is None


def test_labels_from_a_file_or_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", Y)
    for given in (tmp_path / "labels.npy", Y, Y.tolist()):
        found = load({"x": X}, SPEC, given).labels
        assert found is not None
        assert np.array_equal(found, Y)


@pytest.mark.parametrize(
    ("source", "labels", "kind", "message"),
    [
        ({"x": X}, Y[:5], InputError, "5 labels for 20 samples"),
        ({"x": X}, 3, InputError, "one entry per sample"),
        ({"x": X}, "no/such.npy", UsageError, "cannot read the labels"),
        ({"z": X}, None, UsageError, "no array for input 'x'"),
        ({"x": X[:0]}, None, UsageError, "empty"),
        ({"x": np.full((4, 2), np.nan, np.float32)}, None, InputError, "NaN"),
        ({"x": X[:, :1]}, None, InputError, "shape"),
    ],
)
def test_data_that_does_not_fit(source: Any, labels: Any, kind: type[OptdnnError], message: str) -> None:
    with pytest.raises(kind, match=message):
        load(source, SPEC, labels)


def test_inputs_without_a_common_batch_are_refused() -> None:
    specs = [TensorSpec("x", np.dtype(np.float32), (4, 2)), TensorSpec("z", np.dtype(np.float32), (3, 2))]
    with pytest.raises(UsageError, match="begin with the batch"):
        load({"x": X, "z": X}, specs)
