"""Pictures through an engine: files are decoded in threads while the engine runs the previous batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.answer_spec import CLASSES, AnswerSpec
from optdnn.errors import UsageError
from optdnn.runtime.engine import Engine
from optdnn.runtime.pictures.files import File, Placement, pictures_in, placed
from optdnn.runtime.pictures.on_gpu import GpuPictures, gpu_runs
from optdnn.runtime.pictures.port import PicturePort
from optdnn.types import Array

SHOWN = 5
"""Number of classes that are shown for a picture if the engine returns all classes."""
DECODERS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class PictureAnswer:
    """The answer of an engine for one picture: ``name`` (its path), and this picture's part of each output. ``answers`` is the
    postprocessing of the outputs."""

    name: str
    outputs: Mapping[str, Array]
    answers: Mapping[str, AnswerSpec] = field(default_factory=dict, repr=False)

    @cached_property
    def best(self) -> Sequence[tuple[str, float]]:
        """The most likely classes with their values, the largest first; empty if no output has classes."""
        return best_classes(self.outputs, self.answers)


def picture_answers(
    engine: Engine,
    pictures: str | os.PathLike[str] | Iterable[File | str],
    *,
    batch: int | None = None,
    workers: int | None = None,
    decoder: str = "auto",
) -> Iterator[PictureAnswer]:
    """The answers of an engine that takes pictures (``optdnn.build(..., preprocess=...)``), in the order of the pictures.

    ``pictures`` is a file, a folder, or paths and bytes of files (JPEG, PNG and the like). They are decoded in ``workers`` threads
    (default: a thread per core) while the engine runs the previous batch; ``batch`` is the number of pictures per call if the
    engine accepts any number. A picture of another size is converted to the engine's size on the CPU. ``decoder`` is "cpu"
    (Pillow, extra ``images``), "gpu" (nvJPEG and nvImageCodec, extra ``images-gpu``, for engines on GPUs) or "auto": gpu if
    they are installed and can decode for this engine.

    Raises UsageError for an engine that takes no pictures, InputError for a file that is not a picture, MissingDependency for a
    missing extra.
    """
    port = PicturePort.of(engine)
    if decoder not in DECODERS:
        raise UsageError(f"decoder {decoder!r} is not one of {', '.join(DECODERS)}")
    if batch is not None and (batch < 1 or port.batch not in (None, batch)):
        raise UsageError(f"batch {batch} does not fit the engine, which takes {port.batch or 'any number'} at a time")
    if workers is not None and workers < 1:
        raise UsageError(f"workers {workers} is not a positive number of threads")
    files = _files(pictures)
    if decoder == "gpu" or (decoder == "auto" and GpuPictures.usable(engine, port)):
        runs = gpu_runs(engine, port, files, batch or port.usual_batch)
    else:
        runs = _host_runs(engine, port, files, batch or port.usual_batch, workers)
    for names, results, places in runs:
        for k, (name, place) in enumerate(zip(names, places, strict=True)):
            outputs = {
                n: _whole_picture(a[k] if a.ndim and len(a) >= len(names) else a, port.answers.get(n), place)
                for n, a in results.items()
            }
            yield PictureAnswer(name, outputs, port.answers)


def _files(pictures: str | os.PathLike[str] | Iterable[File | str]) -> list[File]:
    if isinstance(pictures, (str, os.PathLike)):
        path = Path(pictures)
        return list(pictures_in(path)) if path.is_dir() else [path]
    if isinstance(pictures, bytes):
        return [pictures]
    return [p if isinstance(p, (bytes, Path)) else Path(p) for p in pictures]


def name_of(file: File, number: int) -> str:
    return str(file) if isinstance(file, Path) else f"picture {number}"


Run = tuple[list[str], Mapping[str, Array], list[Placement]]
"""Names of pictures, the outputs for them, and the place of each in the engine's picture."""


def _host_runs(
    engine: Engine, port: PicturePort, files: Sequence[File], batch: int, workers: int | None
) -> Iterator[Run]:
    """Runs of batches with pictures decoded on the CPU. If sizes differ, consecutive pictures of the same size form a
    batch."""
    threads = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(threads, thread_name_prefix="optdnn-decode") as pool:
        held: list[tuple[str, Array, Placement]] = []
        for name, (array, place) in _ahead(pool, port, files, 2 * batch + threads):
            if held and (len(held) == batch or held[0][1].shape != array.shape):
                yield _run(engine, port, held)
                held = []
            held.append((name, array, place))
        if held:
            yield _run(engine, port, held)


def _ahead(
    pool: ThreadPoolExecutor, port: PicturePort, files: Sequence[File], ahead: int
) -> Iterator[tuple[str, tuple[Array, Placement]]]:
    """The pictures in order; up to ``ahead`` of them are being decoded or waiting."""
    waiting: deque[tuple[str, Future[tuple[Array, Placement]]]] = deque()
    try:
        for number, file in enumerate(files):
            waiting.append((name_of(file, number), pool.submit(placed, file, port.spec, port.size_for)))
            if len(waiting) >= ahead:
                name, found = waiting.popleft()
                yield name, found.result()
        while waiting:
            name, found = waiting.popleft()
            yield name, found.result()
    finally:
        for _, found in waiting:
            found.cancel()


def _run(engine: Engine, port: PicturePort, held: Sequence[tuple[str, Array, Placement]]) -> Run:
    """One batch, padded with copies of its last picture if the engine takes a fixed number."""
    arrays = [array for _, array, _ in held]
    arrays += arrays[-1:] * ((port.batch or len(arrays)) - len(arrays))
    results = engine.run({port.name: np.stack(arrays)})
    return [name for name, _, _ in held], results, [place for _, _, place in held]


# ---------------------------------------------------------------- answers


def best_classes(outputs: Mapping[str, Array], answers: Mapping[str, AnswerSpec]) -> list[tuple[str, float]]:
    """The most likely classes of one picture, from the first output with a value for each class (or for the best classes)."""
    for name, array in outputs.items():
        spec = answers.get(name)
        if array.ndim != 1 or array.dtype.kind != "f" or (spec is not None and spec.boxes):
            continue
        labels: Any = () if spec is None else spec.labels or ()
        places = outputs.get(name + CLASSES) if spec is not None and spec.top_k else None
        numbers = array.astype(np.float64)
        order = np.arange(len(numbers)) if places is not None else np.argsort(-numbers, kind="stable")[:SHOWN]
        found = [(int(i if places is None else places[i]), float(numbers[i])) for i in order]
        return [(labels[c] if c < len(labels) else f"class {c}", number) for c, number in found]
    return []


def _whole_picture(array: Array, spec: AnswerSpec | None, place: Placement) -> Array:
    """Boxes in the engine's picture converted to boxes in the original picture."""
    if spec is None or spec.boxes is None or place == Placement(place.size):
        return array
    order = (0, 1) if spec.boxes == "yxyx" else (1, 0)
    scale, offset, size = (
        np.array([v[i] for i in order], array.dtype) for v in (place.scale, place.offset, place.size)
    )
    first, second = array[..., :2], array[..., 2:]
    first = (first - offset) / scale
    if spec.boxes in ("xyxy", "yxyx"):
        second = np.clip((second - offset) / scale, 0, size)
        first = np.clip(first, 0, size)
    else:
        second = second / scale
    return np.concatenate([first, second], axis=-1).astype(array.dtype)
