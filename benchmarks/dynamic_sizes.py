"""Real networks over ranges of sizes: one engine each, at sizes inside of its range, held against ONNX Runtime.

    python benchmarks/dynamic_sizes.py FOLDER OUT.json --target cpu|simulate|cuda [--precision fp16] [--workers N] [NAME …]

FOLDER holds ``fill.py`` and ``graphs/NAME.onnx`` with ``NAME.json`` (skeletons without weights). Every network whose inputs have
symbolic dimensions is built once, for batches 1 to 5 and lengths 1 to 64, and run at several of them: max |error| over
max |output| against ONNX Runtime at fp32 (integers equal), and, since a network may hardly depend on its input, how far the
result for another input is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from agreement import error_of, fill_module
from targets import facts

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2}
BATCH, LENGTH = (1, 2, 5), (1, 24, 64)
SIZES = {1: [(2,), (1,), (5,)], 2: [(2, 24), (1, 7), (3, 40), (5, 64), (2, 1)]}
"""By the number of symbolic dimensions: batches, or (batch, length) pairs; the first is the optimum."""


def one(folder: Path, graphs: Path, name: str, target: str, precision: str) -> dict[str, Any]:
    """Build one network for its range, and run it at its sizes."""
    import onnxruntime

    import optdnn

    fill = fill_module(folder)
    model = fill.fill(str(graphs / f"{name}.onnx"))
    weights = {t.name for t in model.graph.initializer}
    (value,) = [v for v in model.graph.input if v.name not in weights]
    dims: list[Any] = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
    symbols = [d for d in dims if isinstance(d, str)]
    if not symbols:
        return {"network": name, "fixed": dims}
    ranges = dict(zip(symbols, ("..".join(map(str, r)) for r in (BATCH, LENGTH)), strict=False))
    start = time.perf_counter()
    shape = "x".join(str(ranges.get(d, d)) for d in dims)
    how = {"tactics": "heuristic"} if target.startswith("cuda") else {}
    engine = optdnn.build(model, target=target, precision=precision, shapes={value.name: shape}, **how)
    row: dict[str, Any] = {"network": name, "shape": shape, "build_s": round(time.perf_counter() - start, 2)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 2
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    row["sizes"] = []
    for sizes in SIZES[len(symbols)]:
        feeds, other = (fill.feeds(model, seed, dict(zip(symbols, sizes, strict=True))) for seed in (3, 4))
        start = time.perf_counter()
        got = engine.run(feeds)
        first = time.perf_counter() - start
        want = dict(zip(got, session.run(None, feeds), strict=True))
        row["sizes"].append(
            {
                "size": sizes, "error": rounded(max(error_of(got[k], want[k]) for k in want)), "first_s": round(first, 3),
                "another_input": rounded(max(error_of(a, want[k]) for k, a in engine.run(other).items())),
            }
        )  # fmt: skip
    row["matched"] = all(s["error"] <= TOLERANCE[precision] for s in row["sizes"])
    return row


def rounded(error: float) -> float:
    """To three digits."""
    return float(f"{error:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--graphs", type=Path, help="where the skeletons are (FOLDER/graphs)")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    graphs = args.graphs or args.folder / "graphs"
    if args.one:
        try:
            print(json.dumps(one(args.folder, graphs, args.one, args.target, args.precision)))
        except Exception as error:
            print(json.dumps({"network": args.one, "error": f"{type(error).__name__}: {error}"[:1000]}))
        return
    report: dict[str, Any] = {
        "what": f"shared graphs over ranges of sizes, {args.target}, {args.precision}, against ONNX Runtime at fp32",
        **facts(), "rows": [],
    }  # fmt: skip

    def run(name: str) -> dict[str, Any]:  # a process each: memory goes back to the machine
        command = [sys.executable, __file__, str(args.folder), str(args.out), "--graphs", str(graphs), "--one", name]
        command += ["--target", args.target, "--precision", args.precision]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        row: dict[str, Any] = json.loads(lines[-1]) if lines else {"network": name, "error": done.stderr[-500:]}
        return row

    with ThreadPoolExecutor(args.workers) as pool:
        for row in pool.map(run, args.names or sorted(p.stem for p in graphs.glob("*.onnx"))):
            if "fixed" in row:
                continue
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    matched = sum(bool(row.get("matched")) for row in report["rows"])
    print(f"{matched} of {len(report['rows'])} networks match at every size")


if __name__ == "__main__":
    main()
