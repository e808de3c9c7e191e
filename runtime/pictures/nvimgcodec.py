"""Pictures decoded on the GPU by nvImageCodec, straight into the memory that an engine reads. Needs the extra ``images-gpu``.

Slots hold a batch each. While the engine runs one slot on its stream, decoders fill the next ones, each on a stream and in a thread
of its own; events say when a slot is full and when it is free again. Another thread reads the heads of the files behind them. The
host waits only for the results.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency, UsageError
from optdnn.runtime.contexts.dlpack import import_cupy, on_gpu
from optdnn.runtime.engine import Engine
from optdnn.runtime.pictures.files import File, Placement, Size, placed
from optdnn.runtime.pictures.port import PicturePort
from optdnn.types import Array

DECODERS = 2
"""Decoders that work at once: one leaves the GPU's JPEG engines idle between its batches."""
SLOTS = 2 * DECODERS
"""A multiple of the decoders: a slot's pictures stay with the decoder that made them."""
HEADS_AHEAD = 2
"""Batches whose files are opened before they are decoded."""
DEVICE_TO_DEVICE = 3
"""cudaMemcpyDeviceToDevice."""


def _codec() -> Any:
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise MissingDependency("nvidia-nvimgcodec-cu13", "images-gpu", "to decode pictures on the GPU") from error
    return nvimgcodec


_idle: dict[int, list[Any]] = {}
"""Decoders that nobody uses, by GPU: to make one takes nearly a second. One serves one stream of pictures at a time."""


