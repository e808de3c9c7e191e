"""Pictures decoded by nvImageCodec (extra ``images-gpu``) and copied into the rows of an array on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optdnn.errors import MissingDependency
from optdnn.runtime.pictures.files import File, Size

DEVICE_TO_DEVICE = 3
"""cudaMemcpyDeviceToDevice."""


def library() -> Any:
    """nvImageCodec. Raises MissingDependency."""
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise MissingDependency("nvidia-nvimgcodec-cu13", "images-gpu", "to decode pictures on the GPU") from error
    return nvimgcodec


def installed() -> bool:
    try:
        return all(find_spec(name) is not None for name in ("nvidia.nvimgcodec", "cupy"))
    except ModuleNotFoundError:  # there is no package nvidia at all
        return False


class CodecDecoder:
    """A decoder of nvImageCodec with its stream, for one thread at a time. It is created on first use: that takes nearly a
    second."""

    def __init__(self, codec: Any, cupy: Any, stream: Any, threads: int, color: str):
        self.codec, self.cupy, self.stream, self.threads = codec, cupy, stream, threads
        order = codec.SampleFormat.I_BGR if color == "BGR" else codec.SampleFormat.I_RGB
        self.params = codec.DecodeParams(color_spec=codec.ColorSpec.SRGB, sample_format=order)
        self.decoder: Any = None
        self.images: Sequence[Any] = ()
        """The decoder's pictures. The next pictures are decoded into their memory."""

    def decode(self, files: Mapping[int, File], feed: Any) -> list[int]:
        """Decode ``files``, by row of ``feed``, and copy them there. Returns the filled rows.

        Files of other sizes, and files that nvImageCodec does not know, fill no row. Earlier work must be finished: the
        decoder's memory is overwritten.
        """
        size: Size = (feed.shape[1], feed.shape[2])
        codes = {k: code for k, file in files.items() if (code := self._code(file, size)) is not None}
        if not codes:
            return []
        if self.decoder is None:
            self.decoder = self.codec.Decoder(max_num_cpu_threads=self.threads)
        held = [image for image in self.images if image is not None]
        again = {"images": held} if len(held) == len(codes) else {}
        self.images = self.decoder.decode([*codes.values()], params=self.params, cuda_stream=self.stream.ptr, **again)
        pairs = zip(codes, self.images, strict=True)
        return [k for k, image in pairs if image is not None and self._copied(feed, k, image)]

    def _code(self, file: File, size: Size) -> Any:
        """The parsed header of a file; None if nvImageCodec does not know it, or if the picture has another size."""
        try:
            code = self.codec.CodeStream(str(file) if isinstance(file, Path) else file)
            return code if (code.height, code.width) == size else None  # parsed only here
        except RuntimeError:
            return None

    def _copied(self, feed: Any, k: int, image: Any) -> bool:
        """Copy a decoded picture to row ``k`` of ``feed`` if it has the row's size. Returns whether it has.

        The copy is on the stream that decoded it: CuPy's own conversion would wait for that stream. The row's address is computed
        here, because this runs for each picture."""
        table, (high, wide, channels) = image.__cuda_array_interface__, feed.shape[1:]
        if tuple(table["shape"]) != (high, wide, channels):
            return False
        if table.get("strides") in (None, (wide * channels, channels, 1)):
            nbytes = high * wide * channels
            source, target = table["data"][0], feed.data.ptr + k * nbytes
            self.cupy.cuda.runtime.memcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, self.stream.ptr)
        else:
            with self.stream:
                feed[k][...] = self.cupy.asarray(image)
        return True
