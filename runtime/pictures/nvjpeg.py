"""JPEGs decoded by the JPEG engines of a GPU, directly into the rows of an array: nvJPEG, called by ctypes.

nvImageCodec uses the same engines. Its Python interface decodes only into its own memory, and takes Python's lock for each
picture. Here one call decodes a batch, without that lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda.libraries.find import shared_object
from optdnn.runtime.pictures.contents import Span
from optdnn.runtime.pictures.files import Size

HARDWARE = 3
"""NVJPEG_BACKEND_HARDWARE"""
SMOOTH = 32
"""NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION: colors between stored samples are interpolated, as in libjpeg."""
RGB, BGR = 5, 6
"""NVJPEG_OUTPUT_RGBI and NVJPEG_OUTPUT_BGRI: a pixel's three bytes are contiguous."""
UPRIGHT = (0, 1)
"""EXIF orientations of pictures that are stored upright; 0: the file has none."""
COMPONENTS = (1, 3)
"""Numbers of components: gray, or luma and chroma. Pictures with four components are CMYK."""
_PLANES = 4
"""NVJPEG_MAX_COMPONENT: nvjpegImage_t holds this many addresses, then as many row lengths."""
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvjpegCreateEx": (c_int, c_void_p, c_void_p, c_uint, POINTER(c_void_p)),
    "nvjpegDestroy": (c_void_p,),
    "nvjpegJpegStateCreate": (c_void_p, POINTER(c_void_p)),
    "nvjpegJpegStateDestroy": (c_void_p,),
    "nvjpegJpegStreamCreate": (c_void_p, POINTER(c_void_p)),
    "nvjpegJpegStreamDestroy": (c_void_p,),
    "nvjpegDecodeBatchedInitialize": (c_void_p, c_void_p, c_int, c_int, c_int),
    "nvjpegDecodeBatched": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
}
_QUICK: dict[str, tuple[Any, ...]] = {
    "nvjpegJpegStreamParseHeader": (c_void_p, c_void_p, c_size_t, c_void_p),
    "nvjpegJpegStreamGetFrameDimensions": (c_void_p, c_void_p, c_void_p),
    "nvjpegJpegStreamGetComponentsNum": (c_void_p, c_void_p),
    "nvjpegJpegStreamGetExifOrientation": (c_void_p, c_void_p),
    "nvjpegDecodeBatchedSupported": (c_void_p, c_void_p, c_void_p),
}
"""Functions that take a microsecond. They keep Python's lock: releasing it takes longer."""


@cache
def _library() -> tuple[Any, Any]:
    """nvJPEG without Python's lock and with it. Raises MissingDependency."""
    library = shared_object("nvjpeg")
    quick = ctypes.PyDLL(None, handle=library._handle)
    for held, signatures in ((library, _SIGNATURES), (quick, _QUICK)):
        for name, arguments in signatures.items():
            getattr(held, name).argtypes = arguments
    return library, quick


class JpegEngines:
    """The JPEG engines of the current GPU, for one thread at a time. Several of these share the engines."""

    def __init__(self, library: Any, quick: Any, order: int):
        """``order`` is RGB or BGR. Raises RunError for a GPU without such engines."""
        self.library, self.quick, self.order = library, quick, order
        self.handle, self.state, self.head = c_void_p(), c_void_p(), c_void_p()
        self.said = (c_int * 5)()
        """nvJPEG's information about a file: width, height, components, EXIF orientation, and 0 if the engines can decode it."""
        start = ctypes.addressof(self.said)
        self.places = [start + k * ctypes.sizeof(c_int) for k in range(5)]
        try:
            self._do("nvjpegCreateEx", HARDWARE, None, None, SMOOTH, ctypes.byref(self.handle))
            self._do("nvjpegJpegStateCreate", self.handle, ctypes.byref(self.state))
            self._do("nvjpegJpegStreamCreate", self.handle, ctypes.byref(self.head))
        except RunError:
            self.close()
            raise

    @classmethod
    def here(cls, order: int) -> JpegEngines | None:
        """The JPEG engines of the current GPU; None if nvJPEG is missing or the GPU has no such engines."""
        try:
            return cls(*_library(), order)
        except (MissingDependency, RunError):
            return None

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RunError(f"{name} of nvJPEG failed with status {status}")

    def takes(self, file: Span, size: Size) -> bool:
        """Whether the engines can decode this file as a picture of this size: a baseline JPEG with one scan, stored upright."""
        call, head, to = self.quick, self.head, self.places
        if (
            call.nvjpegJpegStreamParseHeader(self.handle, *file, head)
            or call.nvjpegJpegStreamGetFrameDimensions(head, to[0], to[1])
            or call.nvjpegJpegStreamGetComponentsNum(head, to[2])
            or call.nvjpegJpegStreamGetExifOrientation(head, to[3])
            or call.nvjpegDecodeBatchedSupported(self.handle, head, to[4])
        ):
            return False
        wide, high, components, turn, refused = self.said
        return (high, wide) == size and components in COMPONENTS and turn in UPRIGHT and not refused

    def decode(self, files: Sequence[Span], rows: Sequence[int], pitch: int, stream: int) -> bool:
        """Decode suitable files to the addresses ``rows``, with ``pitch`` bytes from one line to the next, on ``stream``.

        Returns whether the decoding could be started. The engines do not wait for earlier work of ``stream``: the memory must be
        free when this is called. ``files`` must stay in memory until the stream is done.
        """
        count = len(files)
        starts, lengths = np.array(files, np.uint64).T.copy()
        images = np.zeros((count, 2, _PLANES), np.uint64)
        images[:, 0, 0], images[:, 1, 0] = rows, pitch
        call = self.library
        arrays = (a.ctypes.data for a in (starts, lengths, images))
        return not (
            call.nvjpegDecodeBatchedInitialize(self.handle, self.state, count, 1, self.order)
            or call.nvjpegDecodeBatched(self.handle, self.state, *arrays, stream)
        )

    def close(self) -> None:
        for name in ("head", "state", "handle"):
            value, destroy = getattr(self, name), {"head": "JpegStream", "state": "JpegState", "handle": ""}[name]
            if value:
                getattr(self.library, f"nvjpeg{destroy}Destroy")(value)
                setattr(self, name, c_void_p())
