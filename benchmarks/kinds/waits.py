"""The waiting times of a user, measured through the command line and the public API.

    python -m benchmarks waits --out waits.jsonl                     # everything: about three minutes
    python -m benchmarks waits --parts load,call --out waits.jsonl

- ``build``: full autotune (or ``--search`` seconds of it) with cold caches, then with warm ones, which must give the same bytes.
- ``load``: from ``optdnn.load`` to the first result, in a fresh process, three times.
- ``call``: the time that Python adds to the GPU's, with bound buffers and with GPU arrays.
- ``retune``: an engine that was built with the GPU hidden, then ``optdnn retune``.
- ``plan``: the first run of BERT-base at lengths for which its engine holds no plan.

``--target cpu`` has only ``build`` and ``load``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import optdnn
from benchmarks.harness import Job, Kind, turn
from benchmarks.models import LENGTHS, feeds_of, onnx_of, ranged
from benchmarks.rows import Row
from benchmarks.workloads import Workload

CALLS = 400


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--search", help="seconds of tuning, for builds that are not about tuning")


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [f"{options.target} {part}" for part in options.parts.split(",")]


def measure(job: Job) -> Row:
    """One part."""
    turn()
    return PARTS[job.setup.split()[-1]](job)


def optdnn_command(*words: str, limit: float = 240, **environment: str) -> Row:
    """Run ``optdnn WORDS``: its seconds and its text. Raises RuntimeError if it fails."""
    start = time.perf_counter()
    words_run = ["timeout", f"{limit:g}", sys.executable, "-m", "optdnn", *words]
    done = subprocess.run(words_run, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"optdnn {words[0]}: exit code {done.returncode}: {done.stderr[-500:]}")
    shown = " ".join(Path(w).name if w.startswith("/") else w for w in words)
    return {"command": f"optdnn {shown}", "seconds": round(time.perf_counter() - start, 2), "out": done.stdout}


def model(job: Job) -> str:
    """The network as a file."""
    path = job.folder / f"{job.workload.short}.onnx"
    if not path.exists():
        onnx.save(onnx_of(job.workload), path)
    return str(path)


def optimized(job: Job) -> tuple[str, ...]:
    """Options of a build for the target."""
    target = job.options.target.partition(":")[0]
    gpu = ("--precision", job.workload.precision, "--io-dtype", "fp16")
    return ("--target", target, *(gpu if target == "cuda" else ()))


def python(program: str, *words: str) -> str:
    """The output of a Python program in a fresh process. Raises RuntimeError if it fails."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    return done.stdout


def build(job: Job) -> Row:
    """Builds with cold caches, then with warm ones, and the candidates that were tried."""
    folder = job.folder
    words = ("build", model(job), *optimized(job), "--timing-cache", str(folder / "times.json"))
    words += ("--budget", job.options.search) if job.options.search else ()
    row: Row = {}
    for when in ("cold", "warm"):
        done = optdnn_command(*words, "-o", str(folder / f"{when}.engine"), OPTDNN_CACHE=str(folder / "cache"))
        report = json.loads((folder / f"{when}.engine.report.json").read_text())
        tuning = {k: v for k, v in (report.get("tuning") or {}).items() if k != "problems"}
        row[when] = {"stages": report["seconds"], "tuning": tuning, **{k: done[k] for k in ("command", "seconds")}}
    row["the_same_bytes"] = (folder / "cold.engine").read_bytes() == (folder / "warm.engine").read_bytes()
    return row


LOAD = """
import json, sys, time
import numpy as np
start = time.perf_counter()
import optdnn
imported = time.perf_counter()
feeds = dict(np.load(sys.argv[2]))
begin = time.perf_counter()
engine = optdnn.load(sys.argv[1])
loaded = time.perf_counter()
y = engine.run(feeds)
done = time.perf_counter()
assert all(np.isfinite(v).all() for v in y.values())
print(json.dumps({"import_s": imported - start, "loaded_s": loaded - begin, "load_to_result_s": done - begin}))
"""


def engine_file(job: Job) -> str:
    """An engine by the cost model."""
    heuristic = ("--tactics", "heuristic") if job.options.target.startswith("cuda") else ()
    optdnn_command("build", model(job), *optimized(job), *heuristic, "-o", str(job.folder / "own.engine"))
    return str(job.folder / "own.engine")


def load(job: Job) -> Row:
    """Seconds from ``optdnn.load`` to the first result as NumPy arrays, CUDA's own start included; each in a fresh process."""
    path, feeds = engine_file(job), str(job.folder / "feeds.npz")
    given, half = feeds_of(job.workload, onnx_of(job.workload)), job.options.target.startswith("cuda")
    np.savez(feeds, **{k: v.astype(np.float16) if half and v.dtype.kind == "f" else v for k, v in given.items()})
    loads = [json.loads(python(LOAD, path, feeds)) for _ in range(3)]
    return {"loads": loads, "median_s": statistics.median(r["load_to_result_s"] for r in loads)}


