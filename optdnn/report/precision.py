"""The report of automatic precision: plans that were tried, accuracy against latency, and each node with its reason.

It is drawn from the plain data that an engine keeps: ``meta["auto"]``, made by
:meth:`optdnn.precision.search_report.SearchReport.to_plain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError
from optdnn.report.charts import Axis, axis_over
from optdnn.report.markdown import escape, grid
from optdnn.report.page import render, require_jinja
from optdnn.report.words import bytes_text, counted, milliseconds
from optdnn.runtime.file.atomic import check_writable, write_atomic

WIDTH, HEIGHT = 60, 12
"""Characters of the plot in the terminal."""
CULPRITS = 3
"""Operators that are named where a precision loses too much."""
KNOWN = 99.5
"""Percent of samples that fp32 has right: from here on it may be that it was trained on them."""


def columns(auto: Mapping[str, Any]) -> list[str]:
    """The heads of :func:`rows`: an expected drop has a column where the metric has one (engines of older builds have none)."""
    expected = ["expected from margins"] if _expects(auto) else []
    return ["plan", "precisions", "ms", "drop", "drop on unseen data", *expected, "weights", ""]


def rows(auto: Mapping[str, Any]) -> list[list[str]]:
    """The cells under :func:`columns`, the fastest plan first; plans that were not timed last."""
    found, expects = [], _expects(auto)
    for c in sorted(auto["candidates"], key=lambda c: (c["ms"] is None, c["ms"] or 0.0, c["predicted_us"] or 0.0)):
        found.append(
            [
                c["name"],
                ", ".join(f"{n} {p}" for p, n in c["precisions"].items()),
                milliseconds(c["ms"]) if c["ms"] is not None else _predicted(c),
                _drop(c["drop"]),
                "–" if c["verified"] is None and not c.get("error") and c["ms"] is None else _drop(c["verified"]),
                *(["–" if c.get("expected") is None else _drop(c["expected"])] if expects else []),
                "–" if c["weights_bytes"] is None else bytes_text(c["weights_bytes"]),
                remark(c, auto),
            ]
        )
    return found


def remark(c: Mapping[str, Any], auto: Mapping[str, Any]) -> str:
    """A remark on a plan: chosen, on the front, beyond the bound, refused."""
    if c.get("error"):
        return f"refused: {c['error']}"
    said = ["chosen"] if c["name"] == auto["chosen"] else []
    said += ["on the front"] if c["front"] else []
    said += ["tuned"] if c.get("tuned") else []
    bound, seen, worst = auto["metric"]["bound"], _largest_drop(c), _worst(c)
    if seen is None or worst is None or worst > bound:
        said += ["beyond the bound" if seen is None or seen > bound else "expected to be beyond the bound"]
    return ", ".join(said)


def chosen_plan(auto: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of the plan that was chosen."""
    return next(c for c in auto["candidates"] if c["name"] == auto["chosen"])


def _expects(auto: Mapping[str, Any]) -> bool:
    return any(c.get("expected") is not None for c in auto["candidates"])


def _largest_drop(c: Mapping[str, Any]) -> float | None:
    """The larger of a plan's drops, as far as they are known; None where its result is not finite."""
    return None if c["drop"] is None else float(max(c["drop"], c["drop"] if c["verified"] is None else c["verified"]))


def _worst(c: Mapping[str, Any]) -> float | None:
    """The drop that the bound is for: the larger of a plan's drops, or the expected one; None where its result is not finite."""
    lost, expected = _largest_drop(c), c.get("expected")
    return lost if lost is None or expected is None else max(lost, float(expected))


def sentences(auto: Mapping[str, Any]) -> list[str]:
    """The bound, the data, and the source of the times."""
    metric, samples = auto["metric"], auto["samples"]
    step = f"; one sample counts {_points(100 / samples['verification'])} points" if metric["name"] == "top1" else ""
    return [
        f"bound: a drop of {metric['bound']:g} {metric['unit']} (metric {metric['name']}); "
        f"{counted(samples['calibration'], 'sample')} to calibrate and search on, "
        f"{counted(samples['verification'], 'other')} to verify by{step}",
        f"times of operators: {auto['latency']['source']}; "
        + (
            "those of plans were measured on whole engines in turns"
            if auto["latency"]["measured"]
            else "no engine could be timed here: those of plans are predicted"
        ),
        *_resolution(auto),
        *_expectation(auto),
        *(f"{p}: {why}" for p, why in auto["notes"].items()),
        *declined(auto),
    ]


