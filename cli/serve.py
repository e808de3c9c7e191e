"""``optdnn serve``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from optdnn.cli.build_options import load_options
from optdnn.cli.common import give_json, stderr
from optdnn.cli.options import Command, config_option, json_option, option
from optdnn.errors import MissingDependency, UsageError

PACKAGES = ("grpc", "httptools", "orjson", "prometheus_client", "starlette", "tritonclient", "uvicorn", "uvloop")


@click.command("serve", cls=Command)
@click.argument("paths", metavar="ENGINE...|FOLDER", nargs=-1, required=True, type=click.Path(path_type=Path))
@option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all of this machine.")
@option("--http-port", type=int, default=8000, show_default=True, help="Port of HTTP; 0 takes any.")
@option("--grpc-port", type=int, default=8001, show_default=True, help="Port of gRPC; 0 takes any.")
@option("--batch-delay", type=float, default=0.0, show_default=True, metavar="MS", group="Batches",
        help="How long a request waits for others to share its batch.")  # fmt: skip
@option("--max-batch", type=int, metavar="N", group="Batches",
        help="Largest number of rows of a batch.  [default: as many as the engine has plans for, else its range]")  # fmt: skip
@option("--queue", type=int, default=256, show_default=True, metavar="N", group="Batches",
        help="Largest number of waiting requests per model; further ones are refused.")  # fmt: skip
@option("--workers", type=int, default=1, show_default=True, metavar="N", group="Workers",
        help="Processes per model, each with the engine; 0: threads of the server.")  # fmt: skip
@option("--instances", type=int, default=1, show_default=True, metavar="N", group="Workers",
        help="Batches that a worker runs concurrently.")  # fmt: skip
@option("--frontends", type=int, metavar="N",
        help="Processes that handle HTTP and gRPC; 0: the server.  [default: half of the cores up to 8, 0 below 4]")  # fmt: skip
@option("--gpus", metavar="0,1", default="", gpu=True, group="Workers",
        help="GPUs that the workers of a model are spread over.")  # fmt: skip
@option("--threads", type=int, metavar="N", group="Workers",
        help="Threads of a run on a CPU.  [default: the build's choice]")  # fmt: skip
@option("--shared-memory", is_flag=True,
        help="Let clients name shared memory for tensors, also on GPUs: they can read and write all of this user's.")  # fmt: skip
@option("--drain-seconds", type=float, default=30.0, show_default=True, metavar="S",
        help="On SIGTERM: how long to wait for unfinished requests.")  # fmt: skip
@load_options
@config_option
@json_option
def command(
    paths: tuple[Path, ...],
    batch_delay: float,
    gpus: str,
    threads: int | None,
    frontends: int | None,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Serve ENGINE files, or the *.engine files of FOLDER, in the Open Inference Protocol (KServe v2).

    A model has the name of its file. Clients of KServe and Triton reach it by HTTP and gRPC. The extra "serve" is needed.
    """
    check_installed()
    from optdnn.serving.server import serve
    from optdnn.serving.settings import ServeSettings, usual_frontends

    loading = {n: given.pop(n) for n in ("signed_by", "simulate", "trust_cubins", "devices", "recompile")} | {
        "threads": threads
    }
    loading = {n: v for n, v in loading.items() if v}
    given["frontends"] = usual_frontends() if frontends is None else frontends
    settings = ServeSettings(paths, batch_delay_ms=batch_delay, gpus=numbers(gpus), loading=loading, **given)
    names = list(settings.models())

    def listening(http: int, grpc: int) -> None:
        ports = {"host": settings.host, "http_port": http, "grpc_port": grpc, "models": names}
        if not give_json(ports, json_file):
            shown = ", ".join(names) or "no model yet"
            click.echo(f"serving {shown} on http://{settings.host}:{http} and by gRPC on {settings.host}:{grpc}")

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    serve(settings, listening)
    stderr.print("the server has ended")


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in ``0,1``. Raises UsageError."""
    parts = [p for p in text.split(",") if p]
    if not all(p.isascii() and p.isdigit() and len(p) < 6 for p in parts):
        raise UsageError(f"--gpus {text!r} is not a list of numbers", hint="for instance --gpus 0,1")
    return tuple(map(int, parts))


def check_installed() -> None:
    """Raise MissingDependency for the first package of the extra that is not there."""
    from importlib.util import find_spec

    for name in PACKAGES:
        if find_spec(name) is None:
            raise MissingDependency(name, "serve", "to serve engines")
