"""Random networks through optdnn beside ONNX Runtime without optimizations: is any wrong, unsteady, hanging or crashing?

    python benchmarks/random_networks.py --target cpu --seeds 0:2000 --jobs 2 --out cpu.jsonl
    python benchmarks/random_networks.py --target cpu --tactics openvino,onnxruntime --seeds 0:500 --out alone.jsonl
    python benchmarks/random_networks.py --target cuda --precision fp32,fp16,int8 --seeds 0:250 --jobs 14 \
        --cache kernels --out gpu.jsonl --shrink failing
    python benchmarks/random_networks.py --settings processor --seeds 30000:32858 --jobs 16 --budget 3000 --out all.jsonl
    python benchmarks/random_networks.py --files failing/*.onnx --target simulate --out again.jsonl
    python benchmarks/random_networks.py --merge part1.jsonl part2.jsonl --seeds 0:0 --out whole.jsonl

The generator is ``tests/networks/random_nets``. Each seed gives one network of each family (``--family``), tried at each setting
(target, precision, tactics) in worker processes. One that dies or needs more than ``--timeout`` seconds costs its network alone.
``--out`` gets one line of JSON per trial as it ends; trials that it holds already are not repeated: a run that was stopped, or that
``--budget`` ended, goes on with the same command. Parts (ranges of seeds, settings) can run on different machines; ``--merge``
counts their rows with those of ``--out``. ``OUT.summary.json`` has the counts by setting and family, the failing trials, those
that an explanation of ``tests/networks/random_nets/explanations.py`` accounts for, and why others were refused.

A line is printed for each failing trial, and ``--shrink FOLDER`` makes its network small and keeps it there as NAME.onnx with the
inputs in NAME.npz. Exit code 7: something failed.

GPU networks are built by the cost model, and run twice (captured, then replayed), bit for bit the same. "int8" means Q/DQ networks
as they are, and float networks calibrated with their own inputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "networks"))

from random_nets.families import FAMILIES, network  # noqa: E402
from random_nets.pool import Row, Task, Worker, tried  # noqa: E402
from random_nets.shrink import shrunk  # noqa: E402
from random_nets.trial import FAILED, opened, saved  # noqa: E402

PROCESSOR = (
    "cpu fp32 auto", "cpu fp32 openvino", "cpu fp32 onnxruntime", "reference fp32",
    "simulate fp32", "simulate fp16", "simulate int8",
)  # fmt: skip
"""The settings that need no GPU."""
EXAMPLES = 8
"""Names that the summary keeps of trials that were refused for the same reason."""


def settings(args: argparse.Namespace) -> list[list[str]]:
    """Every [target, precision, tactics] that is asked for; reference knows fp32 alone."""
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
    """The trials in order of their seeds, without those that are done."""
    for setting in settings(args):
        told = " ".join(filter(None, setting))
        if args.files:
            yield from ({"file": f, "setting": setting} for f in args.files if (Path(f).stem, told) not in done)
            continue
        first, last = map(int, args.seeds.split(":"))
        for seed in range(first, last):
            for family in args.family.split(","):
                if (f"{family}-{seed}", told) not in done:
                    yield {"family": family, "seed": seed, "setting": setting}


def done_before(out: Path) -> list[Row]:
    """The rows of an interrupted run; its last line may be half written."""
    rows = []
    for line in out.read_text().splitlines() if out.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # a line that was cut off is tried again
    return rows


def summary(rows: Sequence[Row], seconds: float, trials: int) -> dict[str, Any]:
    """Counts by setting and family, the failing and refused trials, and what ran where."""
    from optdnn.runtime.machine import machine, versions

    table: dict[str, dict[str, Counter[str]]] = {}
    for r in rows:
        family = r.get("family", "files")
        table.setdefault(r["setting"], {}).setdefault(family, Counter())[r["verdict"]] += 1
    spent: Counter[str] = Counter()
    for r in rows:
        spent.update(r.get("seconds", {}))
    commit = os.environ.get("OPTDNN_COMMIT") or subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()  # fmt: skip
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "machine": machine(),
        "versions": versions(),
        "trials": len(rows),
        "verdicts": dict(Counter(r["verdict"] for r in rows)),
        "seconds": round(seconds, 1),
        "trials_per_second": round(trials / max(seconds, 1e-9), 2),
        "stages": {k: round(v, 1) for k, v in spent.items()},
        "counts": table,
        "failing": [
            {k: r[k] for k in ("name", "setting", "verdict", "detail")} for r in rows if r["verdict"] in FAILED
        ],
        "explained": explained(rows),
        "refused": refused(rows),
    }


def explained(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """Explanation -> setting -> names: those of the judge, and "oracle" where float64 agrees with optdnn."""
    found: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        if r["verdict"] in ("explained", "oracle"):
            why = r["detail"].partition(":")[0] if r["verdict"] == "explained" else "oracle"
            found.setdefault(why, {}).setdefault(r["setting"], []).append(r["name"])
    return found


def refused(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Setting and reason (without numbers and names) of refused trials, how many, and some of them; the most frequent first."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r["verdict"] in ("refused", "no_oracle"):
            reason = re.sub(
                r"'[^']*'",
                "'…'",
                re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", r["detail"].rpartition(" [")[0] or r["detail"]),
            )
            found.setdefault((r["setting"], f"{r['verdict']}: {reason}"[:240]), []).append(r["name"])
    return [
        {"setting": setting, "reason": reason, "trials": len(names), "first": names[:EXAMPLES]}
        for (setting, reason), names in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def written(found: dict[str, Any]) -> str:
    """JSON with one line for each family's counts and each trial."""

    def lines(value: Any, depth: int) -> str:
        flat = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, dict | list) or len(flat) + depth < 110 or depth > 2:
            return flat
        pad = "\n" + " " * (depth + 1)
        if isinstance(value, dict):
            inner = [f"{json.dumps(k)}: {lines(v, depth + 1)}" for k, v in value.items()]
            return "{" + pad + f",{pad}".join(inner) + "}"
        return "[" + pad + f",{pad}".join(lines(v, depth + 1) for v in value) + "]"

    return lines(found, 0) + "\n"