def _points(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"


def _resolution(auto: Mapping[str, Any]) -> list[str]:
    """A remark if the samples are too few for the bound on an accuracy.

    Of n samples that all come out as before, the part that does not is at most 3 / n (with 95 % confidence).
    """
    n, metric = auto["samples"]["verification"], auto["metric"]
    if metric["name"] != "top1" or metric["bound"] >= 300 / n:
        return []
    enough = (
        f"; {round(300 / metric['bound'])} samples that training has not seen suffice" if metric["bound"] > 0 else ""
    )
    return [
        f"{counted(n, 'sample')} cannot show so small a loss: an engine that loses none may lose up to "
        f"{_points(min(100, 300 / n))} points "
        f"elsewhere (95 % confidence){enough}"
    ]


def _expectation(auto: Mapping[str, Any]) -> list[str]:
    """The meaning of the expected drop, its value for the chosen plan, and when it is too low."""
    if not _expects(auto):
        return []
    chosen = chosen_plan(auto)
    found = [
        "expected from margins: the loss that is likely on new samples. A sample's margin is its right class's score minus the "
        "next score; a plan's errors take a part of it. The largest of this and both drops must meet the bound"
    ]
    if chosen.get("expected") is not None:
        found.append(f"{chosen['name']}: {_counted(chosen, auto)}")
    right = auto["samples"].get("right")
    if right is not None and right >= KNOWN:
        found.append(
            f"fp32 has {right:.4g} % of these samples right: if it was trained on them, new samples have smaller margins, and "
            "more may be lost than expected; give samples that were not in the training data"
        )
    return found


def _counted(c: Mapping[str, Any], auto: Mapping[str, Any]) -> str:
    """ "0 points of top-1 accuracy lost of 1344 samples, 0.14 expected from margins" """
    samples, lost = auto["samples"], _largest_drop(c)
    n = samples["calibration"] + (samples["verification"] if c["verified"] is not None else 0)
    most = "" if c["verified"] in (None, c["drop"]) else "at most "
    return f"{most}{lost:.3g} {auto['metric']['unit']} lost of {n} samples, {c['expected']:.3g} expected from margins"


def declined(auto: Mapping[str, Any]) -> list[str]:
    """Why each single precision was not taken: its loss and the operators that cause it, or its time."""
    chosen = chosen_plan(auto)
    metric, found = auto["metric"], []
    for c in auto["candidates"]:
        if not c["single"] or c["name"] == auto["chosen"] or c.get("error"):
            continue
        seen, worst = _largest_drop(c), _worst(c)
        if seen is None or worst is None or worst > metric["bound"]:
            if seen is None:
                lost = "its result is not finite"
            else:
                lost = f"it loses {seen:.3g} {metric['unit']}" if seen > metric["bound"] else _counted(c, auto)
            found.append(f"{c['name']} declined: {lost}, the bound is {metric['bound']:g}{_culprits(c['name'], auto)}")
        elif c["ms"] is not None and chosen["ms"] is not None and c["ms"] > chosen["ms"]:  # if it was not tuned: by far
            times = f"{milliseconds(c['ms'])} ms against {milliseconds(chosen['ms'])} ms of {chosen['name']}"
            found.append(f"{c['name']} declined: it is slower here, {times}")
    return found


def _culprits(name: str, auto: Mapping[str, Any]) -> str:
    """The operators that put most of a single precision's noise on the outputs, each by itself."""
    p = name.partition("+")[0]
    noise = [(n["sensitivity"][p]["noise"], n) for n in auto["nodes"] if p in n.get("sensitivity", {})]
    if any(v is None for v, _ in noise):
        worst = [(1.0, n) for v, n in noise if v is None]
        return "; not finite there: " + ", ".join(_onnx_name(n) for _, n in worst[:CULPRITS])
    total = sum(v for v, _ in noise)
    if not total:
        return ""
    most = sorted(noise, key=lambda item: -item[0])[:CULPRITS]
    return f"; most of {p}'s noise at the outputs is from " + ", ".join(
        f"{_onnx_name(n)} ({100 * v / total:.0f} %)" for v, n in most
    )


def _onnx_name(node: Mapping[str, Any]) -> str:
    """One ONNX name for an operator of several: that of its kind, where there is one."""
    names = node["nodes"] or [node["key"]]
    return str(next((n for n in names if node["kind"] in n), names[0]))


def _predicted(c: Mapping[str, Any]) -> str:
    return "–" if c["predicted_us"] is None else f"about {milliseconds(c['predicted_us'] / 1e3)}"


def _drop(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


# ---------------------------------------------------------------- the plot


def points(auto: Mapping[str, Any]) -> list[tuple[float, float, Mapping[str, Any]]]:
    """(milliseconds, worst drop, plan) of every plan whose both are known; predicted times where nothing was measured."""
    found = []
    for c in auto["candidates"]:
        ms = c["ms"]
        if ms is None and not auto["latency"]["measured"] and c["predicted_us"] is not None:
            ms = c["predicted_us"] / 1e3
        worst = _worst(c)
        if ms is not None and worst is not None and not c.get("error"):
            found.append((ms, worst, c))
    return found


def text_plot(auto: Mapping[str, Any]) -> list[str]:
    """Accuracy against latency for a terminal: ◆ the chosen plan, ● the front, ○ the rest, ┄ the bound. [] without two plans."""
    shown = points(auto)
    if len(shown) < 2:
        return []
    bound = auto["metric"]["bound"]
    x, y = _axes(shown, bound)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]

    def row(drop: float) -> int:
        return round((1 - y.at(drop) / 100) * (HEIGHT - 1))

    rows[row(bound)] = ["┄"] * WIDTH
    for ms, drop, c in sorted(shown, key=lambda p: _weight(p[2], auto)):
        rows[row(drop)][min(WIDTH - 1, round(x.at(ms) / 100 * (WIDTH - 1)))] = "○●◆"[_weight(c, auto)]
    labels = {row(bound): f"{bound:g}", 0: f"{y.high:.2g}", row(0.0): "0"}
    lines = [f"{labels.get(k, ''):>8} │{''.join(cells)}" for k, cells in enumerate(rows)]
    ticks = [" "] * (WIDTH + 8)
    for at, text in x.ticks:
        start = round(at / 100 * (WIDTH - 1))
        if start + len(text) < len(ticks) and all(t == " " for t in ticks[max(0, start - 1) : start + len(text) + 1]):
            ticks[start : start + len(text)] = text
    return [
        f"{'drop':>8} │ (◆ chosen, ● front, ○ other, ┄ bound)",
        *lines,
        f"{'':>8} └{'─' * WIDTH}",
        f"{'':>10}{''.join(ticks).rstrip()} ms",
    ]


def _axes(shown: Sequence[tuple[float, float, Mapping[str, Any]]], bound: float) -> tuple[Axis, Axis]:
    """Milliseconds, and drops from 0 to beyond the bound."""
    drops = [drop for _, drop, _ in shown]
    return axis_over([ms for ms, _, _ in shown]), Axis(min([0.0, *drops]), max([bound, *drops]) * 1.1 or 1.0, False, ())


def _weight(c: Mapping[str, Any], auto: Mapping[str, Any]) -> int:
    return 2 if c["name"] == auto["chosen"] else 1 if c["front"] else 0


# ---------------------------------------------------------------- files


def to_markdown(auto: Mapping[str, Any], title: str) -> str:
    """The report as Markdown; names from the model are escaped."""
    parts = [f"# Automatic precision: {escape(title)}", grid(columns(auto), rows(auto))]
    plot = text_plot(auto)
    if plot:
        parts.append("```text\n" + "\n".join(plot) + "\n```")
    parts.append("\n".join(f"- {escape(s)}" for s in sentences(auto)))
    parts += ["## Nodes", grid(("ONNX nodes", "operator", "precision", "because"), node_rows(auto["nodes"]))]
    return "\n\n".join(parts) + "\n"


def node_rows(nodes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """ONNX nodes, operator, precision, reason."""
    return [[" + ".join(n["nodes"]) or n["key"], n["kind"], n["precision"], n["reason"]] for n in nodes]


def to_html(auto: Mapping[str, Any], title: str) -> str:
    """The report as one self-contained HTML file, without scripts. Needs jinja2 (extra ``report``)."""
    return render(
        "precision.html.j2",
        title=f"precision of {title}",
        heading=title,
        columns=columns(auto),
        rows=rows(auto),
        sentences=sentences(auto),
        nodes=node_rows(auto["nodes"]),
        plot=_plot(auto),
        chosen=auto["chosen"],
    )


def _plot(auto: Mapping[str, Any]) -> dict[str, Any] | None:
    """Geometry of the scatter plot in a box of 1000 x 300: percents across, heights in the box."""
    shown = points(auto)
    if len(shown) < 2:
        return None
    bound = auto["metric"]["bound"]
    x, y = _axes(shown, bound)

    def height(drop: float) -> float:
        return round(290 - 2.8 * y.at(drop), 1)

    dots = []
    for ms, drop, c in sorted(shown, key=lambda p: _weight(p[2], auto)):
        hint = f"{c['name']}: {ms:.4g} ms, drop {drop:.3g}"
        dots.append((round(10 * x.at(ms), 1), height(drop), hint, _weight(c, auto), c["name"]))
    line = [(d[0], d[1]) for d in sorted(dots) if d[3]]
    return {"dots": dots, "front": line, "bound": height(bound), "bound_text": f"{bound:g}", "ticks": x.ticks}


def write(auto: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the report to ``path``, in the form of its ending. Raises OutputError."""
    text = to_html(auto, title) if form_of(path) == "html" else to_markdown(auto, title)
    write_atomic(path, [text.encode()])


def check_file(path: Path) -> None:
    """Refuse, before any work, a file that could not be written. Raises UsageError, OutputError, MissingDependency."""
    if form_of(path) == "html":
        require_jinja()
    check_writable(path)


def form_of(path: Path) -> str:
    """ "html" or "markdown", by the ending. Raises UsageError for any other."""
    form = {".html": "html", ".htm": "html", ".md": "markdown"}.get(path.suffix.lower())
    if form is None:
        raise UsageError(f"{path} is neither .html nor .md", hint="the file's ending decides the form of the report")
    return form
