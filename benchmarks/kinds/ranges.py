"""Networks over ranges of sizes: one engine each, at sizes inside its range, compared with ONNX Runtime.

    python -m benchmarks ranges --shared FOLDER --target cpu --precisions fp32 --out ranges.jsonl

Every network of the folder whose input has symbolic dimensions is built once, for batches 1 to 5 and lengths 1 to 64, and
run at several of them. A row has max |error| over max |output| against ONNX Runtime at fp32 (integers must be equal), and, since a
network may hardly depend on its input, the difference from the result for another input.
"""

from __future__ import annotations

import time
from typing import Any

import optdnn
from benchmarks.harness import Job, Kind
from benchmarks.models import fill, shared_folder
from benchmarks.rows import Row

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2}
BATCH, LENGTH = (1, 2, 5), (1, 24, 64)
SIZES: dict[int, list[tuple[int, ...]]] = {1: [(2,), (1,), (5,)], 2: [(2, 24), (1, 7), (3, 40), (5, 64), (2, 1)]}
"""By the number of symbolic dimensions: batches, or (batch, length) pairs; the first is the optimum."""


def measure(job: Job) -> Row:
    """Build the network for its range, and run it at its sizes."""
    import onnxruntime

    filled, precision = fill(), job.workload.precision
    from support.agreement import error_of

    model = filled.fill(str(shared_folder() / "graphs" / f"{job.workload.short}.onnx"))
    weights = {t.name for t in model.graph.initializer}
    values = [v for v in model.graph.input if v.name not in weights]
    dims: list[Any] = [d.dim_param or d.dim_value for d in values[0].type.tensor_type.shape.dim]
    symbols = [d for d in dims if isinstance(d, str)]
    if not symbols or len(values) > 1:
        return {"verdict": "fixed"}
    ranges = dict(zip(symbols, ("..".join(map(str, r)) for r in (BATCH, LENGTH)), strict=False))
    start = time.perf_counter()
    shape = "x".join(str(ranges.get(d, d)) for d in dims)
    options = {"tactics": "heuristic"} if job.options.target.startswith("cuda") else {}
    engine = optdnn.build(
        model, target=job.options.target, precision=precision, shapes={values[0].name: shape}, **options
    )
    row: Row = {"shape": shape, "build_s": round(time.perf_counter() - start, 2), "sizes": []}
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level, session_options.intra_op_num_threads = 4, 2
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options, providers=["CPUExecutionProvider"]
    )
    for sizes in SIZES[len(symbols)]:
        feeds, other = (filled.feeds(model, seed, dict(zip(symbols, sizes, strict=True))) for seed in (3, 4))
        start = time.perf_counter()
        got = engine.run(feeds)
        first = time.perf_counter() - start
        want = dict(zip(got, session.run(None, feeds), strict=True))
        row["sizes"].append(
            {
                "size": sizes, "error": _rounded(max(error_of(got[k], want[k]) for k in want)), "first_s": round(first, 3),
                "another_input": _rounded(max(error_of(a, want[k]) for k, a in engine.run(other).items())),
            }
        )  # fmt: skip
    matched = all(s["error"] <= TOLERANCE[precision] for s in row["sizes"])
    largest = max(s["error"] for s in row["sizes"])
    return {**row, "tried": len(row["sizes"]), "largest_error": largest, "verdict": "right" if matched else "wrong"}


def _rounded(error: float) -> float:
    """An error with three digits."""
    return float(f"{error:.2e}")


def shown(row: Row) -> str:
    """The largest error."""
    return f"{row['verdict']} {row.get('largest_error', 0.0):.1e}"


KIND = Kind(
    name="ranges", about=__doc__ or "", measure=measure, groups=("shared",), precisions="fp32,fp16", limit_s=240.0, shown=shown,
)  # fmt: skip
