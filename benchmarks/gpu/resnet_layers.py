"""ResNet-50's convolutions on our CUDA kernels, layer by layer: every candidate checked, then timed.

    python benchmarks/gpu/resnet_layers.py all --batches 1,8,32,128 --out RESULTS_FOLDER

Stages: ``compile`` (all candidates, in parallel), ``layers`` (each distinct layer: every candidate configuration is compared with
an fp32 reference, then timed); then, of the fastest configurations, ``profile`` (launches for a profiler) and ``marks`` (where the
time inside of a kernel goes). Each stage runs in a process of its own: a fault in one kernel ends only that process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from conv_bench import Bench, Config, Layer, candidates, compare, family_of, machine, time_layer
from resnet50 import distinct

from optdnn.runtime.cuda import conv, conv_cost, conv_patch, graphs, nvrtc
from optdnn.runtime.cuda.device import Device, Function

TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}  # relative to the norm; rounding the result alone costs a third of it


def all_candidates(batches: list[int], device: Device, limit: int) -> dict[str, nvrtc.Recipe]:
    recipes: dict[str, nvrtc.Recipe] = {}
    for batch in batches:
        for problem in distinct(batch):
            for config in candidates(problem, device, limit):
                made = family_of(config).recipe(problem, config, checked=True)
                recipes[made.key()] = made
    return recipes


def stage_layers(bench: Bench, batch: int, limit: int, record: Any, tried: set[tuple[str, str]]) -> None:
    for problem, names in distinct(batch).items():
        layer = Layer(problem)
        reference = layer.reference()
        best = None
        for config in candidates(problem, bench.device, limit):
            if (names[0], str(config)) in tried:
                continue
            record({"layer": names[0], "config": str(config), "trying": True})
            try:
                error = compare(bench, layer, config, reference)
            except nvrtc.KernelError as failure:
                record({"layer": names[0], "config": str(config), "failure": str(failure)})
                print(f"FAILED {names[0]} {config}: does not compile", flush=True)
                continue
            estimate = (
                conv_cost.estimate(problem, config, bench.device)
                if isinstance(config, conv.Config)
                else problem.flops / 4e14 + 2e-6
            )
            row = {
                "batch": batch,
                "layer": names[0],
                "count": len(names),
                "config": str(config),
                "fields": asdict(config),
                "error": error,
                "kernel": "patch" if isinstance(config, conv_patch.PatchConfig) else "gemm",
            }
            if not error < TOLERANCE[problem.dtype]:
                record({**row, "us": None})
                print(f"WRONG {names[0]} {config} {error:.2e}", flush=True)
                continue
            launch = bench.bind(problem, config, layer.pointers())
            us = time_layer(bench, launch, estimate)
            record({**row, "us": us, "predicted_us": estimate * 1e6})
            if best is None or us < best[0]:
                best = (us, config, estimate)
        if best:
            print(f"b{batch:<4d}{names[0]:16s} x{len(names)} {best[0]:8.2f} us  {problem.flops / best[0] / 1e6:7.1f} TFLOP/s "
                  f"{problem.bytes / best[0] / 1e3:7.0f} GB/s  {best[1]!s:24s} (predicted {best[2] * 1e6:.1f})",
                  flush=True)  # fmt: skip
        del layer, reference


def best_configs(folder: Path, batch: int) -> dict[str, list[tuple[float, Config]]]:
    """Layer name -> (us, configuration), fastest first, as measured."""
    found: dict[str, list[tuple[float, conv.Config]]] = {}
    for line in (folder / f"layers-{batch}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("us"):
            kind = conv_patch.PatchConfig if row["kernel"] == "patch" else conv.Config
            found.setdefault(row["layer"], []).append((row["us"], kind(**row["fields"])))
    return {name: sorted(rows, key=lambda item: item[0]) for name, rows in found.items()}


def stage_profile(bench: Bench, batch: int, folder: Path, names: list[str]) -> None:
    """Launches some layers' fastest configurations alone, under a profiler such as ``ncu --clock-control none -k regex:conv``."""
    measured = best_configs(folder, batch)
    for problem, layers in distinct(batch).items():
        if layers[0] in names:
            layer = Layer(problem)
            for _, config in measured[layers[0]][:1]:
                print(f"profile b{batch} {layers[0]} {config}", flush=True)
                for _ in range(2):
                    bench.run(bench.bind(problem, config, layer.pointers()))


