"""The timing cache: a JSON file of measured times. With it, builds are quick and repeatable.

A key names everything that the time depends on: the program (a digest), its settings, the library's version, the
processor. A file of another format is refused and never overwritten.

GPU candidates and whole networks have separate sections. Their keys name the device, the problem, the candidate,
and the kernel sources or the library. Each time is stored with the versions of driver and compiler. Under other versions,
a time only ranks candidates.

The cpu target tries each candidate in its own process before using it. The section ``tried`` has the outcomes; its keys
name the weights as well. A second build of the same network on the same machine need not try again.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError
from optdnn.runtime.file.atomic import check_writable, shared_folder, write_atomic
from optdnn.runtime.file.json_file import read_json

FORMAT = "optdnn-timing-cache"
VERSION = 1
SECTIONS = ("entries", "candidates", "networks", "tried")


@dataclass(frozen=True)
class Candidate:
    """A GPU candidate's time, or the reason why it must not be used; exactly one is set. ``versions``: of driver and compiler."""

    seconds: float | None
    failed: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """The outcome of trying a candidate of the cpu target: the reason why it is ``refused``, or ``cut``: the operators that its
    library cannot run (name of the first output -> reason)."""

    refused: str | None = None
    cut: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkChoices:
    """The fastest choices of a whole network, by signature (tactic and configuration each), and its milliseconds.

    ``seconds``: the duration of a tuning that was stopped early (None: it was complete). ``streams``: the choice of lanes as plain
    data (None: not measured). ``problems``: a digest of the network's signatures.
    """

    choices: Mapping[str, tuple[str, str]]
    ms: float
    versions: Mapping[str, str]
    seconds: float | None = None
    streams: Any = None
    problems: str = ""


