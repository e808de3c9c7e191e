"""The table of the checks on a GPU; see ``figures.py``. ``gpu/merge_checks.py`` puts its files together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures_gpu import table

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def correctness(results: Path) -> str:
    """A row for each precision, and a paragraph of everything else. Files that are missing are left out."""
    found = {}
    for name in ("networks", "cases", "sanitizer", "row-invariance"):
        file = results / f"{name}-h200.json"
        found[name] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    networks, cases = found["networks"], found["cases"]
    rows = [
        ["precision", "networks right", "launches", "largest error of a launch (where right)", "operator cases right"]
    ]
    for precision in PRECISIONS:
        of = [r[precision] for r in (networks or {"rows": []})["rows"] if precision in r]
        steps = [f["steps"] for f in of if "steps" in f]
        if not steps:
            continue
        wrong = [f for f in of if f.get("right") is False]
        launches = [f["steps"] for f in of if f.get("right") and "steps" in f]
        worst = max((s["worst"][0] for s in launches if s["worst"]), default=0.0)
        begun = [f for f in of if "right" in f]
        cells = [
            f"{len(begun) - len(wrong)} of {len(begun)}",
            f"{sum(s['count'] for s in steps):,}",
            f"{worst:.0e}",
        ]
        rows.append([precision, *cells, _of_cases(cases, precision)])
    if len(rows) == 1:
        return ""
    said = [_sanitizer(found["sanitizer"]), _rows(found["row-invariance"])]
    runs = "; ".join(f"{p}: {r['date']}, commit {r['commit'][:8]}" for p, r in networks["runs"].items())
    how = (
        f"{networks['machine']['gpu']}, driver {networks['machine']['driver']}; {runs}. Networks of the zoo and of both PyTorch "
        "exporters with seeded weights. A network is right where:\n\n"
        "- every launch by itself agrees with its step's meaning in NumPy, on the GPU's own operands (the error is relative to the "
        "largest element, and results hold NaN before);\n"
        "- runs repeat to the bit, in one CUDA graph and as single launches, on arenas full of NaN between fences;\n"
        "- the whole result is ONNX Runtime's at fp32; at other precisions it is nearer to it than the result of another input; of "
        "detections, nine in ten of the boxes that rounding weights and inputs alone leaves the same.\n\n"
        + (f"Not right: {networks['note']}. " if "note" in networks else "")
        + _whole(networks["rows"])
    )
    command = "python benchmarks/gpu/networks.py OUT.json --zoo --shared FOLDER --checks"
    return table(rows, " ".join(s for s in said if s), how=how, commands=[command])


def _whole(rows: Sequence[Mapping[str, Any]]) -> str:
    """Networks whose whole result alone was looked at."""
    names = [r["network"] for r in rows if any("right" in r[p] and "steps" not in r[p] for p in PRECISIONS if p in r)]
    return f"Not launch by launch: {', '.join(names)}." if names else ""


def _of_cases(cases: Mapping[str, Any] | None, precision: str) -> str:
    if cases is None or precision not in cases["tried"]:
        return ""
    wrong = sum(row["precision"] == precision for row in cases["wrong"])
    return f"{cases['tried'][precision] - wrong} of {cases['tried'][precision]}"


def _sanitizer(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return ""

    def clean(run: Mapping[str, Any]) -> str:
        shown = [
            f"{tool} {found['clean']} of {found['of'] - len(found['not begun'])}"
            + (", seeded fault not caught" if found["seeded fault"] == "not caught" else "")
            for tool, found in run["tools"].items()
        ]
        return "; ".join(shown)

    caught = all(found["seeded fault"] == "caught" for found in data["tools"].values())
    later = [f" Newer kernels (commit {run['commit'][:8]}): {clean(run)}." for run in data.get("later", [])]
    return (
        f"compute-sanitizer (commit {data['commit'][:8]}), families of kernels that are clean: {clean(data)}"
        + ("; each caught the fault seeded for it." if caught else ".")
        + "".join(later)
    )


def _rows(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return ""
    same = [row["network"] for row in data["rows"] if "fp16" in row and not _differ(row["fp16"], "heuristic", "tuned")]
    control = [row["network"] for row in data["rows"] if "fp16" in row and _differ(row["fp16"], "control")]
    return (
        f"With `--row-invariant`, rows of {len(same)} of {len(data['rows'])} networks are the same bits in batches of all sizes "
        f"that were tried; without it, rows of {len(control)} differ."
    )


def _differ(found: Mapping[str, Any], *which: str) -> bool:
    """Whether any rows differ at any batch size."""
    return any(n for key in which for size, n in found.get(key, {}).items() if size != "outputs")
