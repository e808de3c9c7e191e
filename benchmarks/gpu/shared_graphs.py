"""Real networks, as both PyTorch exporters write them, built for ``simulate`` (or ``cpu``) and held against ONNX Runtime at fp32.

    python benchmarks/gpu/shared_graphs.py FOLDER OUT.json [--target simulate|cpu] [--match SECONDS]
        [--sizes N=2,S=24 ...] [--names NAME ...]

FOLDER holds ``fill.py`` and ``graphs/NAME.onnx`` with ``NAME.json`` (skeletons without weights). Each network is built at the
first of ``--sizes`` (of symbolic dimensions: N of first axes, S of others); what runs on the CPU is told; with ``--match`` those
whose program takes less than about that long in NumPy (by ONNX Runtime's time; on ``cpu`` all) are run and compared at each of the
sizes: max |error| over max |output| per output, integers equal. Detections whose scores are nearly tied come in another order:
where an output holds boxes, the kept ones are also compared as a set.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agreement import error_of, fill_module, onnxruntime_results, same_boxes

TOLERANCE = 1e-4
SLOWER = 5
"""How much slower than ONNX Runtime (one thread, its session made) NumPy may be, roughly, where that is at its slowest."""


def one(
    folder: Path, graphs: Path, name: str, match: float, target: str, sizes: Sequence[dict[str, int]]
) -> dict[str, Any]:
    """Build one network, and compare it where it is light enough: at each of the sizes that it can tell apart."""
    import optdnn

    fill = fill_module(folder)
    model = fill.fill(str(graphs / f"{name}.onnx"))
    row: dict[str, Any] = {"network": name}
    if target == "cpu":  # one engine for all sizes, whichever library is first: nothing is timed here
        from optdnn.tactics import cpu

        cpu.take_turns = functools.partial(cpu.take_turns, rounds=1, turn_seconds=0.0)  # type: ignore[assignment]
        start = time.perf_counter()
        whole = optdnn.build(model, target="cpu", threads=1)
        row["build_s"] = round(time.perf_counter() - start, 2)
        row["libraries"] = sorted({str(f.get("library")) for f in whole.facts})
    seen: list[Any] = []
    for at in sizes:
        feeds = fill.feeds(model, sizes=_own_sizes(model, at))
        shapes = {k: v.shape for k, v in feeds.items()}
        if shapes in seen:
            continue
        seen.append(shapes)
        start = time.perf_counter()
        engine = whole if target == "cpu" else optdnn.build(model, target="simulate", shapes=shapes)
        if "build_s" not in row:
            row["build_s"] = round(time.perf_counter() - start, 2)
            row |= _program(engine)
        if match > 0:
            found = _compared(engine, model, feeds, match if target == "simulate" else float("inf"))
            row.setdefault("runs", []).append({"shapes": {k: list(v) for k, v in shapes.items()}, **found})
    if match > 0:
        row["matched"] = all(r["matched"] for r in row["runs"] if r["matched"] is not None)
    return row


def _own_sizes(model: Any, at: dict[str, int]) -> dict[str, int]:
    """Sizes by the network's own names: N for its first symbolic axes, S for others."""
    found = {}
    for v in model.graph.input:
        for axis, d in enumerate(v.type.tensor_type.shape.dim):
            if d.HasField("dim_param"):
                found.setdefault(d.dim_param, at["N"] if axis == 0 else at["S"])
    return {**found, **at}


def _program(engine: Any) -> dict[str, Any]:
    """What of a GPU's program runs where."""
    host = engine.meta["host"]
    kinds: dict[str, int] = {}
    for o in host["operators"]:
        kinds[o["kind"]] = kinds.get(o["kind"], 0) + 1
    copied = sum(c["bytes"] for c in host["copies"])
    found = {"steps": len(engine.program.steps), "coverage": host["coverage"], "on_cpu": kinds, "cuts": host["cuts"]}
    return {**found, "copies": len(host["copies"]), "copied_bytes": copied}


def _compared(engine: Any, model: Any, feeds: dict[str, Any], match: float) -> dict[str, Any]:
    start = time.perf_counter()
    want = onnxruntime_results(model, feeds)
    row: dict[str, Any] = {"onnxruntime_s": round(time.perf_counter() - start, 2)}
    if row["onnxruntime_s"] * SLOWER > match:
        return row | {"matched": None}
    start = time.perf_counter()
    got = engine.run(feeds)
    row["run_s"] = round(time.perf_counter() - start, 2)
    errors = [error_of(got[s.name], w) for s, w in zip(engine.outputs, want, strict=True)]
    row |= {"errors": errors, "matched": max(errors) <= TOLERANCE}
    if not row["matched"]:
        boxes = same_boxes([got[s.name] for s in engine.outputs], want)
        row |= {} if boxes is None else {"boxes_as_a_set": boxes, "matched": boxes["same"] == boxes["of"]}
    return row


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--graphs", type=Path, help="where the skeletons are (FOLDER/graphs)")
    parser.add_argument("--match", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--target", choices=("simulate", "cpu"), default="simulate")
    parser.add_argument(
        "--sizes", nargs="+", default=["N=2,S=24"], help="of the symbolic dimensions, for each comparison"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    graphs = args.graphs or args.folder / "graphs"
    if args.one:
        try:
            print(
                json.dumps(one(args.folder, graphs, args.one, args.match, args.target, [_sizes(t) for t in args.sizes]))
            )
        except Exception as error:
            print(json.dumps({"network": args.one, "error": f"{type(error).__name__}: {error}"[:2000]}))
        return
    rows = []
    for name in args.names or sorted(p.stem for p in graphs.glob("*.onnx")):
        # A process each: memory goes back to the machine.
        command = [sys.executable, __file__, str(args.folder), str(args.out), "--graphs", str(graphs), "--one", name]
        command += ["--match", str(args.match), "--target", args.target, "--sizes", *args.sizes]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        lines = done.stdout.strip().splitlines()
        row = json.loads(lines[-1]) if lines else {"network": name, "error": done.stderr[-500:]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(
            json.dumps({"what": f"shared graphs on {args.target}, fp32", "sizes": args.sizes, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
