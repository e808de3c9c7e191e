"""Compressed archives of arrays (``.npz``): the limit of an array's unpacked size."""

from __future__ import annotations

import zipfile
from pathlib import Path

from optdnn.errors import InputError
from optdnn.limits import UNPACKED_BYTES

RATIO = 100
"""An array may unpack to this many times its packed size, whatever the limit: plain numbers seldom shrink more, except zeros."""


def check_archive(path: Path) -> None:
    """Raise InputError if an array in an archive is declared larger than the limit.

    Raises OSError, and BadZipFile for a file that is not an archive.
    """
    with zipfile.ZipFile(path) as archive:
        for item in archive.infolist():
            if item.file_size > max(UNPACKED_BYTES.value, RATIO * item.compress_size):
                size = f"{item.file_size} bytes from {item.compress_size}"
                raise InputError(f"{path}: {item.filename!r} would unpack to {size}", hint=UNPACKED_BYTES.hint)
