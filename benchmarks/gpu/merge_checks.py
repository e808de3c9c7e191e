"""Puts new runs of the checks on a GPU into the files that are kept, which a table of the docs is made from.

    python benchmarks/gpu/merge_checks.py networks NEW.json [NEW.json ...]     # of networks.py
    python benchmarks/gpu/merge_checks.py sanitizer NEW.json                   # of sanitize.py
    python benchmarks/gpu/merge_checks.py cases NEW.json                       # of cases.py
    python benchmarks/gpu/merge_checks.py rows NEW.json [NEW.json ...]         # of row_invariance.py
    python benchmarks/gpu/merge_checks.py sizes NEW.json [NEW.json ...]        # of dynamic_sizes.py

What a run of networks found at a precision takes the place of what was known, as a whole: ``runs`` says which commit that was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
ABOUT = ("commit", "date", "command")
FILES = {
    "networks": "networks-h200.json", "sanitizer": "sanitizer-h200.json", "cases": "cases-h200.json",
    "rows": "row-invariance-h200.json", "sizes": "dynamic-sizes.json",
}  # fmt: skip
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def _machine(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "machine": {"gpu": run["gpu"], "driver": run["driver"]},
        "versions": {k: run["versions"][k] for k in ("nvidia-cuda-nvrtc", "cuda-bindings", "onnxruntime") if k in run["versions"]},
    }  # fmt: skip


def networks(kept: Mapping[str, Any] | None, new: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of all networks. A row that was not begun leaves what was known of that network."""
    rows: dict[str, dict[str, Any]] = {r["network"]: dict(r) for r in (kept or {}).get("rows", [])}
    runs = dict((kept or {}).get("runs", {}))
    for run in new:
        about = {k: run[k] for k in ABOUT}
        for row in run["rows"]:
            found = {p: {**row[p], "commit": run["commit"][:8]} for p in PRECISIONS if p in row}
            runs |= dict.fromkeys(found, about)
            known = rows.setdefault(row["network"], {"network": row["network"]})
            known.update({k: row[k] for k in ("another_input",) if k in row})
            known.update(found)
    return {"what": "zoo and shared graphs on the GPU, beside ONNX Runtime at fp32 (benchmarks/gpu/networks.py)",
            **_machine(new[-1]), "runs": runs, "rows": list(rows.values())}  # fmt: skip


def sanitizer(kept: Mapping[str, Any] | None, run: Mapping[str, Any]) -> dict[str, Any]:
    """A run by tool. One that had no seeded fault was over some families only: it is kept beside the whole one, as ``later``."""
    tools = {}
    for tool in dict.fromkeys(r["tool"] for r in run["rows"]):
        mine = [r for r in run["rows"] if r["tool"] == tool]
        families = [r for r in mine if "caught" not in r]
        seeded = [r["caught"] for r in mine if "caught" in r]
        tools[tool] = {
            "clean": sum(bool(r.get("clean")) for r in families), "of": len(families),
            "reported": [r["family"] for r in families if r.get("clean") is False],
            "not begun": [r["family"] for r in families if r.get("begun") is False],
            "seeded fault": ("caught" if all(seeded) else "not caught") if seeded else "not tried",
        }  # fmt: skip
    what = "compute-sanitizer over small networks of every kernel template; racecheck with -DRACECHECK (kernels/rnn_sm90.cu), "
    what += "initcheck with -DINITCHECK (kernels/mma.cuh, pool_int8.cu)"
    made = {"what": what, **_machine(run), **{k: run[k] for k in ABOUT}, "tools": tools, "families": run["engines"]}
    if kept is None or any(found["seeded fault"] != "not tried" for found in tools.values()):
        return made
    return {**kept, "later": [*kept.get("later", []), {k: made[k] for k in (*ABOUT, "tools", "families")}]}


def cases(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run over the operator case table."""
    what = (
        "the operator case table (tests/ops) on the GPU: every launch against its step's meaning, results at fp32 against "
        "reference with the operators' tolerances"
    )
    found = {k: run[k] for k in ("cases", "operators", "tried", "wrong")}
    return {"what": what, **_machine(run), **{k: run[k] for k in ABOUT}, **found}


def row_invariance(kept: Mapping[str, Any] | None, new: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of all networks, the newest of each."""
    rows = {r["network"]: r for r in (kept or {}).get("rows", [])}
    for run in new:
        batches = run["command"].partition("--batches ")[2].partition(" ")[0]
        rows |= {r["network"]: {**r, "commit": run["commit"], "batches": batches} for r in run["rows"]}
    what = (
        "row_invariant on the GPU, fp16: rows that differ from those of the largest batch, by batch size (in place, reversed, "
        "one row in all places); control: not row-invariant"
    )
    about = {"date": new[-1]["date"], "command": new[-1]["command"]}
    return {"what": what, **_machine(new[-1]), **about, "rows": list(rows.values())}


def sizes(kept: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Networks over ranges of sizes: rows by network, in the entry of the run's target and precision."""
    entries = {e["what"]: dict(e) for e in kept}
    for run in new:
        entry = entries[run["what"]]
        rows = {r["network"]: r for r in entry["rows"]}
        for row in run["rows"]:
            told = row.get("sizes", [])
            columns = {"sizes": "size", "errors": "error", "another_input": "another_input", "first_s": "first_s"}
            rows[row["network"]] = {
                **{k: row[k] for k in ("network", "shape", "matched", "error") if k in row},
                **({name: [s[key] for s in told] for name, key in columns.items()} if told else {}),
                "commit": run["commit"],
            }
        ordered = [rows[n] for n in sorted(rows)]
        entry |= {
            "networks": len(ordered), "matched": sum(bool(r.get("matched")) for r in ordered),
            "largest_error": max((max(r["errors"]) for r in ordered if "errors" in r), default=None), "rows": ordered,
        }  # fmt: skip
    return list(entries.values())


def text(made: Any) -> str:
    """JSON with a line for each row."""
    if isinstance(made, list):
        return "[\n" + ",\n".join(text(entry).rstrip() for entry in made) + "\n]\n"
    lines = []
    for key, value in made.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        shown = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    kind, *files = sys.argv[1:]
    target = RESULTS / FILES[kind]
    new = [json.loads(Path(f).read_text(encoding="utf-8")) for f in files]
    kept = json.loads(target.read_text(encoding="utf-8")) if target.exists() else None
    made: Any
    if kind == "networks":
        made = networks(kept, new)
    elif kind == "sizes":
        made = sizes(kept or [], new)
    elif kind == "rows":
        made = row_invariance(kept, new)
    elif kind == "sanitizer":
        made = sanitizer(kept, new[-1])
    else:
        made = cases(new[-1])
    target.write_text(text(made), encoding="utf-8")


if __name__ == "__main__":
    main()