def cause(row: Row) -> str:
    """What two failures have in common: the verdict, and of an error its class and the place that raised it."""
    found = re.search(r"(\w+): .*\[([\w/.]+:\d+)\]$", row.get("detail", "").partition(": ")[2])
    return " ".join([row["verdict"], *(found.groups() if found else ())])


def shrink(row: Row, task: Task, folder: Path, timeout: float) -> str:
    """Keep the network of a failing row in ``folder``, as small as it still fails; says what is left of it."""
    net = opened(Path(task["file"])) if "file" in task else network(row["family"], row["seed"])
    worker = Worker(timeout)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "candidate.onnx"

        def fails(candidate: Any) -> bool:
            saved(candidate, file)
            return cause(worker.ask({"file": str(file), "setting": task["setting"]})) == cause(row)

        try:
            small = shrunk(net, fails) if fails(net) else net
        finally:
            worker.close()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{row['setting'].replace(' ', '_').replace(':', '_')}-{row['name']}"
    saved(small, folder / f"{name}.onnx")
    return f"{name}.onnx: {len(small.model.graph.node)} of {len(net.model.graph.node)} nodes"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--target", default="cpu", help="cpu, reference, simulate, cuda (several: separated by commas)")
    p.add_argument("--precision", default="fp32", help="fp32, fp16, int8")
    p.add_argument("--tactics", default="", help="cpu: auto, openvino, onnxruntime; cuda: own and so on")
    p.add_argument(
        "--settings",
        help='"cpu fp32 openvino,simulate fp16" and so on, or "processor": all that need no GPU '
        "(in place of --target, --precision and --tactics)",
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
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--shrink", type=Path, metavar="FOLDER", help="make failing networks small and keep them here")
    p.add_argument("--refused", action="store_true", help="print and shrink networks that are refused, too")
    p.add_argument("--shrink-most", type=int, default=40, help="how many failing networks to shrink")
    return p


def main() -> int:
    args = parser().parse_args()
    if unknown := set(args.family.split(",")) - set(FAMILIES):
        parser().error(f"unknown family {sorted(unknown)[0]!r}: there are {', '.join(FAMILIES)}")
    if args.cache:
        os.environ["OPTDNN_CACHE"] = str(args.cache.resolve())
    once = {(r["name"], r["setting"]): r for file in (args.out, *args.merge) for r in done_before(file)}
    rows = list(once.values())
    tasks = list(planned(args, {(r["name"], r["setting"]) for r in rows}))
    by_name = {
        (Path(t["file"]).stem if "file" in t else f"{t['family']}-{t['seed']}", " ".join(filter(None, t["setting"]))): t
        for t in tasks
    }
    start, failing = time.monotonic(), []
    end = start + args.budget if args.budget else float("inf")
    due = itertools.takewhile(lambda task: time.monotonic() < end, tasks)
    with args.out.open("a") as out:
        for k, row in enumerate(tried(due, args.jobs, args.timeout, args.fresh), 1):
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            if row["verdict"] in FAILED or (args.refused and row["verdict"] == "refused"):
                failing.append(row)
                print(f"{row['setting']} {row['name']}: {row['verdict']}: {row['detail']}", flush=True)
            if k % 500 == 0:
                print(f"{k} of {len(tasks)} in {time.monotonic() - start:.0f} s", flush=True)
    seconds = time.monotonic() - start
    made = len(rows) - len(once)
    found = summary(rows, seconds, made)
    found["left"] = len(tasks) - made
    Path(f"{args.out}.summary.json").write_text(written(found))
    print(f"{made} trials in {seconds:.0f} s, {found['left']} left; with earlier ones {found['verdicts']}")
    for row in failing[: args.shrink_most] if args.shrink else []:
        print(shrink(row, by_name[row["name"], row["setting"]], args.shrink, args.timeout), flush=True)
    return 7 if any(r["verdict"] in FAILED for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
