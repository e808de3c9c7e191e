"""The table of the checks on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.markdown import table
from benchmarks.rows import Row
from benchmarks.workloads import parse

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def correctness(rows: Sequence[Row]) -> str:
    """A table with a row for each precision, and paragraphs about all other checks."""
    networks = [r for r in rows if r["what"] == "correctness" and r["setup"].startswith("cuda") and "verdict" in r]
    networks = [r for r in networks if " compiled for " not in r["setup"]]
    cases = {
        parse(r["workload"])[0].precision: r for r in rows if r["what"] == "cases" and r["setup"].startswith("cuda")
    }
    lines = [
        ["precision", "networks right", "launches", "largest error of a launch (where right)", "operator cases right"]
    ]
    for precision in PRECISIONS:
        of = [r for r in networks if parse(r["workload"])[0].precision == precision]
        if not of:
            continue
        good = [r for r in of if r["verdict"] == "right"]
        worst = max((r["steps"]["worst"][0] for r in good if r.get("steps", {}).get("worst")), default=0.0)
        launches = sum(r["steps"]["count"] for r in of if "steps" in r)
        case = cases.get(precision)
        right = f"{case['tried'] - len(case.get('wrong', ()))} of {case['tried']}" if case else ""
        lines.append([precision, f"{len(good)} of {len(of)}", f"{launches:,}", f"{worst:.0e}", right])
    if len(lines) == 1:
        return ""
    said = [
        _sanitizer([r for r in rows if r["what"] == "sanitize"]),
        _invariance([r for r in rows if r["what"] == "invariance"]),
    ]
    how = (
        "Networks of the zoo and of both PyTorch exporters with seeded weights. A network is right if:\n\n"
        "- every single launch agrees with its step's meaning in NumPy, on the GPU's own operands (the error is relative to the "
        "largest element, and the buffers of results are filled with NaN before);\n"
        "- all runs give the same bits, in one CUDA graph and as single launches, in arenas filled with NaN between fences;\n"
        "- the result agrees with ONNX Runtime's at fp32. At other precisions it is closer to that than the result of "
        "another input. A detector must keep nine in ten of the boxes that remain if only weights and inputs are rounded.\n\n"
        f"{_whole(networks)}"
    )
    return table(lines, " ".join(s for s in said if s), how=how, rows=networks)


def _whole(rows: Sequence[Row]) -> str:
    """Networks that were only checked as a whole, and those that are not right."""
    short = [parse(r["workload"])[0].short for r in rows if "steps" not in r]
    wrong = [parse(r["workload"])[0].label for r in rows if r["verdict"] != "right"]
    said = [f"Not launch by launch: {', '.join(dict.fromkeys(short))}."] if short else []
    return " ".join([*said, *([f"Not right: {'; '.join(wrong)}."] if wrong else [])])


def _sanitizer(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    shown, missed = [], []
    for tool in TOOLS:
        mine = [r for r in rows if r["setup"] == tool and r["workload"] != "kernels/seeded_fault"]
        seeded = [r["verdict"] for r in rows if r["setup"] == tool and r["workload"] == "kernels/seeded_fault"]
        if mine:
            shown.append(f"{tool} {sum(r['verdict'] == 'clean' for r in mine)} of {len(mine)}")
            missed += [tool] if seeded != ["caught"] else []
    faults = (
        f"; the fault seeded for {', '.join(missed)} was not caught."
        if missed
        else "; each caught the fault seeded for it."
    )
    commits = list(dict.fromkeys(r["run"]["commit"][:8] for r in rows))
    when = f"commit {commits[-1]}" if len(commits) == 1 else f"{len(commits)} commits, the last {commits[-1]}"
    return f"compute-sanitizer ({when}), families of kernels that are clean: {'; '.join(shown)}{faults}"


def _invariance(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    same = sum(r["verdict"] == "right" for r in rows if "verdict" in r)
    control = sum(any(r.get("rows", {}).get("control", {}).values()) for r in rows)
    return (
        f"With `--row-invariant`, the rows of {same} of {len(rows)} networks have the same bits in all batch sizes that were "
        f"tried. Without it, the rows of {control} networks differ."
    )


VERDICTS = {
    "right": ("right",),
    "wrong": ("wrong", "unsteady", "crash", "hang"),
    "beyond fp16": ("beyond_fp16",),
    "explained": ("explained", "edge"),
    "refused, typed": ("refused",),
    "no oracle": ("no_oracle",),
}
"""Column of the table of random networks -> the verdicts that it counts."""


def random(rows: Sequence[Row]) -> str:
    """A table with a row for each setting of random networks. It adds up the runs of a setting, which have different seeds."""
    runs: dict[str, list[Row]] = {}
    for r in rows:
        if r["what"] == "random" and "counts" in r:
            runs.setdefault(r["setup"], []).append(r)
    if not runs:
        return ""
    lines = [["target, precision, library", "networks", *VERDICTS]]
    for setup, parts in runs.items():
        columns = [sum(r["counts"].get(v, 0) for r in parts for v in verdicts) for verdicts in VERDICTS.values()]
        lines.append([setup, f"{sum(sum(r['counts'].values()) for r in parts):,}", *(f"{n:,}" for n in columns)])
    return table(lines, rows=[r for parts in runs.values() for r in parts])


def soak(rows: Sequence[Row]) -> str:
    """A table with a row for each precision at which networks were replayed."""
    mine = [r for r in rows if r["what"] == "soak" and "of" in r]
    if not mine:
        return ""
    lines = [["precision", "networks", "network and batch pairs", "hung or differed"]]
    for precision in ("fp16", "fp32", "int8"):
        pairs = {(r["workload"], one): r["verdict"] for r in mine for one in r["of"] if one.startswith(f"{precision}:")}
        bad = sum(verdict != "ok" for verdict in pairs.values())
        lines.append([precision, str(len({name for name, _ in pairs})), str(len(pairs)), str(bad)])
    return table(lines, f"{sum(r['replays'] for r in mine):,} replays.", rows=mine)
