"""Calibration data: batches of feeds from an ``.npz`` or ``.npy`` file, a folder of pictures, arrays, or a Python iterable.

Each source can be read several times, with one batch in memory at a time, and has a digest.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optdnn.calibration.images import ImageSpec, RawPictures, read_image
from optdnn.calibration.stored import StoredArray
from optdnn.errors import InputError, OutputError, UsageError
from optdnn.ranges import Profile
from optdnn.regular_file import check_regular
from optdnn.runtime.file.archive import check_archive
from optdnn.runtime.pictures.files import decoded, pictures_in
from optdnn.temporary import temporary_folder
from optdnn.types import Array, TensorSpec, is_float, is_int

Rows = Array | StoredArray
"""Samples along the first axis: in memory, mapped from a file, or read from a file."""
Pictures: TypeAlias = ImageSpec | RawPictures
"""How pictures become inputs: prepared outside of the network, or by the network itself."""
BATCH = 8
"""Samples per batch if the network's own batch is symbolic."""


class Batch(NamedTuple):
    """Samples per run, and the fewest that the network takes."""

    least: int
    size: int


def batch_of(
    inputs: Sequence[TensorSpec], profiles: Sequence[Profile], usual: int, given: Mapping[str, Sequence[int]]
) -> Batch:
    """The network's own batch, if it is fixed. Otherwise ``usual`` samples, within the range of the first profile that takes the
    other sizes of the samples. ``given``: by input, the shape of an array of samples (inputs may be left out)."""
    firsts = [s.shape[0] for s in inputs if s.shape]
    fixed = next((d for d in firsts if isinstance(d, int)), None)
    if fixed is not None:
        return Batch(fixed, fixed)
    others = [pair for s in inputs if s.name in given for pair in zip(s.shape[1:], given[s.name][1:], strict=True)]
    for profile in profiles:
        ranges = [profile[d] for d in firsts if isinstance(d, str) and d in profile]
        if ranges and all(size in profile[d] for d, size in others if isinstance(d, str) and d in profile):
            least = max(1, *(r.min for r in ranges))
            return Batch(least, max(least, min(usual, *(r.max for r in ranges))))
    return Batch(1, usual)


@dataclass
class CalibrationData:
    """Batches of feeds. Each call of ``batches()`` starts from the beginning. ``name`` is for messages; ``digest`` identifies the
    content."""

    name: str
    batches: Callable[[], Iterator[dict[str, Array]]]
    digest: str
    count: int | None = None
    """Number of batches, if known."""
    samples: int = 0
    """Number of samples in all batches, if the inputs begin with the batch."""
    keep: Any = None
    """An object that must live as long as this one."""


def open_data(
    source: Any, inputs: Sequence[TensorSpec], images: Pictures | None = None, profiles: Sequence[Profile] = ()
) -> CalibrationData:
    """Calibration data for a network with these inputs, in batches within the ranges of ``profiles``.

    ``source`` is one of these:

    - a path to an .npz (an array per input, samples along the first axis; further arrays are ignored), to an .npy (for a network
      of one input), or to a folder of pictures (``images`` describes how they are prepared);
    - an array, or a mapping of arrays, with the same meaning. Arrays of exactly the inputs' shapes without a common number of
      samples are one feed;
    - an iterable of feeds, or a function that returns one. A feed maps input names to arrays of the network's shapes, or is an
      array for the only input. An iterator is copied to temporary files.

    Raises UsageError for a source that cannot be read or is empty, InputError for a source that does not fit the inputs.
    """
    if not inputs:
        raise UsageError(
            "the network has no inputs: there is nothing to calibrate",
            hint="build it in fp32, or in 16 bits without --calib",
        )
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        return _of_folder(path, inputs, images, profiles) if path.is_dir() else _of_file(path, inputs, profiles)
    if isinstance(source, np.ndarray):
        return _of_arrays("the calibration array", {_only(inputs): source}, inputs, profiles)
    if isinstance(source, Mapping):
        arrays = {str(k): _array(v, f"the calibration arrays: {k!r}") for k, v in source.items()}
        return _of_arrays("the calibration arrays", arrays, inputs, profiles)
    if callable(source):
        return _of_iterable(source, inputs)
    if isinstance(source, Iterator):
        return _spooled(source, inputs)
    if isinstance(source, Iterable):
        return _of_iterable(lambda: source, inputs)
    raise UsageError(
        f"{type(source).__name__} is not calibration data",
        hint="give a file, a folder, arrays, or an iterable of feeds",
    )


