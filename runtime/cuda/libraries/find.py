"""Finds the vendors' libraries: in the nvidia wheels, or the system's. They are loaded on first use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optdnn.errors import MissingDependency

_FILES = {
    "cublaslt": ("libcublasLt.so.13", "libcublasLt.so.12"),
    "cudnn": ("libcudnn.so.9",),
    "nvjpeg": ("libnvjpeg.so.13", "libnvjpeg.so.12"),
}
"""Library -> the names of its shared object, newest first."""


def _places(file: str) -> Iterator[str]:
    """The file in every nvidia wheel, then by name only (the system's search path)."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from (str(p) for p in sorted(Path(folder).glob(f"*/lib/{file}")))
    yield file


def files(library: str) -> Iterator[str]:
    """Candidate paths of its shared object, the newest and nearest first."""
    return (place for file in _FILES[library] for place in _places(file))


_BRINGS = {
    "cublaslt": ("nvidia-cublas", "cuda-libs", "by steps that call cuBLASLt"),
    "cudnn": ("nvidia-cudnn-cu13", "cuda-libs", "by steps that call cuDNN"),
    "nvjpeg": ("nvidia-nvjpeg", "images-gpu", "to decode JPEGs with the engines of the GPU"),
}
"""Library -> the package that contains it, the extra that installs the package, and the part that needs it."""


@cache
def shared_object(library: str) -> Any:
    """The loaded library. Raises MissingDependency."""
    for place in files(library):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise MissingDependency(*_BRINGS[library])


@cache
def installed(library: str) -> bool:
    """Whether the library is installed: "cublaslt", or "cudnn" and its Python frontend. The frontend is not imported for
    this, because it imports PyTorch if that is installed (seconds). An installed library may still be broken: :func:`present`."""
    try:
        shared_object(library)
    except MissingDependency:
        return False
    return library != "cudnn" or find_spec("cudnn") is not None


@cache
def present(library: str) -> bool:
    """Whether the library can be used here: "cublaslt", or "cudnn" (with its Python frontend)."""
    if library == "cudnn":
        try:
            from optdnn.runtime.cuda.libraries.cudnn import frontend

            frontend()
        except MissingDependency:
            return False
        return True
    return installed(library)


def version_of(library: str) -> str:
    """The version that an installed library reports. Creates no handle: that takes a second."""
    name = {"cublaslt": "cublasLtGetVersion", "cudnn": "cudnnGetVersion"}[library]
    get = getattr(shared_object(library), name)
    get.restype = ctypes.c_size_t
    return str(int(get()))
