"""Consoles, progress, tables and JSON that several commands share."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from optdnn.errors import EngineError, UsageError, printable, printable_json
from optdnn.report.words import counted, figure, first_of


class PlainConsole(Console):
    """A console that prints text unchanged: names of tensors and files are neither markup nor terminal commands.

    Output to a file or a pipe is not wrapped.
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
        if not self.is_terminal and any(isinstance(o, Table) for o in objects):  # rich pads all lines of a table
            with self.capture() as captured:
                super().print(*objects, **options)
            objects = ("\n".join(line.rstrip() for line in captured.get().splitlines()),)
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **options)


stderr = PlainConsole(stderr=True)
"""For progress and remarks; stdout holds results only."""
stdout = PlainConsole()


@contextmanager
def reading_record(engine: Path) -> Iterator[None]:
    """Raise EngineError if the block finds data of another form than builds write.

    For commands that show the data that a build wrote into an engine (``meta``) or its report: nothing has checked this data."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise EngineError(
            f"{engine}: the record of its build is malformed ({type(error).__name__}: {error})",
            hint="the engine may still run; rebuild it, and report a defect of optdnn if this remains",
        ) from error


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """``("N=4",)`` of ``--size`` as a mapping."""
    sizes = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name or not (value.isascii() and value.isdigit()):
            raise UsageError(f"--size {text!r} is not NAME=N", hint="N is a whole number, such as --size batch=8")
        sizes[name] = int(value)
    return sizes


def shape_text(dtype: Any, shape: Sequence[object]) -> str:
    """An array's element type and sizes: fp32[1, 3, 224, 224]."""
    from optdnn.types import dtype_name

    return f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"


def command_line(ctx: click.Context) -> str:
    """The command as it was given, for reports."""
    return shlex.join(["optdnn", *(ctx.obj or {}).get("argv", ())])


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; nothing at all when stderr is piped, or with ``--quiet``."""
    if not stderr.is_terminal or stderr.quiet:
        yield lambda text: None
        return
    with stderr.status(Text(printable(title))) as status:  # rich reads markup in a plain str here
        yield lambda text: status.update(Text(printable(f"{title}: {text}")))


def remark(text: str) -> None:
    """Print a line on stderr about random inputs or written files; nothing with ``--quiet``."""
    stderr.print(text)


def warn(text: str) -> None:
    """Print a warning on stderr, also with ``--quiet``."""
    stderr.quiet, quiet = False, stderr.quiet
    stderr.print(f"warning: {text}")
    stderr.quiet = quiet


def write_text(file: Path, text: str) -> None:
    """Write a file atomically, and name it in a remark. Raises OutputError."""
    from optdnn.runtime.file.atomic import write_atomic

    write_atomic(file, [text.encode()])
    remark(f"written: {file}")


def give_json(data: Any, file: Path | None) -> bool:
    """Write the JSON of ``--json``. Returns True if it went to stdout, which then holds nothing else. Raises OutputError."""
    if file is None:
        return False
    write_json([data], file, indent=2)
    return str(file) == "-"


def write_json(documents: Sequence[Any], file: Path, indent: int | None = None) -> None:
    """Write JSON documents, each on a line of its own or indented, and note that ``--json`` has its result. Raises OutputError."""
    lacking = str(file) == "-" and sys.stdout.errors == "replace"  # the encoding lacks some characters: escape them
    text = "\n".join(printable_json(json.dumps(one, indent=indent, ensure_ascii=lacking)) for one in documents)
    if str(file) == "-":
        click.echo(text)
    else:
        write_text(file, text + "\n")
    if (context := click.get_current_context(silent=True)) is not None:
        context.find_root().ensure_object(dict)["json_given"] = True


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[int] = (),
    clip: Sequence[int] = (),
) -> Table:
    """A plain table; the columns numbered in ``right`` are right-aligned, those in ``clip`` are cut so that a row is a line."""
    cut = bool(clip) and stdout.is_terminal
    out = Table(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", show_header=any(columns),
        collapse_padding=cut,
    )  # fmt: skip
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if i in right else "left", overflow="fold", no_wrap=bool(clip))
    texts = [[Text(printable(str(cell))) for cell in row] for row in rows]
    if cut and (needed := _cut(texts, columns, clip, stdout.width)) > stdout.width:
        out.width = needed  # the terminal wraps the lines; otherwise rich cuts figures
    for row in texts:
        out.add_row(*row)
    return out


LEAST = 8
"""Cells that a column keeps, however narrow the terminal."""


def _cut(rows: Sequence[Sequence[Text]], columns: Sequence[str], clip: Sequence[int], width: int) -> int:
    """Cut the texts of the columns in ``clip`` so that all columns, with a space between them, are ``width`` cells wide.

    Returns the width that the columns need then, which is larger on a very narrow terminal."""
    widths = [max([len(name), *(row[i].cell_len for row in rows)]) for i, name in enumerate(columns)]
    left = width - (len(columns) - 1) - sum(w for i, w in enumerate(widths) if i not in clip)
    for k, i in enumerate(sorted(clip, key=lambda i: widths[i])):
        share = min(widths[i], max(LEAST, left // (len(clip) - k)))
        left -= share
        for row in rows:
            row[i].truncate(share, overflow="ellipsis")
    return width - left


def print_tuning(tuning: Mapping[str, Any]) -> None:
    """The result of tuning: the whole network's times, and the problems whose choice it changed."""
    rows = []
    for p in tuning["problems"]:
        choices = p["default"], p["chosen"]
        if choices[0] != choices[1]:
            times = [figure(p["us"].get(c), 2) for c in choices]
            rows.append([p["operators"], p["kind"], " ".join(p["nodes"])[:60], *choices, *times])
    if rows:
        columns = ["", "operator", "nodes", "by the cost model", "measured", "µs", "now µs"]
        stdout.print(table("\ntuned", columns, rows, right=[0, 5, 6]))
    failed = [f"{c}: {why}" for p in tuning["problems"] for c, why in p.get("failed", {}).items()]
    if failed:
        stdout.print(f"{len(failed)} candidates were not usable, such as {failed[0]}")
    for line in tuning.get("lost", ()):
        stdout.print(f"refused {line}")
    before, after = tuning["before_ms"], tuning["after_ms"]
    if tuning["cached"]:
        stdout.print(f"\ntuned: {after:.4f} ms when it was measured (from the timing cache)")
    elif before is not None:
        stdout.print(f"\ntuned: {before:.4f} -> {after:.4f} ms")
    elif after is not None:
        stdout.print(f"\ntuned: {after:.4f} ms")
    if tuning.get("stopped"):
        stdout.print(f"tuning ended early: {tuning['stopped']}")


