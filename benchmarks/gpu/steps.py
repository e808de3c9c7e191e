"""Where an engine's time goes on a GPU: its launches, each timed alone, by kind and shape; engines of a network side by side.

    python benchmarks/gpu/steps.py --out steps.json bert_base:32:fp16 bert_base:32:fp8+fp16 efficientnet_b0:128:int8+fp16

Networks are NAME:BATCH:PRECISION, of the zoo. Equal launches are timed once, in a CUDA graph that repeats them: operands are in L2
where they fit, and a launch begins while the one before it ends, as in a network. ``--in-place`` tells also what each step adds
to the graph of those before it: L2 is then as the network leaves it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn import calibration
from optdnn.models import zoo

REPEATED = 20
"""Launches of one step in its graph."""


def prepare(name: str, file: Path, tune: float) -> dict[str, Any]:
    """Build and save an engine, and its inputs."""
    network, batch, precision = name.split(":")
    settings = {"sequence_length": 128} if network == "bert_base" else {}
    model = zoo.build(network, batch=int(batch), **settings)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "tactics": "own" if tune else "heuristic",
        "budget": tune or None,
        "target": "cuda:sm_90a",
        "precision": precision,
        "io_dtype": "fp16",
    }
    if "8" in precision:
        # Time does not depend on ranges, and those of one sample are found at once.
        one = zoo.build(network, batch=1, **settings)  # type: ignore[arg-type]
        found = ranges(one, options)
        calibration.calibrate = lambda *args, **more: found
        options |= {"calib": zoo.example_inputs(model, seed=5), "calibrator": "minmax"}
    begin = time.perf_counter()
    engine = optdnn.build(model, **options)
    engine.save(file)
    np.savez(file.with_suffix(".npz"), **zoo.example_inputs(model, seed=1))  # type: ignore[arg-type]
    return {"build_s": round(time.perf_counter() - begin, 1), "tuned_s": tune}


class _Found(Exception):
    """Ends a build once its calibration is known."""


def ranges(model: Any, options: dict[str, Any]) -> Any:
    """The ranges of all values, by name, as a build of the model finds them."""
    measured = calibration.calibrate
    found: list[Any] = []

    def stop(*args: Any, **more: Any) -> Any:
        found.append(measured(*args, **more))
        raise _Found

    calibration.calibrate = stop
    try:
        with suppress(_Found):
            optdnn.build(model, **options, calib=zoo.example_inputs(model, seed=5), calibrator="minmax")
    finally:
        calibration.calibrate = measured
    return found[0]


def added(launches: list[Any], waits: Any, stream: Any) -> list[float]:
    """Microseconds that each launch adds to the graph of those before it."""
    from optdnn.runtime.cuda.graphs import Graph, time_runs

    marks = [0.0]
    whole = Graph(launches, stream, waits)
    for end in range(1, len(launches) + 1):
        graph = Graph(launches[:end], stream, waits[:end] if waits is not None else None)

        def run(g: Graph = graph) -> None:
            g.replay(stream)

        times = time_runs(run, stream, warmup=2, repeats=15, between=lambda: whole.replay(stream))
        marks.append(statistics.median(times) * 1e3)
        graph.close()
    whole.close()
    return [round(b - a, 2) for a, b in itertools.pairwise(marks)]


def measure(name: str, file: Path, in_place: bool) -> dict[str, Any]:
    """The engine's time, and that of each of its launches."""
    from optdnn.runtime.cuda.graphs import Graph, median_ms, time_runs

    engine = optdnn.load(file)
    context: Any = engine.context()
    feeds = dict(np.load(file.with_suffix(".npz")))
    feeds = {s.name: feeds[s.name].astype(s.dtype) for s, _ in engine.program.inputs}
    context.run(feeds)
    launches, stream, program = context.launches({}), context.stream, engine.program
    graph = Graph(launches, stream)
    times = time_runs(lambda: graph.replay(stream), stream, warmup=10, repeats=30, inner=5)
    rows: dict[str, dict[str, Any]] = {}
    extra = added(launches, None, stream) if in_place else None
    for k, (step, launch) in enumerate(zip(program.steps, launches, strict=True)):
        p = step.params
        operands = (*step.inputs, *step.outputs)
        shapes = [
            [program.buffers[operands[v[0]]].dtype.name, *v[2]] for v in (*p["reads"], *p["writes"]) if v is not None
        ]
        stages = [s["stage"][0] for s in p["op"].get("attrs", {}).get("epilogue", [])]
        stages += [s[0] for s in p["op"].get("attrs", {}).get("stages", [])]
        key = f"{p['op']['kind']} {p.get('tactic')} {stages} {shapes}"
        if key not in rows:
            repeated = Graph([launch] * REPEATED, stream)
            us = median_ms(repeated, stream, warmup=2, repeats=5) * 1e3 / REPEATED
            rows[key] = {
                "kind": p["op"]["kind"], "tactic": p.get("tactic"), "stages": stages, "operands": shapes, "us": round(us, 2),
                "count": 0, "nodes": " ".join(step.src)[:60],
            }  # fmt: skip
        rows[key]["count"] += 1
        if extra is not None:
            rows[key].setdefault("added_us", []).append(extra[k])
    found = sorted(rows.values(), key=lambda r: -r["us"] * r["count"])
    total = sum(r["us"] * r["count"] for r in found)
    return {
        "name": name, "ms": round(statistics.median(times), 4), "sum_ms": round(total / 1e3, 4), "steps": len(program.steps),
        "launches": found,
    }  # fmt: skip


def show(row: dict[str, Any], lines: int) -> None:
    print(f"{row['name']}: {row['ms']} ms, {row['steps']} steps, {row['sum_ms']} ms alone", flush=True)
    for r in row["launches"][:lines]:
        shapes = " ".join(f"{o[0]}{o[1:]}" for o in r["operands"] if len(o) > 2)
        print(
            f"  {r['count']:3d} x {r['us']:7.2f} us  {r['kind']} {r['tactic']} {','.join(r['stages'])} {shapes[:150]}"
            + (f" in place {r['added_us']}" if "added_us" in r else ""),
            flush=True,
        )


def prepared_aside(name: str, file: Path, tune: float) -> subprocess.CompletedProcess[str]:
    """:func:`prepare` in a process of its own: several builds at once, each with the interpreter's lock to itself."""
    command = [sys.executable, __file__, name, "--tune", str(tune), "--child", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NAME:BATCH:PRECISION")
    parser.add_argument("--out", type=Path, default=Path("steps.json"))
    parser.add_argument("--lines", type=int, default=16, help="of each engine's table that are printed")
    parser.add_argument("--tune", type=float, default=0, metavar="S", help="tune each engine for so many seconds")
    parser.add_argument("--in-place", action="store_true", help="what each step adds to those before it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.child:
        print("ROW " + json.dumps(prepare(options.networks[0], Path(options.child), options.tune)))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if options.tune else 6) as pool:
        files = {n: Path(folder) / f"{n}.engine" for n in options.networks}
        for name, future in [(n, pool.submit(prepared_aside, n, f, options.tune)) for n, f in files.items()]:
            done = future.result()
            if done.returncode:
                rows.append({"name": name, "failed": (done.stderr or done.stdout)[-1500:]})
                print(f"{name} FAILED {rows[-1]['failed']}", flush=True)
                continue
            rows.append(
                {
                    **json.loads(done.stdout.split("ROW ")[-1]),
                    **measure(name, files[name], options.in_place),
                }
            )
            show(rows[-1], options.lines)
            options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
