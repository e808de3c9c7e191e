"""``row_invariant``: does a row give the same bits at any batch size and at any position in the batch?

    python -m benchmarks invariance --sizes 1,2,5,9,33 --tuned 4 --out invariance.jsonl

Each network is built for every batch size: by the cost model, and with ``--tuned SECONDS`` also by measurement. Rows are
those of the largest batch: in place, in reverse order, and one row in all positions. ``control``: the number of rows that differ
in a build that is not row-invariant (if it is 0 for all networks, the comparison proves nothing).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind, tuned_for
from benchmarks.models import onnx_of
from benchmarks.rows import Row
from benchmarks.workloads import Workload


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="1,2,5,9,33", help="batch sizes")
    parser.add_argument("--tuned", type=float, default=0.0, metavar="SECONDS", help="of tuning, for each batch size")


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [f"{options.target} {options.sizes}{tuned_for(options.tuned)}"]


def batch_axes(one: optdnn.Engine, two: optdnn.Engine) -> dict[str, int]:
    """The batch axis of each input and output: its size differs between the engines."""
    pairs = zip((*one.inputs, *one.outputs), (*two.inputs, *two.outputs), strict=True)
    return {a.name: next(i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n) for a, b in pairs}


def differing(models: dict[int, Any], batches: list[int], **options: Any) -> Row:
    """The number of rows that differ from those of the largest batch, by batch size."""
    from optdnn.runtime.contexts.feeds import random_feeds

    engines = {batch: optdnn.build(models[batch], **options) for batch in batches}
    largest = max(batches)
    axes = batch_axes(engines[min(batches)], engines[largest])
    found, want, rows = Row(), Row(), Row()
    for batch, engine in sorted(engines.items(), reverse=True):
        if batch == largest:
            rows = random_feeds(engine.inputs, seed=1)
            want = engine.run(rows)
        wrong = 0
        for order in (range(batch), range(largest - 1, largest - 1 - batch, -1), [largest // 2] * batch):
            got = engine.run({k: np.ascontiguousarray(np.take(v, list(order), axes[k])) for k, v in rows.items()})
            for key, value in got.items():
                for i, row in enumerate(order):
                    a, b = np.take(value, i, axes[key]), np.take(want[key], row, axes[key])
                    wrong += a.tobytes() != b.tobytes()
        found[str(batch)] = wrong
    return found


def measure(job: Job) -> Row:
    """Rows that differ, by batch size, of each way to build."""
    sizes = [int(n) for n in job.options.sizes.split(",")]
    models = {n: onnx_of(replace(job.workload, batch=n)) for n in sizes}
    options = {"target": job.options.target, "precision": job.workload.precision, "tactics": "heuristic"}
    ends = [min(sizes), max(sizes)]
    found = {"heuristic": differing(models, sizes, **options, row_invariant=True)}
    found["control"] = differing(models, ends, **options)
    if job.options.tuned:
        more = {"tactics": "own", "budget": job.options.tuned, "row_invariant": True}
        found["tuned"] = differing(models, ends, **{**options, **more})
    wrong = any(n for way in ("heuristic", "tuned") for n in found.get(way, {}).values())
    return {"rows": found, "verdict": "wrong" if wrong else "right"}


KIND = Kind(
    name="invariance", about=__doc__ or "", measure=measure, arguments=arguments, groups=("zoo", "trained"), setups=setups,
    at_once=4, limit_s=240.0,
)  # fmt: skip
