"""Puts the rows of new runs of ``targets.py`` into a kept file: a row takes the place of that of its name.

    python benchmarks/gpu/merge.py benchmarks/results/targets-h200.json NEW.json [NEW.json ...]
    python benchmarks/gpu/merge.py benchmarks/results/timing-h200.json TIMES.json [TIMES.json ...]
    python benchmarks/gpu/merge.py benchmarks/results/waits-h200.json WAITS.json [...]            # parts take the place of parts
    python benchmarks/gpu/merge.py benchmarks/results/dynamic-shapes-h200.json SHAPES.json [...]  # and lengths of a row of lengths

Each row keeps the commit, date and command of its own run; rows that were not measured are left out. What the file says of versions
and machine is the newest run's. Of timing caches, the choices for whole networks are kept, and of each problem the fastest
candidates: enough to build the same engines at once, and to begin with where a kernel has changed since.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST = 4
"""Candidates of a problem that a timing cache keeps."""
WAITS = ("build", "load", "call", "retune", "compare")
"""Parts of ``waits.py``."""
OF_A_RUN = ("commit", "date", "command", "tune_s")


def rows_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured rows of a run, each with what is known of its run."""
    about = {k: run[k] for k in OF_A_RUN if k in run}
    measured = [r for r in run["rows"] if any("median_ms" in c for c in r.get("candidates", {}).values())]
    return [{**about, **row} for row in measured]


def merged(kept: Mapping[str, Any] | None, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The kept file with the rows of ``runs``, the newest last. Raises ValueError where another machine measured them."""
    machines = {(r["gpu"], r["l2"]) for r in [*([kept] if kept else []), *runs]}
    if len(machines) > 1:
        raise ValueError(f"runs of different machines are not put together: {sorted(machines)}")
    rows = {r["name"]: r for run in [*([kept] if kept else []), *runs] for r in rows_of(run)}
    if runs[-1].get("tune_s"):  # "ours" is tuned from now on; what was not goes by its name
        for row in rows.values():
            if not row.get("tune_s") and "ours" in row["candidates"]:
                row["candidates"] = {"untuned" if k == "ours" else k: v for k, v in row["candidates"].items()}
    facts = {k: v for k, v in runs[-1].items() if k not in ("rows", "seconds")}
    return {**facts, "rows": list(rows.values())}


def times(caches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Timing caches as one, the newest last, with little more than what was chosen."""
    found: dict[str, Any] = {"format": caches[-1]["format"], "version": caches[-1]["version"], "entries": {}}
    problems: dict[tuple[str, ...], dict[str, Any]] = {}
    for cache in caches:
        found["entries"] |= cache["entries"]
        found["networks"] = {**found.get("networks", {}), **cache.get("networks", {})}
        for key, row in cache.get("candidates", {}).items():
            device, problem, _, regime, _ = (part.strip() for part in key.split("|"))
            if "us" in row:
                problems.setdefault((device, problem, regime), {})[key] = row
    kept = [sorted(rows.items(), key=lambda item: item[1]["us"])[:MOST] for rows in problems.values()]
    found["candidates"] = dict(sorted(item for rows in kept for item in rows))
    return found


def parts(kept: Mapping[str, Any] | None, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs of ``waits.py``: of each part the newest, ``runs`` says of which run; one that failed is left out."""
    found = dict(kept or {})
    of = {p: {k: found[k] for k in OF_A_RUN if k in found} for p in WAITS if p in found} | found.get("runs", {})
    for run in runs:
        new = {p: run[p] for p in WAITS if p in run and not (isinstance(run[p], dict) and "error" in run[p])}
        found |= {k: v for k, v in run.items() if k not in WAITS} | new
        of |= {p: {k: run[k] for k in OF_A_RUN if k in run} for p in new}
    return {
        **{k: v for k, v in found.items() if k not in (*WAITS, "runs")},
        "runs": of,
        **{p: found[p] for p in WAITS if p in found},
    }


def lengths(kept: Mapping[str, Any] | None, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs of ``dynamic_shapes.py``: of each row and length the newest."""
    rows: dict[tuple[str, int, float], dict[str, Any]] = {}
    for run in [*([kept] if kept else []), *runs]:
        about = {k: run[k] for k in (*OF_A_RUN, "tuned_seconds") if k in run}
        for row in run["rows"]:
            if "length" in row:
                made = {**about, **row}
                rows[made["row"], made["length"], made.get("tuned_seconds", 0.0)] = made
    return {**{k: v for k, v in runs[-1].items() if k != "rows"}, "rows": list(rows.values())}


def main() -> None:
    target, *new = map(Path, sys.argv[1:])
    kept = json.loads(target.read_text(encoding="utf-8")) if target.exists() else None
    runs = [json.loads(p.read_text(encoding="utf-8")) for p in new]
    newest = runs[-1]
    if "entries" in newest:
        made = times([*([kept] if kept else []), *runs])
    elif "rows" not in newest:
        made = parts(kept, runs)
    else:
        made = lengths(kept, runs) if any("length" in row for row in newest["rows"]) else merged(kept, runs)
    target.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
