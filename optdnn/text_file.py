"""Small text files that may be hostile: caches, reports, specs and labels."""

from __future__ import annotations

from pathlib import Path

from optdnn.limits import CACHE_BYTES
from optdnn.regular_file import open_regular


def read_text(path: Path) -> str:
    """The text of a file. Raises OSError, or ValueError for a file that is too large or not UTF-8."""
    limit = CACHE_BYTES.value
    with open(path, "rb", opener=open_regular) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes; {CACHE_BYTES.hint}")
    return str(data, "utf-8")
