"""``optdnn run``."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from optdnn.cli.common import stderr, stdout, table
from optdnn.errors import InputError, RunError, UsageError
from optdnn.types import Array, dtype_name


@click.command("run")
@click.argument("engine", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="NAME=FILE.npy, or an .npz of named arrays."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the outputs to this .npz.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random inputs.")
def command(engine: Path, inputs: tuple[str, ...], out: Path | None, seed: int) -> None:
    """Run ENGINE once. Inputs that are not given are random, and that is said."""
    import optdnn
    from optdnn.runtime.feeds import random_feeds

    loaded = optdnn.load(engine)
    feeds = read_inputs(inputs)
    missing = [s for s in loaded.inputs if s.name not in feeds]
    if missing:
        stderr.print(f"random inputs (seed {seed}): {', '.join(map(str, missing))}")
        feeds = {**random_feeds(missing, seed=seed), **feeds}
    results = loaded.run(feeds)
    rows = [[name, dtype_name(a.dtype), list(a.shape), *_summary(a)] for name, a in results.items()]
    stdout.print(table(None, ["output", "dtype", "shape", "min", "mean", "max"], rows, right=[3, 4, 5]))
    if out is not None:
        try:
            np.savez(out, **results)  # type: ignore[arg-type]
        except OSError as error:
            raise RunError(f"cannot write {out}: {error.strerror}") from None


def read_inputs(texts: tuple[str, ...]) -> dict[str, Array]:
    """The arrays of ``--input`` options. Raises UsageError or InputError."""
    feeds: dict[str, Array] = {}
    for text in texts:
        name, _, file = text.rpartition("=")
        path = Path(file)
        try:
            data = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise UsageError(f"there is no file {path}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a .npy or .npz file: {error}") from None
        if isinstance(data, np.ndarray):
            if not name:
                raise UsageError(f"--input {text!r} needs the input's name: NAME={path}")
            feeds[name] = data
        else:
            if name:
                raise UsageError(f"--input {text!r}: an .npz names its arrays itself; leave out {name!r}")
            feeds.update({key: data[key] for key in data.files})
    return feeds


def _summary(a: Array) -> tuple[str, str, str]:
    if not a.size or a.dtype.kind in "c":
        return "", "", ""
    wide = a.astype(np.float64)
    return f"{wide.min():.5g}", f"{wide.mean():.5g}", f"{wide.max():.5g}"
