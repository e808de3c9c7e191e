"""The user's data, in two parts: one for calibration and search, the other for the decision.

A bound on accuracy is meaningful only on data that took no part in the choice. So ranges, sensitivities and the search see only
the *calibration* part, and the *verification* part accepts the engine.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.calibration.data import CalibrationData, Pictures, open_data
from optdnn.errors import InputError, UsageError
from optdnn.regular_file import check_regular
from optdnn.temporary import temporary_file
from optdnn.types import Array, TensorSpec

LABELS = ("labels", "label", "y")
"""Names under which an .npz holds labels, unless an input has the same name."""
MIN_SAMPLES = 2
HELD_BYTES = 256 << 20
"""Data of up to this size is held in memory."""


@dataclass(frozen=True)
class Samples:
    """``feeds`` maps each input to an array whose first axis counts samples; ``labels`` has one entry per sample, or is None."""

    feeds: Mapping[str, Array]
    labels: Array | None = None

    def __len__(self) -> int:
        return len(next(iter(self.feeds.values())))

    def take(self, index: Any) -> Samples:
        """The samples at an index array or slice."""
        return Samples(
            {n: a[index] for n, a in self.feeds.items()}, None if self.labels is None else self.labels[index]
        )

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Feeds of ``size`` samples each; the last may be smaller."""
        for start in range(0, len(self), size):
            yield {n: a[start : start + size] for n, a in self.feeds.items()}


def halves(
    source: Any, inputs: Sequence[TensorSpec], labels: Any = None, images: Pictures | None = None, seed: int = 0
) -> tuple[Samples, Samples]:
    """Calibration and verification part of data in any of the forms that :func:`optdnn.calibration.data.open_data` takes.

    ``labels``: an array (or a path to an .npy) with one entry per sample. Without it, an array of the .npz or mapping that is
    called "labels", "label" or "y" and is not an input. The source is read twice, for its digest and for the split, with one
    batch in memory at a time. Parts beyond HELD_BYTES are kept in temporary files.

    Raises as ``open_data`` does, UsageError for a network whose inputs have no batch axis in common or for fewer than two
    samples, InputError for labels that do not fit or samples of different shapes.
    """
    fixed = {s.shape[0] if s.shape else None for s in inputs if not s.shape or isinstance(s.shape[0], int)}
    if None in fixed or len(fixed) > 1:
        raise UsageError(
            "automatic precision needs inputs that all begin with the batch; here they are "
            + ", ".join(map(str, inputs)),
            hint="give the others as constants (--value NAME=1), or choose a precision yourself",
        )
    found = _labels(source, labels, {s.name for s in inputs})
    data = open_data(source, inputs, images)
    n = data.samples
    if found is not None and len(found) < n:
        raise InputError(f"there are {len(found)} labels for {n} samples")
    found = None if found is None else found[:n]
    index = split(n, found, seed)
    feeds = _parted(data, index)
    seen, unseen = (Samples(f, None if found is None else found[i]) for f, i in zip(feeds, index, strict=True))
    return seen, unseen


def split(n: int, labels: Array | None = None, seed: int = 0) -> tuple[Array, Array]:
    """The numbers of the samples of both parts, in order: a seeded shuffle, with proportional classes if labels are classes.

    Raises UsageError for fewer than two samples.
    """
    if n < MIN_SAMPLES:
        raise UsageError(
            f"automatic precision needs at least {MIN_SAMPLES} samples, the data hold {n}",
            hint="a bound on accuracy is as fine as one over the number of samples for verification",
        )
    order = np.random.default_rng(seed).permutation(n)
    if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
        order = order[np.argsort(labels[order], kind="stable")]
    # Every other sample of the (class-sorted) shuffle goes to verification, so that each class is split alike.
    return np.sort(order[::2]), np.sort(order[1::2])


def _parted(data: CalibrationData, index: Sequence[Array]) -> list[dict[str, Array]]:
    """The samples of each part, in the order of the source, read once."""
    parts: list[dict[str, Array]] = [{} for _ in index]
    filled = [0] * len(index)
    start = 0
    for feeds in data.batches():
        rows = len(next(iter(feeds.values())))
        for k, wanted in enumerate(index):
            here = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + rows)] - start
            for name, a in feeds.items():
                if name not in parts[k]:
                    each = sum(f[0].nbytes for f in feeds.values()) * data.samples
                    parts[k][name] = new_array((len(wanted), *a.shape[1:]), a.dtype, each)
                to = parts[k][name]
                if to.shape[1:] != a.shape[1:]:
                    raise InputError(
                        f"{data.name}: input {name!r} has samples of shape {list(to.shape[1:])} and {list(a.shape[1:])}",
                        hint="automatic precision needs samples of one shape: pad them",
                    )
                to[filled[k] : filled[k] + len(here)] = a[here]
            filled[k] += len(here)
        start += rows
    if start != data.samples:
        raise InputError(f"{data.name} gave {data.samples} samples at first, then {start}")
    return parts


def new_array(shape: tuple[int, ...], dtype: Any, together: int) -> Array:
    """An array to write: in memory if all arrays ``together`` take up to HELD_BYTES, otherwise mapped from a temporary file that
    lives as long as the array."""
    if together <= HELD_BYTES:
        return np.empty(shape, dtype)
    with temporary_file("optdnn-samples-") as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def _labels(source: Any, labels: Any, inputs: set[str]) -> Array | None:
    if labels is not None:
        if isinstance(labels, (str, os.PathLike)):
            try:
                check_regular(labels)
                labels = np.load(labels, allow_pickle=False)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise UsageError(f"cannot read the labels {os.fspath(labels)}: {why}") from None
        found = np.asarray(labels)
        if found.ndim == 0:
            raise InputError(f"labels must be an array with one entry per sample, not {labels!r}")
        return found
    arrays: Any = {}
    if isinstance(source, Mapping):
        arrays = source
    elif isinstance(source, (str, os.PathLike)) and os.fspath(source).endswith(".npz") and os.path.isfile(source):
        try:
            with np.load(source, allow_pickle=False) as data:
                arrays = {k: data[k] for k in LABELS if k in data.files}
        except (OSError, ValueError, zipfile.BadZipFile):
            return None  # reading all of it will report what is wrong with the file
    return next((np.asarray(arrays[k]) for k in LABELS if k in arrays and k not in inputs), None)
