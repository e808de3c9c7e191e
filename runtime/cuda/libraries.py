"""Where the vendors' libraries are, if they are: in the nvidia wheels, or the system's. Loaded when first asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optdnn.errors import MissingDependency

_FILES = {"cublaslt": ("libcublasLt.so.13", "libcublasLt.so.12"), "cudnn": ("libcudnn.so.9",)}
"""Library -> the names of its shared object, newest first."""


def _places(file: str) -> Iterator[str]:
    """The file in every wheel of nvidia's, then by name alone (the system's search path)."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from (str(p) for p in sorted(Path(folder).glob(f"*/lib/{file}")))
    yield file


def files(library: str) -> Iterator[str]:
    """Where its shared object may be, the newest and nearest first."""
    return (place for file in _FILES[library] for place in _places(file))


@cache
def shared_object(library: str) -> Any:
    """The loaded library. Raises MissingDependency."""
    for place in files(library):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise MissingDependency("nvidia-cublas", "cuda-libs", "by steps that call cuBLASLt")


@cache
def present(library: str) -> bool:
    """Whether the library can be used here: "cublaslt", or "cudnn" (with its Python frontend)."""
    if library == "cudnn":
        try:
            from optdnn.runtime.cuda.cudnn import frontend

            frontend()
        except MissingDependency:
            return False
        return True
    try:
        shared_object(library)
    except MissingDependency:
        return False
    return True
