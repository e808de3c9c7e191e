"""Random networks compared with ONNX Runtime without optimizations: are any wrong, not repeatable, hanging or crashing?

    python -m benchmarks random --target cpu --seeds 0:2000 --jobs 2 --out cpu.jsonl
    python -m benchmarks random --target cpu --tactics openvino,onnxruntime --seeds 0:500 --out alone.jsonl
    python -m benchmarks random --target cuda --precision fp32,fp16,int8 --seeds 0:250 --jobs 14 \
        --cache kernels --out gpu.jsonl --shrink failing
    python -m benchmarks random --settings processor --seeds 30000:32858 --jobs 16 --budget 3000 --out all.jsonl
    python -m benchmarks random --files failing/*.onnx --target simulate --out again.jsonl
    python -m benchmarks random --merge part1.jsonl part2.jsonl --seeds 0:0 --out whole.jsonl

The generator is ``tests/networks/random_nets``. Each seed gives one network of each family (``--family``), tried at each setting
(target, precision, tactics) in worker processes. If one dies or needs more than ``--timeout`` seconds, only its network is lost.
``--out`` gets one line of JSON per trial as it ends. Trials in this file are not repeated, so a run that was stopped, or that
``--budget`` ended, continues with the same command. Parts (ranges of seeds, settings) can run on different machines; ``--merge``
counts their rows with those of ``--out``. ``OUT.summary.json`` has the counts by setting and family, the failing trials, the trials
that ``tests/networks/random_nets/explanations.py`` explains, and the reasons of refusals.

A line is printed for each failing trial, and ``--shrink FOLDER`` makes its network small and keeps it there as NAME.onnx with the
inputs in NAME.npz. Exit code 7: something failed.

GPU networks are built by the cost model. They run twice (captured, then replayed), and must give the same bits. "int8" means that
Q/DQ networks are unchanged, and float networks are calibrated with their own inputs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.models import tests_on_path
from benchmarks.rows import Results, command_parser, lines, say

tests_on_path()

from random_nets.failing import shrink  # noqa: E402
from random_nets.families import FAMILIES  # noqa: E402
from random_nets.pool import Task, tried  # noqa: E402
from random_nets.summary import summary, written  # noqa: E402
from random_nets.trial import FAILED  # noqa: E402

PROCESSOR = (
    "cpu fp32 auto", "cpu fp32 openvino", "cpu fp32 onnxruntime", "reference fp32",
    "simulate fp32", "simulate fp16", "simulate int8",
)  # fmt: skip
"""The settings that need no GPU."""


def settings(args: argparse.Namespace) -> list[list[str]]:
    """Every [target, precision, tactics] that is requested; reference has only fp32."""
    if args.settings:
        asked = PROCESSOR if args.settings == "processor" else args.settings.split(",")
        return [[*s.split(), "", ""][:3] for s in asked]
    found = []
    for target in args.target.split(","):
        for precision in args.precision.split(","):
            for tactics in args.tactics.split(",") if args.tactics else [""]:
                if target == "reference" and (precision != "fp32" or tactics):
                    continue
                found.append([target, precision, tactics])
    return found


def planned(args: argparse.Namespace, done: set[tuple[str, str]]) -> Iterator[Task]:
    """The trials that are not done yet, in the order of their seeds."""
    for setting in settings(args):
        label = " ".join(filter(None, setting))
        if args.files:
            names = [(Path(f).stem, f) for f in args.files]
            yield from ({"name": n, "file": f, "setting": setting} for n, f in names if (n, label) not in done)
            continue
        first, last = map(int, args.seeds.split(":"))
        for seed in range(first, last):
            for family in args.family.split(","):
                if (f"{family}-{seed}", label) not in done:
                    yield {"family": family, "seed": seed, "setting": setting}


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = command_parser("random", __doc__)
    p.add_argument("--target", default="cpu", help="cpu, reference, simulate, cuda (several: separated by commas)")
    p.add_argument("--precision", default="fp32", help="fp32, tf32, fp16, bf16, int8")
    p.add_argument("--tactics", default="", help="cpu: auto, openvino, onnxruntime; cuda: own and so on")
    p.add_argument(
        "--settings", help='in place of these: "cpu fp32 openvino,simulate fp16", or "processor": all without a GPU'
    )
    p.add_argument("--family", default=",".join(FAMILIES))
    p.add_argument("--seeds", default="0:20", help="FIRST:LAST, the last not included")
    p.add_argument("--files", nargs="*", help="networks in files, in place of seeds; NAME.npz holds the inputs")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    p.add_argument("--timeout", type=float, default=120.0, help="seconds for one trial")
    p.add_argument("--budget", type=float, help="seconds after which no further trial begins")
    p.add_argument("--merge", nargs="*", type=Path, default=[], help="files of other runs whose rows are counted, too")
    p.add_argument("--fresh", type=int, default=300, help="trials that one worker process takes")
    p.add_argument("--cache", type=Path, help="folder of compiled kernels that the workers share")
    p.add_argument("--out", type=Path, default=Path("random.jsonl"))
    p.add_argument("--shrink", type=Path, metavar="FOLDER", help="make failing networks small and keep them here")
    p.add_argument("--refused", action="store_true", help="print and shrink networks that are refused, too")
    p.add_argument("--shrink-most", type=int, default=40, help="how many failing networks to shrink")
    return p


def main(words: Sequence[str]) -> int:
    """Try random networks against ONNX Runtime, thousands of seeds."""
    args = parser().parse_args(words)
    if unknown := set(args.family.split(",")) - set(FAMILIES):
        parser().error(f"unknown family {sorted(unknown)[0]!r}: there are {', '.join(FAMILIES)}")
    if args.cache:
        os.environ["OPTDNN_CACHE"] = str(args.cache.resolve())
    if args.jobs > 1:  # threads of several workers on all cores wait for one another: four times as long on 16 cores
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    results = Results(args.out, ["random", *words])
    others = [line for file in args.merge for line in lines(file) if "workload" in line]
    once = {(r["name"], r["setting"]): r for r in (*results.rows, *others)}
    rows = list(once.values())
    tasks = list(planned(args, {(r["name"], r["setting"]) for r in rows}))
    by_name = {(t.get("name") or f"{t['family']}-{t['seed']}", " ".join(filter(None, t["setting"]))): t for t in tasks}
    start, failing = time.monotonic(), []
    end = start + args.budget if args.budget else float("inf")
    due = itertools.takewhile(lambda task: time.monotonic() < end, tasks)
    for k, row in enumerate(tried(due, args.jobs, args.timeout, args.fresh), 1):
        rows.append(row)
        results.add({"workload": f"random/{row['name']}", "what": "random", "setup": row["setting"], **row})
        if row["verdict"] in FAILED or (args.refused and row["verdict"] == "refused"):
            failing.append(row)
            say(f"{row['setting']} {row['name']}: {row['verdict']}: {row['detail']}")
        if k % 500 == 0:
            say(f"{k} of {len(tasks)} in {time.monotonic() - start:.0f} s")
    seconds = time.monotonic() - start
    made = len(rows) - len(once)
    found = summary(rows, seconds, made, results.about)
    found["left"] = len(tasks) - made
    Path(f"{args.out}.summary.json").write_text(written(found))
    say(f"{made} trials in {seconds:.0f} s, {found['left']} left; with earlier ones {found['verdicts']}")
    for row in failing[: args.shrink_most] if args.shrink else []:
        say(shrink(row, by_name[row["name"], row["setting"]], args.shrink, args.timeout))
    return 7 if any(r["verdict"] in FAILED for r in rows) else 0
