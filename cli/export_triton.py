"""``optdnn export-triton``."""

from __future__ import annotations

from pathlib import Path

import click

from optdnn.cli.common import give_json, stdout
from optdnn.cli.options import Command, Integer, engine_argument, json_option, option


@click.command("export-triton", cls=Command)
@engine_argument
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@option("--instances", type=Integer(1, 64), default=1, show_default=True, help="Instances that Triton starts.")
@option("--trust-cubins", is_flag=True, gpu=True, group="Loading",
        help="Run the compiled code in the file unchecked: you trust its author.")  # fmt: skip
@json_option
def command(engine: Path, folder: Path, instances: int, trust_cubins: bool, json_file: Path | None) -> None:
    """Write ENGINE as a model in FOLDER, a model repository of NVIDIA's Triton server, for its Python backend."""
    from optdnn.serving.triton import export_triton

    made = export_triton(engine, folder, instances=instances, trust_cubins=trust_cubins)
    if not give_json({"model": str(made)}, json_file):
        stdout.print(made)
