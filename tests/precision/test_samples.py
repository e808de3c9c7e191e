"""The user's data: recognized labels, counted samples, and a split that keeps both parts separate."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optdnn.errors import InputError, OptdnnError, UsageError
from optdnn.precision.samples import halves
from optdnn.types import Array, TensorSpec

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.repeat(np.arange(4), 5)
SPEC = [TensorSpec("x", np.dtype(np.float32), ("N", 2))]


def test_the_parts_share_no_sample_and_split_each_class_alike() -> None:
    seen, unseen = halves({"x": X, "labels": Y}, SPEC)
    rows = [{tuple(r) for r in part.feeds["x"]} for part in (seen, unseen)]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 20
    assert len(seen) == len(unseen) == 10
    assert unseen.labels is not None
    assert max(np.bincount(unseen.labels)) - min(np.bincount(unseen.labels)) <= 1
    again = halves({"x": X, "labels": Y}, SPEC)
    assert np.array_equal(again[1].feeds["x"], unseen.feeds["x"])
    for part in (seen, unseen):  # labels stay with their samples
        assert part.labels is not None
        assert np.array_equal(part.labels, part.feeds["x"][:, 0] // 10)


def test_two_samples_are_one_for_each_part_and_one_is_too_few() -> None:
    assert [len(part) for part in halves(X[:2], SPEC)] == [1, 1]
    with pytest.raises(UsageError, match="at least 2 samples"):
        halves(X[:1], SPEC)


class Long:
    """Batches of two samples each, created in each iteration. ``most``: the largest number that existed at the same time."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def _gone(self) -> None:
        self.live -= 1

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for start in range(0, len(X), 2):
            batch = X[start : start + 2].copy()
            self.live += 1
            self.most = max(self.most, self.live)
            weakref.finalize(batch, self._gone)
            yield {"x": batch}


def test_a_long_iterable_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.precision.samples.HELD_BYTES", 0)
    source = Long()
    found, wanted = halves(source, SPEC, Y), halves({"x": X, "labels": Y}, SPEC)
    assert source.most <= 2  # the current one, while the next is created
    for part, same in zip(found, wanted, strict=True):
        assert isinstance(part.feeds["x"], np.memmap)
        assert np.array_equal(part.feeds["x"], same.feeds["x"])
        assert np.array_equal(np.concatenate([b["x"] for b in part.batches(3)]), same.feeds["x"])
        assert part.labels is not None
        assert np.array_equal(part.labels, part.feeds["x"][:, 0] // 10)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_is_read_a_batch_at_a_time(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.precision.samples.HELD_BYTES", 0)
    large = np.random.default_rng(0).integers(0, 4, (256, 1 << 13)).astype(np.float32)
    save(tmp_path / "data.npz", x=large, labels=np.arange(256))
    tracemalloc.start()
    seen, unseen = halves(tmp_path / "data.npz", [TensorSpec("x", np.dtype(np.float32), ("N", 1 << 13))])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < large.nbytes / 2
    assert seen.labels is not None
    assert unseen.labels is not None
    assert np.array_equal(seen.feeds["x"], large[seen.labels])
    assert np.array_equal(unseen.feeds["x"], large[unseen.labels])


def test_samples_of_different_shapes_are_refused() -> None:
    spec = [TensorSpec("x", np.dtype(np.float32), ("N", "L"))]
    with pytest.raises(InputError, match=r"shape \[3\] and \[4\].*"):
        halves([np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)], spec)


def test_a_source_that_changes_is_refused() -> None:
    lengths = iter((4, 2))
    with pytest.raises(InputError, match="gave 8 samples at first, then 4"):
        halves(lambda: [X[:2]] * next(lengths), SPEC)


@pytest.mark.parametrize("name", ["labels", "label", "y"])
def test_labels_lie_in_the_npz_or_the_mapping(name: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"x": X, name: Y}
    np.savez(tmp_path / "data.npz", **arrays)
    for source in (str(tmp_path / "data.npz"), arrays):
        for samples in halves(source, SPEC):
            assert samples.labels is not None
            assert np.array_equal(samples.labels, samples.feeds["x"][:, 0] // 10)


def test_an_input_called_y_is_no_label() -> None:
    specs = [*SPEC, TensorSpec("y", np.dtype(np.float32), ("N", 2))]
    assert halves({"x": X, "y": X}, specs)[0].labels is None


def test_labels_from_a_file_or_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", Y)
    for given in (tmp_path / "labels.npy", Y, Y.tolist()):
        for part in halves({"x": X}, SPEC, given):
            assert part.labels is not None
            assert np.array_equal(part.labels, part.feeds["x"][:, 0] // 10)


@pytest.mark.parametrize(
    ("source", "labels", "kind", "message"),
    [
        ({"x": X}, Y[:5], InputError, "5 labels for 20 samples"),
        ({"x": X}, 3, InputError, "one entry per sample"),
        ({"x": X}, "no/such.npy", UsageError, "cannot read the labels"),
        ({"z": X}, None, UsageError, "no array for input 'x'"),
        ({"x": X[:0]}, None, UsageError, "no samples"),
        ({"x": np.full((4, 2), np.nan, np.float32)}, None, InputError, "NaN"),
        ({"x": X[:, :1]}, None, InputError, "shape"),
    ],
)
def test_data_that_does_not_fit(source: Any, labels: Any, kind: type[OptdnnError], message: str) -> None:
    with pytest.raises(kind, match=message):
        halves(source, SPEC, labels)


def test_inputs_without_a_common_batch_are_refused() -> None:
    specs = [TensorSpec("x", np.dtype(np.float32), (4, 2)), TensorSpec("z", np.dtype(np.float32), (3, 2))]
    with pytest.raises(UsageError, match="begin with the batch") as caught:
        halves({"x": X, "z": X}, specs)
    assert "--value NAME=1" in str(caught.value.hint)
