"""Accuracy, time and size of every precision: the trained networks on held-out data, architectures by a cosine distance.

    python -m benchmarks precision --target cpu --threads 2 --search 15 --out precision.jsonl
    python -m benchmarks precision zoo/efficientnet_b0:1 --target cpu --threads 2 --search 15 --out precision.jsonl
    python -m benchmarks precision --tactics heuristic --search 8 --out precision.jsonl            # where the GPU is

For each network: fp32, the 16-bit precisions of the target, int8 with each calibrator, and auto with bounds of 0.5 and 0.1
points. Calibration and automatic precision use only training pictures; accuracy is that on held-out pictures, which neither
has seen. Networks of the zoo have seeded weights and pictures, and are judged by the cosine distance of their outputs from
fp32's. Times are those of whole engines, measured side by side in turns; ``over_best`` is the speed of auto over the fastest
single precision within its bound, measured with only these two, with the 95 % interval of the rounds' ratios. ``--target simulate``
gives the accuracies of the GPU's arithmetic, and no times. ``optdnn explain`` and ``inspect`` show for an engine why each
node has its precision.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind, turn
from benchmarks.rows import Row
from benchmarks.workloads import Workload
from optdnn.config import CALIBRATORS
from optdnn.errors import OptdnnError
from optdnn.models import trained, zoo
from optdnn.precision.cpu_target import cpu_rounds
from optdnn.precision.gpu_target import gpu_rounds
from optdnn.precision.metrics import metric_of
from optdnn.precision.turns import identity, once_each, paired
from optdnn.report.precision import chosen_plan, declined
from optdnn.runtime.engine import Engine
from optdnn.runtime.racing.race import Versus
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array

BOUNDS = (0.5, 0.1)
COSINE = 0.001
"""The bound of automatic precision for networks without labels."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tactics", default="auto")
    parser.add_argument(
        "--search", type=float, metavar="SECONDS", help="budget of each build: tuning, the search of auto"
    )
    parser.add_argument("--configurations", default="", help="only those whose name contains this")


def measure(job: Job) -> Row:
    """All configurations of one network."""
    options = job.options
    more = {"threads": options.threads, "tactics": options.tactics, "budget": options.search}
    if job.workload.source == "trained":
        return of_trained(job.workload, options.target, options.configurations, more)
    return of_zoo(job.workload, options.target, more)


def configurations(target: str) -> dict[str, dict[str, Any]]:
    """Name -> build options."""
    gpu = target != "cpu"
    found: dict[str, dict[str, Any]] = {p: {"precision": p} for p in ("fp32", *(("fp16",) if gpu else ()), "bf16")}
    base = "+fp16" if gpu else ""
    found |= {f"int8 {c}": {"precision": f"int8{base}", "calibrator": c} for c in CALIBRATORS}
    found |= {f"auto {b:g}": {"precision": "auto", "max_drop": b} for b in BOUNDS}
    return found


def of_trained(workload: Workload, target: str, only: str, more: Mapping[str, Any]) -> Row:
    """All configurations of one network. ``more``: further options of every build."""
    name, simulate, batch = workload.short, target == "simulate", workload.batch
    net = trained.load(name)
    x, y = trained.training(name)
    shape = (batch, *net.x.shape[1:])
    scratch = tempfile.TemporaryDirectory()
    caches = {n: Path(scratch.name) / f"{n}.json" for n in ("calib_cache", "timing_cache")}
    engines: dict[str, Engine] = {}
    rows: dict[str, dict[str, Any]] = {}
    for config, options in configurations(target).items():
        if only not in config:
            continue
        start = time.perf_counter()
        data: Any = {"x": x, "labels": y} if options["precision"] == "auto" else {"x": trained.calibration(name)}
        data = {} if options["precision"] in ("fp32", "fp16", "bf16") else {"calib": data}
        # Two bounds of one network share ranges, sensitivities and times of operators; all builds share the tactics' times.
        data |= caches if options["precision"] == "auto" else {"timing_cache": caches["timing_cache"]}
        try:
            engine = optdnn.build(net.path, target=target, shapes={"x": shape}, **more, **options, **data)
            rows[config] = {"accuracy": accuracy(engine, net.x, net.y, batch, simulate=simulate), **_size(engine)}
            rows[config] |= {"precision": engine.precision, "build_s": round(time.perf_counter() - start, 1)}
            if "auto" in engine.meta:
                rows[config]["auto"] = auto_facts(engine.meta["auto"])
            engines[config] = engine
        except OptdnnError as error:
            rows[config] = {"error": str(error)}
    turn()
    if engines and not simulate:
        timed = partial(rounds_of, feeds={"x": net.x[:batch]}, target=target)
        for config, ms in paired(timed(engines, rounds=12)).items():
            rows[config]["ms"] = round(ms, 5)
        lost = {c: rows["fp32"]["accuracy"] - rows[c]["accuracy"] for c in engines} if "fp32" in engines else {}
        for b in BOUNDS:
            _over_best(f"auto {b:g}", b, lost, rows, engines, timed)
    scratch.cleanup()
    return {"pictures": len(net.y), "configurations": rows}


