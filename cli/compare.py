"""``optdnn compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from optdnn.cli.arrays import read_inputs, typed
from optdnn.cli.bench_tables import joules_text
from optdnn.cli.build_options import build_options, make_options
from optdnn.cli.common import (
    command_line,
    give_json,
    is_engine,
    now,
    parse_sizes,
    progress,
    reading_record,
    remark,
    stdout,
    table,
    warn,
)
from optdnn.cli.options import (
    FILE,
    RESULTS,
    WRITTEN,
    Command,
    Integer,
    Number,
    input_option,
    json_option,
    option,
    seed_option,
    size_option,
)
from optdnn.errors import NotMet, RunError, UsageError
from optdnn.report.words import HISTOGRAM, figure, histogram_text
from optdnn.temporary import temporary_folder

if TYPE_CHECKING:
    from optdnn.report.drawing import Drawing

SHOWN_LAYERS = 20
RACE, ACCURACY, BOUNDS = "Race", "Accuracy", "Bounds (exit code 7 where one is missed)"


@dataclass(frozen=True)
class Asked:
    """The options of a comparison, without those of a build."""

    against: tuple[str, ...]
    torch: str | None
    torch_compile: bool
    model: Path | None
    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    seed: int
    rounds: int
    duration: float
    baseline: str | None
    error_reference: str | None
    layers: bool
    bisect: bool
    tolerance: float | None
    energy: bool
    max_error: float | None
    min_speedup: float | None
    fail_if_slower: float | None
    html: Path | None
    markdown: Path | None
    json_file: Path | None


def _percent(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """``3%`` or ``0.03`` as a fraction. Raises UsageError."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise UsageError(f"--fail-if-slower {text!r} is not a percentage or fraction", hint="--fail-if-slower 3%")
    return value


@click.command("compare", cls=Command)
@click.argument("file", metavar="MODEL|ENGINE", type=FILE)
@click.argument("new", metavar="[NEW]", type=FILE, required=False)
@option("--against", group=RACE, multiple=True, metavar="A,B,…",
        help="onnxruntime, openvino[:bf16], reference, or engine files; on a GPU also own, cudnn (the same network with only our "
             "kernels, or only the libraries') and onnxruntime-cuda.  [default: those that are installed]")  # fmt: skip
@option("--torch", group=RACE, gpu=True, metavar="PKG.MODULE:FACTORY",
        help="Also race a PyTorch module, in a CUDA graph, channels last.")  # fmt: skip
@option(
    "--torch-compile", group=RACE, gpu=True, is_flag=True,
    help="Also race the same module by torch.compile, which compiles for minutes.",
)  # fmt: skip
@option("--model", group=RACE, metavar="FILE", type=FILE, help="The model that ENGINE was built from.")
@build_options(without=["--value"])
@input_option
@size_option
@seed_option
@option("--rounds", group=RACE, type=Integer(min=1), default=10, show_default=True, help="Rounds of measurement.")
@option(
    "--duration",
    group=RACE,
    type=Number(min=0, min_open=True),
    default=2.5,
    show_default=True,
    metavar="S",
    help="Seconds to measure each candidate, over all rounds.",
)
@option(
    "--energy", group=RACE, is_flag=True, help="Also measure the energy of an inference: by NVML on GPUs, and by RAPL."
)
@option("--baseline", group=RACE, metavar="NAME", help="The baseline of speedups.  [default: the first of --against]")
@option(
    "--error-reference", group=ACCURACY, metavar="NAME", help="The reference of errors.  [default: NumPy in float64]"
)
@option("--layers", group=ACCURACY, is_flag=True,
        help="Show the divergence node by node, worst first: from the model, or from an engine of --against.")  # fmt: skip
