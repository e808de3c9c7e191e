"""The kernels beside convolution: depthwise, rows (norms, softmax), attention, RNN. Correctness first, then time beside PyTorch.

    python benchmarks/gpu/ops_round.py all --out RESULTS_FOLDER
    python benchmarks/gpu/ops_round.py compile         (fills the kernel cache; needs no GPU)

Every check draws fresh inputs, poisons the output and what lies behind it with NaN, compares with float64 and runs twice (the two
results must be identical bit by bit). Each family has a process of its own: a fault ends only that one. GPU work is serialized by a
file lock, so that the families' slow starts overlap and their timings do not disturb each other.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ops_cases import CHECKS, FAMILIES, LIMITS, TIMED, all_recipes, configs, module_of, recipe_of
from ops_tensors import CASES, Bench, Case

from optdnn.runtime.cuda import depthwise, depthwise_tma, nvrtc, rnn
from optdnn.runtime.cuda.device import Launch

TOLERANCE = {"float16": 1.5e-3, "bfloat16": 1e-2}  # relative to the norm; rounding the result alone costs a fifth of it


def launches_of(bench: Bench, family: str, problem: Any, config: Any, tensors: dict[str, Any]) -> list[Launch]:
    module, recipe = module_of(family, config), recipe_of(family, problem, config)
    made = [(recipe, module.describe(problem, config, *([bench.device] if module is depthwise_tma else [])))]
    if family == "depthwise" and module.squeeze_mode(problem, config) == 1:
        _, x, y = module.tiles(problem, config)
        made.append((depthwise.squeeze_recipe(problem), depthwise.describe_squeeze(problem, x * y)))
    if family == "rnn":
        made.insert(0, (recipe, rnn.describe_reset(problem, config)))
    return [bench.launch(source, description, tensors) for source, description in made]


def run_family(family: str, bench: Bench, record: Callable[[dict[str, Any]], None]) -> None:
    checks, timed = LIMITS[family]

    def compare(problem: Any, config: Any) -> tuple[float, bool, list[Launch], Case]:
        bench.keep.clear()
        case = CASES[family](bench, problem, config)
        tensors, names, reference, _ = case
        launches = launches_of(bench, family, problem, config, tensors)
        bench.run(launches)
        first = {name: tensors[name].clone() for name in names}
        for name in names:
            tensors[name].fill_(float("nan"))
        bench.run(launches)
        wanted = reference()
        errors = [float((tensors[n].double() - wanted[n]).norm() / wanted[n].norm()) for n in names]
        same_bits = all(
            bool((first[n].view(bench.torch.int16) == tensors[n].view(bench.torch.int16)).all()) for n in names
        )
        error = max(errors) if all(e == e for e in errors) else float("nan")
        return error, same_bits and bench.intact(), launches, case

    for problem in CHECKS[family]():
        for config in configs(family, problem, checks):
            record({"trying": str(config), "problem": repr(problem)[:160]})
            error, sound, _, _ = compare(problem, config)
            good = sound and error < TOLERANCE[problem.dtype]
            row = {"family": family, "check": repr(problem)[:160], "config": str(config)}
            record({**row, "error": error, "sound": sound, "good": good})
    for name, problem in TIMED[family]():
        best: tuple[float, Any] | None = None
        own: float | None = None
        for config in configs(family, problem, timed):
            record({"trying": str(config), "problem": name})
            error, sound, launches, case = compare(problem, config)
            good = sound and error < TOLERANCE[problem.dtype]
            estimate = module_of(family, config).estimate(problem, config, bench.device)
            if launches[-1].cluster > 1:
                record({"clusters that run at once": launches[-1].clusters_per_device(), "config": str(config)})
            us = bench.time(launches, estimate) if good else None
            row = {"family": family, "time": name, "config": str(config), "predicted": estimate * 1e6}
            record({**row, "error": error, "sound": sound, "good": good, "us": us})
            if us is not None and (best is None or us < best[0]):
                best = (us, config)
            if own is None:
                try:
                    own = bench.time_torch(case[3], estimate)
                except Exception as fault:  # the baseline may refuse; ours still counts
                    print("torch:", fault)
        size = getattr(problem, "bytes", 0)
        if best is not None:
            record({"family": family, "row": name, "us": best[0], "config": str(best[1]), "torch_us": own,
                    "TB/s": size / best[0] / 1e6, "TFLOP/s": getattr(problem, "flops", 0) / best[0] / 1e6})  # fmt: skip


def worker(family: str, out: Path, cache: Path | None, lock: Path) -> int:
    import torch  # slow to import: outside of the lock

    with lock.open("w") as handle, (out / f"{family}.jsonl").open("w") as log:

        def record(row: dict[str, Any]) -> None:
            log.write(json.dumps(row) + "\n")
            log.flush()

        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            bench = Bench(cache)
            versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "nvrtc": nvrtc.version()}
            record({"device": bench.device.name, "driver": bench.device.driver_version, **versions})
            run_family(family, bench, record)
        except Exception:
            record({"family": family, "fault": traceback.format_exc()[-1500:]})
            return 1
    return 0


def summary(out: Path) -> Iterator[str]:
    for family in FAMILIES:
        path = out / f"{family}.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        checks = [r for r in found if "check" in r]
        timed = [r for r in found if "time" in r]
        right, fine = sum(r["good"] for r in checks), sum(r["good"] for r in timed)
        yield f"== {family}: {right}/{len(checks)} checks, {fine}/{len(timed)} timed right"
        for r in [r for r in checks + timed if not r["good"]][:12]:
            what = r.get("check") or r.get("time")
            yield f"  WRONG {r['config']} error {r['error']:.2e} sound {r.get('sound')} {what}"
        for r in found:
            if "row" in r:
                others = sorted((t["us"], t["config"]) for t in timed if t["time"] == r["row"] and t["us"])[1:4]
                reference = f"{r['torch_us']:.2f}" if r["torch_us"] else "-"
                rates = f"{r['TB/s']:.2f} TB/s {r['TFLOP/s']:6.1f} TFLOP/s"
                rest = ", ".join(f"{us:.2f} {config}" for us, config in others)
                yield f"  {r['row']:24s} {r['us']:8.2f} us  torch {reference:>8s}  {rates}  {r['config']}; {rest}"
            if "fault" in r:
                yield "  FAULT " + r["fault"]
        if found and "trying" in found[-1]:
            yield f"  ended while trying {found[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "compile", *FAMILIES])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seconds", type=float, default=80.0)
    options = parser.parse_args()
    if options.what == "compile":
        recipes = all_recipes()
        nvrtc.KernelCache(options.cache).get_many(recipes, os.cpu_count() or 1)
        print(len(recipes), "kernels")
        return 0
    if options.what != "all":
        return worker(options.what, options.out, options.cache, options.lock or options.out / "lock")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for family in options.families.split(","):
            command = [sys.executable, __file__, family, "--out", str(options.out), "--lock", f"{folder}/lock"]
            running.append(subprocess.Popen([*command, *(["--cache", str(options.cache)] if options.cache else [])]))
        deadline = time.monotonic() + options.seconds
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
    print("\n".join(summary(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