def _over_best(
    auto: str,
    bound: float,
    lost: Mapping[str, float],
    rows: Row,
    engines: Mapping[str, Engine],
    timed: Callable[..., Any],
) -> None:
    """Auto compared with the fastest single precision within its bound: its name, the speedup, the 95 % interval, the verdict."""
    singles = [c for c in lost if not c.startswith("auto") and lost[c] <= bound]
    if auto not in engines or not singles:
        return
    best = min(singles, key=lambda c: rows[c]["ms"])
    same = identity(engines[auto])
    twin = next((c for c in singles if identity(engines[c]) == same and rows[c]["ms"] <= rows[best]["ms"]), None)
    if twin is not None:
        rows[auto]["over_best"] = {"single": twin, "speedup": 1.0, "verdict": "the same engine"}
        return
    rounds = timed({auto: engines[auto], best: engines[best]}, rounds=18)
    versus = Versus.of(rounds[auto], rounds[best])
    figures = {"speedup": round(versus.speedup, 4), "range": [round(v, 4) for v in versus.range]}
    rows[auto]["over_best"] = {"single": best, **figures, "verdict": versus.verdict}


def pictures(seed: int, n: int, size: int) -> Array:
    """Seeded pictures (n, 3, size, size) with coarse structure and fine noise."""
    rng = np.random.default_rng(seed)
    coarse = np.kron(rng.standard_normal((n, 3, size // 16, size // 16)), np.ones((1, 1, 16, 16)))
    return (0.7 * coarse + 0.3 * rng.standard_normal((n, 3, size, size))).astype(np.float32)


def of_zoo(workload: Workload, target: str, more: Mapping[str, Any]) -> Row:
    """One architecture of the zoo at batch 1: single precisions, and auto within a cosine distance of COSINE."""
    model = zoo.build(workload.short, batch=workload.batch)
    (x,) = [i.name for i in model.graph.input]
    seen, held = {x: pictures(0, 32, 224)}, pictures(1, 16, 224)
    singles = ["fp32", *(["fp16"] if target != "cpu" else []), "bf16", "int8"]
    engines: dict[str, Engine] = {}
    rows: dict[str, dict[str, Any]] = {}
    outputs: dict[str, Array] = {}
    for config in (*singles, f"auto {COSINE:g}"):
        precision = config.partition(" ")[0]
        options: dict[str, Any] = {"metric": "cosine", "max_drop": COSINE} if precision == "auto" else {}
        options |= {"calib": seen} if precision in ("int8", "auto") else {}
        start = time.perf_counter()
        engine = engines[config] = optdnn.build(model, target=target, precision=precision, **more, **options)
        outputs[config] = np.concatenate([engine(held[k : k + 1]) for k in range(len(held))])
        metric = metric_of("cosine", None)
        rows[config] = {"drop": metric.drop({"y": outputs[config]}, {"y": outputs["fp32"]}, None), **_size(engine)}
        rows[config] |= {"precision": engine.precision, "build_s": round(time.perf_counter() - start, 1)}
        rows[config] |= {"auto": auto_facts(engine.meta["auto"])} if "auto" in engine.meta else {}
    turn()
    timed = partial(rounds_of, feeds={x: held[:1]}, target=target)
    for config, ms in paired(timed(engines, rounds=12)).items():
        rows[config]["ms"] = round(ms, 5)
    lost = {c: float(r["drop"]) for c, r in rows.items()}
    _over_best(f"auto {COSINE:g}", COSINE, lost, rows, engines, timed)
    return {"bound": COSINE, "configurations": rows}


def rounds_of(
    engines: Mapping[str, Engine], feeds: Mapping[str, Array], target: str, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each engine in each round. Identical engines are timed once."""
    quiet = {"feeds": feeds, "say": lambda text: None, "rounds": rounds, "give_up_ratio": 50.0}
    if target == "cpu":
        return once_each(engines, partial(cpu_rounds, seconds=0.04, **quiet))
    return once_each(engines, partial(gpu_rounds, seconds=0.01, **quiet))


def accuracy(engine: Engine, x: Array, y: Array, batch: int, *, simulate: bool) -> float:
    """Percent of held-out pictures (or pixels) whose largest logit is the right one; the last, smaller batch is filled up."""
    if simulate:
        engine = Engine(engine.program, options=LoadOptions(simulate=True))
    right = []
    for start in range(0, len(x), batch):
        part = x[start : start + batch]
        filled = np.concatenate([part, np.zeros((batch - len(part), *part.shape[1:]), part.dtype)])
        logits = next(iter(engine.run({"x": filled}).values()))[: len(part)]
        right.append(np.argmax(logits.astype(np.float32), axis=1) == y[start : start + batch])
    return float(100 * np.concatenate(right).mean())


def _size(engine: Engine) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        engine.save(path)
        return {"engine_bytes": path.stat().st_size, "weights_bytes": sum(b.nbytes for b in engine.program.blobs)}


def auto_facts(auto: Mapping[str, Any]) -> Row:
    """From auto's report: the choice, how it was verified, and why single precisions were declined."""
    chosen = chosen_plan(auto)
    return {
        "chosen": auto["chosen"], "bound": auto["metric"]["bound"], "verification": auto["samples"]["verification"],
        **{k: chosen.get(k) for k in ("drop", "verified", "expected")}, "declined": declined(auto),
    }  # fmt: skip


def shown(row: Row) -> str:
    """The score of each configuration, and its time."""
    parts = []
    for name, found in row["configurations"].items():
        score = f"{found['accuracy']:.2f} %" if "accuracy" in found else f"{found.get('drop', float('nan')):.1g}"
        parts.append(f"{name} {found.get('error', score)[:60]}" + (f" {found['ms']:.3f} ms" if "ms" in found else ""))
    return ", ".join(parts)


KIND = Kind(
    name="precision", about=__doc__ or "", measure=measure, arguments=arguments, groups=("trained",), timed=True, limit_s=500.0,
    shown=shown, precisions="auto",
)  # fmt: skip
