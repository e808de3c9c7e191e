"""What a tactic is worth in whole networks: engines by the cost model with it and without it, in turn.

    python benchmarks/gpu/without.py conv_pool_sm90 vgg16:1 vgg16_bn:8 --out without.json

Networks are NAME:BATCH of the zoo at fp16. Each launch of the engine that has the tactic is held against its meaning.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import optdnn
from optdnn.models import zoo
from optdnn.runtime.cuda import graphs
from optdnn.runtime.cuda.check import check_steps
from optdnn.tactics.cuda import table


def forbidden(tactic: str) -> AbstractContextManager[Any]:
    """Within this, builds do not use the tactic."""
    kept = {kind: tuple(t for t in tactics if t.name != tactic) for kind, tactics in table.TACTICS.items()}
    return patch.dict(table.TACTICS, kept)


def engine_of(model: Any, without: str) -> Any:
    """An engine by the cost model; ``without``: the tactic that it must not use ("": it may use all)."""
    with forbidden(without):
        return optdnn.build(model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16", tactics="heuristic")


def row_of(name: str, tactic: str, rounds: int) -> dict[str, Any]:
    network, batch = name.split(":")
    model = zoo.build(network, batch=int(batch))
    contexts: dict[str, Any] = {"with": engine_of(model, "").context(), "without": engine_of(model, tactic).context()}
    inputs = zoo.example_inputs(model, seed=1)
    used = [t["config"] for t in contexts["with"].runner.program.meta["tactics"] if t["tactic"] == tactic]
    feeds = {s.name: np.asarray(inputs[s.name]).astype(s.dtype) for s, _ in contexts["with"].runner.program.inputs}
    results = {side: next(iter(context.run(feeds).values())) for side, context in contexts.items()}
    scale = float(np.abs(results["without"]).max())
    wrong = [(e.step, e.kind, e.error) for e in check_steps(contexts["with"], feeds) if not e.error < 2e-3]
    runs = {side: (context.graph(), context.stream) for side, context in contexts.items()}
    times: dict[str, list[float]] = {side: [] for side in runs}
    for _ in range(rounds):
        for side, (graph, stream) in runs.items():
            found = graphs.time_runs(lambda g=graph, s=stream: g.replay(s), stream, warmup=5, repeats=40)  # type: ignore[misc]
            times[side].append(round(statistics.median(found) * 1e3, 2))
    return {
        "name": name, "tactic": tactic, "configs": used, "us": {side: statistics.median(t) for side, t in times.items()},
        "rounds_us": times, "steps": {side: len(c.runner.program.steps) for side, c in contexts.items()}, "wrong": wrong,
        "difference": float(np.abs(results["with"].astype(np.float32) - results["without"].astype(np.float32)).max()) / scale,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tactic")
    parser.add_argument("networks", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for name in options.networks:
        rows.append(row_of(name, options.tactic, options.rounds))
        print(rows[-1], flush=True)
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
