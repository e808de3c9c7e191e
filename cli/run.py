"""``optdnn run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from optdnn.cli.arrays import check_kind, feeds_of, on_random, write_outputs
from optdnn.cli.build_options import load_options
from optdnn.cli.common import give_json, stdout, table
from optdnn.cli.options import (
    Command,
    engine_argument,
    input_option,
    json_option,
    output_option,
    seed_option,
    size_option,
)
from optdnn.cli.pictures import picture_input, run_pictures
from optdnn.runtime.file.atomic import check_writable
from optdnn.types import Array, dtype_name


@click.command("run", cls=Command)
@engine_argument
@input_option
@size_option
@seed_option
@load_options
@output_option("Write the outputs to this .npz, or a single one to this .npy.")
@json_option
def command(
    engine: Path,
    inputs: tuple[str, ...],
    output: Path | None,
    sizes: tuple[str, ...],
    seed: int,
    json_file: Path | None,
    **loading: Any,
) -> None:
    """Run ENGINE once. Inputs that are not given are random, and a message names them.

    An engine that was built with --preprocess takes pictures: --input NAME=photo.jpg, or NAME=FOLDER for all in it. The best
    classes of each are printed; with --json, as one line of JSON per picture.
    """
    import optdnn

    if output is not None:
        check_writable(output)
    pictures = picture_input(inputs)
    loaded = optdnn.load(engine, **loading)
    if output is not None:
        check_kind(output, [s.name for s in loaded.outputs])
    if pictures is not None:
        run_pictures(loaded, *pictures, output, json_file)
        return
    feeds, made = feeds_of(loaded, inputs, sizes, seed)
    with on_random(made):
        results = loaded.run(feeds)
    facts = {
        n: {"dtype": dtype_name(a.dtype), "shape": list(a.shape), **_finite(_range(a))} for n, a in results.items()
    }
    report = {"outputs": facts, "random_inputs": made, "seed": seed}
    if not give_json(report, json_file):
        rows = [
            [n, dtype_name(a.dtype), list(a.shape), *(f"{x:.5g}" for x in _range(a).values())]
            for n, a in results.items()
        ]
        stdout.print(table(None, ["output", "dtype", "shape", "min", "mean", "max"], rows, right=[3, 4, 5]))
    if output is not None:
        write_outputs(output, results)


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """A number for JSON, which has no NaN and no infinities: these become null."""
    return {k: x if np.isfinite(x) else None for k, x in numbers.items()}


def _range(a: Array) -> dict[str, float]:
    """The smallest, mean and largest element; nothing for empty arrays and complex numbers."""
    if not a.size or a.dtype.kind in "c":
        return {}
    wide = a.astype(np.float64)
    return {"min": float(wide.min()), "mean": float(wide.mean()), "max": float(wide.max())}
