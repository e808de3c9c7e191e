"""Engines of one network at several precisions, side by side on a GPU: whether the narrower is the faster, batch by batch.

    python benchmarks/gpu/beside.py --out beside.json resnet50:8:int8+fp16,fp16 resnet50:16:int8+fp16,fp16

Each argument is NAME:BATCH:PRECISION,PRECISION of the zoo. Engines take the cost model's tactics (``--tune S``: measured ones).
Each is replayed as a CUDA graph, in turns with the others of its argument, each round from another place in memory. ``over`` is
the first one's speed over each of the others, with a 95 % interval: above 1, the first is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from steps import prepared_aside
from targets import facts

import optdnn
from optdnn.precision.gpu_target import gpu_rounds
from optdnn.precision.turns import paired
from optdnn.runtime.feeds import random_feeds
from optdnn.runtime.race import Versus

WORKERS = 10


def beside(files: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Milliseconds of engines by label, and the first one's speed over each of the others."""
    engines = {label: optdnn.load(file) for label, file in files.items()}
    first, *others = engines
    feeds = random_feeds(engines[first].inputs, seed=1)
    found = gpu_rounds(engines, feeds=feeds, say=lambda text: None, rounds=rounds, seconds=0.01, give_up_ratio=1e9)
    over = {label: Versus.of(found[first], found[label]) for label in others}
    return {
        "ms": {label: round(ms, 5) for label, ms in paired(found).items()},
        "steps": {label: len(engine.program.steps) for label, engine in engines.items()},
        "over": {
            label: {"speedup": round(v.speedup, 4), "range": [round(r, 4) for r in v.range], "verdict": v.verdict}
            for label, v in over.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="NAME:BATCH:PRECISION,PRECISION")
    parser.add_argument("--out", type=Path, default=Path("beside.json"))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tune", type=float, default=0, metavar="S", help="tune each engine for so many seconds")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if options.tune else WORKERS) as pool:

        def built(name: str) -> Path:
            file = Path(folder) / f"{name}.engine"
            done = prepared_aside(name, file, options.tune)
            if done.returncode:
                raise RuntimeError(f"{name}: {(done.stderr or done.stdout)[-1500:]}")
            return file

        made = {}
        for row in options.rows:
            network, batch, precisions = row.split(":")
            made[row] = {p: pool.submit(built, f"{network}:{batch}:{p}") for p in precisions.split(",")}
        files = {row: {p: future.result() for p, future in futures.items()} for row, futures in made.items()}
        # Measured when all are built: builds on every core would disturb the launches.
        for row, labels in files.items():
            rows.append({"row": row, **beside(labels, options.rounds)})
            print(row, rows[-1]["ms"], rows[-1]["over"], flush=True)
            options.out.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