@dataclass
class TimingCache:
    """Median milliseconds by key (``entries``), and the other sections. ``path`` None: in memory only."""

    path: Path | None = None
    entries: dict[str, float] = field(default_factory=dict)
    changed: bool = False
    candidates: dict[str, Any] = field(default_factory=dict)
    networks: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, Any] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set, repr=False)
    """(section, key) of all entries that were read or added."""

    @classmethod
    def open(cls, path: Path | None) -> TimingCache:
        """Read the file, if it exists.

        Raises UsageError if it is not a timing cache of this version, and OutputError if it cannot be written later.
        """
        if path is None:
            return cls(path)
        check_writable(path)  # first: a device must not be read
        if not path.exists():
            return cls(path)
        try:
            data: Any = read_json(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a timing cache: {error}", hint="delete it, or name another file") from None
        return cls.of_sections(data, str(path), path)

    @classmethod
    def of_sections(cls, data: Any, name: str, path: Path | None = None) -> TimingCache:
        """From parsed JSON. ``name`` is the file's in messages. Raises UsageError for anything else than :meth:`excerpt` gives."""
        entries = data.get("entries") if isinstance(data, dict) else None
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise UsageError(
                f"{name} is not a timing cache of version {VERSION}", hint="delete it, or name another file"
            )
        if not isinstance(entries, dict) or not all(_is_time(v) for v in entries.values()):
            raise UsageError(f"{name} holds something that is not a time", hint="delete it, or name another file")
        candidates, networks, tried = (data.get(name, {}) for name in ("candidates", "networks", "tried"))
        if not _all(candidates, _candidate) or not _all(networks, _network) or not _all(tried, _outcome):
            raise UsageError(
                f"{name} holds something that is not a measurement", hint="delete it, or name another file"
            )
        return cls(path, {str(k): float(v) for k, v in entries.items()}, False, candidates, networks, tried)

    def excerpt(self) -> dict[str, Any]:
        """The sections with all entries that were read or added since the cache was opened."""
        kept = {
            name: {key: table[key] for key in sorted(table) if (name, key) in self.used}
            for name, table in self._sections().items()
        }
        return {"format": FORMAT, "version": VERSION, **kept}

    def _sections(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name) for name in SECTIONS}

    def get(self, key: str) -> float | None:
        self.used.add(("entries", key))
        return self.entries.get(key)

    def put(self, key: str, median_ms: float) -> None:
        self.used.add(("entries", key))
        self.entries[key] = median_ms
        self.changed = True

    def outcome(self, key: str) -> Outcome | None:
        """The outcome of a candidate of the cpu target with the same weights; None if unknown."""
        self.used.add(("tried", key))
        return _outcome(self.tried.get(key))

    def note_outcome(self, key: str, outcome: Outcome) -> None:
        """Add the outcome of a candidate of the cpu target."""
        self.used.add(("tried", key))
        self.tried[key] = {"refused": outcome.refused} if outcome.refused is not None else {"cut": dict(outcome.cut)}
        self.changed = True

    def measured(self, key: str) -> Candidate | None:
        """The time or failure of a GPU candidate; None if unknown."""
        self.used.add(("candidates", key))
        return _candidate(self.candidates.get(key))

    def note(self, key: str, found: Candidate) -> None:
        """Add a GPU candidate's time, or its failure."""
        self.used.add(("candidates", key))
        outcome = (
            {"failed": found.failed} if found.failed is not None else {"us": round((found.seconds or 0.0) * 1e6, 4)}
        )
        self.candidates[key] = {**outcome, "versions": dict(found.versions)}
        self.changed = True

    def network(self, key: str) -> NetworkChoices | None:
        """The choices for a whole network; None if unknown."""
        self.used.add(("networks", key))
        return _network(self.networks.get(key))

    def note_network(self, key: str, found: NetworkChoices) -> None:
        """Add the choices for a whole network."""
        self.used.add(("networks", key))
        table = {k: list(c) for k, c in sorted(found.choices.items())}
        row: dict[str, Any] = {"choices": table, "ms": round(found.ms, 5), "versions": dict(found.versions)}
        row |= {} if found.seconds is None else {"seconds": round(found.seconds, 2)}
        row |= {} if found.streams is None else {"streams": found.streams}
        self.networks[key] = row | ({"problems": found.problems} if found.problems else {})
        self.changed = True

    def save(self) -> None:
        """Write the file atomically if anything changed. Entries that another build added since are kept. Raises OutputError."""
        if self.path is None or not self.changed:
            return
        with shared_folder(self.path.resolve().parent):  # two builds that save concurrently must not lose entries
            self._merge_and_write(self.path)
        self.changed = False

    def _merge_and_write(self, path: Path) -> None:
        with contextlib.suppress(UsageError):
            for name, table in TimingCache.open(path)._sections().items():
                setattr(self, name, table | getattr(self, name))
        sections = self._sections()
        kept = {name: dict(sorted(table.items())) for name, table in sections.items() if table or name == "entries"}
        text = json.dumps({"format": FORMAT, "version": VERSION, **kept}, indent=1)
        write_atomic(path, [(text + "\n").encode()])


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _candidate(row: Any) -> Candidate | None:
    match row:
        case {"us": us, "versions": dict(versions)} if _is_time(us) and _texts(versions):
            return Candidate(us / 1e6, None, versions)
        case {"failed": str(failed), "versions": dict(versions)} if _texts(versions):
            return Candidate(None, failed, versions)
    return None


def _outcome(row: Any) -> Outcome | None:
    match row:
        case {"refused": str(refused)}:
            return Outcome(refused)
        case {"cut": dict(cut)} if _texts(cut):
            return Outcome(cut=cut)
    return None


def _network(row: Any) -> NetworkChoices | None:
    match row:
        case {"choices": dict(choices), "ms": ms, "versions": dict(versions)} if _is_time(ms) and _texts(versions):
            pairs = {k: (c[0], c[1]) for k, c in choices.items() if isinstance(c, list) and len(c) == 2 and _strings(c)}
            seconds = row.get("seconds")
            if len(pairs) < len(choices) or not (seconds is None or _is_time(seconds)):
                return None
            return NetworkChoices(pairs, float(ms), versions, seconds, row.get("streams"), str(row.get("problems", "")))
    return None


def _texts(table: Mapping[Any, Any]) -> bool:
    return _strings([*table, *table.values()])


def _strings(values: list[Any]) -> bool:
    return all(isinstance(v, str) for v in values)


def _all(table: Any, read: Callable[[Any], object | None]) -> bool:
    return isinstance(table, dict) and all(isinstance(k, str) and read(v) is not None for k, v in table.items())
