"""What compilers made in earlier runs of the tests on this machine: a kernel that has not changed is not compiled again."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.file.atomic import replace_file

FOLDER = nvrtc.default_folder().with_name("tests")
"""Beside the cubins of builds. Taken at import, since some tests change the variables that it depends on."""
KEPT_S = 14 * 24 * 3600.0
"""Files that no run has used for this time are deleted."""


def cached(name: str, make: Callable[[], bytes]) -> Path:
    """The file ``name`` of the cache, with the bytes that ``make`` returns unless it is there. Names hold a digest of all that
    the bytes depend on, with the compiler's version."""
    path = _folder() / name
    try:
        if path.stat().st_size:  # an empty file: the machine was switched off before the bytes were written
            os.utime(path)
            return path
    except FileNotFoundError:
        pass
    replace_file(str(path), [make()], flush=False)
    return path


def log(recipe: nvrtc.Recipe) -> str:
    """NVRTC's log of a compilation, with ptxas's report."""
    name = f"{recipe.digest('log', _nvrtc_build())}.log"
    path = cached(name, lambda: nvrtc.compile_recipe(recipe, resources=True)[1].encode())
    return path.read_text(encoding="utf-8")


def resources(recipe: nvrtc.Recipe) -> dict[str, nvrtc.Resources]:
    """:func:`nvrtc.resources`, with the log from the cache."""
    return nvrtc.reported(recipe, log(recipe))


@functools.cache
def _nvrtc_build() -> str:
    """NVRTC's version, and that of its wheel if there is one: a patch may allocate registers otherwise."""
    try:
        wheel = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        wheel = ""
    return f"{nvrtc.version()} {wheel}"


@functools.cache
def _folder() -> Path:
    """The folder, without files that have become old. A temporary one if it cannot be written."""
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path in FOLDER.iterdir():
            with suppress(FileNotFoundError):  # other processes begin at the same time
                if path.stat().st_mtime < time.time() - KEPT_S:
                    path.unlink()
        with tempfile.TemporaryFile(dir=FOLDER):
            return FOLDER
    except OSError:
        made = Path(tempfile.mkdtemp(prefix="optdnn-compiled-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made
