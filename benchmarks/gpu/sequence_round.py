"""Attention, recurrent layers and norms as engines on a GPU: every launch against its meaning, then whole networks timed.

    python benchmarks/gpu/sequence_round.py --out DIR [--checks] [NETWORK:BATCH …]

``--checks`` builds the small graphs of ``tests/support/sequence_cases.py`` in fp16, bf16 and fp32 and holds each launch against
NumPy. A network is built for fp16 with heuristic tactics, checked (small batches: results against the reference; batch 1: each
launch), timed under CUDA-graph replay, and profiled launch by launch. Results are JSON files in DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from optdnn.runtime.cuda.check import check_steps  # noqa: E402
from optdnn.runtime.cuda.device import facts_for  # noqa: E402
from optdnn.runtime.cuda.graphs import Graph, time_runs  # noqa: E402
from optdnn.runtime.engine import Engine  # noqa: E402
from optdnn.target_name import TargetName  # noqa: E402

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


def checks(out: Path) -> None:
    """Every launch of every small case, in each precision."""
    from support.sequence_cases import ATTENTION, GROUP_NORM, RECURRENT, RESIDUAL
    from support.simulated import feeds_of, lowered

    cases = {**ATTENTION, **RECURRENT, **GROUP_NORM, **RESIDUAL}
    jobs = [(name, precision) for name in cases for precision in TOLERANCE]

    def build(job: tuple[str, str]) -> Any:
        graph = cases[job[0]][0]()
        try:
            return graph, lowered(graph, job[1], target="cuda:sm_90a")
        except Exception as error:
            return graph, error

    rows = []
    with ThreadPoolExecutor(8) as pool:
        for (name, precision), (graph, program) in zip(jobs, pool.map(build, jobs), strict=True):
            row: dict[str, Any] = {"case": name, "precision": precision}
            try:
                if isinstance(program, Exception):
                    raise program
                errors = check_steps(Engine(program).context(), feeds_of(graph))
                worst = max(errors, key=lambda e: e.error)
                row |= {
                    "error": worst.error,
                    "kind": worst.kind,
                    "kernel": worst.kernel,
                    "ok": worst.error < TOLERANCE[precision],
                }
            except Exception as error:
                row |= {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}
            rows.append(row)
            if not row["ok"]:
                print("WRONG", json.dumps(row), flush=True)
    rows += wide_tiles()
    print(f"checks: {sum(r['ok'] for r in rows)} of {len(rows)} right", flush=True)
    (out / "checks.json").write_text(json.dumps(rows, indent=1))


def wide_tiles() -> list[dict[str, Any]]:
    """Products on tiles of more than 128 sums a thread, which the cost model takes for large ones alone."""
    from support.net import Net
    from support.simulated import feeds_of

    from optdnn.config import BuildOptions
    from optdnn.lower_cuda import lower_cuda
    from optdnn.optimizing import optimize
    from optdnn.runtime.cuda import conv_cost
    from optdnn.tactics.cuda.select import Choice

    conv_cost.MOST_SUMS = 320
    target, rows = "cuda:sm_90a", []
    for name in ("2x1m2n144s3o1b1", "2x1m2n160s2o1b1", "1x2m2n144s2o1b1"):
        for ending in ("", "Gelu", "Add"):
            n = Net()
            x = n.input(1000, 768)
            y = n.op("Add", n.matmul(x, 520), n.random(520))
            y = n.op("Gelu", y) if ending == "Gelu" else n.op("Add", y, n.input(1000, 520, name="r")) if ending else y
            graph, options = n.done(y), BuildOptions(target=target, precision="fp16", tactics="own")
            optimize(graph, options, target)
            row: dict[str, Any] = {"case": f"wide {name} {ending}", "precision": "fp16"}
            try:
                made = lower_cuda(graph, options, facts_for(TargetName.parse(target).arch), {})
                key = next(t["signature"] for t in made.meta["tactics"] if t["tactic"] == "gemm_sm90")
                program = lower_cuda(
                    graph,
                    options,
                    facts_for(TargetName.parse(target).arch),
                    {},
                    choices={key: Choice("gemm_sm90", name)},
                )
                worst = max(check_steps(Engine(program).context(), feeds_of(graph)), key=lambda e: e.error)
                row |= {"error": worst.error, "ok": worst.error < TOLERANCE["fp16"]}
            except Exception as error:
                row |= {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}
            rows.append(row)
            if not row["ok"]:
                print("WRONG", json.dumps(row), flush=True)
    return rows


def _kind(program: Any, step: Any) -> str:
    """What a step computes, and by which kernel."""
    launch = step.params.get("launch")
    if launch is None or "op" not in step.params:
        return str(step.executor)
    number = launch.get("kernel")
    return f"{step.params['op']['kind']} {program.kernels[number].template if number is not None else 'library'}"


def network(name: str, batch: int, tactics: str, budget: float | None) -> dict[str, Any]:
    """Build, check, time and profile one network."""
    import optdnn
    from optdnn.models import zoo

    model = zoo.build(name, batch=batch)
    start = time.perf_counter()
    options: dict[str, Any] = {"precision": "fp16", "io_dtype": "fp16", "tactics": tactics, "budget": budget}
    engine = optdnn.build(model, target="cuda:sm_90a" if tactics == "heuristic" else "cuda", **options)
    row: dict[str, Any] = {
        "name": name,
        "batch": batch,
        "build_s": round(time.perf_counter() - start, 2),
        "tactics": tactics,
    }
    row["launches"] = len(engine.program.steps)
    feeds = {
        k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in zoo.example_inputs(model, seed=1).items()
    }
    context: Any = engine.context()
    got = context.run(feeds)
    again = context.run(feeds)
    row["repeats"] = all(np.array_equal(got[k], again[k], equal_nan=True) for k in got)
    graph = Graph(context.launches({}), context.stream)
    times = time_runs(lambda: graph.replay(context.stream), context.stream, warmup=20, repeats=40, inner=10)
    row["gpu_ms"] = {"median": round(statistics.median(times), 4), "min": round(min(times), 4)}
    samples = [context.profile(feeds)[1] for _ in range(5)]
    per = [statistics.median(s[i] for s in samples) / 1e3 for i in range(len(samples[0]))]
    row["steps"] = []
    kinds: dict[str, list[float]] = {}
    for us, s in zip(per, engine.program.steps, strict=True):
        write = s.params.get("writes", [None])[0]
        grid = s.params.get("launch", {}).get("grid")
        row["steps"].append([round(us, 2), _kind(engine.program, s), grid, write and write[2], " ".join(s.src)[:50]])
        kinds.setdefault(_kind(engine.program, s), []).append(us)
    row["configs"] = sorted(
        {f"{d['kind']} {d['tactic']} {d.get('config', '')}" for d in engine.program.meta["tactics"]}
    )
    row["by_kind_us"] = {k: [len(v), round(sum(v), 1)] for k, v in sorted(kinds.items(), key=lambda i: -sum(i[1]))}
    if batch <= 2:
        worst = sorted(check_steps(context, feeds), key=lambda e: -e.error)[:3]
        row["worst_steps"] = [[e.step, e.kind, e.kernel, e.error] for e in worst]
        wide = {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in feeds.items()}
        want = optdnn.build(model, target="reference").run(wide)
        row["error"] = {
            k: float(np.abs(got[k].astype(float) - w).max() / max(float(np.abs(w).max()), 1e-30))
            for k, w in want.items()
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NAME:BATCH")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--tactics", default="heuristic")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_intermixed_args()
    if options.checks:
        checks(options.out)
    rows = []
    for text in options.networks:
        name, _, batch = text.partition(":")
        try:
            rows.append(network(name, int(batch or 1), options.tactics, options.budget))
            print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("steps", "configs")}), flush=True)
        except Exception as error:
            traceback.print_exc()
            rows.append({"name": name, "batch": batch, "failed": str(error)})
        (options.out / f"networks-{options.tactics}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
