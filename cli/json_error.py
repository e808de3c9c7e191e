"""``--json`` after an error: an object with the error, where the result would have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optdnn.cli.options import json_with_its_file
from optdnn.errors import OutputError


def give_error(argv: Sequence[str], state: Mapping[str, Any], error: Mapping[str, Any]) -> None:
    """Write ``{"error": error}`` if ``--json`` was given and its result is not written yet.

    ``state`` is the ``obj`` of click's context. A file that cannot be written is not reported: standard error has the first error.
    """
    file = state.get("json_file") or _asked(argv)
    if file is None or state.get("json_given"):
        return
    from optdnn.cli.common import write_json

    try:
        write_json([{"error": error}], file)
    except OutputError:
        return


def _asked(argv: Sequence[str]) -> Path | None:
    """The file of ``--json`` in a command line that click may not have read; "-" for standard output."""
    words = json_with_its_file(argv)
    words = words[: words.index("--")] if "--" in words else words
    files = [word.removeprefix("--json=") for word in words if word.startswith("--json=")]
    return Path(files[-1]) if files else None
