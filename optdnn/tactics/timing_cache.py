"""The timing cache: measured times of tactics, kept between builds so that they are quick and repeatable.

A JSON file. A key names everything the time depends on: what runs (a digest), with which settings, by which library
version, on which processor. A file of another format or one that is not ours is refused, never overwritten.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError
from optdnn.runtime.atomic import check_writable, write_atomic

FORMAT = "optdnn-timing-cache"
VERSION = 1


@dataclass
class TimingCache:
    """Median milliseconds by key. ``path`` None keeps it in memory."""

    path: Path | None = None
    entries: dict[str, float] = field(default_factory=dict)
    changed: bool = False

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
        return cls(path, {str(k): float(v) for k, v in entries.items()})

    def get(self, key: str) -> float | None:
        return self.entries.get(key)

    def put(self, key: str, median_ms: float) -> None:
        self.entries[key] = median_ms
        self.changed = True

    def save(self) -> None:
        """Write back atomically, if anything was measured. Raises OutputError."""
        if self.path is None or not self.changed:
            return
        text = json.dumps(
            {"format": FORMAT, "version": VERSION, "entries": dict(sorted(self.entries.items()))}, indent=1
        )
        write_atomic(self.path, [(text + "\n").encode()])
        self.changed = False


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
