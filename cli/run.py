"""``optdnn run``."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from optdnn.cli.arrays import read_inputs, typed, write_outputs
from optdnn.cli.common import load_options, parse_sizes, print_json, stderr, stdout, table
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
@click.option("--json", "as_json", is_flag=True, help="Print the outputs' types, shapes and ranges as JSON.")
@load_options
def command(
    engine: Path,
    inputs: tuple[str, ...],
    out: Path | None,
    sizes: tuple[str, ...],
    seed: int,
    as_json: bool,
    simulate: bool,
    recompile: bool,
    trust_cubins: bool,
) -> None:
    """Run ENGINE once. Inputs that are not given are random, and that is said."""
    import optdnn
    from optdnn.runtime.feeds import random_feeds

    if out is not None:
        check_writable(out)
    loaded = optdnn.load(engine, simulate=simulate, recompile=recompile, trust_cubins=trust_cubins)
    feeds = typed(read_inputs(inputs), loaded.inputs)
    missing = [s for s in loaded.inputs if s.name not in feeds]
    if missing:
        stderr.print(f"random inputs (seed {seed}): {', '.join(map(str, missing))}")
        made = random_feeds(loaded.inputs, seed=seed, sizes=parse_sizes(sizes), profiles=loaded.profiles, given=feeds)
        feeds = {**made, **feeds}
    results = loaded.run(feeds)
    if as_json:
        facts = {
            n: {"dtype": dtype_name(a.dtype), "shape": list(a.shape), **_finite(_range(a))} for n, a in results.items()
        }
        print_json({"outputs": facts, "random_inputs": [s.name for s in missing], "seed": seed})
    else:
        rows = [
            [n, dtype_name(a.dtype), list(a.shape), *(f"{x:.5g}" for x in _range(a).values())]
            for n, a in results.items()
        ]
        stdout.print(table(None, ["output", "dtype", "shape", "min", "mean", "max"], rows, right=[3, 4, 5]))
    if out is not None:
        write_outputs(out, results)


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinities: null stands for them."""
    return {k: x if np.isfinite(x) else None for k, x in numbers.items()}


def _range(a: Array) -> dict[str, float]:
    """The least, mean and greatest element; nothing of empty arrays and of complex numbers."""
    if not a.size or a.dtype.kind in "c":
        return {}
    wide = a.astype(np.float64)
    return {"min": float(wide.min()), "mean": float(wide.mean()), "max": float(wide.max())}
