"""``optdnn refit``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from optdnn.cli.common import give_json, progress, refuse_engine, stdout
from optdnn.cli.options import FILE, Command, engine_argument, json_option, option, output_option
from optdnn.errors import UsageError

PARTS = ("A", "B", "scale")
"""Endings of the arrays of an adapter."""


@click.command("refit", cls=Command)
@engine_argument
@click.argument("model", type=FILE, required=False)
@output_option("The new engine. It may be ENGINE itself.  [required]", replaces="engine")
@option(
    "--weights", type=FILE, metavar="FILE.npz", help="Arrays by the names of initializers: these replace the model's."
)
@option("--adapter", "adapters", type=FILE, multiple=True, metavar="FILE.npz",
        help="LoRA: arrays NAME.A, NAME.B and perhaps NAME.scale; the weight NAME gets scale * (B @ A) added. Repeat.")  # fmt: skip
@option(
    "--calib",
    metavar="DATA",
    data=True,
    help="Calibration data for the new weights.  [default: the ranges that ENGINE holds]",
)
@json_option
def command(
    engine: Path,
    model: Path | None,
    output: Path | None,
    weights: Path | None,
    adapters: tuple[Path, ...],
    calib: str | None,
    json_file: Path | None,
) -> None:
    """Give ENGINE the weights of MODEL.onnx, the same network trained further; tactics stay, and nothing is measured.

    Without MODEL, the engine's own model is taken (optdnn build --refit), with the --weights and --adapters that are given.
    If MODEL is another network than that of ENGINE, the differences are named, and nothing is written.
    """
    import time

    from optdnn.compiler import rebuilt
    from optdnn.runtime.file.atomic import check_writable
    from optdnn.runtime.file.format import read

    if output is None:
        raise UsageError("the new engine needs a file", hint="-o OUT.engine")
    if model is not None:
        refuse_engine(model)
    check_writable(output)
    given = {} if weights is None else _arrays(weights)
    begin = time.perf_counter()
    with progress(f"refit {engine.name}") as say:
        build = rebuilt(read(engine), model, given, _adapters(adapters), calib=calib, progress=say)
        say("save")
        build.engine.save(output)
    seconds = time.perf_counter() - begin
    if not give_json({"engine": str(output), "from": str(engine), "seconds": round(seconds, 3)}, json_file):
        stdout.print(f"{output}: {engine.name} with other weights, in {seconds:.1f} s")


def _arrays(path: Path) -> dict[str, Any]:
    """The named arrays of an .npz file. Raises UsageError for anything else."""
    from optdnn.cli.arrays import read_inputs

    if path.suffix != ".npz":
        raise UsageError(f"{path} is not an .npz file of named arrays")
    return read_inputs([str(path)])


def _adapters(paths: tuple[Path, ...]) -> Mapping[str, tuple[Any, ...]]:
    """Name -> (A, B) or (A, B, scale). Raises UsageError for an array of another name, a missing half, or a name given twice."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in paths:
        arrays = _arrays(path)
        if strange := [n for n in arrays if n.rpartition(".")[2] not in PARTS]:
            raise UsageError(f"{path}: the array {strange[0]!r} is none of NAME.A, NAME.B and NAME.scale")
        for name in sorted({n.rpartition(".")[0] for n in arrays}):
            parts = [arrays.get(f"{name}.{part}") for part in PARTS]
            if parts[0] is None or parts[1] is None:
                raise UsageError(f"{path}: the adapter of {name!r} needs both arrays, {name}.A and {name}.B")
            if name in found:
                raise UsageError(f"{name!r} has two adapters", hint="add them up: [A1; A2] and [B1, B2] side by side")
            found[name] = tuple(p for p in parts if p is not None)
    return found