@option("--bisect", group=ACCURACY, is_flag=True, help="Find the first node whose output is beyond --tolerance.")
@option(
    "--tolerance", group=ACCURACY, type=Number(min=0), metavar="X",
    help="For --bisect.  [default: 1e-4; 0.1 at bf16, 0.25 at int8]",
)  # fmt: skip
@option("--max-error", "--fail-if-error", "max_error", group=BOUNDS, type=Number(min=0), metavar="X",
        help="Fail beyond this relative error.")  # fmt: skip
@option(
    "--min-speedup",
    group=BOUNDS,
    type=Number(min=0),
    metavar="X",
    help="Fail below this speedup over the baseline.",
)
@option(
    "--fail-if-slower", group=BOUNDS, metavar="P%", callback=_percent,
    help="Fail if the 95 % interval shows it slower than the baseline by more than this: 3%.",
)  # fmt: skip
@option("--html", group=RESULTS, metavar="FILE", type=WRITTEN, help="Write a self-contained HTML report.")
@option("--markdown", group=RESULTS, metavar="FILE", type=WRITTEN, help="Write a Markdown report.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, file: Path, new: Path | None, **given: Any) -> None:
    """Race an optdnn engine against other runtimes on the same model: speed and accuracy side by side.

    With two files, an old ENGINE and NEW (an engine, or a model that is built first), NEW races against the old one. Its errors are
    from the outputs of the old one, unless --model or --error-reference says otherwise.

    A MODEL is built first. Each candidate runs in its own process. They take turns, with the same number of threads. For an
    ENGINE the rivals need --model FILE.
    """
    from optdnn.report import check_outputs, write_reports

    asked = Asked(**{f.name: given.pop(f.name) for f in fields(Asked)})
    if new is not None:
        file, asked = new, _against_old(file, new, asked)
    engine = is_engine(file)
    if engine:
        _refuse_build_options(ctx)
    elif asked.model is not None:
        raise UsageError("--model is for an ENGINE: a MODEL is compared with itself", hint="leave --model out")
    target = _target(file, engine, given["target"])
    rivals = _rivals(asked, engine, target)
    if asked.energy:
        from optdnn.compare.gpu_rivals import is_gpu
        from optdnn.runtime.measuring.energy import counters

        counters(gpu=is_gpu(target))  # errors come before the work
    files = {"html": asked.html, "markdown": asked.markdown}
    check_outputs(files)
    report, drawing = _compared(ctx, file, engine, rivals, asked, given)
    written = write_reports(report, files, drawing)
    if not give_json(report, asked.json_file):
        _show(report)
        if asked.bisect:
            _show_first(report)
        if asked.layers:
            _show_layers(report)
    for path in written:
        remark(f"written: {path}")
    _judge(report, asked.max_error, asked.min_speedup, asked.fail_if_slower)


def _against_old(old: Path, new: Path, asked: Asked) -> Asked:
    """The settings for a race of NEW against an old engine: the old one is the baseline, and the reference of errors."""
    if not is_engine(old):
        raise UsageError(f"{old} is not an engine: NEW races against an engine", hint=f"optdnn build {old}")
    from optdnn.compare.rivals import rival_name

    name = rival_name(str(old), [new.name] if is_engine(new) else [])
    reference = asked.error_reference or (None if asked.model else name)
    return replace(
        asked, against=(str(old), *asked.against), baseline=asked.baseline or name, error_reference=reference
    )


def _rivals(asked: Asked, engine: bool, target: str) -> list[str]:
    """The names of the rivals. Raises UsageError or MissingDependency, before any work, for a rival that cannot take part."""
    from optdnn.compare.gpu_rivals import installed_gpu, is_gpu
    from optdnn.compare.rivals import check_rivals, installed

    default = installed_gpu if is_gpu(target) else installed
    names = [n for text in asked.against for n in text.split(",") if n] if asked.against else default()
    if asked.torch is None and asked.torch_compile:
        raise UsageError("--torch-compile needs --torch", hint="--torch PKG.MODULE:FACTORY")
    if asked.torch is not None and not is_gpu(target):
        raise UsageError(f"--torch is for comparisons on a GPU; the target is {target}", hint="--target cuda")
    if engine and not asked.against and asked.model is None and is_gpu(target):
        names = []  # the default rivals on a GPU are built from the model
    if names or asked.torch is None:
        check_rivals(names, has_model=not engine or asked.model is not None, target=target)
    return names


def _compared(
    ctx: click.Context, file: Path, engine: bool, rivals: Sequence[str], asked: Asked, options: Mapping[str, Any]
) -> tuple[dict[str, Any], Drawing | None]:
    """The report of the comparison, and the subject's network for a page; ``options`` are those of the build."""
    from optdnn.compare.comparison import compare, drawn
    from optdnn.compare.subject import Subject, build_subject, load_subject

    given = read_inputs(asked.inputs, bare=True)
    with temporary_folder() as folder, progress(f"compare {file.name}") as say:
        if engine:
            data = {k: options[k] for k in ("calib", "calibrator", "calib_cache", "labels", "images")}
            subject: Subject = load_subject(file, asked.model, options["threads"], **data)
        else:
            subject = build_subject(file, make_options(ctx, **options), Path(folder), say)
        outcome = compare(
            subject,
            rivals,
            given=typed(given, subject.inputs),
            sizes=parse_sizes(asked.sizes),
            seed=asked.seed,
            baseline=asked.baseline,
            error_reference=asked.error_reference,
            threads=options["threads"],
            rounds=asked.rounds,
            duration=asked.duration,
            look_inside=asked.layers or asked.bisect,
            tolerance=asked.tolerance,
            with_energy=asked.energy,
            torch=asked.torch,
            torch_as=["torch", *(["torch-compile"] if asked.torch_compile else [])],
            say=say,
        )
        report = outcome.to_plain() | {"command": command_line(ctx), "time": now()}
        if asked.html is None:
            return report, None
        with reading_record(file):
            return report, drawn(outcome, report, say)


def _target(file: Path, engine: bool, asked: str) -> str:
    """The target of an engine file, or a build's target resolved on this machine."""
    if engine:
        from optdnn.runtime.file.format import read

        return read(file, verify=False).target
    from optdnn.targets import resolve_target

    return resolve_target(asked)


def _refuse_build_options(ctx: click.Context) -> None:
    """Raise UsageError for build options with an engine: it is built already and would ignore them."""
    for name in ("target", "precision", "shape", "io_dtype", "opt_level", "tactics", "timing_cache", "workspace"):
        if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} is for building a MODEL; the ENGINE is built already")


