"""The operator case table (``tests/ops``) at every precision: launches against their meaning, results against ``reference``.

    python -m benchmarks cases --target cuda --most 400 --out cases.jsonl [--operators Resize]

The cases are those that the operator tests check (collected by running these), at most ``--most`` of an operator. Many cases make
one network of independent parts, so that few engines are built. On a GPU (``cuda``) the result of every launch (filled with NaN
first) is compared with NumPy's on the GPU's own operands. At fp32 the results are also compared with ``reference``, with the
operator's own tolerance. With an architecture (``cuda:sm_90a``) a run only fills the kernel cache.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Job, Kind
from benchmarks.models import tests_on_path
from benchmarks.rows import Row

tests_on_path()

from support.case_networks import collected, tried  # noqa: E402 (the tests' folders are no packages)

TOGETHER = 24
"""Cases in a network."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most", type=int, default=6, help="cases of an operator (%(default)s)")
    parser.add_argument("--operators", default="", help="only these, with commas")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) * 7 // 8), help="(%(default)s)")


def measure(job: Job) -> Row:
    """All cases at one precision."""
    options, precision = job.options, job.workload.precision
    np.seterr(all="ignore")
    cases = collected(options.most, options.operators)
    by_opset: dict[int, list[Any]] = {}
    for case in cases:
        by_opset.setdefault(case.opset, []).append(case)
    groups = [g[i : i + TOGETHER] for g in by_opset.values() for i in range(0, len(g), TOGETHER)]
    with ProcessPoolExecutor(options.workers) as pool:
        found = list(pool.map(partial(tried, precision=precision, target=options.target), groups))
    wrong = [row for rows in found for row in rows]
    counts = {"tried": len(cases), "operators": len({c.op for c in cases})}
    return {**counts, "wrong": wrong, "verdict": "wrong" if wrong else "right"}


def shown(row: Row) -> str:
    """The number of cases that are right."""
    return f"{row['tried'] - len(row['wrong'])} of {row['tried']} right {row['wrong'][:3] or ''}".rstrip()


KIND = Kind(
    name="cases", about=__doc__ or "", measure=measure, arguments=arguments, groups=("cases",), precisions="fp32,tf32,fp16,bf16",
    target="cuda", limit_s=500.0, shown=shown,
)  # fmt: skip
