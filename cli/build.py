"""``optdnn build``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from optdnn.cli.build_options import build_options, make_options
from optdnn.cli.common import command_line, give_json, now, progress, refuse_engine, remark, stderr, stdout, write_text
from optdnn.cli.options import FILE, RESULTS, WRITTEN, Command, json_option, option, output_option
from optdnn.cli.shared_files import refuse_shared_files
from optdnn.errors import OptdnnError, RunError, UsageError

INSIDE = "Look inside"
BENCH_SECONDS = 2.0


@click.command("build", cls=Command)
@click.argument("model", type=FILE)
@build_options()
@output_option("The engine.  [default: MODEL.engine next to the model]")
@option("--bench", is_flag=True, group=RESULTS, help="Measure the engine when it is built, as optdnn bench does.")
@option(
    "--check/--no-check", default=True, group=RESULTS, help="Compare the engine's outputs with the model's in NumPy."
)
@option("--precision-report", type=WRITTEN, group=RESULTS, metavar="FILE",
        help="Write a report on precision auto: .html or .md.")  # fmt: skip
@option("--html", type=WRITTEN, group=RESULTS, metavar="FILE",
        help="Write a report with the network, its fusions and times, as one HTML file.")  # fmt: skip
@option("--refit", is_flag=True, group=RESULTS,
        help="Keep the model in the engine: optdnn refit then needs only the weights that change.")  # fmt: skip
@option("--lock", type=WRITTEN, group=RESULTS, metavar="FILE", help="Write everything that the build depends on here.")
@option("--locked", type=FILE, group=RESULTS, metavar="FILE",
        help="Build the same bytes as with --lock FILE, or report what differs and write nothing.")  # fmt: skip
@json_option
@option("-v", "--verbose", is_flag=True, group=INSIDE, help="Show what each pass did and refused.")
@option("--dump", type=click.Path(path_type=Path, file_okay=False), group=INSIDE, metavar="FOLDER",
        help="Write numbered graph dumps here.")  # fmt: skip
@option("--stop-after", metavar="PASS", group=INSIDE, help="Run the pipeline up to this pass only.")
@option("--emit-onnx", type=WRITTEN, group=INSIDE, metavar="FILE",
        help="Also write the optimized graph as ONNX (and FILE.data, beyond 1 GiB).")  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    output: Path | None,
    precision_report: Path | None,
    html: Path | None,
    json_file: Path | None,
    bench: bool,
    check: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Compile MODEL.onnx into an engine: import, optimize, choose tactics by measurement, save.

    The engine goes to OUT.engine; the measurements and their times go to OUT.engine.report.json.
    """
    from optdnn.compiler import build_verbose
    from optdnn.report import check_outputs

    chosen = make_options(ctx, **options)
    refuse_engine(model)
    output = output or model.with_suffix(".engine")
    _check_outputs(ctx, output, chosen.emit_onnx)
    check_outputs({"html": html})
    if precision_report is not None:
        _check_precision_report(chosen.precision, precision_report)
    with progress(f"build {model.name}") as say:
        build = build_verbose(model, chosen, say)
        say("save")
        began = time.perf_counter()
        build.engine.save(output)
        saved = time.perf_counter()
        report = _report(build, output) | _checked(build, model, check, chosen, say)
    report["seconds"] |= {"save": round(saved - began, 4), "check": round(time.perf_counter() - saved, 4)}
    if bench:
        report["bench"] = _measured(build.engine, output, profile=html is not None)
    if html is not None:
        _write_html(html, build.engine, report, model.name)
    if precision_report is not None:
        from optdnn.report import precision

        precision.write(report["auto"], model.name, precision_report)
    if chosen.workspace is not None and build.engine.target in ("cpu", "reference"):
        remark(f"--workspace bounds GPU kernels; the libraries of target {build.engine.target} manage their own memory")
    if give_json(report, json_file):
        return
    if stderr.quiet:
        stdout.print(str(output))
        return
    from optdnn.cli import summary

    summary.show(build, report, model=model, output=output, verbose=verbose)


def _checked(build: Any, model: Path, check: bool, options: Any, say: Any) -> dict[str, Any]:
    """The error of the finished engine; if it cannot run on this machine, the reason, also as ``elsewhere``."""
    say("compare it with the model")
    elsewhere = _why_not_here(build.engine.target)
    if elsewhere is not None:
        return {"elsewhere": elsewhere, "error": {"not_measured": elsewhere}}
    return {"error": _error(build, model, options) if check else {"not_measured": "--no-check"}}


def _report(build: Any, output: Path) -> dict[str, Any]:
    from optdnn.cli.words import precision_text

    engine = build.engine
    report: dict[str, Any] = {"engine": str(output), **build.report()}
    report["precision_text"] = precision_text(engine.precision, engine.meta)
    return report


def _write_html(html: Path, engine: Any, report: Mapping[str, Any], title: str) -> None:
    from optdnn.report.drawing import draw
    from optdnn.report.html import build_html

    full = {**report, "command": command_line(click.get_current_context()), "time": now()}
    drawing = draw(engine.program, full, measured=report.get("bench"))
    write_text(html, build_html(full, drawing, title))


def _measured(engine: Any, output: Path, *, profile: bool) -> dict[str, Any]:
    """The report of ``bench``, with ``profile`` step by step. Raises RunError for an engine that does not run on this machine."""
    from optdnn.cli.bench import measured
    from optdnn.runtime.contexts.feeds import random_feeds

    if (reason := _why_not_here(engine.target)) is not None:
        raise RunError(f"{output} is written, but cannot be measured: {reason}", hint="leave --bench out")
    feeds = random_feeds(engine.inputs, profiles=engine.profiles, typical=engine.meta.get("sizes"))
    found: dict[str, Any] = measured([engine], feeds, output.name, duration=BENCH_SECONDS, profile=profile)
    return found


def _why_not_here(target: str) -> str | None:
    """Why an engine cannot run on this machine, or None."""
    if not target.startswith("cuda"):
        return None
    from optdnn.runtime.cuda.usable import why_not

    reason = why_not()
    return None if reason is None else f"{target} does not run here: {reason}"


def _error(build: Any, model: Path, options: Any) -> dict[str, Any]:
    from optdnn.compare.output_error import output_error

    try:
        return output_error(build.engine, model, options).to_plain()
    except OptdnnError as error:
        fits = f"do the sizes of --shape fit the model? With inputs of your own: optdnn verify ENGINE --model {model} --input FILE"
        return {"not_measured": str(error.message), "hint": error.hint or fits}


def _check_precision_report(asked: str, path: Path) -> None:
    from optdnn.report.precision import check_file

    if asked != "auto":
        raise UsageError("--precision-report needs --precision auto", hint="--precision auto --calib DATA")
    check_file(path)


def _check_outputs(ctx: click.Context, output: Path, emit_onnx: Path | None) -> None:
    """Refuse, before the work, files that could not be written at its end, or would overwrite others."""
    from optdnn.runtime.engine import report_path
    from optdnn.runtime.file.atomic import check_writable

    report = Path(report_path(output))
    default = {} if ctx.params["output"] else {"the engine": output}
    refuse_shared_files(ctx, {**default, "the report": report})
    for path in (output, report, *([emit_onnx] if emit_onnx else [])):
        check_writable(path)