def _show(report: Mapping[str, Any]) -> None:
    from optdnn.report import error_cells, speedup_text

    rows = [
        [
            row["name"],
            *(figure(row[k], d) for k, d in (("median_ms", 3), ("p99_ms", 3), ("throughput_per_s", 1))),
            speedup_text(row),
            *error_cells(row, report),
        ]
        for row in report["rows"]
    ]
    base = report["speedup_reference"]
    speedup = "speedup" if base is None else f"speedup over {base}"
    columns = ["", "median ms", "p99 ms", "per second", speedup, "abs err", "rel err"]
    stdout.print(table(None, columns, rows, right=range(1, 7), clip=[0]))
    for row in report["rows"]:
        if row.get("energy"):
            e = row["energy"]
            of = ", ".join(c["counter"] for c in e["counters"])
            stdout.print(
                f"{row['name']}: {joules_text(e['net_joules'])} an inference ({joules_text(e['joules'])} with idle power; {of})"
            )
        if row["error"]:
            stdout.print(f"{row['name']}: {row['error']}")
    stdout.print()
    for line in _notes(report):
        stdout.print(line)


def _notes(report: Mapping[str, Any]) -> list[str]:
    from optdnn.report import problems, sentences

    machine = report["machine"]
    return [
        *sentences(report),
        *problems(report),
        *([f"GPU: {', '.join(machine['gpus'])}; driver {machine['gpu_driver']}"] if machine.get("gpus") else []),
        f"machine: {machine['cpu']}, {machine['usable_cores']} cores, {report['threads']} threads for each",
        "versions: " + ", ".join(f"{k} {v}" for k, v in report["versions"].items()),
    ]


