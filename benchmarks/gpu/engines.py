"""Engines on the GPU: are they right, and how long does a run take?

    python benchmarks/gpu/engines.py --out results.json resnet50:1 resnet50:128 mobilenet_v2:1 …

Builds each network of ``optdnn.models.zoo`` (NAME:BATCH) with heuristic tactics, in parallel and without the GPU. Then, one process
each, holds every kernel against its step's meaning in NumPy (8-bit results to the bit), the network against the reference, GPU
arrays against host arrays, and times the CUDA graph. A network that fails is a row with its error; the others go on.

``--arch sm_80 --compile-for sm_90a``: the program of an older GPU, its kernels compiled for this one, which runs their source as
that GPU would (mma.sync and cp.async, nothing of Hopper's own).
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from targets import facts

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda.kernels_of import recipe_of, source_digest
from optdnn.runtime.cuda.nvrtc import KernelCache
from optdnn.runtime.engine import Engine
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.program import Program

DEEP = 8
"""Largest batch whose results are compared with NumPy's."""


def compiled_for(program: Program, arch: str) -> Program:
    """The same program, its kernels to be compiled for another architecture."""
    recipes = [replace(recipe_of(k), arch=arch) for k in program.kernels]
    made = zip(program.kernels, recipes, strict=True)
    kernels = tuple(replace(k, arch=arch, source=source_digest(r), cubin=None) for k, r in made)
    KernelCache().get_many(recipes, workers=4)
    return replace(program, kernels=kernels, meta={**program.meta, "arch": arch})