PRODUCTS = frozenset({"Attention", "Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})
"""Operators that take long on the CPU if their sizes depend on data."""


def print_host(host: Mapping[str, Any], target: str) -> None:
    """The part of a network that runs on the CPU (an engine's ``meta["host"]``): operators with reasons, copies, cost."""
    coverage, operators, copies = host["coverage"], host["operators"], host["copies"]
    if not operators:
        stdout.print(f"\nall {coverage['operators']} operators run on {target}")
        return
    rows = [[o["kind"], first_of(o["nodes"], 3), f"{o['us']:.0f}", o["why"]] for o in operators]
    stdout.print(table("\non the CPU", ["operator", "ONNX nodes", "about µs", "because"], rows, right=[2]))
    if copies:
        rows = [[c["to"], c["tensor"], c["bytes"], f"{c['us']:.0f}"] for c in copies]
        stdout.print(table("\ncopies", ["to", "tensor", "bytes", "about µs"], rows, right=[2, 3]))
    total = sum(c["bytes"] for c in copies)
    stdout.print(
        f"\n{coverage['device']} of {coverage['operators']} operators run on {target}, {coverage['host']} on the CPU: "
        f"{counted(len(copies), 'copy', 'copies')} of {total} bytes and {counted(host['cuts'], 'cut')} of the CUDA graph, about "
        f"{host['estimated_us'] / 1e3:.2f} ms a run in all (sizes that depend on data count as 1)"
    )
    if any(o["kind"] in PRODUCTS and "depends on data" in o["why"] for o in operators):
        stdout.print(
            "hint: sizes that depend on data keep convolutions or products on the CPU, which can take far longer than estimated; "
            'two engines avoid it: docs/guide/dynamic-shapes.md, "Sizes that depend on data"'
        )


def refuse_engine(path: Path) -> None:
    """Raise UsageError for an engine where a model is wanted."""
    if is_engine(path):
        raise UsageError(f"{path} is an engine already", hint=f"optdnn run {path}, or optdnn inspect {path}")


def is_engine(path: Path) -> bool:
    """Whether a file starts as an engine does. Raises UsageError where it cannot be read."""
    from optdnn.runtime.file import format

    try:
        return format.is_engine(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
