"""The summary of ``build``: model, engine, library, error, speed, and the next commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from optdnn.cli.bench_tables import show_cliffs
from optdnn.cli.common import print_host, print_tuning, remark, stdout, table, warn
from optdnn.cli.precision import show_auto
from optdnn.cli.words import precision_text, runs_on
from optdnn.report.words import bytes_text, counted, first_of, slower_text
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.target_name import GPUS, TargetName

SHOWN = 12


def show(build: Any, report: Mapping[str, Any], *, model: Path, output: Path, verbose: bool) -> None:
    """Print the summary. ``report`` is the build's, with the command's own ``error`` and ``bench``."""
    if verbose:
        _passes(build.passes)
    engine = build.engine
    operators = sum(build.passes[0].kinds_before.values()) if build.passes else 0
    rows = [
        ["model", f"{model}: {counted(operators, 'operator')}, {len(build.graph)} in the engine"],
        ["inputs", ", ".join(map(str, engine.inputs)) + _profiles(engine)],
        ["outputs", ", ".join(map(str, engine.outputs))],
        ["engine", f"{output} ({bytes_text(output.stat().st_size)}), target {engine.target}"],
        ["precision", precision_text(engine.precision, engine.meta)],
        ["runs on", runs_on(engine.program)],
        *_planned_for(engine),
        ["error", _error(report)],
        ["speed", _speed(report, engine)],
        ["time", _seconds(report["seconds"])],
        ["next", _next(report, engine, model, output)],
    ]
    stdout.print(table(None, ["", ""], rows))
    if "auto" in report:
        show_auto(report["auto"], nodes=verbose)
    if verbose:
        show_cliffs(report.get("cliffs", ()))
    _precisions(engine)
    _fallbacks(build)
    if build.compiled.tuning is not None:
        print_tuning(build.compiled.tuning)
    for line in dict.fromkeys(w for tried in build.compiled.first_runs for w in tried.warnings):
        warn(line)


def _profiles(engine: Any) -> str:
    """The ranges of symbolic sizes, or the sizes at which the build measured."""
    if engine.profiles:
        shown = ["; ".join(f"{n}={r if r.min < r.max else r.min}" for n, r in p.items()) for p in engine.profiles]
        return f"; for {' or '.join(shown)}"
    sizes = engine.meta.get("sizes")
    return f"; measured at {', '.join(f'{n}={size}' for n, size in sizes.items())}" if sizes else ""


def _planned_for(engine: Any) -> list[list[str]]:
    """The GPU that the kernels were planned for; and how to name another, if the target names only an architecture."""
    planned, name = engine.program.meta.get("gpu"), TargetName.parse(engine.target)
    if planned is None or name.family != "cuda":
        return []
    text = f"{planned['name']}, {planned['multiprocessors']} multiprocessors"
    if not name.gpu and planned["name"] == of_arch(name.arch).name:
        others = [gpu for gpu, arch in GPUS.items() if arch == name.arch]
        text += f" (the default of {name.arch}; name another: --target cuda:{'|'.join(others)})" if others[1:] else ""
    return [["planned for", text]]


def _error(report: Mapping[str, Any]) -> str:
    """The differences between the outputs and the model's, in words."""
    e = report["error"]
    if "not_measured" in e:
        return f"not measured: {e['not_measured']}" + (f"\n{e['hint']}" if e.get("hint") else "")
    if e["max_rel_err"] is None:
        text = f"outputs are not finite, or have other shapes than the model's, on {e['inputs_from']}"
        told = report["options"]
        if told["precision"] == "fp16" and "calibrator" not in told:
            text += "\nvalues may exceed 65504, where fp16 ends: with samples (--calib DATA), a build keeps such operators in fp32"
        return text
    text = f"{e['max_rel_err']:.1e} of the largest output, from the model in NumPy (float64)"
    if e["input_difference"]:
        text += f"; other inputs make a difference of {e['input_difference']:.1g}"
    if report["options"]["precision"] != "fp32" or e["max_rel_err"] > 1e-3:
        moved = []
        if e["rms_rel_err"] is not None:  # None without floating-point outputs
            moved.append(f"outputs moved by {e['rms_rel_err']:.1e} (root mean square)")
        if e["same_top"] is not None:
            moved.append(f"the same largest class in {e['same_top']:.0%} of {counted(e['rows'], 'row')}")
        text += ("\n" + "; ".join(moved) if moved else "") + f", on {e['inputs_from']}"
    if e["undefined"]:
        text += f"\nthe model itself gives NaN in {', '.join(e['undefined'])}, on {e['inputs_from']}"
        if names := e["undefined_weights"]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text += f"; weights with NaN: {', '.join(names[:3])}{more}"
    return text


