"""One engine for a range of sequence lengths on a GPU: right at every length, and against the static engine at each.

    python benchmarks/gpu/dynamic_shapes.py --out FOLDER [--row bert_base:1 …] [--tune SECONDS]

Writes dynamic_shapes.json: per row (network:batch) and length the milliseconds of the static engine and of the dynamic one
(bound calls, a graph launch each, the two in turns), seconds until a plan for a new length was made, and the largest
difference between the two. Without ``--tune`` the cost model chooses everywhere. With it the dynamic engine is tuned at its
optimum and each static one at its own length, each for that long: what a plan that is made later loses. What it would lose by the
cost model alone is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import time_runs

OPTIMUM, LONGEST = 128, 384
ROWS = ("bert_base:1", "bert_base:32", "lstm:1", "lstm:32")


class Network:
    """A network of the zoo at a batch size, its sequence length symbolic."""

    def __init__(self, name: str, batch: int, depth: float):
        self.name, self.batch = name, batch
        self.model = zoo.build(name, batch=batch, sequence_length="seq", depth=depth)

    def shapes(self, length: Any) -> dict[str, str]:
        """Text of ``--shape`` for a length, or a range of them."""
        if self.name == "lstm":
            return {"x": f"{length}x{self.batch}x512"}
        return dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), f"{self.batch}x{length}")

    def feeds(self, length: int, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        if self.name == "lstm":
            return {"x": rng.standard_normal((length, self.batch, 512)).astype(np.float32)}
        shape = (self.batch, length)
        ids, kinds = rng.integers(0, 1000, shape), np.zeros(shape, np.int64)
        return {"input_ids": ids, "attention_mask": np.ones(shape, np.int64), "token_type_ids": kinds}


class _Stream:
    def __init__(self, stream: Any):
        self.handle = stream.ptr
        self.synchronize = stream.synchronize


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference, of the largest element."""
    return max(float(np.abs(a[k] - b[k]).max() / np.abs(b[k]).max()) for k in b)


def measure(name: str, lengths: list[int], args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """One row: a table per length, in the order given."""
    import cupy

    kind, _, batch = name.partition(":")
    network, target = Network(kind, int(batch), args.depth), f"cuda:{Device.open().arch}"
    cache = args.out / "times.json"  # both builds choose the same at the optimum
    how: dict[str, Any] = {"precision": args.precision, "tactics": "heuristic"}
    if args.tune:
        how |= {"tactics": "auto", "budget": args.tune, "timing_cache": cache, "nearest_tactics": True}
    started = time.perf_counter()
    engine = optdnn.build(network.model, target=target, shapes=network.shapes(f"1..{OPTIMUM}..{LONGEST}"), **how)
    built = time.perf_counter() - started
    engine.save(args.out / "dynamic.engine")
    size = (args.out / "dynamic.engine").stat().st_size
    context: Any = optdnn.load(args.out / "dynamic.engine").context()
    stream = cupy.cuda.Stream(non_blocking=True)
    rows = []
    for length in lengths:
        if time.monotonic() > until:
            break
        feeds = network.feeds(length)
        started = time.perf_counter()
        first = context.run(feeds)
        seen = time.perf_counter() - started
        static = optdnn.build(network.model, target=target, shapes=network.shapes(length), **how)
        own: Any = static.context()
        want = own.run(feeds)
        given = {k: cupy.asarray(v) for k, v in feeds.items()}
        bound = {"dynamic": context.bind(given), "static": own.bind(given)}
        if args.tune:
            guessed = {**how, "tactics": "heuristic", "budget": None, "timing_cache": None}
            by_model: Any = optdnn.build(
                network.model, target=target, shapes=network.shapes(length), **guessed
            ).context()
            bound["cost_model"] = by_model.bind(given)
        times: dict[str, list[float]] = {which: [] for which in bound}
        for _ in range(5):
            for which, call in bound.items():
                times[which] += time_runs(lambda c=call: c.run(stream), _Stream(stream), repeats=10, inner=5)
        medians = {which: statistics.median(t) for which, t in times.items()}
        started = time.perf_counter()
        context.run(feeds)
        again = time.perf_counter() - started
        rows.append(
            {
                "row": name, "length": length, **{f"{k}_ms": round(v, 5) for k, v in medians.items()},
                "ratio": round(medians["dynamic"] / medians["static"], 4), "first_seconds": round(seen, 3),
                "again_ms": round(again * 1e3, 3), "difference": apart(first, want),
                "another_input": apart(own.run(network.feeds(length, 1)), want),
                "build_seconds": round(built, 2), "engine_bytes": size,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    (args.out / "dynamic.engine").unlink()
    (args.out / "dynamic.engine.report.json").unlink(missing_ok=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--row", action="append", help=f"NETWORK:BATCH (default: {' '.join(ROWS)})")
    parser.add_argument("--depth", type=float, default=1.0)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--lengths", default=f"{OPTIMUM},64,{LONGEST}")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of tuning for each engine")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further length after this")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    device = Device.open()
    report: dict[str, Any] = {
        "gpu": device.name, "arch": device.arch, "commit": os.environ.get("OPTDNN_COMMIT", ""), "depth": args.depth,
        "precision": args.precision, "range": f"1..{OPTIMUM}..{LONGEST}", "tuned_seconds": args.tune, "rows": [],
    }  # fmt: skip
    for name in args.row or ROWS:
        try:
            report["rows"] += measure(name, list(map(int, args.lengths.split(","))), args, until)
        except Exception as error:
            report["rows"].append({"row": name, "error": f"{type(error).__name__}: {error}"[:500]})
            traceback.print_exc()
        (args.out / "dynamic_shapes.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "times.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
