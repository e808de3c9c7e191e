"""Reading and writing arrays as ``.npy`` and ``.npz``. Files hold bfloat16 and 8-bit floats as raw bytes of the same size."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from optdnn.cli.common import parse_sizes, remark, shape_text
from optdnn.errors import InputError, RunError, UsageError
from optdnn.regular_file import check_regular
from optdnn.runtime.file.archive import check_archive
from optdnn.runtime.file.atomic import write_atomic
from optdnn.types import Array, TensorSpec

_BROKEN = (OSError, ValueError, EOFError, KeyError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""The errors that NumPy and zipfile raise for a broken file."""


def read_inputs(texts: Sequence[str], *, bare: bool = False) -> dict[str, Array]:
    """The arrays of ``--input`` options: "NAME=FILE.npy", "FILE.npz", "NAME=FILE.npz". Raises UsageError or InputError.

    Each array of an .npz is for the input of its name. NAME=FILE.npz takes only the array NAME, or the file's only array.
    ``bare`` also accepts one FILE.npy without NAME, under the name "" (:func:`typed` finds the input).
    """
    feeds: dict[str, Array] = {}
    for text in texts:
        name, _, file = text.rpartition("=")
        arrays = _load(Path(file))
        if "" in arrays:
            if not name and not bare:
                raise UsageError(f"--input {text!r} needs the input's name: NAME={file}")
            arrays = {name: arrays[""]}
        elif name:
            arrays = {name: _one_of(arrays, name, text)}
        for key, array in arrays.items():
            if key in feeds:
                raise UsageError(f"input {key!r} is given twice")
            feeds[key] = array
    return feeds


def _one_of(arrays: Mapping[str, Array], name: str, text: str) -> Array:
    if name in arrays:
        return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UsageError(f"--input {text!r}: the file has no array {name!r}; it has {', '.join(arrays) or 'none'}")


def _load(path: Path) -> dict[str, Array]:
    """Name -> array of an .npz. The array of an .npy has the name ""."""
    try:
        check_regular(path)
        data: Any = np.load(path, allow_pickle=False)
        if isinstance(data, np.ndarray):
            return {"": data}
        check_archive(path)
        with data:
            return {key: data[key] for key in data.files}
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except _BROKEN as error:
        # NumPy takes unknown files for pickles, and advises to allow pickles: its text must not reach the user.
        why = "" if "pickle" in str(error) else f": {error}"
        raise InputError(
            f"{path} is not a .npy or .npz file of plain arrays{why}", hint="write it with numpy.save or numpy.savez"
        ) from None


def typed(feeds: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """``feeds``, with raw bytes viewed as the dtype of their input, if that has the same size.

    An array without a name is for the only input. Raises UsageError if there are several inputs.
    """
    if "" in feeds and len(inputs) != 1:
        raise UsageError(
            f"a file of --input needs the input's name: NAME=FILE.npy; the inputs are {', '.join(s.name for s in inputs)}"
        )
    if "" in feeds and inputs[0].name in feeds:
        raise UsageError(f"input {inputs[0].name!r} is given twice")
    feeds = {name or inputs[0].name: a for name, a in feeds.items()}
    dtypes = {s.name: s.dtype for s in inputs}
    return {
        name: a.view(dtypes[name]) if a.dtype.kind == "V" and a.dtype.itemsize == _size(dtypes.get(name)) else a
        for name, a in feeds.items()
    }


def feeds_of(
    engine: Any, inputs: Sequence[str], sizes: Sequence[str], seed: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """The inputs for ``--input`` and ``--size``, and the names of the random ones.

    Inputs that are not given are random, and a remark names them. Raises UsageError for a size that an array contradicts."""
    from optdnn.runtime.contexts.feeds import random_feeds

    specs: Sequence[TensorSpec] = engine.inputs
    given = typed(read_inputs(inputs, bare=True), specs)
    asked = parse_sizes(sizes)
    for spec in (s for s in specs if s.name in given):
        for d, n in zip(spec.shape, given[spec.name].shape, strict=False):
            if isinstance(d, str) and asked.get(d, n) != n:
                raise UsageError(f"--size {d}={asked[d]}: input {spec.name!r} has {d} = {n}", hint="leave --size out")
    missing = [s for s in specs if s.name not in given]
    if given.keys() - {s.name for s in specs}:  # the run reports the error
        return given, []
    made = random_feeds(
        specs, seed=seed, sizes=asked, profiles=engine.profiles, given=given, typical=engine.meta.get("sizes")
    )
    if missing:
        shown = (f"{s.name}: {shape_text(s.dtype, made[s.name].shape)}" for s in missing)
        remark(f"random inputs (seed {seed}): {', '.join(shown)}")
    return {**made, **given}, [s.name for s in missing]


@contextmanager
def on_random(names: Sequence[str]) -> Iterator[None]:
    """Add a hint to the error of a run: the inputs with these names are random, and may be the reason."""
    try:
        yield
    except RunError as error:
        if names and error.hint is None:
            error.hint = f"the random inputs ({', '.join(names)}) may not fit the network: give --input NAME=FILE"
        raise


def _size(dtype: np.dtype[Any] | None) -> int:
    return 0 if dtype is None else dtype.itemsize


OTHER_FORMS = frozenset({".bin", ".csv", ".json", ".pb", ".pt", ".raw", ".txt"})
"""Endings that promise another form than .npz."""


def check_kind(path: Path, names: Sequence[str]) -> None:
    """Raise UsageError for an .npy, which holds one array, unless there is exactly one output, and for other forms."""
    if path.suffix.lower() in OTHER_FORMS:
        raise UsageError(f"--output {path}: outputs are written as .npz or .npy", hint=f"-o {path.with_suffix('.npz')}")
    if path.suffix == ".npy" and len(names) != 1:
        raise UsageError(
            f"--output {path}: an .npy holds one array, and the engine has {len(names)} outputs: {', '.join(names)}",
            hint=f"-o {path.with_suffix('.npz')}",
        )


def write_outputs(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz, or one array as .npy, under exactly this name, atomically. Raises OutputError, UsageError."""
    check_kind(path, list(arrays))
    buffer = io.BytesIO()
    if path.suffix == ".npy":
        _write_array(buffer, next(iter(arrays.values())))
    else:
        # np.savez would append a suffix, and an output may have the name of one of its parameters.
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                    _write_array(file, array)
    write_atomic(path, [buffer.getbuffer()])


def _write_array(file: IO[bytes], array: Array) -> None:
    np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
