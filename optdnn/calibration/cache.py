"""The calibration cache: a readable JSON file with the result, keyed by what it depends on, or with how far it has come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import OutputError, UsageError
from optdnn.passes.support.ranges import Calibration, from_plain, to_plain
from optdnn.runtime.atomic import check_writable, write_atomic

FORMAT = "optdnn calibration 1"
KEPT = 8
"""Calibrations that one file keeps, the newest."""
_ARRAYS = {"largest": np.float64, "sum": np.float64}


@dataclass
class Sweep:
    """One passage through the data: batches seen, whether it is over, and what was gathered of each value."""

    batches: int = 0
    done: bool = False
    table: dict[str, Any] = field(default_factory=dict)


@dataclass
class Progress:
    """How far a calibration has come."""

    extremes: Sweep = field(default_factory=Sweep)
    counts: Sweep = field(default_factory=Sweep)


@dataclass
class Cache:
    """A cache file (or none). ``result`` is set where it holds a finished calibration for this very key."""

    path: Path | None
    key: dict[str, str]
    result: Calibration | None = None
    progress: Progress | None = None
    others: list[Any] = field(default_factory=list)
    """What the file holds of other graphs, data and methods."""

    @classmethod
    def open(cls, path: str | Path | None, graph: str, data: str, method: str) -> Cache:
        """Read what fits the digests of graph and data and the method. Raises UsageError for a file of something else,
        OutputError where it could not be written."""
        cache = cls(None if path is None else Path(path), {"graph": graph, "data": data, "method": method})
        if cache.path is None:
            return cache
        check_writable(cache.path)
        try:
            cache.others = [e for e in cache._read() if e["key"] != cache.key]
            for entry in cache._read():
                if entry["key"] != cache.key:
                    continue
                if "result" in entry:
                    cache.result = from_plain(entry["result"])
                else:
                    found = entry["progress"]
                    cache.progress = Progress(*(_sweep_of(found[n]) for n in ("extremes", "counts")))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(f"{cache.path} is a damaged calibration cache", hint="delete it") from None
        return cache

    def _read(self) -> list[Any]:
        assert self.path is not None
        try:
            plain = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            plain = None
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise UsageError(f"{self.path} is not a calibration cache", hint="name another file, or delete it")
        return list(plain["entries"])

    def save(self, progress: Progress) -> None:
        """Keep an unfinished calibration."""
        if self.path is not None:
            plain = {"extremes": _plain(progress.extremes), "counts": _plain(progress.counts)}
            self._write({"progress": plain})

    def finish(self, result: Calibration) -> None:
        """Keep the result."""
        self.result = result
        if self.path is not None:
            self._write({"result": to_plain(result)})

    def _write(self, what: Mapping[str, Any]) -> None:
        assert self.path is not None
        entries = [*self.others[-KEPT + 1 :], {"key": self.key, **what}]
        text = json.dumps({"format": FORMAT, "entries": entries}, indent=1, allow_nan=False)
        try:
            write_atomic(self.path, [text.encode(), b"\n"])
        except OutputError as error:
            raise OutputError(f"the calibration cache: {error.message}", hint=error.hint) from None


def _plain(sweep: Sweep) -> dict[str, Any]:
    def value(v: Any) -> Any:
        if isinstance(v, dict):
            return {k: value(x) for k, x in v.items()}
        return v.tolist() if isinstance(v, np.ndarray) else v

    return {"batches": sweep.batches, "done": sweep.done, "table": value(sweep.table)}


def _sweep_of(plain: Mapping[str, Any]) -> Sweep:
    table: dict[str, Any] = {}
    for name, entry in plain["table"].items():
        if isinstance(entry, dict):
            table[name] = {k: np.asarray(v, _ARRAYS[k]) if k in _ARRAYS else v for k, v in entry.items()}
        else:
            table[name] = np.asarray(entry, np.int64)
    return Sweep(int(plain["batches"]), bool(plain["done"]), table)
