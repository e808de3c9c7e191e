"""JSON files that may be hostile: caches and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optdnn.limits import CACHE_BYTES


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError, or ValueError for a file that is too large, no text, no JSON or nested too deeply."""
    limit = CACHE_BYTES.value
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes; {CACHE_BYTES.hint}")
    try:
        return json.loads(str(data, "utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
