"""``optdnn diff``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optdnn.cli.common import give_json, is_engine, progress, reading_record, remark, stdout, table
from optdnn.cli.options import FILE, RESULTS, WRITTEN, Command, Number, json_option, option, seed_option

if TYPE_CHECKING:
    from optdnn.report.drawing import Drawing

SHOWN = 20


@click.command("diff", cls=Command)
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@option("--shape", "shape", multiple=True, metavar="NAME=1x3x224x224", help="Fix the shape of a model's input. Repeat.")
@option("--run/--no-run", default=True, help="Run both on the same inputs; of two engines, also measure the times.")
@option("--duration", type=Number(min=0, min_open=True), default=1.0, show_default=True, metavar="S",
        help="Seconds to measure each engine.")  # fmt: skip
@seed_option
@option("--html", type=WRITTEN, group=RESULTS, metavar="FILE", help="Write a self-contained HTML report.")
@json_option
def command(
    a: Path,
    b: Path,
    shape: tuple[str, ...],
    run: bool,
    duration: float,
    seed: int,
    html: Path | None,
    json_file: Path | None,
) -> None:
    """Show the differences between two engines or models: network, weights, fusions, precisions, tactics, sizes, times, outputs.

    A model runs in NumPy, for its outputs. The exit code is 0 whether or not they differ: the command reports and does not judge
    (optdnn compare OLD NEW --fail-if-slower 3% does).
    """
    from optdnn.compare.difference import TABLES, difference
    from optdnn.ranges import parse_shapes
    from optdnn.report import check_outputs
    from optdnn.report.difference import cells, sentences, to_html
    from optdnn.runtime.file.atomic import write_atomic

    for path in (a, b):
        is_engine(path)  # raises UsageError for a file that cannot be read
    check_outputs({"html": html})
    with reading_record(a), progress(f"diff {a.name} {b.name}") as say:
        found = difference(a, b, shapes=parse_shapes(shape), seed=seed, run=run, duration=duration, say=say)
    if html is not None:
        with reading_record(b):
            write_atomic(html, [to_html(found, TABLES, _drawing(b, found)).encode()])
    if not give_json(found, json_file):
        for name, rows in found["tables"].items():
            stdout.print(table(f"{TABLES[name]}", ["", "A", "B"], [cells(row) for row in rows[:SHOWN]], clip=[0, 1, 2]))
            if len(rows) > SHOWN:
                stdout.print(f"and {len(rows) - SHOWN} more (all of them: --json)")
            stdout.print()
        for line in sentences(found):
            stdout.print(line)
    if html is not None:
        remark(f"written: {html}")


def _drawing(b: Path, found: Mapping[str, Any]) -> Drawing | None:
    """The network of B, where it is an engine, with the times that differ."""
    if not is_engine(b):
        return None
    from optdnn.report.drawing import draw
    from optdnn.runtime.cuda.measuring.expected import expected_cliffs
    from optdnn.runtime.engine import saved_report
    from optdnn.runtime.file.format import read

    program = read(b)
    told = {**saved_report(b), "cliffs": expected_cliffs(program)}
    return draw(program, told, changes=found["tables"].get("times", ()))
