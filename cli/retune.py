"""``optdnn retune``."""

from __future__ import annotations

from pathlib import Path

import click

from optdnn.cli.common import give_json, print_tuning, progress, stdout, warn
from optdnn.cli.options import Command, Number, engine_argument, json_option, option


@click.command("retune", cls=Command)
@engine_argument
@option("--budget", type=Number(min=0, min_open=True), default=None, metavar="SECONDS", help="Bound the tuning.")
@option("--tactics", default=None, metavar="T", help="auto, or of own,cudnn,cublaslt.  [default: the build's]")
@option("--timing-cache", type=click.Path(path_type=Path), default=None, help="Keep measured times here.")
@json_option
def command(
    engine: Path, budget: float | None, tactics: str | None, timing_cache: Path | None, json_file: Path | None
) -> None:
    """Tune ENGINE on this machine's GPU and improve it in place.

    For engines built with heuristic tactics, on a machine without a GPU, or for another driver. ENGINE is replaced, atomically,
    only if the result is faster; both are measured side by side. Ctrl-C keeps the best result so far.
    """
    from dataclasses import asdict

    from optdnn.tuning.retune import retune

    with progress(f"retune {engine.name}") as say:
        found = retune(engine, budget=budget, tactics=tactics, timing_cache=timing_cache, progress=say)
    if give_json({"engine": str(engine), **asdict(found)}, json_file):
        return
    print_tuning(found.tuning)
    for line in found.warnings:
        warn(line)
    before = "it did not run" if found.before_ms is None else f"{found.before_ms:.4f} ms"
    outcome = "replaced" if found.replaced else "left as it was: nothing faster was found"
    stdout.print(f"\n{engine}: {before} -> {found.after_ms:.4f} ms, {outcome}")