@contextmanager
def _decoder(codec: Any, device: int) -> Iterator[Any]:
    """A decoder of the library for this GPU, which is kept for the next one who asks."""
    waiting = _idle.setdefault(device, []) if codec is sys.modules.get("nvidia.nvimgcodec") else []
    cores = os.cpu_count() or 1
    decoder = waiting.pop() if waiting else codec.Decoder(max_num_cpu_threads=max(1, cores // DECODERS))
    yield decoder
    waiting.append(decoder)


def _installed() -> bool:
    try:
        return all(find_spec(name) is not None for name in ("nvidia.nvimgcodec", "cupy"))
    except ModuleNotFoundError:  # there is no package nvidia at all
        return False


def _why_not(port: PicturePort) -> str | None:
    """Why the decoder cannot write what the port takes, or None."""
    given, dims = port.spec.input, port.tensor.shape
    if (given.layout, given.dtype) != ("hwc", "uint8") or given.color == "L":
        return f"it gives color pictures in hwc and uint8, the engine takes {given.color} in {given.layout} and {given.dtype}"
    if any(not isinstance(d, int) for d in dims):
        return f"the engine takes pictures of several sizes or numbers: {port.tensor}"
    return None


@dataclass
class _Slot:
    """Memory of one batch and of its results, on the GPU."""

    feed: Any
    images: Sequence[Any] = ()
    """The decoder's pictures, which are copied to ``feed``. The next batch is decoded into their memory."""
    free: Any = None
    """The event behind the run that read ``feed`` last."""
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Running:
    """A batch whose run is under way."""

    names: list[str]
    places: list[Placement]
    results: Mapping[str, Any]
    done: Any


@dataclass(frozen=True)
class _Line:
    """One decoder, with its stream and its thread."""

    decoder: Any
    stream: Any
    thread: ThreadPoolExecutor


def _threads(what: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"optdnn-{what}")


class GpuPictures:
    """Runs of an engine on pictures that the GPU decodes. ``by_cpu`` counts those that the CPU had to decode: those of another
    size than the engine's, and those that nvImageCodec does not know."""

    def __init__(self, engine: Engine, port: PicturePort, codec: Any = None, cupy: Any = None):
        """``codec`` and ``cupy`` are the libraries. Raises MissingDependency for one that is missing, UsageError for an engine
        whose input it cannot write."""
        if (reason := _why_not(port)) is not None:
            raise UsageError(f"nvImageCodec does not decode for this engine: {reason}", hint="decoder='cpu'")
        self.context = engine.context()
        if not self.context.takes_device_arrays:
            raise UsageError("pictures are decoded on the GPU for engines that run there, which this one does not")
        self.codec = _codec() if codec is None else codec
        self.cupy = import_cupy("to decode pictures on the GPU") if cupy is None else cupy
        self.port, self.by_cpu = port, 0
        order = self.codec.SampleFormat.I_BGR if port.spec.input.color == "BGR" else self.codec.SampleFormat.I_RGB
        self.params = self.codec.DecodeParams(color_spec=self.codec.ColorSpec.SRGB, sample_format=order)

    @staticmethod
    def usable(engine: Engine, port: PicturePort) -> bool:
        """Whether pictures for this engine can be decoded on the GPU here."""
        return _installed() and _why_not(port) is None and engine.context().takes_device_arrays

    def runs(
        self, files: Sequence[File], batch: int
    ) -> Iterator[tuple[list[str], Mapping[str, Array], list[Placement]]]:
        """Names, results and places of batch after batch."""
        cupy = self.cupy
        decoding = [cupy.cuda.Stream(non_blocking=True) for _ in range(DECODERS)]
        slots = [_Slot(cupy.empty(self.port.tensor.shape, np.uint8)) for _ in range(SLOTS)]
        device = cupy.cuda.runtime.getDevice()
        try:
            with ExitStack() as kept:
                lines = [
                    _Line(kept.enter_context(_decoder(self.codec, device)), s, kept.enter_context(_threads("decode")))
                    for s in decoding
                ]
                yield from self._batches(files, batch, slots, lines, cupy.cuda.Stream(non_blocking=True))
        finally:  # a decoder's pictures free their memory on its stream: they must go before the stream does
            for stream in decoding:
                stream.synchronize()
            for slot in slots:
                slot.images = ()

    def _batches(
        self, files: Sequence[File], batch: int, slots: Sequence[_Slot], lines: Sequence[_Line], running: Any
    ) -> Iterator[tuple[list[str], Mapping[str, Array], list[Placement]]]:
        """What ``runs`` gives, by slots of memory, by decoders and by the stream that runs."""
        parts = [files[start : start + batch] for start in range(0, len(files), batch)]
        before: _Running | None = None
        with _threads("heads") as reading:
            heads = deque(reading.submit(self._heads, part) for part in parts[:HEADS_AHEAD])

            def fill(k: int) -> Future[tuple[list[Placement], Any]]:
                codes, line = heads.popleft(), lines[k % DECODERS]
                if k + HEADS_AHEAD < len(parts):
                    heads.append(reading.submit(self._heads, parts[k + HEADS_AHEAD]))
                return line.thread.submit(lambda: self._fill(slots[k % SLOTS], parts[k], codes.result(), line))

            ahead = deque(fill(k) for k in range(min(SLOTS, len(parts))))
            for k, part in enumerate(parts):
                slot, (places, full) = slots[k % SLOTS], ahead.popleft().result()
                running.wait_event(full)
                results = self.context.run({self.port.name: slot.feed}, out=slot.outputs, stream=running)
                slot.outputs = {n: a for n, a in results.items() if on_gpu(a)}  # the others' sizes depend on data
                slot.free = running.record()
                if k + SLOTS < len(parts):
                    ahead.append(fill(k + SLOTS))
                names = [str(f) if isinstance(f, Path) else f"picture {k * batch + i}" for i, f in enumerate(part)]
                if before is not None:
                    yield self._finished(before)
                before = _Running(names, places, results, slot.free)
        if before is not None:
            yield self._finished(before)

    def _finished(self, run: _Running) -> tuple[list[str], Mapping[str, Array], list[Placement]]:
        run.done.synchronize()
        return run.names, {n: self.cupy.asnumpy(a) if on_gpu(a) else a for n, a in run.results.items()}, run.places

    def _heads(self, files: Sequence[File]) -> dict[int, Any]:
        """The parsed heads of the files that nvImageCodec knows and whose pictures have the engine's size, by their number."""
        size: Size = tuple(self.port.tensor.shape[1:3])  # type: ignore[assignment]
        return {k: code for k, file in enumerate(files) if (code := self._code(file, size)) is not None}

    def _fill(
        self, slot: _Slot, files: Sequence[File], codes: Mapping[int, Any], line: _Line
    ) -> tuple[list[Placement], Any]:
        """Decode pictures into the rows of the slot; rows beyond them keep what they hold. ``codes`` is of :meth:`_heads`.

        Returns where the pictures lie in the rows, and the event behind the last one."""
        stream = line.stream
        if slot.free is not None:
            stream.wait_event(slot.free)
        size: Size = (slot.feed.shape[1], slot.feed.shape[2])
        images = self._decoded([*codes.values()], slot, line) if codes else []
        decoded, slot.images = dict(zip(codes, images, strict=True)), images
        whole, places = Placement(size), []
        with stream:
            for k, file in enumerate(files):
                image = decoded.get(k)
                if image is not None and self._copied(slot.feed, k, image, stream):
                    places.append(whole)
                    continue
                self.by_cpu += 1
                array, place = placed(file, self.port.spec, size)
                slot.feed[k].set(array)
                places.append(place)
        return places, stream.record()

    def _decoded(self, codes: Sequence[Any], slot: _Slot, line: _Line) -> Sequence[Any]:
        """Pictures of the decoder, in the memory of the slot's last ones where there were as many."""
        held = [image for image in slot.images if image is not None]
        again = {"images": held} if len(held) == len(codes) else {}
        found: Sequence[Any] = line.decoder.decode(codes, params=self.params, cuda_stream=line.stream.ptr, **again)
        return found

    def _copied(self, feed: Any, k: int, image: Any, stream: Any) -> bool:
        """Whether a decoded picture has the size of row ``k`` of ``feed``, where it is copied then.

        The copy is on the stream that decoded it: CuPy's own conversion would wait for that stream. The row's address is computed
        here, since this runs for each picture."""
        table, (high, wide, channels) = image.__cuda_array_interface__, feed.shape[1:]
        if tuple(table["shape"]) != (high, wide, channels):
            return False
        if table.get("strides") in (None, (wide * channels, channels, 1)):
            nbytes = high * wide * channels
            source, target = table["data"][0], feed.data.ptr + k * nbytes
            self.cupy.cuda.runtime.memcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, stream.ptr)
        else:
            feed[k][...] = self.cupy.asarray(image)
        return True

    def _code(self, file: File, size: Size) -> Any:
        """The parsed head of a file; None where nvImageCodec does not know it, or where the picture has another size."""
        try:
            code = self.codec.CodeStream(str(file) if isinstance(file, Path) else file)
            return code if (code.height, code.width) == size else None  # parsed only here
        except RuntimeError:
            return None
