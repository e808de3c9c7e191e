"""The calibration cache: a readable JSON file with the result or the progress so far, keyed by everything that it depends on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import OutputError, UsageError
from optdnn.passes.support.ranges import Calibration, channel_axis, finite, from_plain, to_plain
from optdnn.runtime.file.atomic import check_writable, shared_folder, write_atomic
from optdnn.runtime.file.json_file import read_json
from optdnn.types import Array

FORMAT = "optdnn calibration 1"
KEPT = 8
"""The number of calibrations, the newest, that one file keeps."""


@dataclass
class Extremes:
    """The smallest and largest element of one value. Per channel: the largest magnitude and the sum, over ``number`` elements
    each."""

    low: float
    high: float
    largest: Array
    sum: Array
    number: int

    @classmethod
    def of(cls, array: Array) -> Extremes:
        axis = channel_axis(array.ndim)
        others = tuple(i for i in range(array.ndim) if i != axis)
        largest = np.atleast_1d(np.abs(array).max(axis=others).astype(np.float64))
        total = np.atleast_1d(array.sum(axis=others, dtype=np.float64))
        return cls(float(array.min()), float(array.max()), largest, total, array.size // max(1, largest.size))

    def merged(self, old: Extremes | None) -> Extremes:
        """Over the elements of both. If the numbers of channels differ (the words of a text), the channels are dropped."""
        if old is None:
            return self
        low, high = min(old.low, self.low), max(old.high, self.high)
        if old.largest.shape != self.largest.shape:
            return Extremes(low, high, np.zeros(0), np.zeros(0), 0)
        largest = np.maximum(old.largest, self.largest)
        return Extremes(low, high, largest, old.sum + self.sum, old.number + self.number)

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "largest": self.largest.tolist(), "sum": self.sum.tolist()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Extremes:
        low, high, number = (finite(plain[name], 0) for name in ("low", "high", "number"))
        largest, total = finite(plain["largest"], 1), finite(plain["sum"], 1)
        if largest.size != total.size:
            raise ValueError("its sums and magnitudes have different channels")
        return cls(float(low), float(high), largest, total, int(number))


@dataclass
class Sweep:
    """One pass over the data: the number of batches seen, whether it is complete, and for each value :class:`Extremes` or counts
    (int64)."""

    batches: int = 0
    done: bool = False
    table: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        table = {n: v.to_plain() if isinstance(v, Extremes) else v.tolist() for n, v in self.table.items()}
        return {"batches": self.batches, "done": self.done, "table": table}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], read: Callable[[Any], Any]) -> Sweep:
        """The inverse of :meth:`to_plain`; ``read`` parses the entries of its table. KeyError, TypeError, ValueError,
        AttributeError or OverflowError for anything else."""
        return cls(int(plain["batches"]), bool(plain["done"]), {n: read(v) for n, v in plain["table"].items()})


def _counts(plain: Any) -> Array:
    """The counts of a histogram, int64 [bins]. Raises TypeError, ValueError or OverflowError for anything else."""
    found = finite(plain, 1)
    if found.size and not 0 <= found.min() <= found.max() < 1 << 53:
        raise ValueError("these are not counts")
    return found.astype(np.int64)


@dataclass
class UnfinishedCalibration:
    """The state of an unfinished calibration."""

    extremes: Sweep = field(default_factory=Sweep)
    counts: Sweep = field(default_factory=Sweep)


@dataclass
class CalibrationCache:
    """A cache file (or none). ``result`` is set if it holds a finished calibration for exactly this key."""

    path: Path | None
    key: dict[str, str]
    result: Calibration | None = None
    progress: UnfinishedCalibration | None = None
    others: list[Any] = field(default_factory=list)
    """The file's entries for other graphs, data and methods."""

    @classmethod
    def open(cls, path: str | Path | None, graph: str, data: str, method: str) -> CalibrationCache:
        """Read the entries that match the digests of graph and data and the method. Raises UsageError if the file is not a
        calibration cache, OutputError if it could not be written."""
        cache = cls(None if path is None else Path(path), {"graph": graph, "data": data, "method": method})
        if cache.path is None:
            return cache
        check_writable(cache.path)
        try:
            for entry in cache._read():
                if entry["key"] != cache.key:
                    cache.others.append(entry)
                elif "result" in entry:
                    cache.result = from_plain(entry["result"])
                else:
                    found = entry["progress"]
                    extremes = Sweep.from_plain(found["extremes"], Extremes.from_plain)
                    cache.progress = UnfinishedCalibration(extremes, Sweep.from_plain(found["counts"], _counts))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise cache.damaged() from None
        return cache

    def damaged(self) -> UsageError:
        """The error for a file with entries that no calibration could have written."""
        return UsageError(f"{self.path} is a damaged calibration cache", hint="delete it")

    def _read(self) -> list[Any]:
        assert self.path is not None
        try:
            plain = read_json(self.path)
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            plain = None
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise UsageError(f"{self.path} is not a calibration cache", hint="name another file, or delete it")
        json.dumps(plain["entries"], allow_nan=False)  # raises ValueError: other entries are written back
        return list(plain["entries"])

    def save(self, progress: UnfinishedCalibration) -> None:
        """Store an unfinished calibration."""
        if self.path is not None:
            sweeps = {"extremes": progress.extremes.to_plain(), "counts": progress.counts.to_plain()}
            self._write({"progress": sweeps})

    def finish(self, result: Calibration) -> None:
        """Store the result."""
        self.result = result
        if self.path is not None:
            self._write({"result": to_plain(result)})

    def _write(self, what: Mapping[str, Any]) -> None:
        assert self.path is not None
        with shared_folder(self.path.resolve().parent):
            with contextlib.suppress(
                UsageError, KeyError, TypeError, ValueError
            ):  # damaged since it was opened: it is rewritten
                self.others = [entry for entry in self._read() if entry["key"] != self.key]
            entries = [*self.others[-KEPT + 1 :], {"key": self.key, **what}]
            text = json.dumps({"format": FORMAT, "entries": entries}, indent=1, allow_nan=False)
            try:
                write_atomic(self.path, [text.encode(), b"\n"])
            except OutputError as error:
                raise OutputError(f"the calibration cache: {error.message}", hint=error.hint) from None