def stage_marks(bench: Bench, batch: int, folder: Path, record: Any) -> None:
    """Where a layer's time goes: mean nanoseconds between the kernels' time marks, over the blocks of one launch in a chain."""
    import numpy as np

    from optdnn.runtime.cuda.device import check, driver

    cu, measured = driver(), best_configs(folder, batch)
    for problem, layers in distinct(batch).items():
        layer, config = Layer(problem), measured[layers[0]][0][1]
        family = family_of(config)
        made = family.recipe(problem, config)
        cubin, _ = nvrtc.compile_recipe(replace(made, options=(*made.options, "-DPROFILE")))
        name = "conv_patch_sm90" if family is conv_patch else "conv_sm90"
        function = Function(
            cubin, name, shared=family.shared_bytes(problem, config), wide_cluster=getattr(config, "split", 1) > 8
        )
        launch = family.bind(problem, config, bench.device, function, layer.pointers())
        graph = graphs.Graph([launch] * 20, bench.stream)
        graph.replay(bench.stream)
        bench.stream.synchronize()
        address, _ = check("cuModuleGetGlobal", cu.cuModuleGetGlobal(function._module, b"profile_log"))
        log = np.zeros((2048, 16), np.uint64)
        check("cuMemcpyDtoH", cu.cuMemcpyDtoH(log.ctypes.data, address, log.nbytes))
        log = log[: min(launch.grid[0], 2048)].astype(np.int64)
        names = ["ready", "wait", "issued", "first", "mma", "pushed", "reduced", "end", *(f"k{i}" for i in range(8))]
        times = {n: int((log[:, i] - log[:, 1]).mean()) for i, n in enumerate(names) if log[:, i].any()}
        spread = int(log[:, 7].max() - log[:, 1].min())
        record({"batch": batch, "layer": layers[0], "config": str(config), "marks": times, "wait_to_last_end": spread})
        print(f"marks b{batch} {layers[0]:16s} {config!s:24s} {times} last end {spread} ns", flush=True)
        graph.close()


def worker(options: argparse.Namespace) -> int:
    bench = Bench(options.cache, checked=options.stage == "layers")  # a deadlock must trap, not hang
    file = options.out / (f"{options.stage}-{options.batch}.jsonl" if options.batch else f"{options.stage}.jsonl")
    tried: set[tuple[str, str]] = set()
    if file.exists():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        tried = {(row["layer"], row["config"]) for row in rows if "config" in row and "layer" in row}
    with file.open("a") as handle:

        def record(row: dict[str, Any]) -> None:
            handle.write(json.dumps(row) + "\n")
            handle.flush()

        record(machine(bench))
        if options.stage == "compile":
            recipes = list(all_candidates(options.batches, bench.device, options.limit).values())
            begin = time.time()
            try:
                bench.cache.get_many(recipes, os.cpu_count() or 1)
            except nvrtc.KernelError as failure:
                print(failure, flush=True)
            print(f"{len(recipes)} kernels, {bench.cache.misses} compiled in {time.time() - begin:.1f} s", flush=True)
        elif options.stage == "layers":
            stage_layers(bench, options.batch, options.limit, record, tried)
        elif options.stage == "profile":
            stage_profile(bench, options.batch, options.out, options.layers.split(","))
        else:
            stage_marks(bench, options.batch, options.out, record)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("all", "compile", "layers", "profile", "marks"))
    parser.add_argument("--batches", default="1,8,32,128", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--batch", type=int, default=0, help="of one worker")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cache", type=Path, default=None, help="kernel cache folder")
    parser.add_argument("--limit", type=int, default=10, help="candidates per layer")
    parser.add_argument("--layers", default="stem,layer1.0.conv2", help="of stage profile")
    parser.add_argument("--stages", default="compile,layers", help="of stage all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage != "all":
        return worker(options)

    def sub(stage: str, batch: int, seconds: int) -> int:
        command = [sys.executable, __file__, stage, "--out", str(options.out), "--limit", str(options.limit), "--batch", str(batch),
                   "--batches", ",".join(map(str, options.batches))]  # fmt: skip
        begin = time.time()
        try:
            code = subprocess.run(
                [*command, *(["--cache", str(options.cache)] if options.cache else [])], timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        print(f"[{stage} {batch or ''} {time.time() - begin:.1f} s, exit {code}]", flush=True)
        return code

    for stage in options.stages.split(","):
        if stage == "profile":
            continue
        if stage == "compile":
            sub(stage, 0, 100)
            continue
        for batch in options.batches:
            for _ in range(4 if stage == "layers" else 1):  # a faulty kernel ends its process: go on behind it
                if sub(stage, batch, 60) == 0:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main())
