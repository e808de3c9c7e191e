"""Tables of speeds on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.figures.markdown import geometric, table
from benchmarks.rows import Row
from benchmarks.workloads import REACH, Workload, group, parse

NAMES = {
    "ours": "optdnn", "untuned": "not tuned", "own": "our kernels", "libraries": "libraries", "eager": "eager",
    "compile": "torch.compile", "compile-max": "max-autotune",
}  # fmt: skip
"""Candidate -> its column."""


def workload(row: Row) -> Workload:
    """A row's workload."""
    return parse(row["workload"])[0]


def ms(row: Row, name: str) -> float | None:
    """A candidate's milliseconds."""
    found = row.get("times", {}).get(name)
    return None if found is None else float(found["ms"])


def speeds(rows: Sequence[Row], gpu: str = "H200") -> list[Row]:
    """Rows of kind ``speed`` with times, from GPUs of this name."""
    mine = [r for r in rows if r["what"] == "speed" and r["setup"].startswith("cuda") and r.get("times")]
    return [r for r in mine if gpu in r["run"]["machine"]["gpu"]]


def of_group(rows: Sequence[Row], name: str) -> list[Row]:
    """The newest row of each workload of a group, in the group's order. Times of further candidates come from older rows;
    ``older`` names these candidates."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: str(r["run"]["date"])):
        before = found.get(row["workload"], {"times": {}})
        older = sorted(before["times"].keys() - row["times"].keys())
        merged = {
            part: {**row.get(part, {}), **{n: before[part][n] for n in older if n in before.get(part, {})}}
            for part in ("times", "checks", "builds")
        }
        found[row["workload"]] = {**row, **merged, "older": older}
    return [found[w.name] for w in group(name) if w.name in found]


FP32 = ("fp32", "tf32")
"""Precisions that store fp32."""
EARLIER = "If a run had no torch.compile, its time comes from an earlier run."
README = (
    "zoo/resnet50:1@fp16", "zoo/resnet50:128@fp16", "zoo/mobilenet_v2:1@fp16", "zoo/efficientnet_b0:128@fp16",
    "zoo/vit_b_16:32@fp16", "zoo/bert_base:1:sequence_length=128@fp16", "zoo/bert_base:32:sequence_length=128@fp16",
    "zoo/lstm:1@fp16",
)  # fmt: skip
"""Rows of the README's table."""


def readme(rows: Sequence[Row]) -> str:
    """Some target rows, compared with the libraries alone, torch.compile and eager PyTorch."""
    found = {r["workload"]: r["times"] for r in of_group(_beside_eager(rows), "targets")}
    compiled = _beside_compile(rows)
    lines = [["network, batch", "optdnn", "cuDNN, cuBLASLt", "torch.compile", "PyTorch eager"]]
    for name in (n for n in README if n in found):
        of = found[name]
        times = [of[n]["ms"] if n in of else None for n in ("ours", "libraries")]
        cells = [*times, compiled.get(name), of.get("eager", {}).get("ms")]
        lines.append([parse(name)[0].label, *("–" if t is None else f"{t:.3f}" for t in cells)])
    return table(lines) if len(lines) > 1 else ""


def targets(rows: Sequence[Row]) -> str:
    """The target networks: ours, ours by the cost model, the libraries alone, PyTorch eager."""
    compiled = _beside_compile(rows)
    mine = []
    for row in of_group(_beside_eager(rows), "targets"):
        best = compiled.get(row["workload"])
        mine.append(row if best is None else {**row, "times": {**row["times"], "compile": {"ms": best}}})
    if not mine:
        return ""
    shown = [n for n in NAMES if any(n in r["times"] for r in mine)]
    lines = [["network, batch", *(f"{NAMES[n]} ms" for n in shown), "to reach"]]
    for row in mine:
        reach = REACH.get(row["workload"])
        lines.append(
            [workload(row).label, *(_cell(row, n, reach or 0.0) for n in shown), f"{reach:g}" if reach else ""]
        )
    text = " ".join(cell for line in lines for cell in line)
    wrong = '"wrong": the error against fp32 exceeds the bound. ' if "(wrong)" in text else ""
    if "(off by" in text:
        wrong += (
            '"off by": the error of 8 bits against fp32, relative to the largest output. The networks have seeded random weights, '
            "which amplify rounding errors (fp16 is off by 0.01). Every int8 launch equals its integer meaning to the bit. "
        )
    tuned = sorted({r["setup"].partition(" tuned ")[2] for r in mine} - {""})
    most = f"for at most {' or '.join(sorted(tuned, key=lambda t: float(t.split()[0])))} each, except in the column that says so. "
    tactics = f"Engines were tuned {most}" if tuned else ""
    said = "Median milliseconds of one inference; **bold**: the goal is reached. "
    said += _over_libraries(mine) + _over_compile(mine) + wrong
    earlier = sum("libraries" in r["older"] for r in mine)
    how = (
        "The GPU replays a CUDA graph between two events. All arrays are on the GPU, L2 is warm, and the candidates of a row "
        f"alternate. Each result was first compared with PyTorch in fp32. {tactics}The libraries were tuned among the first six "
        "candidates of their own ranking. Where the libraries have no kernel, ours run."
    )
    how += f" In {earlier} rows, the libraries' times are from an earlier run." if earlier else ""
    if compiled:
        how += (
            " torch.compile's times are from earlier runs: mode max-autotune, frozen weights, channels last, in a CUDA graph "
            "(cuDNN runs an nn.LSTM)."
        )
    return table(lines, said, how=how, rows=mine)


