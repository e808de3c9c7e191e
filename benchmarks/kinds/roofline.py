"""Each step of a run on a GPU compared with its roofline: the least time for its work, over the time that it adds to the run.

    python -m benchmarks roofline --out roofline.jsonl                       # single operators
    python -m benchmarks roofline --groups wide --out roofline.jsonl         # networks
    python -m benchmarks roofline --groups wide --predicted --out p.jsonl    # the same by predicted times, without a GPU
    python -m benchmarks cliffs roofline.jsonl                               # steps below 25 % that take over 2 % of a run

Engines take the cost model's tactics (``--tune S``: measured ones). A share above 1 means that operands are in L2.
``at_roofline`` is the part of a run that its steps would take at their rooflines.
Cliffs and their reasons are those of ``optdnn bench --profile``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind, tune_argument, tuned_for, tuning, turn
from benchmarks.models import save_engine
from benchmarks.rows import Row
from benchmarks.workloads import Workload
from optdnn.runtime.cuda.measuring.cliffs import cliffs
from optdnn.runtime.cuda.measuring.expected import expected_steps
from optdnn.runtime.file.format import read

MOST = 400
"""Most steps in a row. Rows in ``benchmarks/results`` have no steps."""
WORDS = (
    ("attention", ("Attention",), ("attention",)),
    ("recurrence", ("Recurrence",), ("rnn",)),
    ("products", ("MatMul", "Product"), ("gem",)),
    ("norms", ("Norm", "Moments", "Softmax"), ("norm", "rows", "group_norm")),
    ("depthwise convolutions", (), ("depthwise",)),
    ("convolutions", ("Conv",), ("conv", "subpixel", "separable", "expanded", "chained")),
    ("reductions", ("Reduce", "Pool", "Arg", "TopK"), ()),
    ("pointwise", ("Pointwise",), ("pointwise",)),
)
"""Words for steps in a summary: (word, parts of the step's kind, beginnings of its tactic's name). The first match counts."""
OTHERS = "moves"
NAMES = 60
"""Most characters for the ONNX nodes of a step."""


def arguments(parser: argparse.ArgumentParser) -> None:
    tune_argument(parser)
    parser.add_argument("--predicted", action="store_true", help="the times that engines record, without a GPU")


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [f"{options.target}{tuned_for(options.tune)}{' predicted' * options.predicted}"]


def prepare(job: Job) -> Row:
    """The engine, and inputs for it."""
    save_engine(job.workload, job.folder, target=job.options.target, io_dtype="fp16", **tuning(job.options.tune))
    return {}


def measure(job: Job) -> Row:
    """The run's time, its cliffs, and its steps, the longest first."""
    program = read(job.folder / "engine")
    steps = expected_steps(program) if job.options.predicted else profiled(job)
    if steps is None:
        return {"error": "the run is not on the GPU alone"}
    whole = sum(s["us"] for s in steps)
    least = sum(s["us"] * min(1.0, s["roofline"]) for s in steps if s["roofline"] is not None)
    ordered = [step(s) for s in sorted(steps, key=lambda s: -s["us"])]
    return {
        "times": {"ours": {"ms": whole / 1e3}},
        "at_roofline": three(least / whole),
        "count": len(steps),
        "cliffs": [cliff(c, whole) for c in cliffs(steps, program)],
        "words": summary(steps),
        "further_steps": ordered[:MOST],
    }


def word(kind: str, tactic: str) -> str:
    """The word for a step in a summary."""
    fits = (w for w, kinds, names in WORDS if any(k in kind for k in kinds) or tactic.startswith(names or ("\0",)))
    return next(fits, OTHERS)


def summary(steps: Sequence[Row]) -> list[Row]:
    """For each word, largest share first: the share of the run, and the part of it that the steps would take at their rooflines.

    Steps with the same work and configuration count their median: a change of the GPU's clock shows up in single ones.
    """
    equal: dict[tuple[Any, ...], list[Row]] = {}
    for s in steps:
        equal.setdefault(tuple(s.get(k) for k in ("kind", "tactic", "flops", "bytes")), []).append(s)
    found: dict[str, list[float]] = {}
    for same in equal.values():
        us = statistics.median(s["us"] for s in same)
        least = statistics.median(s["us"] * (s["roofline"] or 0.0) for s in same)
        spent = found.setdefault(word(same[0].get("kind", ""), same[0]["tactic"]), [0.0, 0.0])
        spent[0] += us * len(same)
        spent[1] += min(us, least) * len(same)
    whole = sum(us for us, _ in found.values())
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [
        {"word": w, "share": three(us / whole), "at_roofline": three(least / us)}
        for w, (us, least) in ordered
        if us > 0
    ]


def profiled(job: Job) -> Any:
    """The steps of a run on the GPU; None if a part of it runs elsewhere."""
    from optdnn.runtime.cuda.measuring.measure import profile_gpu
    from optdnn.runtime.measuring.bench import cuda_context

    turn()  # before the engine is loaded: its copies and first runs would disturb the profile of another workload
    engine = optdnn.load(job.folder / "engine")
    given = dict(np.load(job.folder / "feeds.npz"))
    feeds = {s.name: given[s.name].astype(s.dtype) for s in engine.inputs}
    context: Any = cuda_context(engine.context(), feeds)
    if context is None:
        return None
    return [s.to_plain() for s in profile_gpu(context, feeds)]


def step(plain: Row) -> Row:
    """A step in the form of a row: three digits of each number."""
    kept = [(k, plain[k]) for k in ("kind", "tactic", "us", "share", "roofline", "flops", "bytes") if k in plain]
    return {k: three(v) for k, v in kept} | {"nodes": " ".join(plain["src"])[:NAMES]}


def cliff(found: Row, whole_us: float) -> Row:
    """A cliff in the form of a row. ``gain``: the share of the run that it would save at a quarter of its roofline."""
    kept = {k: three(found[k]) for k in ("step", "tactic", "us", "share", "roofline", "gain_us", "why")}
    return {**kept, "gain": three(found["gain_us"] / whole_us), "nodes": " ".join(found["src"])[:NAMES]}


def three(value: Any) -> Any:
    """A number with three digits; other values as they are."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def listed(rows: Sequence[Row]) -> list[Row]:
    """The cliffs of all rows, each with its workload, those with the largest gain first."""
    every = [{"workload": row["workload"], **c} for row in rows for c in row.get("cliffs", ())]
    return sorted(every, key=lambda c: -float(c["gain"]))


def shown(row: Row) -> str:
    """The run's time, the part of it that the steps would take at their rooflines, and the worst cliffs."""
    head = [f"{c['tactic']} gains {c['gain']:.0%}" for c in row["cliffs"][:3]]
    return f"{row['times']['ours']['ms']:.4f} ms, {row['at_roofline']:.0%} at roofline" + "".join(
        f", {h}" for h in head
    )


KIND = Kind(
    name="roofline", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("operators",),
    setups=setups, timed=True, shown=shown,
)  # fmt: skip
