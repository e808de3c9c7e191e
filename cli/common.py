"""Options, progress and tables that several commands share."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from optdnn.config import BuildOptions
from optdnn.errors import UsageError, printable
from optdnn.ranges import parse_shapes


class PlainConsole(Console):
    """A console that prints what it is given: names of tensors and files are not markup, and hold no terminal commands.

    What goes to a file or a pipe is not wrapped at some terminal's width.
    """

    def __init__(self, *, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    @property
    def size(self) -> ConsoleDimensions:
        return super().size if self.is_terminal else ConsoleDimensions(10_000, 25)

    @size.setter
    def size(self, size: tuple[int, int]) -> None:
        self._width, self._height = size

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **options)


stderr = PlainConsole(stderr=True)
"""For progress and remarks; stdout holds results only."""
stdout = PlainConsole()


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """``("N=4",)`` of ``--size`` as a mapping."""
    sizes = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name or not (value.isascii() and value.isdigit()):
            raise UsageError(f"--size {text!r} is not NAME=N")
        sizes[name] = int(value)
    return sizes


def build_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that builds; they arrive as keyword arguments for :func:`make_options`."""
    decorators = [
        click.option(
            "--target",
            default="auto",
            metavar="TARGET",
            help="auto, cpu, reference, cuda, cuda:ARCH or simulate.",
            show_default=True,
        ),
        click.option(
            "--precision",
            default="fp32",
            metavar="P",
            help="fp32, tf32, bf16, fp16, int8, fp8, int8+fp16 …, or auto: per node, within a bound on accuracy.",
            show_default=True,
        ),
        click.option("--calib", metavar="DATA", help="Calibration data: .npz, .npy, or a folder of pictures."),
        click.option(
            "--calibrator",
            default="mse",
            metavar="C",
            help="mse, entropy, percentile or minmax.",
            show_default=True,
        ),
        click.option(
            "--calib-cache", type=click.Path(path_type=Path, dir_okay=False), help="Keep the ranges here (JSON)."
        ),
        click.option(
            "--metric",
            default="top1",
            metavar="M",
            help="Of precision auto: top1, mse, cosine or PKG.MODULE:F.",
            show_default=True,
        ),
        click.option(
            "--max-drop",
            type=click.FloatRange(min=0),
            metavar="X",
            help="Of precision auto: the largest loss, in the metric's unit.  [default: 0.5 points for top1]",
        ),
        click.option(
            "--labels",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE.npy",
            help="Labels of --calib, where they are not in it.",
        ),
        click.option(
            "--candidates",
            metavar="P,P",
            help="Of precision auto: what it may choose from besides fp32.  [default: all but tf32]",
        ),
        click.option("--images", metavar="SPEC", help="How pictures are prepared: JSON, or a file of it."),
        click.option(
            "--pin", multiple=True, metavar="NODES=P", help="Another precision for some nodes: --pin 'head*=fp32'."
        ),
        click.option("--strict-precision", is_flag=True, help="Fail where a node does not run in what was asked for."),
        click.option(
            "--shape",
            "shape",
            multiple=True,
            metavar="NAME=1x3x224x224",
            help="Fix an input's shape; ? leaves a dimension symbolic, MIN..OPT..MAX gives a range. Repeat for another profile.",
        ),
        click.option("--io-dtype", default="model", metavar="DTYPE", help="fp32, fp16, bf16, or the model's own."),
        click.option(
            "--opt-level", "-O", type=click.IntRange(0, 3), default=3, show_default=True, help="Passes to run."
        ),
        click.option(
            "--tactics",
            default="auto",
            metavar="T",
            help="auto, openvino, onnxruntime; on GPUs of heuristic,own,cudnn,cublaslt.",
            show_default=True,
        ),
        click.option("--threads", type=click.IntRange(min=1), default=None, help="Pin the number of threads."),
        click.option("--timing-cache", type=click.Path(path_type=Path), default=None, help="Keep measured times here."),
        click.option("--no-cubins", is_flag=True, help="Keep the recipes of GPU kernels alone in the engine."),
        click.option("--strict", is_flag=True, help="Refuse a network that would need steps on the CPU (for GPUs)."),
        click.option(
            "--workspace",
            type=click.IntRange(min=1),
            default=None,
            metavar="BYTES",
            help="Bound GPU kernels' scratch memory.",
        ),
        click.option(
            "--budget",
            type=click.FloatRange(min=0, min_open=True),
            default=None,
            metavar="SECONDS",
            help="Bound tuning on a GPU, and the search of precision auto.",
        ),
        click.option(
            "--streams",
            default="auto",
            metavar="N",
            show_default=True,
            help="On GPUs: streams for independent steps (auto: several where that is faster).",
        ),
        click.option("--row-invariant", is_flag=True, help="On GPUs: the same bits for a row, whatever the batch."),
        click.option(
            "--nearest-tactics/--no-nearest-tactics",
            default=True,
            help="On GPUs: later plans take tactics of the plan for the nearest size, or the cost model's alone.",
        ),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How an engine for a GPU is loaded; the arguments are those of :func:`optdnn.load`."""
    command = click.option(
        "--recompile", is_flag=True, help="Compile GPU kernels anew, from this version's templates."
    )(command)
    command = click.option(
        "--trust-cubins", is_flag=True, help="Run the GPU code in the file, whatever it is: you trust who made it."
    )(command)
    return click.option("--simulate", is_flag=True, help="Run an engine for a GPU in NumPy, on any machine.")(command)


def value_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Inputs whose values are known when the network is built; an argument for :func:`make_options`."""
    return click.option(
        "--value", "value", multiple=True, metavar="NAME=1,2", help="What an input always is: sizes follow from it."
    )(command)


def parse_values(texts: Sequence[str]) -> dict[str, Any]:
    """``("axes=0,2", "k=5")`` of ``--value`` as a mapping of names to a number or a list of numbers."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, given = text.partition("=")
        try:
            numbers = [float(n) if set(n) & set(".einf") else int(n) for n in given.split(",") if n]
        except ValueError:
            numbers, equals = [], ""
        if not name or not equals or name in values:
            raise UsageError(
                f"--value {text!r} is not NAME=1,2,3", hint="each input has one value: numbers with commas"
            )
        values[name] = numbers if "," in given or not numbers else numbers[0]
    return values


def make_options(
    ctx: click.Context, shape: Sequence[str], pin: Sequence[str] = (), value: Sequence[str] = (), **options: Any
) -> BuildOptions:
    """Build options from a command's arguments."""
    return BuildOptions(
        shapes=parse_shapes(shape),
        values=parse_values(value),
        precision_map=parse_pins(pin),
        debug=bool(ctx.obj and ctx.obj.get("debug")),
        **options,
    )


def parse_pins(texts: Sequence[str]) -> dict[str, str]:
    """``("head*=fp32",)`` as a mapping from patterns of node names to precisions."""
    pins = {}
    for text in texts:
        nodes, _, precision = text.rpartition("=")
        if not nodes:
            raise UsageError(f"--pin {text!r} is not NODES=PRECISION", hint="for instance --pin 'head*=fp32'")
        pins[nodes] = precision
    return pins


def command_line(ctx: click.Context) -> str:
    """The command as it was given, for reports."""
    return shlex.join(["optdnn", *(ctx.obj or {}).get("argv", ())])


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; nothing at all when stderr is piped."""
    if not stderr.is_terminal:
        yield lambda text: None
        return
    with stderr.status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")


def print_json(data: Any) -> None:
    """Results for scripts, on stdout."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()
) -> Table:
    """A plain table; the columns numbered in ``right`` are right-aligned."""
    out = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(Text(printable(str(cell))) for cell in row))
    return out


