"""Each step of a run on a GPU beside its roofline: the least time that its work allows, over the time that it adds to the run.

    python -m benchmarks roofline --out roofline.jsonl                       # single operators
    python -m benchmarks roofline --groups wide --out roofline.jsonl         # networks
    python -m benchmarks cliffs roofline.jsonl                               # steps below 25 % that take over 2 % of a run

Engines take the cost model's tactics (``--tune S``: measured ones). A share above 1 means that operands lie in L2.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind, turn
from benchmarks.models import TORCH, engine_of, feeds_of, onnx_of
from benchmarks.rows import Row
from benchmarks.workloads import Workload

MOST = 400
"""Steps that a row holds."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune", type=float, default=0.0, metavar="S", help="tune each engine for so many seconds (not)"
    )


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [f"{options.target}{f' tuned {options.tune:g} s' if options.tune else ''}"]


def prepare(job: Job) -> Row:
    """The engine, and inputs for it."""
    workload = job.workload
    feeds = feeds_of(workload, None if workload.source in TORCH else onnx_of(workload))
    options = {
        "tactics": "auto" if job.options.tune else "heuristic",
        "budget": job.options.tune or None,
        "io_dtype": "fp16",
    }
    engine_of(workload, feeds, target=job.options.target, **options).save(job.folder / "engine")
    np.savez(job.folder / "feeds.npz", **feeds)
    return {}


def measure(job: Job) -> Row:
    """The run's time, and every step, the longest first."""
    from optdnn.runtime.cuda.measuring.measure import profile_gpu
    from optdnn.runtime.measuring.bench import cuda_context

    engine = optdnn.load(job.folder / "engine")
    given = dict(np.load(job.folder / "feeds.npz"))
    feeds = {s.name: given[s.name].astype(s.dtype) for s in engine.inputs}
    context: Any = cuda_context(engine.context(), feeds)
    if context is None:
        return {"error": "the run is not on the GPU alone"}
    turn()
    shares = sorted(profile_gpu(context, feeds), key=lambda s: -s.us)
    steps = [step(s.to_plain()) for s in shares[:MOST]]
    return {"times": {"ours": {"ms": sum(s.us for s in shares) / 1e3}}, "steps": steps}


def step(plain: Row) -> Row:
    """What a row keeps of a step; three digits of each number."""
    kept = [(k, plain[k]) for k in ("kind", "tactic", "us", "share", "roofline", "flops", "bytes")]
    return {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in kept} | {
        "nodes": " ".join(plain["src"])[:60]
    }


def cliffs(rows: list[Row], below: float, over: float) -> list[Row]:
    """Steps of rows whose roofline share is less than ``below`` and that take more than ``over`` of their run, the ones that
    would gain most first. ``gain_us``: what ``below`` of the roofline would save."""
    found = []
    for row in rows:
        for s in row.get("steps", []):
            if s["roofline"] is not None and s["roofline"] < below and s["share"] > over:
                gain = s["us"] * (1 - s["roofline"] / below)
                found.append({"workload": row["workload"], **s, "gain_us": float(f"{gain:.3g}")})
    return sorted(found, key=lambda s: -s["gain_us"] * s["share"] / s["us"])


def shown(row: Row) -> str:
    """The run's time, and its longest steps."""
    head = [
        f"{s['kind']} {s['us']:.4g} us at {s['roofline']:.0%}" for s in row["steps"][:3] if s["roofline"] is not None
    ]
    return f"{row['times']['ours']['ms']:.4f} ms: {', '.join(head)}"


KIND = Kind(
    name="roofline", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("operators",),
    setups=setups, timed=True, shown=shown,
)  # fmt: skip
