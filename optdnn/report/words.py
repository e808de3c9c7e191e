"""The wording of a report: the same on the terminal, in Markdown and in HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from optdnn.runtime.cuda.measuring.cliffs import BELOW, OVER
from optdnn.runtime.program import Plain


def times(value: float) -> str:
    """A speedup."""
    return f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def error_text(value: float | None) -> str:
    """An error; None is one that is not finite."""
    return "not finite" if value is None else "0" if value == 0 else f"{value:.1e}"


def error_cells(row: Mapping[str, Any], report: Mapping[str, Plain]) -> tuple[str, str]:
    """A row's absolute and relative error, where it was compared at all."""
    if row["error"] is not None or report["error_reference"] is None:
        return "–", "–"
    return error_text(row["max_abs_err"]), error_text(row["max_rel_err"])


HISTOGRAM = "errors ≤1e-8 … ≥1"
"""The bars of :func:`histogram_text`: elements by their error over the value's largest magnitude, in decades."""
_BARS = " ▁▂▃▄▅▆▇█"
_CONSTANT = re.compile(r"(^|[/_])Constant(_\d+)?$")
"""Names that PyTorch's exporters give to Constant nodes."""


def figure(value: float | None, digits: int) -> str:
    """A number with this many digits after the point, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def counted(n: int, one: str, many: str | None = None) -> str:
    """A number with its noun: 1 step, 2 steps, 2 copies."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def first_of(names: Sequence[str], most: int, total: int | None = None) -> str:
    """The first names, and how many more there are (of ``total``, where ``names`` are not all). Constants come last, as they say
    least."""
    names = sorted(names, key=lambda name: _CONSTANT.search(name) is not None)
    more = (total or len(names)) - min(len(names), most)
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def histogram_text(counts: Sequence[int]) -> str:
    """A bar for each bin, as high as its share of the elements; one that holds any is at least the lowest bar."""
    total = sum(counts)
    return "".join(_BARS[0 if not n else max(1, round(8 * n / total))] for n in counts) if total else ""


def layer_error(layer: Mapping[str, Any]) -> float | None:
    """The error that ranks a layer: the distance of two engines, or of one from the model; None: not finite."""
    found: float | None = layer.get("between_rel_err", layer["max_rel_err"])
    return found


def milliseconds(value: float | None) -> str:
    """Three or four significant digits."""
    return "–" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def duration(us: float) -> str:
    """Microseconds as a reader wants them: in µs, or in ms from 1,000 on."""
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def bytes_text(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 1024:.1f} KiB" if n >= 1024 else f"{n} bytes"


def speedup_text(row: Mapping[str, Any]) -> str:
    """A row's speedup with its interval; no figure where the interval decides nothing: it is wide, or reaches across the 2 % within
    which two are equal."""
    if row["speedup"] is None:
        return "–"
    if row["verdict"] == "baseline":
        return "baseline"
    low, high = row["speedup_range"]
    interval = f"{low:.2f} to {high:.2f}"
    return f"not clear ({interval})" if row["verdict"] == "unstable" else f"{times(row['speedup'])} ({interval})"


def sentences(report: Mapping[str, Plain]) -> list[str]:
    """The figures in sentences, with their references (see also :func:`problems`)."""
    said = [_versus(report["subject"], v) for v in report["versus"]]
    if report["speedup_reference"] is not None:
        said.append(
            f"speedup: median over rounds of {report['speedup_reference']}'s latency over each one's, "
            "with a 95 % confidence interval"
        )
    if report["error_reference"] is not None:
        text = f"errors: against {report['error_reference']}; relative ones to the largest magnitude of an output"
        if report["input_difference"] is not None:
            text += f" (other inputs make a difference of {report['input_difference']:.1g})"
        said.append(text)
    if on_gpu := [r["name"] for r in report["rows"] if r.get("clock") == "gpu"]:
        others = [r["name"] for r in report["rows"] if r.get("clock") == "host" and r["error"] is None]
        text = "latencies: GPU time of a CUDA graph between events, arrays on the GPU, L2 as the run before left it"
        if others:
            text += f", of {', '.join(on_gpu)}; by the host's clock for {', '.join(others)}"
        said.append(text)
    said.append(f"inputs: {inputs_text(report)}; {report['inputs_from']}")
    return said


