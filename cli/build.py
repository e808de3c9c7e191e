"""``optdnn build``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from optdnn.cli.common import (
    build_options,
    make_options,
    print_host,
    print_json,
    print_tuning,
    progress,
    refuse_engine,
    stderr,
    stdout,
    table,
    value_option,
)
from optdnn.cli.inspect import later_plans
from optdnn.cli.precision import show_auto
from optdnn.errors import UsageError


@click.command("build")
@click.argument("model", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: MODEL.engine beside it."
)
@build_options
@value_option
@click.option("--dump", type=click.Path(path_type=Path, file_okay=False), help="Write numbered graph dumps here.")
@click.option("--stop-after", metavar="PASS", help="Run the pipeline up to this pass only.")
@click.option(
    "--emit-onnx",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the optimized graph as ONNX (and FILE.data, beyond 1 GiB).",
)
@click.option(
    "--precision-report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the account of precision auto: .html or .md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the full report as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="List every fusion made and refused.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    output: Path | None,
    dump: Path | None,
    stop_after: str | None,
    emit_onnx: Path | None,
    precision_report: Path | None,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Compile MODEL.onnx into an engine: import, optimize, choose tactics by measurement, save.

    The engine goes to OUT.engine; what was measured and how long it took goes to OUT.engine.report.json beside it.
    """
    from optdnn.compiler import build_verbose

    chosen = replace(make_options(ctx, **options), dump=dump, stop_after=stop_after, emit_onnx=emit_onnx)
    refuse_engine(model)
    output = output or model.with_suffix(".engine")
    _check_outputs(model, output, emit_onnx)
    if precision_report is not None:
        _check_precision_report(chosen.precision, precision_report)
    with progress(f"build {model.name}") as say:
        build = build_verbose(model, chosen, say)
        say("save")
        build.engine.save(output)
    report = build.report()
    if precision_report is not None:
        from optdnn.report import precision

        precision.write(report["auto"], model.name, precision_report)
    if chosen.workspace is not None and build.engine.target in ("cpu", "reference"):
        stderr.print(
            f"--workspace bounds GPU kernels; the libraries of target {build.engine.target} manage their own memory"
        )
    if as_json:
        print_json({"engine": str(output), **report})
        return
    rows = [
        [p.name, p.changes, len(p.refused), p.nodes_before, p.nodes_after, f"{p.seconds * 1e3:.1f}"]
        for p in build.passes
    ]
    stdout.print(table(None, ["pass", "made", "refused", "nodes before", "after", "ms"], rows, right=range(1, 6)))
    if verbose:
        _explain(build)
    if "auto" in report:
        show_auto(report["auto"], nodes=verbose)
    if build.tactics:
        stdout.print()
        rows = [[m.name, f"{m.median_ms:.3f}" if m.median_ms is not None else "-", _remark(m)] for m in build.tactics]
        stdout.print(table(None, ["tactic", "median ms", ""], rows, right=[1]))
    _precisions(build)
    if "beside_fp32" in report and report["beside_fp32"]["slower"]:
        from optdnn.report.words import slower_text

        stdout.print(f"\n{slower_text(report['beside_fp32'])}; build with --precision fp32")
    tactic = build.engine.meta.get("tactic")
    for item in build.fallbacks.get(tactic["library"], []) if tactic else []:
        by = f"by {item['library']}" if "library" in item else "from its NumPy kernel"
        stdout.print(f"{by}: {item['operator']} {item['node']}: {item['reason']}")
    if build.engine.meta.get("host", {}).get("operators"):
        print_host(build.engine.meta["host"], build.engine.target)
        by_value = build.engine.program.by_value
        if by_value is not None:
            stdout.print(
                f"plans for the values of {', '.join(by_value.inputs)}, made when first seen, leave less to the CPU"
            )
    dynamic = build.engine.program.dynamic
    if dynamic is not None and dynamic.source is None:
        stdout.print(
            f"plans for other sizes in range: {later_plans(build.engine.program)}; without --pin it runs at all"
        )
    if build.tuning is not None:
        print_tuning(build.tuning)
    for line in dict.fromkeys(w for tried in build.first_runs for w in tried.warnings):
        stderr.print(f"warning: {line}", markup=False)
    total = sum(build.seconds.values())
    stdout.print(
        f"\n{output}: target {build.engine.target}, precision {build.engine.precision}"
        + (f", tactic {tactic['name']}" if tactic else "")
        + f", {len(build.graph)} operators, built in {total:.1f} s"
    )


SHOWN = 12


def _precisions(build: Any) -> None:
    """What does not run as asked, hazards of quantization, risks of fp16."""
    told = build.engine.meta.get("precision", {})
    lines = [
        f"{r['kind']} {' + '.join(r['nodes']) or r['op']}: asked for {r['asked']}, runs in {r['runs']}: {r['reason']}"
        for r in told.get("differs", ())
    ]
    for title in ("hazards", "risks"):
        lines += [f"{r['kind']} {' + '.join(r['nodes']) or r['op']}: {r['what']}" for r in told.get(title, ())]
    if lines:
        stdout.print()
    for line in lines[:SHOWN]:
        stdout.print(line)
    if len(lines) > SHOWN:
        stdout.print(f"… and {len(lines) - SHOWN} more: optdnn inspect, or --json")


def _check_precision_report(asked: str, path: Path) -> None:
    from optdnn.report.precision import check_file

    if asked != "auto":
        raise UsageError("--precision-report tells how precision auto chose", hint="--precision auto --calib DATA")
    check_file(path)


def _check_outputs(model: Path, output: Path, emit_onnx: Path | None) -> None:
    """Refuse, before the work, what could not be written at its end, or would overwrite the model."""
    from optdnn.runtime.atomic import check_writable
    from optdnn.runtime.engine import report_path

    for path in (output, Path(report_path(output)), *([emit_onnx] if emit_onnx else [])):
        if path.resolve() == model.resolve():
            raise UsageError(f"{path} is the model itself", hint="name another file: -o OUT.engine")
        check_writable(path)


def _explain(build: Any) -> None:
    for p in build.passes:
        for fired in p.fired:
            stdout.print(f"  {p.name}/{fired.rule}: {' + '.join(fired.nodes)}")
        for refused in p.refused:
            stdout.print(
                f"  {p.name}/{refused.rule} not at {' + '.join(refused.nodes)}: {refused.reason}", markup=False
            )


def _remark(measured: Any) -> str:
    if measured.refused is not None:
        return f"refused: {measured.refused}"
    return "from the timing cache" if measured.cached else ""
