"""One engine for a range of sequence lengths on a GPU: right at every length, and against the static engine at each.

    python benchmarks/gpu/dynamic_shapes.py --out FOLDER [--row bert_base:1 …] [--tune SECONDS]

Writes dynamic_shapes.json: per row (network:batch) and length the milliseconds of the static engine and of the dynamic one
(bound calls, a graph launch each, the two in turns), and the largest difference between the two. ``first_seconds`` is how long
the first run of a length takes in a fresh process that has loaded the engine and run it at its optimum, ``stages`` where they go,
``kernels_compiled`` how many kernels the plan needs that neither the engine nor the kernel cache holds (``--cold-kernels``: the
cache is empty at the start of that process). Without ``--tune`` the cost model chooses everywhere. With it the dynamic engine is
tuned at its optimum and each static one at its own length, each for that long: what a plan that is made later loses. What it would
lose by the cost model alone is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import time_runs

OPTIMUM, LONGEST = 128, 384
ROWS = ("bert_base:1", "bert_base:32", "lstm:1", "lstm:32")


FIRST = """
import json, sys, time
import numpy as np
import dynamic_shapes
print(json.dumps(dynamic_shapes.first_runs(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))))
"""
STAGES = {
    "open the model, know the weights": "optdnn.plan_base:Common.of",
    "import": "optdnn.plan_base:import_model",
    "passes": "optdnn.optimizing:optimize",
    "lower": "optdnn.lower_cuda:emit_program",
    "compile": "optdnn.lower_cuda:_compiled",
    "load kernels and weights": "optdnn.runtime.cuda.loaded:Loaded.__init__",
    "arena and buffers": "optdnn.runtime.cuda.runner:CudaContext.__init__",
    "graph": "optdnn.runtime.cuda.graphs:Graph.__init__",
}
"""Stages of the first run of a length: a name, and the function that it is."""


def first_runs(path: str, optimum: dict[str, Any], lengths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first run of each of these inputs (shape and type by name), after one of the optimum's: seconds, by stage, too."""
    spent: dict[str, float] = {}

    def feeds(like: dict[str, Any]) -> dict[str, Any]:
        return {name: np.ones(shape, dtype) for name, (shape, dtype) in like.items()}

    def watch(name: str, place: str) -> None:
        module, _, attribute = place.partition(":")
        owner: Any = import_module(module)
        *names, last = attribute.split(".")
        for step in names:
            owner = getattr(owner, step)
        real = getattr(owner, last)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, last, timed)

    context: Any = optdnn.load(path).context()
    context.run(feeds(optimum))
    start = time.perf_counter()
    import_module("optdnn.plans")
    found = [{"import_the_compiler_s": round(time.perf_counter() - start, 3)}]
    for name, place in STAGES.items():
        watch(name, place)
    compiled: list[Any] = []
    nvrtc = import_module("optdnn.runtime.cuda.nvrtc")
    real_compile = nvrtc.compile_recipe
    nvrtc.compile_recipe = lambda recipe, **options: (compiled.append(recipe), real_compile(recipe, **options))[1]
    for like in lengths:
        spent.clear()
        compiled.clear()
        given = feeds(like)
        start = time.perf_counter()
        context.run(given)
        seconds = round(time.perf_counter() - start, 3)
        stages = {name: round(spent.get(name, 0.0), 3) for name in STAGES}
        found.append({"first_seconds": seconds, "stages": stages, "kernels_compiled": len(compiled)})
    return found


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
        how |= {"tactics": "auto", "budget": args.tune, "timing_cache": cache}
    started = time.perf_counter()
    engine = optdnn.build(network.model, target=target, shapes=network.shapes(f"1..{OPTIMUM}..{LONGEST}"), **how)
    built = time.perf_counter() - started
    engine.save(args.out / "dynamic.engine")
    size = (args.out / "dynamic.engine").stat().st_size
    context: Any = optdnn.load(args.out / "dynamic.engine").context()
    stream = cupy.cuda.Stream(non_blocking=True)
    waits = _first_runs(args.out / "dynamic.engine", network, lengths, args)
    rows = []
    for k, length in enumerate(lengths):
        if time.monotonic() > until:
            break
        feeds = network.feeds(length)
        first = context.run(feeds)
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
                "ratio": round(medians["dynamic"] / medians["static"], 4), **waits[1 + k],
                "again_ms": round(again * 1e3, 3), "difference": apart(first, want),
                "another_input": apart(own.run(network.feeds(length, 1)), want),
                **waits[0], "build_seconds": round(built, 2), "engine_bytes": size,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    (args.out / "dynamic.engine").unlink()
    (args.out / "dynamic.engine.report.json").unlink(missing_ok=True)
    return rows


def _first_runs(engine: Path, network: Network, lengths: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """:func:`first_runs` in a fresh process."""
    like = [{n: (a.shape, a.dtype.name) for n, a in network.feeds(length).items()} for length in (OPTIMUM, *lengths)]
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, "-c", FIRST, str(engine), json.dumps(like[0]), json.dumps(like[1:])]
    with tempfile.TemporaryDirectory() as empty:
        more = {"OPTDNN_CACHE": empty} if args.cold_kernels else {}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **more}
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _told(words: list[str]) -> list[str]:
    """The command's words without folders of a machine."""
    return [Path(w).name if w.startswith("/") else w for w in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--row", action="append", help=f"NETWORK:BATCH (default: {' '.join(ROWS)})")
    parser.add_argument("--depth", type=float, default=1.0)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--lengths", default=f"{OPTIMUM},64,{LONGEST}")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of tuning for each engine")
    parser.add_argument(
        "--cold-kernels", action="store_true", help="first runs find no kernel compiled but the engine's"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further length after this")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.seconds
    device = Device.open()
    report: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu/dynamic_shapes.py", *_told(sys.argv[1:])]), "date": time.strftime("%F"),
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