def _cell(row: Row, name: str, reach: float) -> str:
    found, check = ms(row, name), row.get("checks", {}).get(name, {})
    if found is None:
        return "–"
    text = f"{found:.3f}"
    if "wrong" in check:
        coarse = "8" in workload(row).precision and "error_rel" in check
        return f"{text} (off by {check['error_rel']:.2f})" if coarse else f"{text} (wrong)"
    return f"**{text}**" if name == "ours" and found <= reach else text


def _over_libraries(rows: Sequence[Row]) -> str:
    """A sentence on our kernels alone against the libraries alone: the geometric mean over the rows that have both."""
    ratios = []
    for row in rows:
        own = next((n for n in ("own", "untuned", "ours") if n in row["times"]), None)
        steps = row.get("builds", {}).get("libraries", {}).get("library_steps")
        if (
            own is not None
            and "libraries" in row["times"]
            and steps != 0
            and "wrong" not in row.get("checks", {}).get(own, {})
        ):
            ratios.append(row["times"]["libraries"]["ms"] / row["times"][own]["ms"])
    if not ratios:
        return ""
    return (
        f"Our kernels alone, not tuned, are {geometric(ratios):.2f} times as fast as the libraries alone in geometric mean over "
        f"{len(ratios)} rows (the least: {min(ratios):.2f}). "
    )


def _over_compile(rows: Sequence[Row]) -> str:
    """A sentence on the speed compared with torch.compile."""
    ratios = [
        r["times"]["compile"]["ms"] / r["times"]["ours"]["ms"] for r in rows if {"compile", "ours"} <= r["times"].keys()
    ]
    if not ratios:
        return ""
    return (
        f"optdnn is {geometric(ratios):.2f} times as fast as torch.compile in geometric mean over {len(ratios)} rows (the least: "
        f"{min(ratios):.2f}). "
    )


def _beside_eager(rows: Sequence[Row]) -> list[Row]:
    """Rows of speed beside eager PyTorch, without torch.compile."""
    return [r for r in speeds(rows) if "eager" in r["times"] and not _compiled(r)]


def _beside_compile(rows: Sequence[Row]) -> dict[str, float]:
    """Target network -> the milliseconds of torch.compile, in the faster of its modes."""
    mine = of_group([r for r in speeds(rows) if _compiled(r)], "targets")
    return {r["workload"]: min(r["times"][n]["ms"] for n in r["times"] if n.startswith("compile")) for r in mine}


def _compiled(row: Row) -> bool:
    return any(n.startswith("compile") for n in row["times"])


def lanes(rows: Sequence[Row]) -> str:
    """Networks in one lane and with lanes."""
    mine = [r for r in speeds(rows) if {"ours", "one_lane"} <= r["times"].keys()]
    lines = [["network, batch", "one lane µs", "lanes µs", "faster", "lanes", "steps aside"]]
    alike = []
    other = [workload(r).label for r in mine if not r.get("checks", {}).get("one_lane", {}).get("same_bits")]
    for row in mine:
        one, several, found = (
            row["times"]["one_lane"]["ms"] * 1e3,
            row["times"]["ours"]["ms"] * 1e3,
            row["builds"]["ours"],
        )
        if found["lanes"] == 1:
            alike.append(workload(row).label)
            continue
        cells = [f"{one:.1f}", f"{several:.1f}", f"{one / several:.2f}×", str(found["lanes"]), str(found["aside"])]
        lines.append([workload(row).label, *cells])
    if len(lines) == 1:
        return ""
    said = f"Not the same bits: {'; '.join(other)}." if other else "Results are the same bits."
    said += f" No independent steps worth a lane: {'; '.join(alike)}." if alike else ""
    how = "fp16. The cost model chose the kernels, the same ones in both columns. Times are medians of alternating replays."
    return table(lines, said, how=how, rows=mine)


