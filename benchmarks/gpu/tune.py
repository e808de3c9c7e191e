"""Tunes whole engines on the GPU: times before and after, what was measured, build times cold and warm.

    python benchmarks/gpu/tune.py --out results.json --budget 30 resnet50:1 resnet50:32

For each NAME:BATCH of ``optdnn.models.zoo``: a build with heuristic tactics, one with measured tactics and cold caches, one again
with the timing and kernel caches warm (the engine must be the same, byte for byte); the network's result against the heuristic
engine's; and where the time goes, step by step. A network that fails is a row with its error; the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.graphs import Graph, time_runs


def measured(engine: Any, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """Medians of GPU milliseconds: of one run, and of ten in a row; and the result."""
    context = engine.context()
    result = context.run(feeds)
    graph = context.graph()
    one = time_runs(lambda: graph.replay(context.stream), context.stream, warmup=10, repeats=40)
    ten = time_runs(lambda: graph.replay(context.stream), context.stream, warmup=3, repeats=20, inner=10)
    return {"ms": statistics.median(one), "ten_ms": statistics.median(ten), "min_ms": min(one), "result": result}


def shares(engine: Any, feeds: dict[str, np.ndarray]) -> list[list[Any]]:
    """What each step adds to the graph of those before it, in microseconds."""
    context = engine.context()
    context.run(feeds)
    launches = context.launches({})
    marks = [0.0]
    for end in range(1, len(launches) + 1):
        graph = Graph(launches[:end], context.stream)
        times = time_runs(lambda g=graph: g.replay(context.stream), context.stream, warmup=3, repeats=11)
        marks.append(statistics.median(times) * 1e3)
        graph.close()
    steps = engine.program.steps
    return [
        [round(b - a, 2), s.params["op"]["kind"], s.params.get("tactic", ""), " ".join(s.src)[:50]]
        for a, b, s in zip(marks, marks[1:], steps, strict=False)
    ]


def row_of(name: str, batch: int, options: argparse.Namespace, folder: Path, row: dict[str, Any]) -> None:
    model = zoo.build(name, batch=batch)
    feeds = zoo.example_inputs(model, seed=1)
    common: dict[str, Any] = {"target": f"cuda:{options.arch}", "precision": options.precision}
    start = time.perf_counter()
    plain = optdnn.build(model, tactics="heuristic", **common)
    row["heuristic_build_s"] = time.perf_counter() - start
    before = measured(plain, feeds)
    common |= {"timing_cache": folder / f"{name}-{batch}.json", "tactics": options.tactics}
    log: list[str] = []
    start = time.perf_counter()
    tuned = optdnn.build(model, budget=options.budget, progress=log.append, **common)
    row["cold_build_s"] = time.perf_counter() - start
    report: Any = tuned.report
    row["tuning"], row["seconds"], row["last_words"] = report["tuning"], report["seconds"], log[-3:]
    after = measured(tuned, feeds)
    for key in ("ms", "ten_ms", "min_ms"):
        row[key] = {"heuristic": before[key], "tuned": after[key]}
    row["steps"] = {"heuristic": len(plain.program.steps), "tuned": len(tuned.program.steps)}
    row["difference"] = {
        k: float(np.abs(v.astype(float) - before["result"][k]).max() / np.abs(before["result"][k]).max())
        for k, v in after["result"].items()
    }
    times = " -> ".join(f"{x['ms']:.4f} ({x['ten_ms']:.4f} of ten)" for x in (before, after))
    tuning = report["tuning"]
    print(
        f"{name} {batch}: {times} ms, {row['cold_build_s']:.1f} s {tuning['seconds']} {tuning.get('stopped')}",
        flush=True,
    )
    if options.warm:
        start = time.perf_counter()
        again = optdnn.build(model, **common)
        row["warm_build_s"] = time.perf_counter() - start
        for engine, path in ((tuned, "a.engine"), (again, "b.engine")):
            engine.save(folder / path)
        row["warm_is_the_same"] = (folder / "a.engine").read_bytes() == (folder / "b.engine").read_bytes()
        print(f"  warm build {row['warm_build_s']:.2f} s, the same: {row['warm_is_the_same']}", flush=True)
    if options.retune:
        path = folder / "retuned.engine"
        plain.save(path)
        start = time.perf_counter()
        found = optdnn.retune(path, budget=options.budget, tactics=options.tactics)
        row["retune"] = {"before_ms": found.before_ms, "after_ms": found.after_ms, "replaced": found.replaced}
        row["retune"] |= {"seconds": time.perf_counter() - start, "bytes": path.stat().st_size}
        row["retune"]["ms"] = measured(optdnn.load(path), feeds)["ms"]
        print(f"  retune {row['retune']}", flush=True)
    if options.shares:
        row["shares_us"] = shares(tuned, feeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--tactics", default="auto")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--warm", action="store_true", help="build once more with warm caches")
    parser.add_argument("--retune", action="store_true", help="also retune the heuristic engine in place")
    parser.add_argument("--shares", action="store_true", help="what each step adds")
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    options = parser.parse_intermixed_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OPTDNN_CACHE", f"{folder}/cache")
        for text in options.networks:
            name, _, batch = text.partition(":")
            rows.append({"name": name, "batch": int(batch or 1), "precision": options.precision})
            try:
                row_of(name, int(batch or 1), options, Path(folder), rows[-1])
            except Exception as error:
                rows[-1]["failed"] = f"{type(error).__name__}: {error}"
                print(f"{text} failed: {traceback.format_exc()[-2500:]}", flush=True)
            options.out.write_text(json.dumps({"rows": rows}, indent=1, default=str))


if __name__ == "__main__":
    main()
