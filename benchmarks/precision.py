"""Accuracy, latency and size of every precision, on the shipped trained networks, by one command.

    python benchmarks/precision.py --target cpu --out benchmarks/results/precision-cpu.json
    python benchmarks/precision.py --target cuda:sm_90a --out benchmarks/results/precision-h200.json      # where the GPU is

For each network: fp32, the 16-bit precisions of the target, int8 with each calibrator, and auto with bounds of 0.5 and 0.1 points.
Calibration and automatic precision see training pictures alone; accuracy is that on held-out pictures, which neither has seen.
``--zoo`` adds real architectures with seeded weights and pictures, judged by the cosine distance of their outputs from fp32's.
Latencies are those of whole engines, measured side by side in turns; ``over_best`` is the speed of auto over the fastest single
precision within its bound, of these two alone, with the 95 % interval of the rounds' ratios. What auto tells of its choices is
kept in a .md beside the results. Where there is no GPU, ``--target simulate`` gives the accuracies of the GPU's arithmetic, and no
latencies. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.config import CALIBRATORS
from optdnn.errors import OptdnnError
from optdnn.models import trained, zoo
from optdnn.precision.cpu_target import cpu_rounds
from optdnn.precision.gpu_target import gpu_rounds
from optdnn.precision.metrics import metric_of
from optdnn.precision.turns import identity, once_each, paired
from optdnn.report import precision as report
from optdnn.runtime.engine import Engine
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.machine import machine, versions
from optdnn.runtime.race import Versus
from optdnn.types import Array

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = (0.5, 0.1)
COSINE = 0.001
"""The bound of automatic precision for networks without labels."""
BATCH = 32
"""Pictures per call, in accuracy and latency alike: one alone takes microseconds, most of them Python's."""
VERBOSE = False


def configurations(target: str) -> dict[str, dict[str, Any]]:
    """Name -> build options."""
    gpu = target != "cpu"
    found: dict[str, dict[str, Any]] = {p: {"precision": p} for p in ("fp32", *(("fp16",) if gpu else ()), "bf16")}
    base = "+fp16" if gpu else ""
    found |= {f"int8 {c}": {"precision": f"int8{base}", "calibrator": c} for c in CALIBRATORS}
    found |= {f"auto {b:g}": {"precision": "auto", "max_drop": b} for b in BOUNDS}
    return found