def _only(inputs: Sequence[TensorSpec]) -> str:
    if len(inputs) != 1:
        raise UsageError(
            f"the network has {len(inputs)} inputs ({', '.join(s.name for s in inputs)}): calibration data needs an array for each",
            hint="write them with numpy.savez(FILE, NAME=…)",
        )
    return inputs[0].name


# ---------------------------------------------------------------- arrays


def _of_file(path: Path, inputs: Sequence[TensorSpec], profiles: Sequence[Profile]) -> CalibrationData:
    try:
        check_regular(path)
        found: Any = np.load(path, allow_pickle=False, mmap_mode="r" if path.suffix == ".npy" else None)
        if isinstance(found, np.ndarray):
            arrays: Mapping[str, Rows] = {_only(inputs): found}
        else:
            check_archive(path)
            with found:
                names = _names(path, found.files, inputs)
            arrays = {name: StoredArray(path, file) for name, file in names.items()}
    except FileNotFoundError:
        raise UsageError(f"there is no calibration data {path}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, UsageError):
            raise
        why = getattr(error, "strerror", None)
        raise UsageError(
            f"{path} is not a .npz or .npy file of plain arrays" + (f": {why}" if why else ""),
            hint="write it with numpy.savez, or give a folder of pictures",
        ) from None
    return _of_arrays(str(path), arrays, inputs, profiles)


def _names(path: Path, files: Sequence[str], inputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Input -> the array of the file for it: the array of its name, or the only array for the only input."""
    missing = [s.name for s in inputs if s.name not in files]
    if not missing:
        return {s.name: s.name for s in inputs}
    if len(inputs) == 1 and len(files) == 1:
        return {inputs[0].name: files[0]}
    raise UsageError(
        f"{path} has no array for input {missing[0]!r}; it has {', '.join(files) or 'none'}",
        hint="name the arrays as the network's inputs: numpy.savez(FILE, NAME=…)",
    )


def _of_arrays(
    name: str, arrays: Mapping[str, Rows], inputs: Sequence[TensorSpec], profiles: Sequence[Profile]
) -> CalibrationData:
    """Arrays with all samples along the first axis, in batches."""
    specs = {s.name: s for s in inputs}
    if missing := [n for n in specs if n not in arrays]:
        raise UsageError(
            f"{name}: there is no array for input {missing[0]!r}; there are {', '.join(map(repr, arrays)) or 'none'}",
            hint="name the arrays as the network's inputs",
        )
    used = {n: arrays[n] for n in specs}
    own = all(a.ndim and tuple(a.shape) == specs[n].shape for n, a in used.items())
    if own and len({len(a) for a in used.values()}) > 1:
        return _one_feed(name, used, inputs)
    for n, a in used.items():
        if len(specs[n].shape) == 0 or a.ndim != len(specs[n].shape):
            raise InputError(
                f"{name}: input {specs[n]}: the array has shape {list(a.shape)}",
                hint="give an iterable of feeds: a number has no axis of samples" if not specs[n].shape else None,
            )
    lengths = {len(a) for a in used.values()}
    if len(lengths) > 1:
        raise InputError(f"{name}: the arrays have different numbers of samples: {sorted(lengths)}")
    if not lengths.pop() or any(not a.size for a in used.values()):
        raise no_samples(name)
    if len({d for s in inputs if isinstance(d := s.shape[0], int)}) > 1:
        raise UsageError(
            f"{name}: the inputs have different first dimensions, so that samples cannot be cut from arrays",
            hint="give an iterable of feeds",
        )
    batch = batch_of(inputs, profiles, BATCH, {n: a.shape for n, a in used.items()})
    starts = _starts(name, len(used[inputs[0].name]), "samples", batch)

    def batches() -> Iterator[dict[str, Array]]:
        for k, start in enumerate(starts):
            yield checked({n: a[start : start + starts.step] for n, a in used.items()}, inputs, f"{name}, batch {k}")

    return CalibrationData(name, batches, _digest(used), len(starts), starts.stop)


def _one_feed(name: str, used: Mapping[str, Rows], inputs: Sequence[TensorSpec]) -> CalibrationData:
    """Arrays of the inputs' own shapes, without a common axis of samples: the nodes and the edges of a graph."""

    def batches() -> Iterator[dict[str, Array]]:
        yield checked({n: a[:] for n, a in used.items()}, inputs, name)

    return CalibrationData(name, batches, _digest(used), 1)


def _starts(name: str, count: int, what: str, batch: Batch) -> range:
    """The starts of batches in ``count`` samples: a range up to the samples used, in steps of a batch.

    Samples that do not fill the smallest batch are left out at the end. Raises InputError if all of them do not fill one.
    """
    size, rest = min(batch.size, max(count, 1)), count % batch.size
    if count < batch.least:
        raise InputError(
            f"{name} has {count} {what}, a batch of the network is {batch.least}",
            hint=f"give at least {batch.least} {what}",
        )
    return range(0, count - rest if rest < batch.least else count, size)


def _array(given: Any, what: str) -> Array:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:  # for example, rows of different lengths
        raise InputError(f"{what}, the given value is not an array: {error}") from None


def _digest(arrays: Mapping[str, Rows]) -> str:
    digest = hashlib.sha256()
    for name, a in sorted(arrays.items()):
        digest.update(f"{name} {a.dtype} {a.shape}".encode())
        for row in a if a.ndim else [a]:  # an array may be mapped from a file larger than memory
            digest.update(np.ascontiguousarray(row).tobytes())
    return digest.hexdigest()


def checked(feeds: Any, inputs: Sequence[TensorSpec], where: str) -> dict[str, Array]:
    """One batch in the form that the network expects. Raises InputError for a batch of another shape or type, or with NaN or
    infinity.

    Floating-point data of another width is converted; so is integer data for floating-point inputs.
    """
    if not isinstance(feeds, Mapping):
        if len(inputs) != 1:
            raise InputError(f"{where}: a batch must map the network's {len(inputs)} inputs to arrays")
        feeds = {inputs[0].name: feeds}
    if missing := [s.name for s in inputs if s.name not in feeds]:
        raise InputError(f"{where}: there is no array for input {missing[0]!r}")
    sizes: dict[str, int] = {}
    found = {}
    for s in inputs:
        what = f"{where}: input {s}"
        array = _array(feeds[s.name], what)
        if array.ndim != len(s.shape):
            raise InputError(f"{what}: the array has shape {list(array.shape)}")
        for d, n in zip(s.shape, array.shape, strict=True):
            if n != (d if isinstance(d, int) else sizes.setdefault(d, n)):
                raise InputError(f"{what}: the array has shape {list(array.shape)}")
        if not array.size:
            raise InputError(f"{what}: the array is empty")
        if is_float(s.dtype) and (is_float(array.dtype) or is_int(array.dtype)):
            with np.errstate(over="ignore"):  # values too large for the type are refused below
                array = array.astype(s.dtype, copy=False)
            wide = array if array.dtype.kind == "f" else array.astype(np.float32)
            if not np.isfinite(wide).all():
                raise InputError(f"{what}: the data holds NaN or infinity", hint="calibrate with finite data")
        elif is_int(s.dtype) and is_int(array.dtype):
            info = np.iinfo(s.dtype)
            if array.min() < info.min or array.max() > info.max:
                raise InputError(f"{what}: the data does not fit its type")
            array = array.astype(s.dtype, copy=False)
        elif array.dtype != s.dtype:
            raise InputError(f"{what}, the data is {array.dtype}")
        found[s.name] = array
    return found


# ---------------------------------------------------------------- folders and iterables


def _of_folder(
    path: Path, inputs: Sequence[TensorSpec], images: Pictures | None, profiles: Sequence[Profile]
) -> CalibrationData:
    files = pictures_in(path)
    name = _only(inputs)
    spec = ImageSpec() if images is None else images
    (declared,) = inputs
    if not declared.shape:
        raise InputError(f"{path}: input {declared} takes no pictures")
    starts = _starts(str(path), len(files), "pictures", batch_of(inputs, profiles, BATCH, {}))
    digest = hashlib.sha256(repr(spec).encode())
    for file in files:
        digest.update(str(file.relative_to(path)).encode() + file.read_bytes())

    def batches() -> Iterator[dict[str, Array]]:
        for start in starts:
            part = files[start : start + starts.step]
            pictures = (
                _raw(part, spec, declared) if isinstance(spec, RawPictures) else [read_image(p, spec) for p in part]
            )
            try:
                batch = checked({name: np.stack(pictures)}, inputs, f"{path}, pictures from {part[0].name} on")
            except InputError as error:
                if images is None:
                    error.hint = 'say how pictures are prepared: --images \'{"resize": 256, "crop": 224}\''
                raise
            yield batch

    return CalibrationData(str(path), batches, digest.hexdigest(), len(starts), starts.stop)


def _raw(files: Sequence[Path], given: RawPictures, declared: TensorSpec) -> list[Array]:
    """Pictures that the network itself prepares: of the size that it expects; if it accepts any size, of the first picture's
    size."""
    spec = given.specs.get(declared.name)
    if spec is None:
        raise UsageError(f"input {declared.name!r} takes no pictures: it has no preprocessing")
    high = 1 if spec.input.layout == "hwc" else 2
    fixed = [d if isinstance(d, int) else None for d in declared.shape[high : high + 2]]
    if None in fixed:
        own = decoded(files[0], spec).shape[high - 1 : high + 1]
        fixed = [a if b is None else b for a, b in zip(own, fixed, strict=True)]
    size = (int(fixed[0] or 0), int(fixed[1] or 0))
    return [decoded(p, spec, size) for p in files]


def _of_iterable(make: Callable[[], Any], inputs: Sequence[TensorSpec]) -> CalibrationData:
    def batches() -> Iterator[dict[str, Array]]:
        found = make()
        if not isinstance(found, Iterable):
            raise UsageError(
                f"the function that makes calibration data gave {type(found).__name__}",
                hint="it must give an iterable of feeds",
            )
        for k, feeds in enumerate(found):
            yield checked(feeds, inputs, f"calibration batch {k}")

    digest, count, samples = hashlib.sha256(), 0, 0
    for feeds in batches():
        digest.update(_digest(feeds).encode())
        count += 1
        samples += len(a) if (a := next(iter(feeds.values()))).ndim else 1
    if not count:
        raise no_samples("the calibration data")
    return CalibrationData("the calibration data", batches, digest.hexdigest(), count, samples)


def _spooled(source: Iterator[Any], inputs: Sequence[TensorSpec]) -> CalibrationData:
    """The batches of an iterator, which can be read only once, in temporary files."""
    folder = temporary_folder("optdnn-calibration-")
    count = 0

    def again() -> Iterator[dict[str, Array]]:
        for k in range(count):
            yield {s.name: np.load(Path(folder.name) / f"{k}-{i}.npy") for i, s in enumerate(inputs)}

    try:
        for k, feeds in enumerate(source):
            _keep(Path(folder.name), k, checked(feeds, inputs, f"calibration batch {k}"), inputs)
            count += 1
        found = _of_iterable(again, inputs)
    except BaseException:
        folder.cleanup()
        raise
    found.keep = folder
    return found


def no_samples(name: str) -> UsageError:
    """The error for calibration data without samples."""
    return UsageError(f"{name}: there are no samples", hint="calibration needs some dozens of typical samples")


def _keep(folder: Path, k: int, batch: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> None:
    try:
        for i, s in enumerate(inputs):
            np.save(folder / f"{k}-{i}.npy", batch[s.name])
    except OSError as error:
        raise OutputError(
            f"batch {k} of the calibration data cannot be kept in {folder}: {error.strerror or error}",
            hint="set TMPDIR to a folder with more space, or give the data as a file",
        ) from error