def print_tuning(tuning: Mapping[str, Any]) -> None:
    """What tuning came to: the whole network's times, and the problems whose choice it changed."""
    rows = [
        [
            p["operators"],
            p["kind"],
            " ".join(p["nodes"])[:60],
            p["default"],
            p["chosen"],
            _us(p, "default"),
            _us(p, "chosen"),
        ]
        for p in tuning["problems"]
        if p["chosen"] != p["default"]
    ]
    if rows:
        columns = ["", "operator", "nodes", "by the cost model", "measured", "µs", "now µs"]
        stdout.print(table("\ntuned", columns, rows, right=[0, 5, 6]))
    failed = [f"{c}: {why}" for p in tuning["problems"] for c, why in p.get("failed", {}).items()]
    if failed:
        stdout.print(f"{len(failed)} candidates were not usable, such as {failed[0]}")
    for line in tuning.get("lost", ()):
        stdout.print(f"refused {line}", markup=False)
    before, after = tuning["before_ms"], tuning["after_ms"]
    if tuning["cached"]:
        stdout.print(f"\ntuned: {after:.4f} ms when it was measured (from the timing cache)")
    elif before is not None:
        stdout.print(f"\ntuned: {before:.4f} -> {after:.4f} ms")
    elif after is not None:
        stdout.print(f"\ntuned: {after:.4f} ms")
    if tuning.get("stopped"):
        stdout.print(f"tuning ended early: {tuning['stopped']}")


def _us(problem: Mapping[str, Any], which: str) -> str:
    found = problem["us"].get(problem[which])
    return "-" if found is None else f"{found:.2f}"


def print_host(host: Mapping[str, Any], target: str) -> None:
    """What of a network runs on the CPU (an engine's ``meta["host"]``): operators with reasons, copies, cost."""
    coverage, operators, copies = host["coverage"], host["operators"], host["copies"]
    if not operators:
        stdout.print(f"\nall {coverage['operators']} operators run on {target}")
        return
    rows = [[o["kind"], _nodes(o["nodes"]), f"{o['us']:.0f}", o["why"]] for o in operators]
    stdout.print(table("\non the CPU", ["operator", "ONNX nodes", "about µs", "because"], rows, right=[2]))
    if copies:
        rows = [[c["to"], c["tensor"], c["bytes"], f"{c['us']:.0f}"] for c in copies]
        stdout.print(table("\ncopies", ["to", "tensor", "bytes", "about µs"], rows, right=[2, 3]))
    total = sum(c["bytes"] for c in copies)
    stdout.print(
        f"\n{coverage['device']} of {coverage['operators']} operators run on {target}, {coverage['host']} on the CPU: "
        f"{len(copies)} copies of {total} bytes and {host['cuts']} cuts of the CUDA graph, about "
        f"{host['estimated_us'] / 1e3:.2f} ms a run in all (sizes that depend on data count as 1)"
    )


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_engine(path: Path) -> None:
    """Raise UsageError for an engine where a model is wanted."""
    if is_engine(path):
        raise UsageError(f"{path} is an engine already", hint=f"optdnn run {path}, or optdnn inspect {path}")


def is_engine(path: Path) -> bool:
    """True for a file that starts as an engine does. Raises UsageError where it cannot be read."""
    from optdnn.runtime.format import MAGIC

    try:
        with path.open("rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