def prepare(name: str, batch: int, precision: str, archs: tuple[str, str], folder: Path) -> None:
    """Build, save, and compute what must come out. ``archs``: what it is for, and what its kernels are compiled for."""
    model = zoo.build(name, batch=batch)
    start = time.perf_counter()
    # Ranges of made-up inputs serve: kernels are held against their own meaning, and time does not depend on ranges.
    ranges: dict[str, Any] = (
        {"calib": zoo.example_inputs(model, seed=5), "calibrator": "minmax"} if "8" in precision else {}
    )
    options = {"precision": precision, "tactics": "heuristic", "no_cubins": archs[0] != archs[1], **ranges}
    engine = optdnn.build(model, target=f"cuda:{archs[0]}", **options)
    if archs[0] != archs[1]:
        engine = Engine(compiled_for(engine.program, archs[1]), options=LoadOptions(simulate=True))
    row: dict[str, Any] = {"name": name, "batch": batch, "precision": precision, "arch": archs[0]}
    row["build_s"] = time.perf_counter() - start
    p = engine.program
    row |= {"steps": len(p.steps), "kernels": len(p.kernels), "arena_bytes": p.arena_bytes}
    engine.save(folder / f"{name}-{batch}.engine")
    feeds = zoo.example_inputs(model, seed=1)
    np.savez(folder / f"{name}-{batch}.in.npz", **feeds)
    if batch <= DEEP:
        reference = optdnn.build(model, target="reference")
        want, other = reference.run(feeds), reference.run(zoo.example_inputs(model, seed=2))
        np.savez(folder / f"{name}-{batch}.out.npz", **want)
        row["another_input"] = {k: _difference(other[k], w) for k, w in want.items()}
    (folder / f"{name}-{batch}.json").write_text(json.dumps(row))


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, of the largest magnitude of ``b``."""
    return float(np.abs(a.astype(float) - b).max() / max(float(np.abs(b).max()), 1e-30))


def run(name: str, batch: int, folder: Path) -> dict[str, Any]:
    """Check and time a prepared engine."""
    from optdnn.runtime.cuda.check import check_steps
    from optdnn.runtime.cuda.graphs import Graph, time_runs

    row: dict[str, Any] = json.loads((folder / f"{name}-{batch}.json").read_text())
    feeds = dict(np.load(folder / f"{name}-{batch}.in.npz"))
    start = time.perf_counter()
    engine = optdnn.load(folder / f"{name}-{batch}.engine")
    context: Any = engine.context()
    got = context.run(feeds)
    row["load_to_first_result_s"] = time.perf_counter() - start
    row["repeats"] = all(np.array_equal(got[k], v, equal_nan=True) for k, v in context.run(feeds).items())
    if batch <= DEEP:
        want = dict(np.load(folder / f"{name}-{batch}.out.npz"))
        row["error"] = {k: _difference(got[k], w) for k, w in want.items()}
        if batch == 1:
            worst = sorted(check_steps(context, feeds), key=lambda e: -e.error)
            row["worst_steps"] = [asdict(e) for e in worst[:6]]
            row["steps_above_1e-2"] = sum(e.error > 1e-2 for e in worst)
    graph = Graph(context.launches({}), context.stream)
    times = time_runs(lambda: graph.replay(context.stream), context.stream, warmup=10, repeats=20, inner=10)
    row["gpu_ms"] = {"median": statistics.median(times), "min": min(times)}
    row["numpy_to_numpy_ms"] = _median_ms(lambda: context.run(feeds), 10)
    row |= _device_arrays(context, feeds, got)
    _, steps = context.profile(feeds)
    slow = sorted(zip(steps, engine.program.steps, strict=True), key=lambda p: -p[0])[:10]
    row["slowest_us"] = [[ns / 1e3, s.params["op"]["kind"], " ".join(s.src)[:60]] for ns, s in slow]
    return row


def _device_arrays(context: Any, feeds: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> dict[str, Any]:
    try:
        import cupy
    except ImportError:
        return {}
    given = {k: cupy.asarray(v) for k, v in feeds.items()}
    out = context.run(given)
    same = all(np.array_equal(cupy.asnumpy(v), got[k], equal_nan=True) for k, v in out.items())
    bound = context.bind(given)
    enqueue = _median_ms(bound.run, 50)
    cupy.cuda.Device().synchronize()
    bound_same = all(np.array_equal(cupy.asnumpy(v), got[k], equal_nan=True) for k, v in bound.outputs.items())
    return {"cupy_arrays_agree": same, "bound_agrees": bound_same, "bound_call_us": enqueue * 1e3}


def _median_ms(call: Any, times: int) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--compile-for", help="compile the kernels for this architecture (default: that of --arch)")
    parser.add_argument("--out", type=Path, default=Path("engines.json"))
    parser.add_argument("--seconds", type=float, default=120, help="start no further network after this many")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["prepare", "run"], help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    pairs = [(n, int(b or 1)) for n, _, b in (t.partition(":") for t in options.networks)]
    if options.only == "prepare":
        archs = (options.arch, options.compile_for or options.arch)
        prepare(*pairs[0], options.precision, archs, options.folder)
        return
    if options.only == "run":
        print("ROW " + json.dumps(run(*pairs[0], options.folder)))
        return
    begin, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        common = ["--folder", folder, "--precision", options.precision, "--arch", options.arch]
        common += ["--compile-for", options.compile_for] if options.compile_for else []

        def child(what: str, pair: tuple[str, int], limit: float) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, __file__, "--only", what, f"{pair[0]}:{pair[1]}", *common]
            environment = {**os.environ, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}
            return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)

        prepared = [(pair, pool.submit(child, "prepare", pair, 300)) for pair in pairs]
        for pair, future in prepared:
            row: dict[str, Any] = {"name": pair[0], "batch": pair[1]}
            if time.perf_counter() - begin > options.seconds:
                rows.append({**row, "skipped": "out of time"})
                continue
            try:
                done = future.result()
                done = child("run", pair, 60) if done.returncode == 0 else done
                last = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
                rows.append(
                    json.loads(last[-1][4:]) if last else {**row, "failed": (done.stderr or done.stdout)[-1500:]}
                )
            except subprocess.TimeoutExpired as error:
                rows.append({**row, "failed": str(error)})
            shown = {k: v for k, v in rows[-1].items() if k not in ("slowest_us", "another_input")}
            print(f"{time.perf_counter() - begin:6.1f} s", json.dumps(shown)[:1800], flush=True)
            options.out.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
