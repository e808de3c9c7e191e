"""Pictures as inputs of ``optdnn run``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optdnn.cli.arrays import write_outputs
from optdnn.cli.common import remark, stderr, stdout, table, write_json
from optdnn.errors import UsageError
from optdnn.types import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from optdnn.runtime.engine import Engine
    from optdnn.runtime.pictures.stream import PictureAnswer

SMALL = 64
"""Largest size of an output whose elements are all shown."""


def picture_input(texts: Sequence[str]) -> tuple[str, Path] | None:
    """Name and path of an ``--input`` that is a picture or a folder; None if the inputs are arrays. Raises UsageError."""
    from optdnn.runtime.pictures.files import is_image

    found = [(name, Path(file)) for name, _, file in (t.rpartition("=") for t in texts)]
    pictures = [(name, path) for name, path in found if path.is_dir() or is_image(path)]
    if not pictures:
        return None
    if len(found) > 1:
        raise UsageError("a picture, or a folder of them, is the only --input", hint="put the pictures into one folder")
    return pictures[0]


def run_pictures(engine: Engine, name: str, path: Path, output: Path | None, json_file: Path | None) -> None:
    """Run the pictures, print the answer for each one, and write all outputs to ``output`` if that is given."""
    from optdnn.runtime.pictures.files import pictures_in
    from optdnn.runtime.pictures.port import PicturePort
    from optdnn.runtime.pictures.stream import picture_answers

    port = PicturePort.of(engine)
    if name and name != port.name:
        raise UsageError(f"the engine has no input {name!r}", hint=f"its input is {port.name!r}")
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    files = pictures_in(path) if path.is_dir() else [path]
    told: list[dict[str, Any]] = []
    arrays: dict[str, list[Any]] = {}
    began = time.perf_counter()
    with _bar(len(files)) as done:
        for answer in picture_answers(engine, files):
            told.append(_plain(answer))
            if output is not None:
                for key, array in answer.outputs.items():
                    arrays.setdefault(key, []).append(array)
            done()
    seconds = time.perf_counter() - began
    _tell(told, json_file)
    if len(files) > 1:
        remark(f"{len(files)} pictures in {seconds:.2f} s: {len(files) / seconds:.1f} pictures/s")
    if output is not None:
        write_outputs(output, {key: _stacked(key, found) for key, found in arrays.items()})


def _plain(answer: PictureAnswer) -> dict[str, Any]:
    """An answer for JSON: the classes, and the small outputs."""
    small = {n: a.tolist() for n, a in answer.outputs.items() if a.size <= SMALL and not answer.best}
    return {
        "picture": answer.name,
        **({"best": [{"class": c, "score": number} for c, number in answer.best]} if answer.best else {}),
        **({"outputs": small} if small else {}),
        "shapes": {n: [dtype_name(a.dtype), *a.shape] for n, a in answer.outputs.items()},
    }


def _tell(told: Sequence[dict[str, Any]], json_file: Path | None) -> None:
    if json_file is not None:
        write_json(told, json_file)
        if str(json_file) == "-":
            return
    if len(told) == 1 and "best" in told[0]:
        stdout.print(table(told[0]["picture"], ["class", "score"], _rows(told[0]["best"]), right=[1]))
        return
    rows = [[one["picture"], *(_rows(one["best"])[0] if "best" in one else [_shapes(one), ""])] for one in told]
    stdout.print(table(None, ["picture", "class", "score"], rows, right=[2]))


def _rows(best: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[one["class"], f"{one['score']:.4g}"] for one in best]


def _shapes(one: dict[str, Any]) -> str:
    """The outputs in words, if they are not classes."""
    small = one.get("outputs", {})
    return ", ".join(
        f"{n} {small[n]}" if n in small else f"{n} {dtype}{sizes}" for n, (dtype, *sizes) in one["shapes"].items()
    )


def _stacked(name: str, arrays: Sequence[Any]) -> Any:
    if len({a.shape for a in arrays}) > 1:
        raise UsageError(
            f"output {name!r} has different shapes for these pictures: it is not one array", hint="leave -o out"
        )
    return np.stack(arrays)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, for several pictures; nothing where stderr is piped, or with ``--quiet``."""
    if total < 2 or not stderr.is_terminal or stderr.quiet:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(console=stderr, transient=True) as progress:
        task = progress.add_task("pictures", total=total)
        yield lambda: progress.advance(task)
