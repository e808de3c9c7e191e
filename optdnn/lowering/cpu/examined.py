"""Parts of engines that passed the examination on this machine before: they need not be examined at each load.

An entry is an empty file. Its name is a digest of everything that the verdict depends on: the verified digests of the ONNX and of
the weights, the program's statements about them, and the sources of the examination itself. The folder belongs to the user; a
folder that others can write to is not trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import stat
from functools import cache
from pathlib import Path

from optdnn.runtime.cuda.compile.nvrtc import default_folder
from optdnn.runtime.steps.executor import LibraryPart

_RULES = ("importers/*.py", "ir/*.py", "ops/*.py", "lowering/cpu/*.py", "dim.py", "dim_text.py", "types.py")
"""The sources that an examination runs, below the package's folder."""


def entry_of(part: LibraryPart) -> Path | None:
    """The path of a part's entry; None if the part's contents were not verified."""
    if part.digest is None:
        return None
    return default_folder().parent / "examined" / hashlib.sha256(f"{_rules()} {part.digest}".encode()).hexdigest()


def is_known(entry: Path) -> bool:
    """Whether there is an entry, in a folder that nobody else can write to."""
    try:
        folder = entry.parent.stat()
        return _own(folder) and _own(entry.lstat())
    except OSError:
        return False


def remember(entry: Path) -> None:
    """Make the entry. If it cannot be written, the next load examines the part again."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _own(entry.parent.stat()):
            entry.touch(mode=0o600)


def _own(found: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):  # Windows: the folder is in the user's profile
        return True
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def _rules() -> str:
    """A digest of the examination's sources."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(importlib.metadata.version("onnx").encode())
    for path in sorted(p for pattern in _RULES for p in root.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
