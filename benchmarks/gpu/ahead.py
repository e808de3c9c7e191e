"""What it gains that launches bring weights of later ones into L2: whole engines by how much of L2 may hold them.

    python benchmarks/gpu/ahead.py --out ahead.json vgg16:1 vit_b_16:1

Networks are NAME:BATCH of the zoo at fp16, by the cost model. Every engine's result is that of the engine without.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import optdnn
from optdnn import lower_cuda
from optdnn.models import zoo
from optdnn.runtime.cuda import graphs
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.program import Program
from optdnn.tactics.cuda import ahead

WINDOWS = (0, 4, 8, 16, 40)
"""Megabytes."""
CARRIERS = (("conv_sm90", "conv_patch_sm90"), ("conv_sm90", "conv_patch_sm90", "gemv"))
"""Kernels that bring weights."""


def built(name: str) -> tuple[Any, Any, dict[int, float]]:
    """The engine without pieces, its inputs, and the seconds of its steps."""
    known: dict[int, float] = {}

    def keep(program: Program, gpu: GpuFacts, seconds: Mapping[int, float]) -> Program:
        known.update(seconds)
        return program

    network, batch = name.split(":")
    settings = {"sequence_length": 128} if network == "bert_base" else {}
    model = zoo.build(network, batch=int(batch), **settings)  # type: ignore[arg-type]
    with patch.object(lower_cuda, "with_ahead", keep):
        engine = optdnn.build(model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16", tactics="heuristic")
    return engine, zoo.example_inputs(model, seed=1), known


def measure(program: Program, inputs: Mapping[str, Any], rounds: int) -> tuple[list[float], list[Any]]:
    from optdnn.runtime.engine import Engine

    context: Any = Engine(program).context()
    feeds = {s.name: np.asarray(inputs[s.name]).astype(s.dtype) for s, _ in program.inputs}
    result = list(context.run(feeds).values())
    graph, stream = context.graph(), context.stream
    times = [
        statistics.median(graphs.time_runs(lambda: graph.replay(stream), stream, warmup=5, repeats=40))
        for _ in range(rounds)
    ]
    return [round(t * 1e3, 2) for t in times], result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for name in options.networks:
        engine, inputs, known = built(name)
        want: list[Any] | None = None
        for window, carriers in [(w, c) for w in WINDOWS for c in CARRIERS if w or c is CARRIERS[0]]:
            program = replace(engine.program, meta=dict(engine.program.meta))
            with patch.object(ahead, "CARRIERS", {k: v for k, v in ahead.CARRIERS.items() if k in carriers}):
                program = ahead.with_ahead(program, facts_for("sm_90a"), known, window << 20)
            times, result = measure(program, inputs, 3)
            want = want or result
            same = all(np.array_equal(a, b) for a, b in zip(result, want, strict=True))
            brought = program.meta.get("ahead_bytes", 0)
            rows.append(
                {"name": name, "carriers": carriers, "window_mb": window, "bytes": brought, "us": times, "same": same}
            )
            print(rows[-1], flush=True)
            options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
