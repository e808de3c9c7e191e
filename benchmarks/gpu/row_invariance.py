"""``row_invariant`` on a GPU: does a row of a batch give the same bits whatever the batch, and wherever it stands in it?

    python benchmarks/gpu/row_invariance.py OUT.json [--precisions fp16,bf16] [--batches 1,2,5,9,33] [--tuned 4] [--only TEXT]

Networks of the zoo, each built for every batch size: by the cost model, and with ``--tuned SECONDS`` also by measurement. Rows are
those of the largest batch: in place, in reverse order, and one row in all places. ``control``: how many rows differ where the build
is not row-invariant (where none does for any network, the comparison says nothing). A process per network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from targets import facts

import optdnn

NETWORKS = ("resnet50", "vgg16", "densenet121", "vit_b_16", "bert_base", "efficientnet_b0", "lstm", "mobilenet_v2", "unet",
            "inception_v3", "squeezenet1_1", "yolox_s", "resnet18", "mlp")  # fmt: skip


def batch_axes(models: dict[int, Any]) -> dict[str, int]:
    """Which axis of each input and output is the batch: the one whose size follows it."""
    one, two = models[min(models)].graph, models[max(models)].graph

    def shapes(values: Any) -> dict[str, list[int]]:
        return {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    pairs = [(shapes(one.input), shapes(two.input)), (shapes(one.output), shapes(two.output))]
    return {
        name: next(i for i, (m, n) in enumerate(zip(a[name], b[name], strict=True)) if m != n)
        for a, b in pairs
        for name in a
    }


def differing(models: dict[int, Any], batches: list[int], precision: str, **options: Any) -> dict[str, Any]:
    """Rows that are not those of the largest batch, by batch size; and what was compared."""
    from optdnn.runtime.feeds import random_feeds

    axes, largest = batch_axes(models), max(batches)
    found: dict[str, Any] = {}
    want: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for batch in sorted(batches, reverse=True):
        engine = optdnn.build(models[batch], target="cuda", precision=precision, **options)
        if batch == largest:
            rows = random_feeds(engine.inputs, seed=1)
            want = engine.run(rows)
            found["outputs"] = {k: list(v.shape) for k, v in want.items()}
        wrong = 0
        for order in (range(batch), range(largest - 1, largest - 1 - batch, -1), [largest // 2] * batch):
            got = engine.run({k: np.ascontiguousarray(np.take(v, list(order), axes[k])) for k, v in rows.items()})
            for key, value in got.items():
                for i, row in enumerate(order):
                    a, b = np.take(value, i, axes[key]), np.take(want[key], row, axes[key])
                    wrong += a.tobytes() != b.tobytes()
        found[str(batch)] = wrong
    return found


def one(name: str, precisions: list[str], batches: list[int], tuned: float) -> dict[str, Any]:
    """The row of a network."""
    from optdnn.models import zoo

    row: dict[str, Any] = {"network": name}
    models, ends = {batch: zoo.build(name, batch=batch) for batch in batches}, [min(batches), max(batches)]
    for precision in precisions:
        try:
            found = {"heuristic": differing(models, batches, precision, tactics="heuristic", row_invariant=True)}
            row[precision] = found
            found["control"] = differing(models, ends, precision, tactics="heuristic")
            if tuned:
                found["tuned"] = differing(models, ends, precision, tactics="own", budget=tuned, row_invariant=True)
        except Exception as error:
            row.setdefault(precision, {})["failed"] = f"{type(error).__name__}: {error}"[:600]
    return row


def wrong(found: dict[str, Any]) -> int:
    """Rows that differ in a row-invariant build."""
    return sum(n for how in ("heuristic", "tuned") for n in found.get(how, {}).values() if isinstance(n, int))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--precisions", default="fp16")
    parser.add_argument("--batches", default="1,2,5,9,33")
    parser.add_argument("--tuned", type=float, default=0.0, metavar="SECONDS", help="of tuning, for each batch size")
    parser.add_argument("--only", default="", metavar="NAMES", help="of these networks, with commas between them")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a network")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    precisions, batches = args.precisions.split(","), [int(n) for n in args.batches.split(",")]
    if args.one:
        print("ROW " + json.dumps(one(args.one, precisions, batches, args.tuned)))
        return 0
    begin, rows = time.perf_counter(), []

    def child(name: str) -> dict[str, Any]:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=args.seconds, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return {"network": name, "failed": f"not done in {args.seconds:.0f} s"}
        last = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        return json.loads(last[-1][4:]) if last else {"network": name, "failed": done.stderr[-1500:]}

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) * 7 // 8)) as pool:
        for row in pool.map(child, [n for n in NETWORKS if not args.only or n in args.only.split(",")]):
            rows.append(row)
            print(f"{time.perf_counter() - begin:6.1f} s", json.dumps(row), flush=True)
            args.out.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")
    found = [(r["network"], p, r.get(p, {"failed": r.get("failed")})) for r in rows for p in precisions]
    bad = [f"{n} {p}" for n, p, f in found if "failed" in f or wrong(f)]
    controls = sum(any(isinstance(n, int) and n for n in f.get("control", {}).values()) for _, _, f in found)
    print(f"{len(found) - len(bad)} of {len(found)} row-invariant (without it rows of {controls} differ); not: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
