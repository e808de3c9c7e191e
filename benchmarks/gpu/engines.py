"""Engines on the GPU: are they right, and how long does a run take?

    python benchmarks/gpu/engines.py --out results.json resnet50:1 resnet50:128 mobilenet_v2:1 …

builds each network of ``optdnn.models.zoo`` (NAME:BATCH) for this machine's GPU with heuristic tactics, holds every kernel against its
step's meaning in NumPy and the whole network against the reference (both at the first batch of a network), and times the CUDA graph.
A network that fails is reported with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.check import check_steps
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import time_runs


def measure(name: str, batch: int, precision: str, deep: bool) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"name": name, "batch": batch, "precision": precision}
    model = zoo.build(name, batch=batch)
    start = time.perf_counter()
    engine = optdnn.build(model, target="cuda", precision=precision, tactics="heuristic")
    row |= {
        "build_s": time.perf_counter() - start,
        "steps": len(engine.program.steps),
        "kernels": len(engine.program.kernels),
    }
    row["arena_bytes"] = engine.program.arena_bytes
    feeds = zoo.example_inputs(model, seed=1)
    start = time.perf_counter()
    context: Any = engine.context()
    got = context.run(feeds)
    row["first_run_s"] = time.perf_counter() - start
    again = context.run(feeds)
    row["repeats"] = all(np.array_equal(got[k], again[k], equal_nan=True) for k in got)
    if deep:
        errors = check_steps(context, feeds)
        worst = sorted(errors, key=lambda e: -e.error)[:6]
        row["worst_steps"] = [asdict(e) for e in worst]
        reference = optdnn.build(model, target="reference")
        want, other = reference.run(feeds), reference.run(zoo.example_inputs(model, seed=2))
        row["outputs"] = {
            k: {
                "error": float(np.abs(got[k].astype(float) - w).max() / np.abs(w).max()),
                "another_input": float(np.abs(other[k].astype(float) - w).max() / np.abs(w).max()),
            }
            for k, w in want.items()
            if w.dtype.kind == "f"
        }
    graph = context._graph({})
    times = time_runs(lambda: graph.replay(context.stream), context.stream, warmup=10, repeats=20, inner=10)
    row["gpu_ms"] = {"median": statistics.median(times), "min": min(times)}
    whole = []
    for _ in range(10):
        start = time.perf_counter()
        context.run(feeds)
        whole.append((time.perf_counter() - start) * 1e3)
    row["numpy_to_numpy_ms"] = statistics.median(whole)
    _, steps = context.profile(feeds)
    slow = sorted(zip(steps, engine.program.steps, strict=True), key=lambda p: -p[0])[:8]
    row["slowest"] = [[ns / 1e3, s.params["op"]["kind"], " ".join(s.src)[:60]] for ns, s in slow]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120, help="start no further network after this many")
    options = parser.parse_args()
    begin, rows, seen = time.perf_counter(), [], set()
    device = asdict(Device.open())
    for text in options.networks:
        name, _, batch = text.partition(":")
        if time.perf_counter() - begin > options.seconds:
            rows.append({"name": name, "batch": int(batch), "skipped": "out of time"})
            continue
        try:
            rows.append(measure(name, int(batch), options.precision, name not in seen))
            seen.add(name)
        except Exception as error:
            rows.append(
                {
                    "name": name,
                    "batch": int(batch),
                    "failed": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc()[-1500:],
                }
            )
        row = rows[-1]
        print(
            f"{time.perf_counter() - begin:6.1f} s",
            json.dumps({k: v for k, v in row.items() if k not in ("trace", "slowest")})[:1500],
            flush=True,
        )
        options.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