def _speed(report: Mapping[str, Any], engine: Any) -> str:
    """The time of a run (with ``--bench``, as measured at the end), and the tactics that were slower or refused."""
    lines = []
    if "bench" in report:
        own = report["bench"]
        sizes = ", ".join(f"{n} {s}" for n, s in own["inputs"].items())
        text = f"{own['latency_ms']['median']:.3f} ms a run ({own['throughput_per_s']:.1f}/s), inputs {sizes}"
        lines.append(text + ("" if own["stable"] else "; the machine was unstable"))
    timed = [t for t in report.get("tactics", ()) if t.get("median_ms") is not None]
    tuned = (report.get("tuning") or {}).get("after_ms")
    if timed:
        first, *others = timed
        lost = ", ".join(f"{o['tactic']} {o['median_ms']:.3f} ms" for o in others)
        cached = " (from the timing cache)" if first.get("cached") else ""
        text = f"{first['median_ms']:.3f} ms a run with {first['tactic']}{cached}"
        lines.append(text + (f"; it beat {lost}" if lost else ""))
    elif tuned is not None:
        lines.append(f"{tuned:.4f} ms a run on the GPU")
    refused = [f"refused: {t['tactic']}: {t['refused']}" for t in report.get("tactics", ()) if t.get("refused")]
    if not lines:
        how = "" if refused or "elsewhere" in report else ": optdnn build --bench"
        lines.append(f"not measured{how}" + (" (the cost model chose)" if engine.target.startswith("cuda") else ""))
    return "\n".join(lines + refused)


def _seconds(seconds: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items() if s >= 0.05)
    return f"{sum(seconds.values()):.1f} s" + (f" ({parts})" if parts else "")


def _next(report: Mapping[str, Any], engine: Any, model: Path, output: Path) -> str:
    """Commands that work with this engine on this machine, as a shell takes them."""
    name, source = (quote(f"./{path}" if str(path).startswith("-") else str(path)) for path in (output, model))
    if "elsewhere" not in report:
        return f"optdnn bench {name}, or optdnn compare {name} --model {source}"
    tuned = f"optdnn retune {name}" if "graph" in engine.program.meta else "this build again, which tunes it,"
    return f"optdnn run {name} --simulate, or {tuned} on the machine with the GPU"


def _precisions(engine: Any) -> None:
    """Print the operators that do not run as requested, hazards of quantization, and risks of fp16."""
    told = engine.meta.get("precision", {})
    lines = [
        f"{r['kind']} {_nodes(r)}: asked for {r['asked']}, runs in {r['runs']}: {r['reason']}"
        for r in told.get("differs", ())
    ]
    for title in ("hazards", "risks"):
        lines += [f"{r['kind']} {_nodes(r)}: {r['what']}" for r in told.get(title, ())]
    if lines:
        stdout.print()
    for line in lines[:SHOWN]:
        stdout.print(line)
    if len(lines) > SHOWN:
        stdout.print(f"… and {len(lines) - SHOWN} more: optdnn inspect, or --json")
    if told.get("fp16_tried") is False:
        remark(
            "no trial run of fp16: the network is too large, or its inputs cannot be made up. Values beyond 65504 would become "
            "infinite: give --calib DATA, or check with optdnn compare"
        )


def _nodes(row: Mapping[str, Any]) -> str:
    """The first ONNX nodes of an operator: nodes that are named like its kind come before those that were fused with it."""
    return first_of(sorted(row["nodes"], key=lambda name: row["kind"] not in name), 3) or str(row["op"])


def _fallbacks(build: Any) -> None:
    """Print the time in fp32 if that is faster, and the operators that another library, NumPy or the CPU runs."""
    if build.compiled.beside_fp32 is not None and build.compiled.beside_fp32.slower:
        stdout.print(f"\n{slower_text(build.compiled.beside_fp32.to_json())}; build with --precision fp32")
    meta = build.engine.meta
    tactic = meta.get("tactic")
    for item in build.compiled.fallbacks.get(tactic["library"], []) if tactic else []:
        by = f"by {item['library']}" if "library" in item else "from its NumPy kernel"
        stdout.print(f"{by}: {item['operator']} {item['node']}: {item['reason']}")
    if meta.get("host", {}).get("operators"):
        print_host(meta["host"], build.engine.target)
        by_value = build.engine.program.by_value
        if by_value is not None:
            remark(f"plans for the values of {', '.join(by_value.inputs)}, made when first seen, leave less to the CPU")
    dynamic = build.engine.program.dynamic
    if dynamic is not None and dynamic.source is None:
        from optdnn.cli.inspect import later_plans

        plans = later_plans(build.engine.program)
        stdout.print(f"plans for other sizes in range: {plans}; without --pin it runs at all")


def _passes(passes: Sequence[Any]) -> None:
    """The rewrites and refusals of each pass, in words and then node by node."""
    from optdnn.passes.support.words import in_words

    for p in passes:
        if not p.fired and not p.refused:
            continue
        done = "; ".join(in_words(f.rule for f in p.fired)) or "nothing to do"
        refused = f"; {len(p.refused)} refused" if p.refused else ""
        stdout.print(f"{p.name} ({p.nodes_before} → {p.nodes_after} operators): {done}{refused}")
        for fired in p.fired:
            stdout.print(f"  {p.name}/{fired.rule}: {' + '.join(fired.nodes)}")
        for one in p.refused:
            stdout.print(f"  {p.name}/{one.rule} not at {' + '.join(one.nodes)}: {one.reason}")
    busy = {p.name for p in passes if p.fired or p.refused}
    idle = dict.fromkeys(p.name for p in passes if p.name not in busy)
    if idle:
        stdout.print(f"found nothing to do: {', '.join(idle)}\n")
