"""JSON files that may be hostile: caches and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optdnn.text_file import read_text


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError for a file that is too large, no text, no JSON or nested too
    deeply."""
    text = read_text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
