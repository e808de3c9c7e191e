"""Temporary folders and files, with one error for a machine that has no place for them."""

from __future__ import annotations

import tempfile
from typing import IO

from optdnn.errors import OutputError


def temporary_folder(prefix: str = "optdnn-") -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the object ends. Raises OutputError where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise _failure(error) from error


def temporary_file(prefix: str = "optdnn-") -> IO[bytes]:
    """An open file without a name. Raises OutputError where none can be made."""
    try:
        return tempfile.TemporaryFile(prefix=prefix)
    except OSError as error:
        raise _failure(error) from error


def _failure(error: OSError) -> OutputError:
    return OutputError(
        f"no temporary file can be made: {error.strerror or error}", hint="set TMPDIR to a folder that can be written"
    )
