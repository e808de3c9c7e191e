"""nvJPEG by ctypes: the files that the JPEG engines accept, and their arguments; with a stand-in, and on a GPU."""

from __future__ import annotations

import ctypes
import io
from typing import Any

import numpy as np
import pytest
from support.pictures import picture

from optdnn.errors import RunError
from optdnn.image_spec import ImageSpec
from optdnn.runtime.pictures import nvjpeg
from optdnn.runtime.pictures.contents import Contents
from optdnn.runtime.pictures.files import decoded
from optdnn.runtime.pictures.nvjpeg import JpegEngines

SIZE = (20, 30)


class _NvJpeg:
    """nvJPEG's functions. ``head``: the facts of a file; ``status``: codes that some of them return instead of 0."""

    def __init__(self, **status: int):
        self.head = {"wide": 30, "high": 20, "components": 3, "turn": 0, "refused": 0}
        self.status, self.alive, self.batch = status, 0, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if self.status.get(name):
                return self.status[name]
            self._done(name, arguments)
            return 0

        return call

    def _done(self, name: str, arguments: tuple[Any, ...]) -> None:
        if "Create" in name:
            self.alive += 1
            arguments[-1]._obj.value = self.alive
        elif "Destroy" in name:
            self.alive -= 1
        elif name == "nvjpegJpegStreamGetFrameDimensions":
            for address, key in zip(arguments[1:], ("wide", "high"), strict=True):
                ctypes.c_int.from_address(address).value = self.head[key]
        elif name == "nvjpegDecodeBatchedInitialize":
            self.batch["count"], self.batch["order"] = arguments[2], arguments[4]
        elif name == "nvjpegDecodeBatched":
            count, (_, _, data, lengths, images, self.batch["stream"]) = self.batch["count"], arguments
            sizes = (ctypes.c_size_t * count).from_address(lengths)
            starts = (ctypes.c_void_p * count).from_address(data)
            self.batch["files"] = [ctypes.string_at(d, n) for d, n in zip(starts, sizes, strict=True)]
            self.batch["images"] = np.array((ctypes.c_size_t * (8 * count)).from_address(images)).reshape(count, 8)
        elif name != "nvjpegJpegStreamParseHeader":
            key = {"ComponentsNum": "components", "ExifOrientation": "turn", "Supported": "refused"}
            said = next(self.head[value] for end, value in key.items() if name.endswith(end))
            ctypes.c_int.from_address(arguments[-1]).value = said


JPEG = (1000, 50)
"""The address of a file in memory."""


@pytest.mark.parametrize(
    "changes", [{"wide": 31}, {"high": 19}, {"components": 4}, {"turn": 6}, {"refused": 1}, {"turn": 1}, {}]
)
def test_files_that_the_engines_take(changes: dict[str, int]) -> None:
    library = _NvJpeg()
    engines = JpegEngines(library, library, nvjpeg.RGB)
    library.head.update(changes)
    assert engines.takes(JPEG, SIZE) is (changes in ({}, {"turn": 1}))
    engines.close()
    engines.close()
    assert library.alive == 0


@pytest.mark.parametrize("name", ["JpegStreamParseHeader", "JpegStreamGetFrameDimensions", "DecodeBatchedSupported"])
def test_a_file_whose_head_nvjpeg_cannot_read(name: str) -> None:
    library = _NvJpeg(**{f"nvjpeg{name}": 3})
    assert not JpegEngines(library, library, nvjpeg.RGB).takes(JPEG, SIZE)


def test_files_and_rows_are_handed_to_nvjpeg() -> None:
    library = _NvJpeg()
    engines = JpegEngines(library, library, nvjpeg.BGR)
    files = [b"one file", b"an\0other"]
    spans = [(ctypes.cast(ctypes.c_char_p(file), ctypes.c_void_p).value or 0, len(file)) for file in files]
    assert engines.decode(spans, [1000, 2**40], 90, 77)
    assert (library.batch["files"], library.batch["order"], library.batch["stream"]) == (files, 6, 77)
    np.testing.assert_array_equal(
        library.batch["images"], [[1000, 0, 0, 0, 90, 0, 0, 0], [2**40, 0, 0, 0, 90, 0, 0, 0]]
    )
    library.status["nvjpegDecodeBatched"] = 3
    assert not engines.decode(spans, [1, 2], 90, 77)


def test_a_gpu_without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvjpegCreateEx", "nvjpegJpegStateCreate", "nvjpegJpegStreamCreate"):
        library = _NvJpeg(**{name: 7})
        monkeypatch.setattr(nvjpeg, "_library", lambda library=library: (library, library))
        with pytest.raises(RunError, match=f"{name} of nvJPEG failed with status 7"):
            JpegEngines(library, library, nvjpeg.RGB)
        assert library.alive == 0
        assert JpegEngines.here(nvjpeg.RGB) is None


@pytest.mark.hopper
def test_the_engines_write_pixels_near_libjpegs_and_bgr() -> None:
    cupy = pytest.importorskip("cupy")
    if (engines := JpegEngines.here(nvjpeg.BGR)) is None:
        pytest.skip("no nvJPEG here, or a GPU without JPEG engines")
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    files = []
    for k in range(9):
        held = io.BytesIO()
        image.fromarray(picture((375, 500), k)).save(held, "jpeg", quality=90)
        files.append(held.getvalue())
    memory = Contents()
    spans = memory.read([*files, b"no JPEG"], 1 << 20)
    assert [engines.takes(span, (375, 500)) for span in spans] == [True] * 9 + [False]
    assert not engines.takes(spans[0], (500, 375))
    feed, stream = cupy.zeros((9, 375, 500, 3), np.uint8), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    assert engines.decode(spans[:9], [feed.data.ptr + k * feed[0].nbytes for k in range(9)], 1500, stream.ptr)
    stream.synchronize()
    want = np.stack([decoded(file, ImageSpec()) for file in files])[..., ::-1].astype(int)
    assert np.abs(feed.get() - want).max() <= 3
    engines.close()
