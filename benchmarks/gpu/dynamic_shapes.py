"""One engine for a range of sequence lengths on a GPU: right at every length, and against the static engine at each.

    python benchmarks/gpu/dynamic_shapes.py --out FOLDER [--depth 1.0] [--precision fp16]

Writes dynamic_shapes.json: per length the milliseconds of the static engine and of the dynamic one (bound calls, a graph
launch each, the two in turns), seconds until a plan for a new length was made, and the largest difference between the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import time_runs

OPTIMUM = 128


def feeds_of(length: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, 1000, (1, length)),
        "attention_mask": np.ones((1, length), np.int64),
        "token_type_ids": np.zeros((1, length), np.int64),
    }


class _Stream:
    def __init__(self, stream: Any):
        self.handle = stream.ptr
        self.synchronize = stream.synchronize


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--depth", type=float, default=1.0)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--lengths", default="128,64,200,384,17,128")
    args = parser.parse_args()
    import cupy

    arch = Device.open().arch
    model = zoo.build("bert_base", batch="batch", sequence_length="seq", depth=args.depth)
    model = getattr(model, "model", model)
    names = ("input_ids", "attention_mask", "token_type_ids")
    ranged = dict.fromkeys(names, f"1x1..{OPTIMUM}..384")
    started = time.perf_counter()
    # One timing cache: both builds choose the same tactics at the optimum. Other lengths are planned by the cost model.
    cache = args.out / "times.json"
    engine = optdnn.build(model, target=f"cuda:{arch}", precision=args.precision, shapes=ranged, timing_cache=cache)
    built = time.perf_counter() - started
    engine.save(args.out / "bert.engine")
    size = (args.out / "bert.engine").stat().st_size
    engine = optdnn.load(args.out / "bert.engine")
    context: Any = engine.context()
    stream = cupy.cuda.Stream(non_blocking=True)
    rows = []
    for length in map(int, args.lengths.split(",")):
        feeds = feeds_of(length)
        started = time.perf_counter()
        first = context.run(feeds)
        seen = time.perf_counter() - started
        how = {"timing_cache": cache} if length == OPTIMUM else {"tactics": "heuristic"}
        fixed = dict.fromkeys(names, (1, length))
        static = optdnn.build(model, target=f"cuda:{arch}", precision=args.precision, shapes=fixed, **how)
        own: Any = static.context()
        want = own.run(feeds)
        worst = max(float(np.abs(first[k] - want[k]).max() / np.abs(want[k]).max()) for k in want)
        other = own.run(feeds_of(length, 1))
        apart = max(float(np.abs(other[k] - want[k]).max() / np.abs(want[k]).max()) for k in want)
        given = {k: cupy.asarray(v) for k, v in feeds.items()}
        bound = {"dynamic": context.bind(given), "static": own.bind(given)}
        times: dict[str, list[float]] = {"dynamic": [], "static": []}
        for _ in range(5):
            for name, call in bound.items():
                times[name] += time_runs(lambda c=call: c.run(stream), _Stream(stream), repeats=10, inner=5)
        medians = {name: statistics.median(t) for name, t in times.items()}
        started = time.perf_counter()
        context.run(feeds)
        again = time.perf_counter() - started
        rows.append(
            {
                "length": length, **{f"{k}_ms": round(v, 5) for k, v in medians.items()},
                "ratio": round(medians["dynamic"] / medians["static"], 4), "first_seconds": round(seen, 3),
                "again_ms": round(again * 1e3, 3), "difference": worst, "another_input": apart,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    report = {
        "gpu": Device.open().name, "arch": arch, "network": f"bert_base depth {args.depth}", "precision": args.precision,
        "range": "1..128..384", "build_seconds": round(built, 2), "engine_bytes": size, "rows": rows,
    }  # fmt: skip
    (args.out / "bert.engine").unlink()
    cache.unlink(missing_ok=True)
    (args.out / "bert.engine.report.json").unlink(missing_ok=True)
    (args.out / "dynamic_shapes.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
