"""Speed of optdnn and its rivals, which take turns; each result is checked first.

    python -m benchmarks speed --rivals ours,untuned,libraries,eager --tune 10 --timing-cache times.json --out targets.jsonl
    python -m benchmarks speed --groups wide --rivals ours,eager,compile --at-once 12 --limit 400 --out wide.jsonl
    python -m benchmarks speed --groups wide-max --rivals ours,eager,compile-max --at-once 4 --limit 500 --out max.jsonl
    python -m benchmarks speed --groups 8bit --rivals ours,ours@fp16 --out beside.jsonl
    python -m benchmarks speed --groups lanes --rivals ours,one_lane --shared FOLDER --out lanes.jsonl
    python -m benchmarks speed --groups cpu --target cpu --shared FOLDER --out cpu.jsonl

On a GPU, times are those of replays of a CUDA graph between events, with all arrays on the GPU. Engines are built in parallel.
Builds that tune, and measurements, take turns on the GPU. With ``--at-once`` above 1, torch.compile compiles this many workloads
concurrently. They are stopped while one workload is timed, or while cuDNN searches for eager PyTorch: both have the GPU to
themselves. On the CPU ``optdnn compare`` races whole processes.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from benchmarks import products
from benchmarks.harness import Job, Kind, release, tune_argument, tuned_for, turn
from benchmarks.models import (
    TORCH,
    engine_of,
    feeds_of,
    forbidden,
    kinds_on_cpu,
    module_of,
    onnx_of,
    ranged,
    tests_on_path,
)
from benchmarks.rows import Row, error_text
from benchmarks.workloads import Workload
from optdnn.errors import MissingDependency
from optdnn.runtime.cuda.libraries import find

ENGINES = {
    "ours": "auto", "untuned": "auto", "own": "own", "libraries": "cudnn,cublaslt", "one_lane": "auto", "ranged": "auto",
}  # fmt: skip
"""Candidate -> the kernels that its engine may use. "untuned" is never tuned, even if the others are. "one_lane" runs no steps
concurrently. "ranged" takes a range of sequence lengths (only for the zoo's transformers and recurrent layers).
"ours@PRECISION" has another precision, "ours-TACTIC" must not use a tactic."""
TORCH_RIVALS = ("eager", "compile", "compile-max")
LIBRARIES = ("_cudnn", "_cublaslt")
"""The endings of the names of tactics that call a library."""
SHARE = {"untuned": 0.0, "libraries": 0.2}
"""Candidate -> its share of the tuning time, if not all of it: the libraries' algorithms were already measured for "ours"."""
WRONG = 0.03
"""Largest error against fp32, relative to the largest output. Larger errors are wrong, unless PyTorch's is as large."""
WRONG_FP32 = 3e-4
"""The same at fp32."""
WRONG_8BIT = 0.25
"""The same at int8 and fp8: the logits of a network with random weights are small differences."""
IO_DTYPES = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16"}
"""Precision of a workload -> dtype of the inputs on the GPU, for all candidates; fp16 for other precisions."""
SAMPLES = 16
"""Number of inputs for calibration on the CPU."""


def arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join((*ENGINES, *TORCH_RIVALS))
    parser.add_argument("--rivals", help=f"of {names} (on the CPU: onnxruntime, openvino)")
    tune_argument(parser)
    parser.add_argument("--timing-cache", type=Path, help="times measured in tuning are added to it")
    parser.add_argument("--rounds", type=int, default=4, help="turns that each candidate gets")
    parser.add_argument("--turn", type=float, default=0.03, metavar="SECONDS", help="of one turn")
    parser.add_argument("--flush-l2", action="store_true", help="empty L2 before each run")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU, of each candidate")
    parser.add_argument("--duration", type=float, default=1.5, help="on the CPU: seconds for each candidate")


def rivals_of(options: argparse.Namespace) -> list[str]:
    """The candidates of a row."""
    text: str = options.rivals or ("onnxruntime,openvino" if options.target == "cpu" else "ours,eager")
    return text.split(",")


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    flushed = " L2 flushed" if options.flush_l2 else ""
    return [f"{options.target} {','.join(rivals_of(options))}{tuned_for(options.tune)}{flushed}"]


# ---------------------------------------------------------------- preparing: needs no GPU, unless tactics are measured


def prepare(job: Job) -> Row:
    """Build and save the engines, and inputs."""
    workload, options = job.workload, job.options
    model = None if workload.source in TORCH else onnx_of(workload)
    for seed, name in ((1, "in"), (2, "other")):
        np.savez(job.folder / f"{name}.npz", **feeds_of(workload, model, seed=seed))
    times = job.folder / "times.json"
    common = Path(options.timing_cache) if options.timing_cache else None
    if common is not None and common.exists():
        shutil.copy(common, times)
    found: dict[str, Row] = {}
    for name in rivals_of(options):
        if name not in TORCH_RIVALS:
            try:
                found[name] = _built(job, name, times if common is not None else None)
            except Exception as error:
                found[name] = {"error": error_text(error)}
    if common is not None and times.exists():
        _merge(times, common)
    return {"builds": found}


def _built(job: Job, name: str, times: Path | None) -> Row:
    workload, start = job.workload, time.perf_counter()
    plain, _, precision = name.partition("@")
    plain, _, without = plain.partition("-")
    if plain == "libraries" and not find.present("cudnn"):
        raise MissingDependency("nvidia-cudnn-frontend", "cuda-libs", "to measure the libraries alone")
    seconds = job.options.tune * SHARE.get(name, 1.0)
    asked = ENGINES[plain]
    if not seconds:  # by the cost model, which knows our own kernels; of the libraries', what they rank first
        asked = "heuristic" if asked == "auto" else f"heuristic,{asked}"
    options: dict[str, Any] = {
        "target": job.options.target, "precision": precision or workload.precision, "tactics": asked, "budget": seconds or None,
    }  # fmt: skip
    if options["target"].startswith("cuda"):
        options["io_dtype"] = IO_DTYPES.get(workload.precision, "fp16")
    options |= {"calib_cache": job.folder / "ranges"} if "8" in options["precision"] else {}
    options |= {"timing_cache": times} if times is not None else {}
    if plain == "one_lane":
        options["streams"] = "1"
    with forbidden(without):
        if plain == "ranged":
            model, dims = ranged(workload)
            engine = optdnn.build(model, shapes={k: "x".join(d) for k, d in dims.items()}, **options)
        else:
            engine = engine_of(workload, **options)
    engine.save(job.folder / f"{name}.engine")
    p = engine.program
    found = {
        "build_s": round(time.perf_counter() - start, 2),
        "steps": len(p.steps),
        "kernels": len(p.kernels),
        "arena_bytes": p.arena_bytes,
        **{k: v for k, v in p.meta.get("streams", {"lanes": 1}).items() if k in ("lanes", "aside")},
        "library_steps": sum(s.params.get("tactic", "").split(" ")[0].endswith(LIBRARIES) for s in p.steps),
        "on_cpu": kinds_on_cpu(engine),
    }
    tuning: Any = engine.report.get("tuning") if engine.report else None
    if tuning:
        found["tuning"] = {k: tuning.get(k) for k in ("cached", "seconds", "stopped", "providers")}
    return found


def _merge(source: Path, target: Path) -> None:
    """Add the measured times of one timing cache to another; one process at a time."""
    from optdnn.tuning.timing_cache import TimingCache

    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = TimingCache.open(source)
        found.path, found.changed = target, True
        found.save()


# ---------------------------------------------------------------- on a GPU


def measure(job: Job) -> Row:
    """Check each candidate, then race those that are right."""
    if job.options.target == "cpu":
        return compared(job)
    from optdnn.runtime.cuda.device import Device

    place = Device.open().place
    with _alone(place) if job.options.at_once == 1 else nullcontext():  # not beside those that tune
        found = _raced(job, place)
    free()
    return found


def free() -> None:
    """Free the GPU's memory: the child lives on, and others use the GPU."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _alone(place: str) -> AbstractContextManager[None]:
    from optdnn.runtime.cuda.gpu_lock import alone

    return alone(place)


def _raced(job: Job, place: str) -> Row:
    import torch

    from benchmarks import race
    from optdnn.runtime.cuda.launches.graphs import Stream

    race.begin()
    torch.zeros(1, device="cuda")
    workload, asked = job.workload, rivals_of(job.options)
    given, other = (dict(np.load(job.folder / f"{name}.npz")) for name in ("in", "other"))
    stream = Stream()
    outside = torch.cuda.ExternalStream(stream.handle)
    feeds = [torch.from_numpy(a).cuda() for a in given.values()]
    module, want, moved = _truth(workload, feeds, [torch.from_numpy(a).cuda() for a in other.values()])
    rounded = [t.to(race.dtype_of(workload.precision)) if t.is_floating_point() else t for t in feeds]
    checks: dict[str, Row] = {}
    replays: dict[str, race.Replay] = {}
    results: dict[str, Any] = {}
    kept: list[Any] = []
    crowded = job.options.at_once > 1
    torch_error = 0.0
    for name in () if module is None else in_turn(asked, crowded=crowded):
        captured = partial(race.torch_graph, module, rounded, outside, workload.precision, mode=race.MODES.get(name))
        try:
            start = time.perf_counter()
            replays[name], outputs = searched(captured, place) if crowded and name == "eager" else captured()
            error = race.errors(outputs(), want)
            torch_error = max(torch_error, error)
            checks[name] = {"error_rel": error, "prepare_s": round(time.perf_counter() - start, 2)}
            kept.append(outputs)
        except Exception as fault:
            checks[name] = {"error": error_text(fault)}
            torch.cuda.synchronize()
    if any(n.startswith("compile") for n in asked) and not crowded:
        race.end_compilers()  # else they serve the next workload, and have nothing to do while this one is timed
    torch.cuda.empty_cache()
    for name in (n for n in asked if n not in TORCH_RIVALS):
        if "error" in job.prepared["builds"][name]:
            checks[name] = {"error": job.prepared["builds"][name]["error"]}
            continue
        try:
            replays[name], checks[name], more = _engine(job, name, dict(zip(given, rounded, strict=True)), want, stream)
            bound = _most_error(f"{workload.precision}{name.partition('@')[2]}")
            if checks[name]["error_rel"] > bound and module is not None and not replays.keys() & {*TORCH_RIVALS}:
                torch_error = torch_error or _rounding_error(module, feeds, want)  # PyTorch cannot run it so
            if not checks[name]["error_rel"] <= max(bound, 2 * torch_error):
                checks[name]["wrong"] = f"{checks[name]['error_rel']:.3g} of the largest output"
            kept.append(more)
            results[name] = more[-1]
        except Exception as error:
            if "CUDA_ERROR" in str(error):
                raise
            checks[name] = {"error": error_text(error)}
    if {"ours", "one_lane"} <= results.keys():
        pairs = zip(results["ours"], results["one_lane"], strict=True)
        checks["one_lane"]["same_bits"] = all(torch.equal(a, b) for a, b in pairs)
    turn()
    with _alone(place) if crowded else nullcontext():
        quiet = {} if race.settled(race.round_trip) else {"disturbed": True}
        found = race.race(
            replays, stream, outside, rounds=job.options.rounds, seconds=job.options.turn, flush_l2=job.options.flush_l2
        )
    del kept
    if workload.source == "products":
        found["of_bandwidth"] = products.of_bandwidth(workload, found["times"])
    return {**found, **quiet, "checks": checks, "another_input": moved, **verdict(checks, workload)}


def _most_error(precisions: str) -> float:
    """The largest error of a right engine at these precisions, if PyTorch's error is smaller."""
    return WRONG_8BIT if "8" in precisions else WRONG_FP32 if precisions == "fp32" else WRONG


def in_turn(asked: Sequence[str], *, crowded: bool) -> list[str]:
    """PyTorch's candidates as they are set up: beside other children eager goes first, and torch.compile takes what cuDNN found."""
    return sorted((n for n in asked if n in TORCH_RIVALS), key=lambda n: (n == "eager") != crowded)


def searched(captured: Callable[[], Any], place: str) -> Any:
    """``captured()`` with the GPU alone: cuDNN times each of its algorithms once."""
    turn()
    try:
        with _alone(place):
            return captured()
    finally:
        release()


def verdict(checks: Mapping[str, Row], workload: Workload) -> Row:
    """Whether our engines are right. At 8 bits an error says little, since random weights amplify rounding errors."""
    ours = [c for name, c in checks.items() if name not in TORCH_RIVALS]
    if errors := [c["error"] for c in ours if "error" in c]:
        return {"verdict": "failed", "error": errors[0]} if len(errors) == len(ours) else {"verdict": "failed"}
    wrong = any("wrong" in c or not c.get("repeats", True) for c in ours) and "8" not in workload.precision
    return {"verdict": "wrong" if wrong else "right"}


def _engine(job: Job, name: str, inputs: Mapping[str, Any], want: Any, stream: Any) -> tuple[Any, Row, Any]:
    """A candidate's replay, whether its result is right, and the objects that must live on."""
    import torch

    from benchmarks import race

    start = time.perf_counter()
    engine = optdnn.load(job.folder / f"{name}.engine")
    context: Any = engine.context()
    bound, out = race.bind(engine, context, {s.name: inputs[s.name] for s in engine.inputs})
    bound.run(stream)
    stream.synchronize()
    load = time.perf_counter() - start
    got = [t.clone() for t in out.values()]
    error = race.errors(got[: len(want)], want)
    bound.run(stream)
    stream.synchronize()
    repeats = all(torch.equal(a, b) for a, b in zip(got, out.values(), strict=True))
    facts = {"error_rel": error, "load_s": round(load, 3), "repeats": repeats}
    return lambda: bound.run(stream), facts, (engine, context, bound, out, got)


def _rounding_error(module: Any, feeds: list[Any], want: list[Any]) -> float:
    """The change of the module's fp32 results, relative to the largest one, if only weights and inputs are rounded to fp16."""
    from benchmarks import race

    rounded = copy.deepcopy(module).half().float()
    return race.errors(race.flat(rounded(*(f.half().float() if f.is_floating_point() else f for f in feeds))), want)


def _truth(workload: Workload, feeds: list[Any], other: list[Any]) -> tuple[Any, list[Any], float]:
    """The module in fp32 on the GPU, its results, and their change with another input.

    A network that is not a PyTorch module has ONNX Runtime's results."""
    import torch

    from benchmarks import race
    from benchmarks.torch_modules import FACTORIES

    if workload.source in TORCH or (workload.source == "zoo" and workload.short in FACTORIES):
        module = module_of(workload).cuda()
        want = race.flat(module(*feeds))
        return module, want, race.errors(race.flat(module(*other)), want)
    if workload.source == "products":
        (want,), (moved,) = (products.truth(workload, *given) for given in (feeds, other))
        return None, [want], race.errors([moved], [want])
    tests_on_path()
    from support.agreement import onnxruntime_results

    model = onnx_of(workload)
    names = list(feeds_of(workload, model))
    found = [
        [
            torch.from_numpy(np.asarray(a)).cuda()
            for a in onnxruntime_results(model, {n: t.cpu().numpy() for n, t in zip(names, given, strict=True)})
        ]
        for given in (feeds, other)
    ]
    return None, found[0], race.errors(found[1], found[0])


# ---------------------------------------------------------------- on the CPU


def compared(job: Job) -> Row:
    """One ``optdnn compare``. ``over``: rival over ours, the median over rounds of the ratio within a round, so that a machine
    that slows down for a while hits all alike."""
    import onnx

    file, out = job.folder / "model.onnx", job.folder / "compare.json"
    model = onnx_of(job.workload)
    onnx.save(model, file)
    command = [sys.executable, "-m", "optdnn", "compare", str(file), "--against", ",".join(rivals_of(job.options))]
    command += ["--target", "cpu", "--precision", job.workload.precision, "--threads", str(job.options.threads)]
    command += ["--error-reference", "onnxruntime", "--duration", str(job.options.duration), "--json", str(out)]
    if job.workload.precision.startswith("int8"):
        samples = [feeds_of(job.workload, model, seed=seed) for seed in range(SAMPLES)]
        np.savez(job.folder / "calib.npz", **{k: np.concatenate([s[k] for s in samples]) for k in samples[0]})
        command += ["--calib", str(job.folder / "calib.npz")]
    turn()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        return {"error": done.stderr.strip()[-600:]}
    result = json.loads(out.read_text(encoding="utf-8"))
    ours = next(r for r in result["rows"] if r["name"].startswith("optdnn"))
    times, checks = {}, {}
    for r in result["rows"]:
        name = "optdnn" if r is ours else r["name"]
        if r["error"] is None:
            times[name] = {
                "ms": r["median_ms"],
                "p99_ms": r["p99_ms"],
                "rounds_ms": r["round_medians_ms"],
                "runs": r["n"],
            }
            checks[name] = {"error_rel": r["max_rel_err"]}
        else:
            checks[name] = {"error": r["error"]}
    return {"times": times, "over": over(times, "optdnn"), "checks": checks, "threads": result["threads"]}


def over(times: Mapping[str, Row], ours: str) -> dict[str, float]:
    """Each rival's time over ours: the median of the ratios within rounds."""
    own = times[ours]["rounds_ms"] if ours in times else []
    found = {}
    for name, t in times.items():
        with suppress(statistics.StatisticsError):
            if name != ours:
                found[name] = statistics.median(b / a for a, b in zip(own, t["rounds_ms"], strict=False))
    return found


KIND = Kind(
    name="speed", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("targets",), setups=setups,
    timed=True, limit_s=60.0, prepares=lambda options: options.target != "cpu",
)  # fmt: skip
