"""``optdnn verify``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from optdnn.cli.arrays import read_inputs, typed
from optdnn.cli.build_options import load_options
from optdnn.cli.common import give_json, parse_sizes, progress, stdout, table
from optdnn.cli.options import (
    FILE,
    Command,
    Integer,
    Number,
    engine_argument,
    input_option,
    json_option,
    option,
    seed_option,
    size_option,
)
from optdnn.errors import NotMet


@click.command("verify", cls=Command)
@engine_argument
@option("--model", type=FILE, help="The model that ENGINE was built from: also check the results of the whole engine.")
@input_option
@size_option
@seed_option
@option(
    "--tolerance",
    type=Number(min=0),
    help="For --model: largest error, relative to the change by another input.  [default: 1e-4; fp16 0.01, bf16 0.1, int8 0.25]",
)
@option("--threads", type=Integer(min=1), default=None, help="Threads of an engine for cpu.")
@load_options
@json_option
def command(
    engine: Path,
    model: Path | None,
    inputs: tuple[str, ...],
    sizes: tuple[str, ...],
    seed: int,
    tolerance: float | None,
    threads: int | None,
    signed_by: str | None,
    json_file: Path | None,
    **loading: Any,
) -> None:
    """Check ENGINE on this machine: its signature (--signed-by), its steps, its use of memory, its repeatability, and (--model) its
    results.

    Ends with exit code 7 if a check fails. An engine for ranges of shapes is checked at the minimum, optimum and maximum of
    each profile.
    """
    import optdnn
    from optdnn.compare.verification import verify
    from optdnn.runtime.file.signatures import signers

    wanted = list(signers([] if signed_by is None else [signed_by]))
    loaded = optdnn.load(engine, threads=threads, signed_by=signed_by, **loading)
    given = typed(read_inputs(inputs, bare=True), loaded.inputs)
    with progress(f"verify {engine.name}") as say:
        found = verify(loaded, model, given, sizes=parse_sizes(sizes), seed=seed, tolerance=tolerance, progress=say)
    report = found.to_plain() | {"engine": str(engine), "signed_by": wanted}
    if not give_json(report, json_file):
        _show(report)
    if not found.ok:
        first = found.failed[0]
        where = f" ({first.case})" if first.case else ""
        raise NotMet(
            f"{len(found.failed)} of {len(found.checks)} checks of {engine} failed; the first: {first.name}{where}: {first.text}"
        )


def _show(report: Mapping[str, Any]) -> None:
    several = len({c["case"] for c in report["checks"]}) > 1
    rows = [
        [c["check"], *([cases] if several else []), c["status"], c["text"]] for c, cases in _together(report["checks"])
    ]
    stdout.print(table(None, ["check", *(["inputs"] if several else []), "result", ""], rows))
    stdout.print()
    how = ", simulated in NumPy" if report["simulated"] else ""
    stdout.print(f"{report['engine']}: {report['target']}, {report['precision']}{how}; inputs: {report['inputs_from']}")
    if report["signed_by"]:
        stdout.print(f"signed by {', '.join(report['signed_by'])}")


def _together(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The rows of the table, each with the names of its inputs.

    A check that did not fail, and has the same status on all inputs, has one row with its worst outcome. Any other check has a row
    for each outcome."""
    for name in dict.fromkeys(c["check"] for c in checks):
        own = [c for c in checks if c["check"] == name]
        if len({c["status"] for c in own}) > 1 or own[0]["status"] == "failed":
            yield from ((c, c["case"]) for c in own)
            continue
        worst = max(own, key=lambda c: (c["error"] or 0.0) / (c["limit"] or 1.0))
        yield worst, ", ".join(c["case"] for c in own)
