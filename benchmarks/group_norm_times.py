"""Seconds of each configuration of the group norms' kernels on the GPU, beside what the cost models predict.

PYTHONPATH=tests python -m benchmarks.group_norm_times times.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import group_norm as tactic
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.kernels.tactic import Offer
from optdnn.ops.norm import GroupNormAttrs
from optdnn.ops.unary import AlphaAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.graphs import Graph as CudaGraph
from optdnn.runtime.cuda.launches.graphs import time_runs
from optdnn.runtime.engine import Engine

PROBLEMS = (
    (1, 64, 320, 32), (2, 64, 320, 32), (1, 64, 640, 32), (1, 64, 960, 32), (2, 64, 960, 32), (1, 32, 640, 32), (2, 32, 1280, 32),
    (1, 16, 1280, 32), (2, 16, 2560, 32), (1, 8, 1280, 32), (2, 8, 2560, 32), (1, 64, 128, 32), (8, 64, 64, 32), (1, 128, 128, 32),
    (1, 32, 64, 32), (8, 16, 128, 32), (1, 256, 256, 32), (1, 512, 128, 32), (4, 112, 64, 64),
)  # fmt: skip
"""Batch, side, channels, groups."""
NORMS = {"GroupMoments", "GroupApply", "ActivatedNorm", "GroupNormalization"}


def network(problem: tuple[int, int, int, int]) -> Graph:
    batch, side, channels, groups = problem
    n = Net()
    x = n.conv(n.input(batch, 8, side, side), channels, 1)
    y = n.op("GroupNormalization", x, n.positive(channels), n.random(channels), attrs=GroupNormAttrs(groups, 1e-5))
    return n.done(n.conv(n.op("Swish", y, attrs=AlphaAttrs(1.0)), 8, 1))


def configs(problem: tuple[int, int, int, int]) -> list[Any]:
    batch, side, channels, groups = problem
    gpu = of_arch("sm_90a")
    p = clustered.Problem(batch, side * side, channels, groups, (("silu",),))
    found: list[Any] = []
    for one in clustered.candidates(p, gpu, 999):
        alike = [c for c in found if c.cluster == one.cluster and c.slab == one.slab]
        if len(alike) < 1 and len(found) < 9:
            found.append(one)
    tiles: list[Any] = []
    for one in tiled.candidates(p, gpu, 999):
        alike = [c for c in tiles if c.slab == one.slab and c.threads == one.threads]
        if len(alike) < 2 and len(tiles) < 10:
            tiles.append(one)
    return found + tiles


def built(task: tuple[tuple[int, int, int, int], Any]) -> Any:
    problem, config = task
    tactic.group_norm_offers = lambda p, gpu: (Offer(config, 0.0, True),)  # type: ignore[assignment]
    try:
        return lowered(network(problem), "fp16", target="cuda:sm_90a")
    except Exception as error:
        return repr(error)[:300]


def main(out: str) -> None:
    tasks = [(p, c) for p in PROBLEMS for c in configs(p)]
    print(len(tasks), "configurations", flush=True)
    with ProcessPoolExecutor(14) as pool:
        programs = list(pool.map(built, tasks, chunksize=4))
    print("built", flush=True)
    golden: dict[Any, Any] = {}
    begin = time.monotonic()
    with Path(out).open("w") as file:
        for (problem, config), program in zip(tasks, programs, strict=True):
            if time.monotonic() - begin > 70:
                break
            row = predicted(problem, config)
            if isinstance(program, str):
                row["error"] = program
            else:
                row |= measured(problem, program, golden)
            file.write(json.dumps(row) + "\n")
            file.flush()


def predicted(problem: tuple[int, int, int, int], config: Any) -> dict[str, Any]:
    batch, side, channels, groups = problem
    p = clustered.Problem(batch, side * side, channels, groups, (("silu",),))
    module: Any = tactic._kernel(config)
    seconds = module.estimate(p, config, of_arch("sm_90a"))
    return {"problem": problem, "config": str(config), "mb": p.bytes / 1e6, "predicted": round(seconds * 1e6, 2)}


def measured(problem: tuple[int, int, int, int], program: Any, golden: dict[Any, Any]) -> dict[str, Any]:
    """Microseconds, and how far the network's result is from that of the problem's first configuration."""
    context: Any = Engine(program).context()
    feeds = feeds_of(network(problem))
    (found,), (again,) = context.run(feeds).values(), context.run(feeds).values()
    wanted = golden.setdefault(problem, found).astype(np.float64)
    row = {
        "off": float(np.abs(found - wanted).max() / np.abs(wanted).max()),
        "repeats": found.tobytes() == again.tobytes(),
    }
    steps = zip(context.launches({}), context.runner.steps, strict=True)
    launches = [x for x, s in steps if s.meaning.kind in NORMS]
    parts = {"us": launches, **({"moments": launches[:1]} if len(launches) > 1 else {})}
    for key, some in parts.items():
        graph = CudaGraph(some * 20, context.stream)
        times = time_runs(partial(graph.replay, context.stream), context.stream, warmup=2, repeats=9)
        row[key] = round(statistics.median(times) * 1e3 / 20, 2)
        graph.close()
    return row


if __name__ == "__main__":
    main(sys.argv[1])
