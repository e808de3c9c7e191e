"""The user's data, in two parts: one to calibrate and search on, one that decides.

A bound on accuracy means something only on data that had no part in choosing: ranges, sensitivities and the search see the
*calibration* part alone, and the engine is accepted by the *verification* part.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.calibration.data import open_data
from optdnn.calibration.images import ImageSpec
from optdnn.errors import InputError, UsageError
from optdnn.types import Array, TensorSpec

LABELS = ("labels", "label", "y")
"""Names under which an .npz holds labels, where they are no input's."""
MIN_SAMPLES = 2
VERIFY = 0.5
"""The part of the data that is kept for verification."""


@dataclass(frozen=True)
class Samples:
    """``feeds`` maps each input to an array whose first axis counts samples; ``labels`` has one entry per sample, or is None."""

    feeds: Mapping[str, Array]
    labels: Array | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(a) for name, a in self.feeds.items()}
        if not sizes:
            raise UsageError("the calibration data hold no input")
        if self.labels is not None:
            sizes["labels"] = len(self.labels)
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{n} {k}" for n, k in sizes.items())
            raise InputError(f"the calibration data disagree on the number of samples: {shown}")

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


def split(samples: Samples, seed: int = 0, verify: float = VERIFY) -> tuple[Samples, Samples]:
    """Calibration and verification part: a seeded shuffle, classes in proportion where the labels are classes.

    Raises UsageError for fewer than two samples.
    """
    n = len(samples)
    if n < MIN_SAMPLES:
        raise UsageError(
            f"automatic precision needs at least {MIN_SAMPLES} samples, the data hold {n}",
            hint="a bound on accuracy is as fine as one over the number of samples for verification",
        )
    order = np.random.default_rng(seed).permutation(n)
    if samples.labels is not None and samples.labels.ndim == 1 and samples.labels.dtype.kind in "iu":
        order = order[np.argsort(samples.labels[order], kind="stable")]
    # Every k-th of the (class-sorted) shuffle goes to verification, so that each class is split alike.
    rank = np.arange(n)
    chosen = np.floor((rank + 1) * verify) > np.floor(rank * verify)
    if chosen.all() or not chosen.any():
        chosen[-1] = not chosen[-1]
    return samples.take(np.sort(order[~chosen])), samples.take(np.sort(order[chosen]))


def load(source: Any, inputs: Sequence[TensorSpec], labels: Any = None, images: ImageSpec | None = None) -> Samples:
    """Samples of calibration data in any of the forms that :func:`optdnn.calibration.data.open_data` takes.

    ``labels``: an array (or a path to an .npy) with one entry per sample; without, an array of an .npz or a mapping that is no
    input's and is called "labels", "label" or "y". Everything is held in memory. Raises as ``open_data`` does, UsageError for a
    network whose inputs have no batch axis in common, InputError for labels that do not fit.
    """
    fixed = {s.shape[0] if s.shape else None for s in inputs if not s.shape or isinstance(s.shape[0], int)}
    if None in fixed or len(fixed) > 1:
        raise UsageError(
            "automatic precision needs inputs that all begin with the batch; here they are "
            + ", ".join(map(str, inputs))
        )
    found = _labels(source, labels, {s.name for s in inputs})
    batches = list(open_data(source, inputs, images).batches())
    feeds = {s.name: np.concatenate([b[s.name] for b in batches]) for s in inputs}
    n = len(next(iter(feeds.values())))
    if found is not None and len(found) < n:
        raise InputError(f"there are {len(found)} labels for {n} samples")
    return Samples(feeds, None if found is None else found[:n])


def _labels(source: Any, labels: Any, inputs: set[str]) -> Array | None:
    if labels is not None:
        if isinstance(labels, (str, os.PathLike)):
            try:
                labels = np.load(labels, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot read the labels {os.fspath(labels)}: {error}") from None
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
            return None  # what is wrong with the file is said by who reads all of it
    return next((np.asarray(arrays[k]) for k in LABELS if k in arrays and k not in inputs), None)
