"""``optdnn run``."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from optdnn.cli.arrays import read_inputs, typed, write_outputs
from optdnn.cli.common import load_options, parse_sizes, stderr, stdout, table
from optdnn.runtime.atomic import check_writable
from optdnn.types import Array, dtype_name


@click.command("run")
@click.argument("engine", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[NAME=]FILE",
    help="NAME=FILE.npy, or an .npz of named arrays; NAME=FILE.npz takes one.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the outputs to this .npz.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Size of a symbolic dimension (1).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random inputs.")
@load_options
def command(
    engine: Path,
    inputs: tuple[str, ...],
    out: Path | None,
    sizes: tuple[str, ...],
    seed: int,
    simulate: bool,
    recompile: bool,
) -> None:
    """Run ENGINE once. Inputs that are not given are random, and that is said."""
    import optdnn
    from optdnn.runtime.feeds import random_feeds

    if out is not None:
        check_writable(out)
    loaded = optdnn.load(engine, simulate=simulate, recompile=recompile)
    feeds = typed(read_inputs(inputs), loaded.inputs)
    missing = [s for s in loaded.inputs if s.name not in feeds]
    if missing:
        stderr.print(f"random inputs (seed {seed}): {', '.join(map(str, missing))}")
        made = random_feeds(loaded.inputs, seed=seed, sizes=parse_sizes(sizes), profiles=loaded.profiles, given=feeds)
        feeds = {**made, **feeds}
    results = loaded.run(feeds)
    rows = [[name, dtype_name(a.dtype), list(a.shape), *_summary(a)] for name, a in results.items()]
    stdout.print(table(None, ["output", "dtype", "shape", "min", "mean", "max"], rows, right=[3, 4, 5]))
    if out is not None:
        write_outputs(out, results)


def _summary(a: Array) -> tuple[str, str, str]:
    if not a.size or a.dtype.kind in "c":
        return "", "", ""
    wide = a.astype(np.float64)
    return f"{wide.min():.5g}", f"{wide.mean():.5g}", f"{wide.max():.5g}"