def _show_first(report: Mapping[str, Any]) -> None:
    found = report["bisect"]
    first, tolerance = found["first"], found["tolerance"]
    if first is None:
        stdout.print(f"\nbisect: no node is beyond {tolerance:g} of its largest output")
        return
    stdout.print(
        f"\nbisect: the first node beyond {tolerance:g} is {first['operator']} {first['node']} (output {first['value']}): "
        + (
            f"max rel err {_error(first['max_rel_err'])}; the passes make {_error(first['passes_rel_err'])} of it"
            if "layers_against" not in report
            else f"{_error(first['between_rel_err'])} from {report['layers_against']}; from the model this engine is "
            f"{_error(first['max_rel_err'])}, that one {_error(first['other_rel_err'])}"
        )
    )


def _show_layers(report: Mapping[str, Any]) -> None:
    shown = report["layers"][:SHOWN_LAYERS]
    against = report.get("layers_against")
    keys = ("max_rel_err", "max_abs_err", "passes_rel_err")
    columns = ["max rel", "max abs", "by passes"]
    if against is not None:
        keys, columns = ("between_rel_err", "max_rel_err", "other_rel_err"), ["between them", "this one", against]
    rows: Sequence[Sequence[object]] = [
        [
            d["position"],
            d["operator"],
            *(_error(d[k]) for k in keys),
            histogram_text(d["histogram"]),
            d["value"],
            d["node"],
        ]
        for d in shown
    ]
    title = "divergence, worst first" if against is None else f"divergence from {against}, worst first"
    title += f" (errors: elements by decade, {HISTOGRAM.removeprefix('errors ')})"
    columns = ["op", "operator", *columns, "errors", "output", "ONNX nodes"]
    stdout.print(table(f"\n{title}", columns, rows, right=[0, 2, 3, 4], clip=[1, 6, 7]))
    if len(report["layers"]) > len(shown):
        stdout.print(f"and {len(report['layers']) - len(shown)} more (all of them: --json)")


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _judge(
    report: Mapping[str, Any], max_error: float | None, min_speedup: float | None, fail_if_slower: float | None
) -> None:
    """Raise RunError where the subject itself failed, NotMet where it misses a bound."""
    row = report["rows"][0]
    if row["error"] is not None:
        raise RunError(f"{row['name']} failed: {row['error']}")
    if max_error is not None and not (row["max_rel_err"] is not None and row["max_rel_err"] <= max_error):
        raise NotMet(f"the error of {row['name']} is {_error(row['max_rel_err'])}, not within {max_error:g}")
    if fail_if_slower is not None:
        _judge_time(row, str(report["speedup_reference"]), fail_if_slower)
    if min_speedup is not None and not (row["speedup"] is not None and row["speedup"] >= min_speedup):
        base = report["speedup_reference"]
        raise NotMet(f"{row['name']} is {figure(row['speedup'], 3)} times as fast as {base}, not {min_speedup:g}")


def _judge_time(row: Mapping[str, Any], base: str, allowed: float) -> None:
    """Raise NotMet where the whole 95 % interval of the race lies beyond the allowed time; warn where only a part of it does."""
    if row["speedup_range"] is None:
        raise RunError(f"{base} was not measured, so {row['name']} cannot be judged by it")
    least, most = (1 / speedup - 1 for speedup in reversed(row["speedup_range"]))
    said = f"{row['name']} takes {least:+.1%} to {most:+.1%} longer than {base} (95 %)"
    if least > allowed:
        raise NotMet(f"{said}, not within {allowed:+.1%}")
    if most > allowed:
        warn(f"{said}: whether that is within {allowed:+.1%} is not decided; a longer --duration or more --rounds help")
