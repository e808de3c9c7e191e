"""Real networks, as both PyTorch exporters write them, built for ``simulate`` and held against ONNX Runtime at fp32.

    python benchmarks/gpu/shared_graphs.py FOLDER OUT.json [--match SECONDS] [NAME ...]

FOLDER holds ``fill.py`` and ``graphs/NAME.onnx`` with ``NAME.json`` (skeletons without weights). Each network is built at its
first sizes (batch 2); what runs on the CPU is told; with ``--match`` those whose program takes less than about that long in NumPy
(by ONNX Runtime's time) are run and compared: max |error| over max |output| per output, integers equal. Detections whose scores
are nearly tied come in another order: where an output holds boxes, the kept ones are also compared as a set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-4
BOX = 1e-3
"""Of the image: how far the corners of one box may be from those of another that is the same."""
SLOWER = 5
"""How much slower than ONNX Runtime (one thread, its session made) NumPy may be, roughly, where that is at its slowest."""


def fill_module(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("fill", folder / "fill.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one(folder: Path, graphs: Path, name: str, match: float) -> dict[str, Any]:
    """Build one network, and compare it where it is light enough."""
    import optdnn

    fill = fill_module(folder)
    model = fill.fill(str(graphs / f"{name}.onnx"))
    feeds = fill.feeds(model)
    start = time.perf_counter()
    engine = optdnn.build(model, target="simulate", shapes={k: v.shape for k, v in feeds.items()})
    row: dict[str, Any] = {"network": name, "build_s": round(time.perf_counter() - start, 2)}
    host = engine.meta["host"]
    kinds: dict[str, int] = {}
    for o in host["operators"]:
        kinds[o["kind"]] = kinds.get(o["kind"], 0) + 1
    row |= {"steps": len(engine.program.steps), "coverage": host["coverage"], "on_cpu": kinds, "cuts": host["cuts"]}
    row |= {"copies": len(host["copies"]), "copied_bytes": sum(c["bytes"] for c in host["copies"])}
    if match <= 0:
        return row
    start = time.perf_counter()
    want = _onnxruntime(model, feeds)
    row["onnxruntime_s"] = round(time.perf_counter() - start, 2)
    if row["onnxruntime_s"] * SLOWER > match:
        return row | {"matched": None}
    start = time.perf_counter()
    got = engine.run(feeds)
    row["simulate_s"] = round(time.perf_counter() - start, 2)
    errors = [_error(got[s.name], w) for s, w in zip(engine.outputs, want, strict=True)]
    row |= {"errors": errors, "matched": max(errors) <= TOLERANCE}
    if not row["matched"]:
        boxes = _same_boxes([got[s.name] for s in engine.outputs], want)
        row |= {} if boxes is None else {"boxes_as_a_set": boxes, "matched": boxes[0] == boxes[1]}
    return row


def _onnxruntime(model: Any, feeds: dict[str, Any]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, feeds)
    return found


def _error(got: Any, want: Any) -> float:
    """Of the largest magnitude; inf where shapes or integers differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if want.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    scale = float(np.abs(want).max(initial=0.0)) or 1.0
    return float(np.abs(got.astype(np.float64) - want).max(initial=0.0) / scale)


def _same_boxes(got: list[Any], want: list[Any]) -> tuple[int, int] | None:
    """How many of the kept boxes (with their scores) are also kept by the other, of how many; None where there are none."""
    k = next((k for k, a in enumerate(want) if a.ndim == 2 and a.shape[1] == 4), None)
    scores = next((k for k, a in enumerate(want) if a.ndim == 1 and a.dtype.kind == "f"), None)
    if k is None or scores is None or got[k].shape != want[k].shape:
        return None
    found = 0
    for box, score in zip(got[k], got[scores], strict=True):
        near = np.abs(want[k] - box).max(axis=1) <= BOX * np.abs(want[k]).max()
        found += bool((np.abs(want[scores][near] - score) <= 1e-3).any())
    return found, len(want[k])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--graphs", type=Path, help="where the skeletons are (FOLDER/graphs)")
    parser.add_argument("--match", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    graphs = args.graphs or args.folder / "graphs"
    if args.one:
        try:
            print(json.dumps(one(args.folder, graphs, args.one, args.match)))
        except Exception as error:
            print(json.dumps({"network": args.one, "error": f"{type(error).__name__}: {error}"[:2000]}))
        return
    rows = []
    for name in args.names or sorted(p.stem for p in graphs.glob("*.onnx")):
        # A process each: memory goes back to the machine.
        command = [sys.executable, __file__, str(args.folder), str(args.out), "--graphs", str(graphs), "--one", name]
        done = subprocess.run([*command, "--match", str(args.match)], capture_output=True, text=True, env=os.environ)
        lines = done.stdout.strip().splitlines()
        row = json.loads(lines[-1]) if lines else {"network": name, "error": done.stderr[-500:]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps({"what": "shared graphs on simulate, fp32", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
