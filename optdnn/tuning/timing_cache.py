"""The timing cache: measured times of tactics, kept between builds so that they are quick and repeatable.

A JSON file. A key names everything the time depends on: what runs (a digest), with which settings, by which library
version, on which processor. A file of another format or one that is not ours is refused, never overwritten.

GPU candidates and whole networks have sections of their own. Their keys name what must agree (device, problem, candidate, kernel
sources or library); beside each time stand the versions (driver, compiler) it was measured under. Under other versions a time
still says what to try first, and no more.

A candidate of the cpu target is tried in a process of its own before it is used. How that ended has a section, too, whose keys name
the weights besides: a build of the same network on the same machine need not try again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError
from optdnn.runtime.atomic import check_writable, write_atomic

FORMAT = "optdnn-timing-cache"
VERSION = 1


@dataclass(frozen=True)
class Candidate:
    """A GPU candidate's time, or why it must not be used; exactly one is set. ``versions``: see the module."""

    seconds: float | None
    failed: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """How the trial of a candidate of the cpu target ended: why it is refused, or the operators that its library did not take
    (the name of the first output -> the reason) when it was right."""

    refused: str | None = None
    cut: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkChoices:
    """The choices by signature ((tactic, configuration) each) that made a whole network fastest, and its milliseconds.

    ``seconds``: how long tuning went on before it was ended; None where it came to its own end. ``streams``: what was found of
    steps side by side, as plain data (None: not looked at); ``problems`` a digest of the signatures that the choices were made for.
    """

    choices: Mapping[str, tuple[str, str]]
    ms: float
    versions: Mapping[str, str]
    seconds: float | None = None
    streams: Any = None
    problems: str = ""


@dataclass
class TimingCache:
    """Median milliseconds by key, and what was measured on GPUs. ``path`` None keeps it in memory."""

    path: Path | None = None
    entries: dict[str, float] = field(default_factory=dict)
    changed: bool = False
    candidates: dict[str, Any] = field(default_factory=dict)
    networks: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None) -> TimingCache:
        """Read the file, if there is one.

        Raises UsageError when it is not a timing cache of this version, and OutputError where it could not be written
        afterwards (better known before all is measured).
        """
        if path is None:
            return cls(path)
        check_writable(path)  # first: a device, say, is not to be read either
        if not path.exists():
            return cls(path)
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not a timing cache: {error}", hint="delete it, or name another file") from None
        entries = data.get("entries") if isinstance(data, dict) else None
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise UsageError(
                f"{path} is not a timing cache of version {VERSION}", hint="delete it, or name another file"
            )
        if not isinstance(entries, dict) or not all(_is_time(v) for v in entries.values()):
            raise UsageError(f"{path} holds something that is not a time", hint="delete it, or name another file")
        candidates, networks, tried = (data.get(name, {}) for name in ("candidates", "networks", "tried"))
        if not _all(candidates, _candidate) or not _all(networks, _network) or not _all(tried, _outcome):
            raise UsageError(
                f"{path} holds something that is not a measurement", hint="delete it, or name another file"
            )
        return cls(path, {str(k): float(v) for k, v in entries.items()}, False, candidates, networks, tried)

    def get(self, key: str) -> float | None:
        return self.entries.get(key)

    def put(self, key: str, median_ms: float) -> None:
        self.entries[key] = median_ms
        self.changed = True

    def outcome(self, key: str) -> Outcome | None:
        """What became of a candidate of the cpu target, when it was tried with these very weights."""
        return _outcome(self.tried.get(key))

    def note_outcome(self, key: str, outcome: Outcome) -> None:
        """Keep it."""
        self.tried[key] = {"refused": outcome.refused} if outcome.refused is not None else {"cut": dict(outcome.cut)}
        self.changed = True

    def measured(self, key: str) -> Candidate | None:
        """What is known of a GPU candidate."""
        return _candidate(self.candidates.get(key))

    def note(self, key: str, seconds: float | None, versions: Mapping[str, str], failed: str | None = None) -> None:
        """Keep a GPU candidate's time, or its failure."""
        outcome = {"failed": failed} if failed is not None else {"us": round((seconds or 0.0) * 1e6, 4)}
        self.candidates[key] = {**outcome, "versions": dict(versions)}
        self.changed = True

    def network(self, key: str) -> NetworkChoices | None:
        """What was chosen for a whole network."""
        return _network(self.networks.get(key))

    def note_network(
        self,
        key: str,
        choices: Mapping[str, tuple[str, str]],
        ms: float,
        versions: Mapping[str, str],
        seconds: float | None = None,
        streams: Any = None,
        problems: str = "",
    ) -> None:
        """Keep the choices for a whole network."""
        table = {k: list(c) for k, c in sorted(choices.items())}
        ended: dict[str, Any] = {} if seconds is None else {"seconds": round(seconds, 2)}
        ended |= {} if streams is None else {"streams": streams}
        ended |= {"problems": problems} if problems else {}
        self.networks[key] = {"choices": table, "ms": round(ms, 5), "versions": dict(versions), **ended}
        self.changed = True

    def save(self) -> None:
        """Write back atomically, if anything was measured; what another build has written since is kept. Raises OutputError."""
        if self.path is None or not self.changed:
            return
        with contextlib.suppress(UsageError):
            other = TimingCache.open(self.path)
            self.entries = other.entries | self.entries
            self.candidates = other.candidates | self.candidates
            self.networks = other.networks | self.networks
            self.tried = other.tried | self.tried
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "entries": dict(sorted(self.entries.items()))}
        data |= {"candidates": dict(sorted(self.candidates.items()))} if self.candidates else {}
        data |= {"networks": dict(sorted(self.networks.items()))} if self.networks else {}
        data |= {"tried": dict(sorted(self.tried.items()))} if self.tried else {}
        text = json.dumps(data, indent=1)
        write_atomic(self.path, [(text + "\n").encode()])
        self.changed = False


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


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
            made = {k: (c[0], c[1]) for k, c in choices.items() if isinstance(c, list) and len(c) == 2 and _strings(c)}
            seconds = row.get("seconds")
            whole = len(made) == len(choices) and (seconds is None or _is_time(seconds))
            streams, problems = row.get("streams"), row.get("problems", "")
            return NetworkChoices(made, float(ms), versions, seconds, streams, str(problems)) if whole else None
    return None


def _texts(table: Mapping[Any, Any]) -> bool:
    return _strings([*table, *table.values()])


def _strings(values: list[Any]) -> bool:
    return all(isinstance(v, str) for v in values)


def _all(table: Any, read: Callable[[Any], object | None]) -> bool:
    return isinstance(table, dict) and all(isinstance(k, str) and read(v) is not None for k, v in table.items())
