"""Compile every kernel that the zoo's engines use, for each architecture and precision: none may fail, the hot ones may not spill.

    python benchmarks/gpu/compile_all.py                                        # the whole zoo (minutes; needs NVRTC, no GPU)
    python benchmarks/gpu/compile_all.py --arch sm_80 --precision fp16 resnet50:1 mobilenet_v2:128

Networks are NAME:BATCH. Prints one line per network and one per fault; exits 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optdnn.config import BuildOptions
from optdnn.errors import OptdnnError
from optdnn.models import zoo
from optdnn.runtime.cuda import nvrtc
from optdnn.runtime.cuda.kernels_of import recipe_of
from optdnn.runtime.cuda.nvrtc import Recipe

HOT = frozenset(
    {
        *(
            "conv_sm90.cu",
            "conv_patch_sm90.cu",
            "conv_sm80.cu",
            "conv_stem.cu",
            "conv_fp32.cu",
            "matmul_fp32.cu",
            "depthwise.cu",
            "depthwise_sm90.cu",
            "separable_sm90.cu",
            "attention_sm90.cu",
            "attention_sm80.cu",
        ),
        *("rows.cu", "group_norm.cu", "rnn_sm90.cu", "pool_int8.cu", "gemv.cu", "squeeze_finish.cu"),
    }
)
"""Templates whose kernels must keep everything in registers; the general ones may spill where they serve rare shapes."""


def recipes_of(name: str, batch: int, precision: str, arch: str) -> dict[str, Recipe]:
    """By key, what an engine with heuristic tactics is made of."""
    from optdnn.compiler import build_verbose

    model = zoo.build(name, batch=batch)
    options = BuildOptions(
        target=f"cuda:{arch}", precision=precision, tactics="heuristic", no_cubins=True,
        calib=zoo.example_inputs(model, seed=5) if "8" in precision else None, calibrator="minmax",
    )  # fmt: skip
    program = build_verbose(model, options).engine.program
    return {recipe.key(): recipe for recipe in map(recipe_of, program.kernels)}


def compiled(recipe: Recipe) -> str:
    """What is wrong with a kernel, or ""."""
    try:
        found = nvrtc.resources(recipe)
    except OptdnnError as error:
        return f"does not compile: {str(error)[:400]}"
    worst = max((k.spill_bytes + k.stack_bytes for k in found.values()), default=0)
    return f"spills {worst} bytes" if worst and recipe.name in HOT else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NAME:BATCH")
    parser.add_argument("--arch", default="sm_80,sm_90a")
    parser.add_argument("--precision", default="fp16,bf16,tf32,fp32,int8+fp16")
    parser.add_argument("--batches", default="1,128", help="of the zoo's networks, where none are named")
    parser.add_argument("--out", type=Path, help="write the outcome as JSON")
    options = parser.parse_intermixed_args(arguments)
    networks = options.networks or [f"{name}:{batch}" for name in zoo.NAMES for batch in options.batches.split(",")]
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for arch in options.arch.split(","):
            for precision in options.precision.split(","):
                for network in networks:
                    name, _, batch = network.partition(":")
                    start = time.perf_counter()
                    row: dict[str, Any] = {"network": network, "arch": arch, "precision": precision}
                    try:
                        recipes = recipes_of(name, int(batch or 1), precision, arch)
                    except OptdnnError as error:
                        rows.append({**row, "faults": [str(error)[:300]]})
                        print(f"{network} {arch} {precision}: {error}", flush=True)
                        continue
                    fresh = {k: r for k, r in recipes.items() if k not in seen}
                    seen |= fresh.keys()
                    said = list(pool.map(compiled, fresh.values()))
                    faults = [f"{r.name}: {text}" for r, text in zip(fresh.values(), said, strict=True) if text]
                    rows.append({**row, "kernels": len(recipes), "compiled": len(fresh), "faults": faults})
                    seconds = time.perf_counter() - start
                    counts = f"{len(recipes):3d} kernels, {len(fresh):3d} new"
                    print(f"{network:20s} {arch:7s} {precision:10s} {counts}, {seconds:.1f} s", flush=True)
                    for fault in faults:
                        print(f"  FAULT {fault}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"nvrtc": list(nvrtc.version()), "rows": rows}, indent=1))
    faults = sum(len(row["faults"]) for row in rows)
    print(f"{len(seen)} kernels, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