def call(job: Job) -> Row:
    """Median microseconds: the GPU's time, the host's part of a call, a call with the wait for its end, and its excess over the
    GPU's time."""
    import cupy

    engine = optdnn.load(engine_file(job))
    given = {s.name: cupy.asarray(np.random.default_rng(0).random(s.shape).astype(s.dtype)) for s in engine.inputs}
    context: Any = engine.context()
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = context.bind(given)
    bound.run(stream)
    stream.synchronize()
    events = [cupy.cuda.Event() for _ in range(2)]

    def on_gpu() -> float:
        events[0].record(stream)
        bound.run(stream)
        events[1].record(stream)
        events[1].synchronize()
        return float(cupy.cuda.get_elapsed_time(*events)) * 1e3

    gpu = statistics.median(on_gpu() for _ in range(CALLS))
    row: Row = {"gpu_us": round(gpu, 2)}
    row["bound"] = timed(lambda: bound.run(stream), stream, gpu)
    null = cupy.cuda.Stream.null  # the stream of a run without a stream
    row["context_with_gpu_arrays"] = timed(lambda: context.run(given), null, gpu)
    row["engine_with_gpu_arrays"] = timed(lambda: engine.run(given), null, gpu)
    return row


def timed(once: Callable[[], object], stream: Any, gpu: float) -> dict[str, float]:
    """``call_us``: until the call returns. ``done_us``: until the GPU is done. ``over_gpu_us``: ``done_us`` less the GPU's time."""
    calls, whole = [], []
    for k in range(CALLS + 20):
        start = time.perf_counter_ns()
        once()
        returned = time.perf_counter_ns()
        stream.synchronize()
        if k >= 20:
            calls.append((returned - start) / 1e3)
            whole.append((time.perf_counter_ns() - start) / 1e3)
    done = statistics.median(whole)
    found = {"call_us": statistics.median(calls), "done_us": done, "over_gpu_us": done - gpu}
    return {k: round(v, 2) for k, v in found.items()}


def retune(job: Job) -> Row:
    """An engine that is built with the GPU hidden, and then tuned in place; libraries are among the candidates."""
    path = job.folder / "hidden.engine"
    words = ("--target", job.options.target, "--precision", job.workload.precision, "-o", str(path))
    built = optdnn_command("build", model(job), *words, CUDA_VISIBLE_DEVICES="")
    done = optdnn_command("retune", str(path), "--budget", job.options.search or "25", "--json")
    optdnn_command("run", str(path))
    found = json.loads(done["out"])
    figures = {k: found[k] for k in ("before_ms", "after_ms", "replaced")}
    return {"build_s": built["seconds"], "command": done["command"], "seconds": done["seconds"], **figures}


PLAN = """
import json, sys, time
from importlib import import_module
import numpy as np
import optdnn
first, *lengths = [{n: np.ones(*like) for n, like in given.items()} for given in json.loads(sys.argv[2])]
context = optdnn.load(sys.argv[1]).context()
context.run(first)
start = time.perf_counter()
import_module("optdnn.shapes.plans")
print(json.dumps({"import_s": time.perf_counter() - start}))
nvrtc, compiled = import_module("optdnn.runtime.cuda.compile.nvrtc"), []
real = nvrtc.compile_recipe
nvrtc.compile_recipe = lambda recipe, **options: (compiled.append(recipe), real(recipe, **options))[1]
for given in lengths:
    compiled.clear()
    start = time.perf_counter()
    context.run(given)
    print(json.dumps({"first_s": time.perf_counter() - start, "kernels_compiled": len(compiled)}))
"""
PLANNED = (128, 120, 256, 96, 384)
"""Lengths of sequences, the optimum first."""


def plan(job: Job) -> Row:
    """The first runs at lengths for which an engine for a range holds no plan, in a fresh process.

    Seconds, and the number of kernels that had to be compiled because neither the engine nor the kernel cache holds them."""
    network, path = replace(job.workload, network="zoo/bert_base"), job.folder / "ranged.engine"
    graph, dims = ranged(network)
    how: dict[str, Any] = {"target": job.options.target, "precision": network.precision, "tactics": "heuristic"}
    optdnn.build(graph, shapes={k: "x".join(d) for k, d in dims.items()}, **how).save(path)
    like = [{k: ([int(str(n) if d == LENGTHS else d) for d in of], "int64") for k, of in dims.items()} for n in PLANNED]
    first, *later = [json.loads(line) for line in python(PLAN, str(path), json.dumps(like)).splitlines()]
    return {**first, "lengths": [{"length": n, **found} for n, found in zip(PLANNED[1:], later, strict=True)]}


PARTS: dict[str, Callable[[Job], Row]] = {"build": build, "load": load, "call": call, "retune": retune, "plan": plan}


def shown(row: Row) -> str:
    """The part's own figures."""
    return json.dumps({k: v for k, v in row.items() if k not in ("workload", "what", "setup")})[:400]


KIND = Kind(
    name="waits", about=__doc__ or "", measure=measure, arguments=arguments, groups=("waits",), setups=setups, timed=True,
    limit_s=300.0, fresh=True, shown=shown,
)  # fmt: skip