def inputs_text(report: Mapping[str, Plain]) -> str:
    return ", ".join(f"{n} {i['dtype']}[{', '.join(map(str, i['shape']))}]" for n, i in report["inputs"].items())


def problems(report: Mapping[str, Plain]) -> list[str]:
    """Warnings that a reader must not miss."""
    found = []
    beside = report["build"].get("beside_fp32")
    if beside is not None and beside["slower"]:
        found.append(slower_text(beside))
    difference = report["input_difference"]
    compared = [r for r in report["rows"] if r["error"] is None and report["error_reference"] is not None]
    if broken := [r["name"] for r in compared if r["max_rel_err"] is None]:
        found.append(
            f"warning: other shapes than the reference's, or elements that are not finite: {', '.join(broken)}"
        )
    if difference == 0:
        found.append("warning: other inputs make no difference to the outputs, so the errors prove little")
    elif difference is not None:
        near = [r["name"] for r in compared if r["max_rel_err"] and r["max_rel_err"] > difference / 10]
        if near:
            found.append(f"warning: errors that are not well below what other inputs make: {', '.join(near)}")
    if drifted := [r["name"] for r in report["rows"] if r["stable"] is False]:
        found.append(
            f"note: latencies drifted or were few while measuring {', '.join(drifted)}; speedups compare the same rounds"
        )
    return found


def slower_text(beside: Mapping[str, Any]) -> str:
    """The warning that a precision is slower than fp32, from ``beside_fp32`` of a build's report."""
    own, fp32 = beside["own"], beside["fp32"]
    return (
        f"warning: {beside['precision']} is slower than fp32 on this machine: {own['median_ms']:.4g} ms ({own['tactic']}), "
        f"fp32 {fp32['median_ms']:.4g} ms ({fp32['tactic']})"
    )


def _versus(subject: str, v: Mapping[str, Any]) -> str:
    low, high = v["range"]
    interval = f"{low:.2f} to {high:.2f}"
    if v["verdict"] == "unstable":
        return f"{subject} against {v['against']}: not clear which is faster ({interval} times as fast)"
    if v["verdict"] == "equal":
        return f"{subject} is as fast as {v['against']}, within 2 % ({interval})"
    return f"{subject} is {v['speedup']:.2f} times as fast as {v['against']} ({interval})"


def pass_groups(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """The rewrites that a pass made or refused, grouped by rule and reason: (rule, reason or "", nodes of each rewrite)."""
    items = [(e["rule"], e.get("reason", ""), " + ".join(e["nodes"])) for e in entries]
    items.sort(key=lambda i: i[:2])
    return [(rule, reason, [i[2] for i in group]) for (rule, reason), group in groupby(items, key=lambda i: i[:2])]


CLIFF_COLUMNS = ("step", "µs", "of the run", "of roofline", "gain µs", "ONNX nodes", "why")
_SOURCES = {"measured": "times measured in tuning", "predicted": "predicted times"}


def cliffs_title(cliffs: Sequence[Mapping[str, Any]]) -> str:
    """The heading of a table of cliffs. It names the source of the times if that is not the run itself."""
    sources = {c.get("source") for c in cliffs}
    by = " and ".join(text for source, text in _SOURCES.items() if source in sources)
    title = f"steps below {BELOW:.0%} of their roofline that take over {OVER:.0%} of the run"
    return f"{title}, by {by}" if by else title


def cliff_cells(cliff: Mapping[str, Any]) -> list[str]:
    """The cells of a cliff under :data:`CLIFF_COLUMNS`."""
    return [
        str(cliff["step"]),
        f"{cliff['us']:.1f}",
        f"{cliff['share']:.0%}",
        "CPU" if cliff["roofline"] is None else f"{cliff['roofline']:.0%}",
        f"{cliff['gain_us']:.1f}",
        first_of(cliff["src"], 2),
        str(cliff["why"]),
    ]
