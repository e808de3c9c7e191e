"""Pictures decoded on the GPU into the memory that an engine reads, while the engine runs the previous batch.

Each slot holds a batch. Several lines decode concurrently, each in a thread and on a separate stream. A free line takes the next
batch and reads the files. The GPU's JPEG engines decode the files that they support, nvImageCodec others, and the CPU the rest.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Semaphore
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.contexts.dlpack import import_cupy, on_gpu
from optdnn.runtime.engine import Engine
from optdnn.runtime.pictures import nvimgcodec, nvjpeg
from optdnn.runtime.pictures.contents import METADATA, Contents, Span
from optdnn.runtime.pictures.files import File, Placement, Size, placed
from optdnn.runtime.pictures.jpeg import only_for_libjpeg
from optdnn.runtime.pictures.nvimgcodec import CodecDecoder
from optdnn.runtime.pictures.nvjpeg import JpegEngines
from optdnn.runtime.pictures.port import PicturePort
from optdnn.types import Array

LINES = 3
"""Batches that are read or decoded concurrently. A single line leaves the GPU's JPEG engines idle while its files are read."""
DECODING = 2
"""Batches that the JPEG engines get concurrently."""
PATIENCE = 0.02
"""Seconds that a line waits for another line that reads files."""
SLOTS = LINES + 3
"""Batches in memory: those being decoded, one that is full, one that runs, and one whose results are copied."""


Run = tuple[list[str], Mapping[str, Array], list[Placement]]
"""Names of pictures, the outputs for them, and the place of each in the engine's picture."""


@dataclass
class _Line:
    """The resources to decode one batch at a time."""

    stream: Any
    done: Any
    """The event after the last work of the stream."""
    engines: JpegEngines | None
    codec: CodecDecoder
    contents: Contents = field(default_factory=Contents)

    def wait(self) -> None:
        self.done.record(self.stream)
        self.done.synchronize()


_idle: dict[tuple[int, str], list[_Line]] = {}
"""Unused lines, by GPU and order of colors: creating one takes some tenths of a second."""


@dataclass
class _Slot:
    """Memory of one batch and of its results, on the GPU."""

    feed: Any
    free: Any = None
    """The event after the run that read ``feed`` last."""
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Running:
    """A batch with its run in flight."""

    names: list[str]
    places: list[Placement]
    results: Mapping[str, Any]
    done: Any


def _why_not(port: PicturePort) -> str | None:
    """Why the decoders cannot write the port's format, or None."""
    given, dims = port.spec.input, port.tensor.shape
    if (given.layout, given.dtype) != ("hwc", "uint8") or given.color == "L":
        return f"it gives color pictures in hwc and uint8, the engine takes {given.color} in {given.layout} and {given.dtype}"
    if any(not isinstance(d, int) for d in dims):
        return f"the engine takes pictures of several sizes or numbers: {port.tensor}"
    return None