def h100(rows: Sequence[Row]) -> str:
    """Networks on an H100."""
    others = {w.name for other in ("later", "wide-fp32") for w in group(other)}
    beside = [r for r in speeds(rows, "H100") if r["workload"] not in others and "eager" in r["times"]]
    mine = list({workload(r).label: r for r in beside}.values())
    mine.sort(key=lambda r: (workload(r).label.partition(",")[0], workload(r).batch))
    lines = [["network, batch", "optdnn ms", "eager ms", "faster"]]
    for row in mine:
        ours, eager = ms(row, "ours") or math.nan, ms(row, "eager") or math.nan
        lines.append([workload(row).label, f"{ours:.3f}", f"{eager:.3f}", f"{eager / ours:.1f}×"])
    how = "fp16, by the cost model; the GPU replays CUDA graphs; each result was first compared with PyTorch in fp32."
    return table(lines, how=how, rows=mine) if mine else ""


def later(rows: Sequence[Row]) -> str:
    """Networks of further kinds, which the wide benchmark does not have, compared with torch.compile on an H100."""
    mine = of_group(speeds(rows, "H100"), "later")
    lines = [["network, batch", "optdnn ms", "eager ms", "torch.compile ms", "over torch.compile"]]
    ratios = []
    for row in mine:
        times = [ms(row, name) for name in ("ours", "eager", "compile")]
        ours, _, theirs = times
        ratios += [theirs / ours] if ours and theirs else []
        over = f"{ratios[-1]:.2f}×" if ours and theirs else "–"
        lines.append([workload(row).label, *("–" if t is None else f"{t:.3f}" for t in times), over])
    if not ratios:
        return ""
    said = (
        f"optdnn is {geometric(ratios):.2f} times as fast as torch.compile (default mode) in geometric mean of {len(ratios)} "
        f"networks; slower: {sum(r < 1 for r in ratios)}. –: PyTorch cannot run it at fp16 or in a CUDA graph, or was not run."
    )
    how = f"fp16, by the cost model; all in CUDA graphs; each result was first compared with PyTorch in fp32. {EARLIER}"
    return table(lines, said, how=how, rows=mine)


def stored_in_fp32(rows: Sequence[Row]) -> str:
    """Networks at fp32 and tf32, compared with PyTorch at the same precision."""
    found = {r["workload"]: r for r in of_group(speeds(rows), "wide-fp32") if ms(r, "compile") is not None}
    names = list(dict.fromkeys(w.name.partition("@")[0] for w in group("wide-fp32")))
    columns, said = ["optdnn ms", "eager ms", "torch.compile ms", "faster"], []
    lines = [["network, batch", *(f"{p} {c}" if c == columns[0] else c for p in FP32 for c in columns)]]
    ratios: dict[str, list[float]] = {p: [] for p in FP32}
    for name in names:
        pair = [found.get(f"{name}@{p}") for p in FP32]
        if not any(pair):
            continue
        cells = []
        for precision, row in zip(FP32, pair, strict=True):
            if row is None:
                cells += ["–"] * len(columns)
                continue
            ours, eager, theirs = (ms(row, n) or math.nan for n in ("ours", "eager", "compile"))
            ratios[precision].append(theirs / ours)
            cells += [f"{ours:.3f}", f"{eager:.3f}", f"{theirs:.3f}", f"{theirs / ours:.2f}×"]
        w = parse(name)[0]
        lines.append([", ".join([w.short, str(w.batch), *(str(v) for _, v in w.settings)]), *cells])
    for precision, over in ratios.items():
        if over:
            slower = sum(r < 1 for r in over)
            times = f"{geometric(over):.2f} times as fast as torch.compile in geometric mean of {len(over)}"
            said.append(f"{precision}: {times}, slower: {slower}.")
    how = (
        "By the cost model; all in CUDA graphs, PyTorch at the same precision (tf32: allowed for convolutions and products); "
        "each result was first compared with PyTorch in fp32. –: not measured on this GPU yet."
    )
    return table(lines, " ".join(said), how=how, rows=list(found.values())) if len(lines) > 1 else ""


def growth(rows: Sequence[Row]) -> str:
    """How latency grows with batch and with the length of a sequence."""
    names = [w.name for w in group("growth")]
    found = {
        r["workload"]: r for r in speeds(rows) if r["workload"] in names and r["times"].keys() == {"ours", "eager"}
    }
    mine = [found[n] for n in names if n in found]
    lines = [["network, batch or length", "optdnn ms", "eager ms", "faster"]]
    for row in mine:
        w, ours, eager = workload(row), ms(row, "ours") or math.nan, ms(row, "eager") or math.nan
        size = dict(w.settings).get("sequence_length", w.batch)
        lines.append([f"{w.short}, {size}", f"{ours:.3f}", f"{eager:.3f}", f"{eager / ours:.1f}×"])
    if not mine:
        return ""
    how = "fp16, by the cost model, compared with PyTorch eager in a CUDA graph; sequences at batch 1."
    return table(lines, how=how, rows=mine)