def measure(name: str, target: str, only: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """All configurations of one network; ``more`` are further options of every build."""
    simulate = target == "simulate"
    net = trained.load(name)
    x, y = trained.training(name)
    shape = (BATCH, *net.x.shape[1:])
    scratch = tempfile.TemporaryDirectory()
    caches = {n: Path(scratch.name) / f"{n}.json" for n in ("calib_cache", "timing_cache")}
    engines: dict[str, Engine] = {}
    rows: dict[str, dict[str, Any]] = {}
    for config, options in configurations(target).items():
        if only is not None and only not in config:
            continue
        print(f"  {config}", end="", flush=True)
        start = time.perf_counter()
        data: Any = {"x": x, "labels": y} if options["precision"] == "auto" else {"x": trained.calibration(name)}
        data = {} if options["precision"] in ("fp32", "fp16", "bf16") else {"calib": data}
        # Two bounds of one network share ranges, sensitivities and times of operators; all share what is known of tactics.
        data |= caches if options["precision"] == "auto" else {"timing_cache": caches["timing_cache"]}
        try:
            engine = optdnn.build(
                net.path, target=target, shapes={"x": shape}, progress=_progress(start), **more, **options, **data
            )
            rows[config] = {"accuracy": accuracy(engine, net.x, net.y, simulate=simulate), **_size(engine)}
            rows[config] |= {"precision": engine.precision, "build_s": round(time.perf_counter() - start, 1)}
            if "auto" in engine.meta:
                rows[config]["auto"] = engine.meta["auto"]
            engines[config] = engine
            print(f" {rows[config]['accuracy']:.2f} %", end="", flush=True)
        except OptdnnError as error:
            rows[config] = {"error": str(error)}
            print(f" {error.message[:60]}", end="", flush=True)
    print(flush=True)
    if engines and not simulate:
        for config, ms in _times(engines, {"x": net.x[:BATCH]}, target).items():
            rows[config]["ms"] = round(ms, 5)
        lost = {c: rows["fp32"]["accuracy"] - rows[c]["accuracy"] for c in engines} if "fp32" in engines else {}
        for b in BOUNDS:
            _over_best(f"auto {b:g}", b, lost, rows, engines, {"x": net.x[:BATCH]}, target)
    scratch.cleanup()
    return {"network": name, "pictures": len(net.y), "rows": rows}


def _over_best(
    auto: str,
    bound: float,
    lost: Mapping[str, float],
    rows: Mapping[str, dict[str, Any]],
    engines: Mapping[str, Engine],
    feeds: Mapping[str, Array],
    target: str,
) -> None:
    """Auto beside the fastest single precision within its bound: who that is, the speedup, its 95 % interval and the verdict."""
    singles = [c for c in lost if not c.startswith("auto") and lost[c] <= bound]
    if auto not in engines or not singles:
        return
    best = min(singles, key=lambda c: rows[c]["ms"])
    same = identity(engines[auto])
    twin = next((c for c in singles if identity(engines[c]) == same and rows[c]["ms"] <= rows[best]["ms"]), None)
    if twin is not None:
        rows[auto]["over_best"] = {"single": twin, "speedup": 1.0, "verdict": "the same engine"}
        return
    rounds = turns({auto: engines[auto], best: engines[best]}, feeds, target, rounds=18)
    versus = Versus.of(rounds[auto], rounds[best])
    rows[auto]["over_best"] = {
        "single": best,
        "speedup": round(versus.speedup, 4),
        "range": [round(v, 4) for v in versus.range],
        "verdict": versus.verdict,
    }


def _progress(start: float) -> Any:
    """Lines of the build's progress with the seconds since ``start``, where --verbose asks for them."""
    if not VERBOSE:
        return None
    return lambda text: print(f"\n    {time.perf_counter() - start:6.2f} {text}", end="", flush=True)


def pictures(seed: int, n: int, size: int) -> Array:
    """Seeded pictures (n, 3, size, size) with coarse structure and fine noise."""
    rng = np.random.default_rng(seed)
    coarse = np.kron(rng.standard_normal((n, 3, size // 16, size // 16)), np.ones((1, 1, 16, 16)))
    return (0.7 * coarse + 0.3 * rng.standard_normal((n, 3, size, size))).astype(np.float32)


def measure_zoo(name: str, target: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """One architecture of the zoo at batch 1: single precisions, and auto within a cosine distance of COSINE."""
    model = zoo.build(name, batch=1)
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
        rows[config] |= {"auto": engine.meta["auto"]} if "auto" in engine.meta else {}
        print(f"  {config}: {rows[config]['drop']:.2g}", flush=True)
    for config, ms in _times(engines, {x: held[:1]}, target).items():
        rows[config]["ms"] = round(ms, 5)
    lost = {c: float(r["drop"]) for c, r in rows.items()}
    _over_best(f"auto {COSINE:g}", COSINE, lost, rows, engines, {x: held[:1]}, target)
    return {"network": name, "bound": COSINE, "rows": rows}


def _times(engines: Mapping[str, Engine], feeds: Mapping[str, Array], target: str) -> dict[str, float]:
    """Milliseconds of whole engines."""
    return paired(turns(engines, feeds, target, rounds=12))


def turns(
    engines: Mapping[str, Engine], feeds: Mapping[str, Array], target: str, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each engine in each round; those that are the very same engine are timed as one."""
    quiet = {"feeds": feeds, "say": lambda text: None, "rounds": rounds, "give_up_ratio": 50.0}
    if target == "cpu":
        return once_each(engines, partial(cpu_rounds, seconds=0.04, **quiet))
    return once_each(engines, partial(gpu_rounds, seconds=0.01, **quiet))


def accuracy(engine: Engine, x: Array, y: Array, *, simulate: bool) -> float:
    """Percent of held-out pictures (or pixels) whose largest logit is the right one; the last, smaller batch is filled up."""
    if simulate:
        engine = Engine(engine.program, options=LoadOptions(simulate=True))
    right = []
    for start in range(0, len(x), BATCH):
        part = x[start : start + BATCH]
        filled = np.concatenate([part, np.zeros((BATCH - len(part), *part.shape[1:]), part.dtype)])
        logits = next(iter(engine.run({"x": filled}).values()))[: len(part)]
        right.append(np.argmax(logits.astype(np.float32), axis=1) == y[start : start + BATCH])
    return float(100 * np.concatenate(right).mean())


def _size(engine: Engine) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        engine.save(path)
        return {"engine_bytes": path.stat().st_size, "weights_bytes": sum(b.nbytes for b in engine.program.blobs)}


def told(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What auto tells of each choice: the plans, the front, each node and the reason of its precision."""
    parts = []
    for entry in (*results["networks"], *results["zoo"]):
        for config, row in entry["rows"].items():
            if "auto" in row:
                parts.append(report.to_markdown(row["auto"], f"{entry['network']}, {config}"))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tactics", default="auto")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--networks", default=",".join(trained.NAMES))
    parser.add_argument("--zoo", default="", help="architectures of the zoo, besides")
    parser.add_argument("--only", help="only configurations whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="what the builds are doing, with seconds")
    parser.add_argument("--append", action="store_true", help="keep the other networks that --out holds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    global VERBOSE
    VERBOSE = args.verbose
    more = {"threads": args.threads, "tactics": args.tactics, "budget": args.budget}
    kept = json.loads(args.out.read_text()) if args.append and args.out.exists() else {}
    results = {key: list(kept.get(key, [])) for key in ("networks", "zoo")}
    wanted = [("networks", n) for n in args.networks.split(",") if n] + [("zoo", n) for n in args.zoo.split(",") if n]
    for key, name in wanted:
        print(name, flush=True)
        found = (
            measure(name, args.target, args.only, more) if key == "networks" else measure_zoo(name, args.target, more)
        )
        order = [*trained.NAMES, name]
        results[key] = sorted(
            [*(r for r in results[key] if r["network"] != name), found],
            key=lambda r: order.index(r["network"]) if r["network"] in order else len(order),
        )
        args.out.write_text(json.dumps({**_facts(args), **results}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(told(results))


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    return {
        "command": "python benchmarks/precision.py "
        + " ".join(a for a in sys.argv[1:] if a not in ("--append", "--verbose")),
        "commit": commit,
        "date": time.strftime("%F"),
        "target": args.target,
        "batch": BATCH,
        "machine": {**machine(), "device": _device()},
        "versions": versions(),
    }


def _device() -> str | None:
    try:
        from optdnn.runtime.cuda.device import Device

        return str(Device.open().name)
    except Exception:  # no driver, no GPU: the table is of the CPU
        return None


if __name__ == "__main__":
    main()