class GpuPictures:
    """Runs of an engine on pictures that the GPU decodes. ``by_cpu`` counts the pictures that the CPU had to decode: pictures of
    another size than the engine's, and those that nvImageCodec does not know."""

    def __init__(
        self, engine: Engine, port: PicturePort, codec: Any = None, cupy: Any = None, engines: Any = JpegEngines
    ):
        """``codec`` and ``cupy`` are the libraries, ``engines`` creates the JPEG engines. Raises MissingDependency for a missing
        library, UsageError for an engine with an input that they cannot write."""
        if (reason := _why_not(port)) is not None:
            raise UsageError(f"the GPU does not decode for this engine: {reason}", hint="decoder='cpu'")
        self.context = engine.context()
        if not self.context.takes_device_arrays:
            raise UsageError("pictures are decoded on the GPU for engines that run there, which this one does not")
        self.idle = _idle if codec is None else {}
        self.codec = nvimgcodec.library() if codec is None else codec
        self.cupy = import_cupy("to decode pictures on the GPU") if cupy is None else cupy
        self.engines, self.port, self.by_cpu = engines, port, 0
        self.program, self.slots = engine.program, list[_Slot]()
        self.reading, self.decoding = Lock(), Semaphore(DECODING)

    @staticmethod
    def usable(engine: Engine, port: PicturePort) -> bool:
        """Whether pictures for this engine can be decoded on this machine's GPU."""
        if not nvimgcodec.installed() or _why_not(port) is not None:
            return False
        return engine in _ready or engine.context().takes_device_arrays

    @contextmanager
    def _line(self, device: int) -> Iterator[_Line]:
        """A line on this GPU; it is kept for later use."""
        color = self.port.spec.input.color
        waiting = self.idle.setdefault((device, color), [])
        line = waiting.pop() if waiting else self._new_line(color)
        try:
            yield line
        except BaseException:
            line.stream.synchronize()
            if line.engines is not None:
                line.engines.close()
            raise
        finally:
            line.stream.synchronize()
            line.codec.images = ()  # their memory
        waiting.append(line)

    def _new_line(self, color: str) -> _Line:
        cuda = self.cupy.cuda
        stream, threads = cuda.Stream(non_blocking=True), max(1, (os.cpu_count() or 1) // LINES)
        engines = self.engines.here(nvjpeg.BGR if color == "BGR" else nvjpeg.RGB)
        return _Line(stream, self._event(), engines, CodecDecoder(self.codec, self.cupy, stream, threads, color))

    def _event(self) -> Any:
        """An event. A thread that waits for it yields its core."""
        return self.cupy.cuda.Event(block=True, disable_timing=True)

    def runs(self, files: Sequence[File], batch: int) -> Iterator[Run]:
        """Names, results and places of the batches, in order."""
        cupy = self.cupy
        device = cupy.cuda.runtime.getDevice()
        parts = [files[start : start + batch] for start in range(0, len(files), batch)]
        self.slots += [_Slot(cupy.empty(self.port.tensor.shape, np.uint8)) for _ in parts[len(self.slots) : SLOTS]]
        with ExitStack() as kept:
            lines: SimpleQueue[_Line] = SimpleQueue()
            for _ in parts[:LINES]:
                lines.put(kept.enter_context(self._line(device)))
            pool = ThreadPoolExecutor(LINES, "optdnn-decode", initializer=lambda: cupy.cuda.Device(device).use())
            kept.callback(lambda: pool.shutdown(cancel_futures=True))
            yield from self._batches(parts, self.slots, lines, pool)

    def _batches(
        self,
        parts: Sequence[Sequence[File]],
        slots: Sequence[_Slot],
        lines: SimpleQueue[_Line],
        pool: ThreadPoolExecutor,
    ) -> Iterator[Run]:
        """The generator behind ``runs``, given the files of each batch, slots of memory, free lines and their threads."""
        running = self.cupy.cuda.Stream(non_blocking=True)
        before: _Running | None = None

        def fill(k: int) -> Future[tuple[list[Placement], int]]:
            return pool.submit(self._filled, slots[k % SLOTS], parts[k], lines)

        ahead = deque(fill(k) for k in range(min(SLOTS, len(parts))))
        for k, part in enumerate(parts):
            slot, (places, by_cpu) = slots[k % SLOTS], ahead.popleft().result()
            self.by_cpu += by_cpu
            results = self.context.run({self.port.name: slot.feed}, out=slot.outputs, stream=running)
            slot.outputs = {n: a for n, a in results.items() if on_gpu(a)}  # sizes of the others depend on data
            slot.free = running.record(self._event())
            if k + SLOTS < len(parts):
                ahead.append(fill(k + SLOTS))
            first = k * len(parts[0])
            names = [str(f) if isinstance(f, Path) else f"picture {first + i}" for i, f in enumerate(part)]
            if before is not None:
                yield self._finished(before)
            before = _Running(names, places, results, slot.free)
        if before is not None:
            yield self._finished(before)

    def _finished(self, run: _Running) -> Run:
        run.done.synchronize()
        return run.names, {n: self.cupy.asnumpy(a) if on_gpu(a) else a for n, a in run.results.items()}, run.places

    def _filled(self, slot: _Slot, files: Sequence[File], lines: SimpleQueue[_Line]) -> tuple[list[Placement], int]:
        """:meth:`_fill` with a free line."""
        line = lines.get()
        try:
            return self._fill(slot, files, line)
        finally:
            lines.put(line)

    def _fill(self, slot: _Slot, files: Sequence[File], line: _Line) -> tuple[list[Placement], int]:
        """Decode pictures into the rows of the slot; rows beyond them keep their contents.

        Returns, once the pictures are stored, their places in the rows, and the number that the CPU decoded."""
        size: Size = (slot.feed.shape[1], slot.feed.shape[2])
        places, left = [Placement(size)] * len(files), dict(enumerate(files))
        spans = self._read(files, size, line)
        others = {k for k, span in enumerate(spans) if only_for_libjpeg(line.contents.of(span))}
        if slot.free is not None:
            slot.free.synchronize()
        for k in self._by_engines({k: span for k, span in enumerate(spans) if k not in others}, slot.feed, line):
            del left[k]
        if not left:
            return places, 0
        for k in line.codec.decode({k: file for k, file in left.items() if k not in others}, slot.feed):
            del left[k]
        with line.stream:
            for k, file in left.items():
                array, places[k] = placed(file, self.port.spec, size)
                slot.feed[k].set(array)
        line.wait()
        return places, len(left)

    def _read(self, files: Sequence[File], size: Size, line: _Line) -> list[Span]:
        """Read files into the line's memory.

        One line reads at a time: threads that read concurrently mostly wait for Python's lock. No line waits long for another, so
        several read concurrently from slow storage."""
        alone = self.reading.acquire(timeout=PATIENCE)
        try:
            return line.contents.read(files, 2 * size[0] * size[1] * 3 + METADATA)
        finally:
            if alone:
                self.reading.release()

    def _by_engines(self, spans: Mapping[int, Span], feed: Any, line: _Line) -> list[int]:
        """Make the JPEG engines decode the files that they support, by row of ``feed``. Returns the rows that they filled."""
        engines, (high, wide, channels) = line.engines, feed.shape[1:]
        if engines is None:
            return []
        taken = {k: span for k, span in spans.items() if engines.takes(span, (high, wide))}
        rows = [feed.data.ptr + k * high * wide * channels for k in taken]
        if not taken:
            return []
        with self.decoding:
            begun = engines.decode([*taken.values()], rows, wide * channels, line.stream.ptr)
            line.wait()  # the engines read the files' contents until then
        return [*taken] if begun else []


_ready: WeakKeyDictionary[Engine, deque[GpuPictures]] = WeakKeyDictionary()
"""Unused objects, by engine: creating one, with its context, graphs and memory, takes some hundredths of a second."""


def gpu_runs(engine: Engine, port: PicturePort, files: Sequence[File], batch: int) -> Iterator[Run]:
    """:meth:`GpuPictures.runs`, with the object of an earlier call if there is one."""
    ready, found = _ready.get(engine, deque()), None
    while found is None or found.program is not engine.program:  # a refit has changed the engine meanwhile
        try:
            found = ready.pop()
        except IndexError:
            found = GpuPictures(engine, port)
            break
    yield from found.runs(files, batch)
    _ready.setdefault(engine, ready).append(found)  # not after an error: a run may still be in flight
