"""Kernels under compute-sanitizer: memcheck, racecheck and initcheck, over engines of small networks of every template.

    python -m benchmarks sanitize --out sanitize.jsonl         # all tools; also that each tool catches the fault seeded for it
    python -m benchmarks sanitize --tools memcheck int8 rows

Each buffer of an engine is a separate allocation of exactly its size, so that memcheck sees faults that a planned arena would hide.
The seeded faults (``SEEDED_FAULT`` in pool_int8.cu: a write past the end, a missing barrier, a read of unwritten memory, a barrier
that some threads never reach) are compiled into a copy of the family "int8". Families are named in tests/support/sanitizer_nets.py.
Exits 1 if a tool reports a clean family, or misses a seeded fault. Rows in the file of ``--out`` are not run again.

synccheck runs on request. In convolutions that split K it reports a missing wait in block 121, at the first arrival at a barrier
that the block has just initialized: the barrier of the partial sums or, in a rank that receives none, that of the first stage.
No phase of the barrier has ended by then, so there was nothing to wait for: the report is a false alarm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from benchmarks.children import environment_with
from benchmarks.models import tests_on_path
from benchmarks.rows import Results, Row, command_parser, say

tests_on_path()

from support.sanitized import file_of, prepare, run  # noqa: E402 (the tests' folders are no packages)
from support.sanitizer_nets import GENERAL, graphs  # noqa: E402

FAULTS = {"memcheck": 1, "racecheck": 2, "initcheck": 3, "synccheck": 4}
TOOLS = ("memcheck", "racecheck", "initcheck")
AND, TOGETHER, GENERAL_TOGETHER = " + ", 2, 6
"""Families per process, since the start of a process takes longer than a family; families of generated kernels are small."""


def watched(tool: str, folder: Path, name: str, fault: int, seconds: int) -> tuple[bool, str, float]:
    """Whether a tool reports no fault, its output, and its seconds."""
    start = time.time()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks", "sanitize",
               "--folder", str(folder), "--run", name, "--fault", str(fault), "--tools", tool]  # fmt: skip
    environment = environment_with(OPTDNN_CACHE=str(folder))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return False, f"not done after {seconds} s", time.time() - start
    text = done.stdout + done.stderr
    ran = all(f"ran {one}:" in text for one in name.split(AND))
    return done.returncode == 0 and ran, text, time.time() - start


def main(words: Sequence[str]) -> int:
    """Run every kernel template under compute-sanitizer."""
    options = parser().parse_intermixed_args(words)
    if options.run:
        for name in options.run.split(AND):
            run(options.folder, name, options.tools, options.fault)
        return 0
    names = [n for n in graphs() if not options.families or any(part in n for part in options.families)]
    tools, begin = options.tools.split(","), time.time()
    results = Results(options.out, ["sanitize", *words])
    left = {
        tool: [n for n in names if ("sanitize", f"kernels/{file_of(n)}", tool) not in results.done] for tool in tools
    }
    needed = [n for n in names if any(n in of for of in left.values()) or n == "int8"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            engines = dict(zip(needed, pool.map(prepare, [folder] * len(needed), needed), strict=True))
        say(f"{len(needed)} engines in {time.time() - begin:.0f} s")
        jobs = [(tool, group, 0) for tool in tools for group in groups(left[tool])]
        seeded = [t for t in tools if "int8" in names and ("sanitize", "kernels/seeded_fault", t) not in results.done]
        jobs = [*((tool, "int8", FAULTS[tool]) for tool in seeded), *jobs]

        def job(tool: str, name: str, fault: int) -> None:
            if time.time() - begin > options.budget:
                return
            clean, text, seconds = watched(tool, folder, name, fault, options.seconds)
            for row in rows_of(tool, name, fault, clean, text):
                results.add({**row, "took_s": round(seconds, 1), **(engines[row["family"]] if not fault else {})})

        with ThreadPoolExecutor(options.workers) as threads:
            list(threads.map(lambda j: job(*j), jobs))
    return summarize(results.rows, tools, names)


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = command_parser("sanitize", __doc__)
    p.add_argument("families", nargs="*", help="parts of their names; all, where there are none")
    p.add_argument("--tools", default=",".join(TOOLS))
    p.add_argument("--out", type=Path, default=Path("sanitize.jsonl"))
    p.add_argument("--seconds", type=int, default=60, help="of one family under one tool")
    p.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="begin nothing after this")
    p.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) * 5 // 8))
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--run", help=argparse.SUPPRESS)
    p.add_argument("--fault", type=int, default=0, help=argparse.SUPPRESS)
    return p


def groups(names: Sequence[str]) -> list[str]:
    """Families that share a process."""
    general, others = ([n for n in names if (n in GENERAL) is of] for of in (True, False))
    found = [AND.join(others[i : i + TOGETHER]) for i in range(0, len(others), TOGETHER)]
    return found + [AND.join(general[i : i + GENERAL_TOGETHER]) for i in range(0, len(general), GENERAL_TOGETHER)]


def rows_of(tool: str, name: str, fault: int, clean: bool, text: str) -> list[Row]:
    """The rows of one process under a tool: one for each family, or one for the seeded fault. Faults are
    printed."""
    row: Row = {"what": "sanitize", "setup": tool}
    if fault:
        caught = not clean and "global_average_pool" in text and "does not compile" not in text
        if not caught:
            say(f"{tool} seeded fault: MISSED\n{text[-3000:]}")
        return [
            {**row, "workload": "kernels/seeded_fault", "family": name, "verdict": "caught" if caught else "missed"}
        ]
    lines = [line for line in text.splitlines() if "Host Frame" not in line and "backtrace" not in line][:24]
    if not clean:
        say("\n".join([f"{tool} {name}: REPORTED", *lines]))
    more = {"verdict": "clean"} if clean else {"verdict": "reported", "reported": lines}
    return [{**row, "workload": f"kernels/{file_of(one)}", "family": one, **more} for one in name.split(AND)]


def summarize(rows: Sequence[Row], tools: Sequence[str], names: Sequence[str]) -> int:
    """Print what each tool found. Exit code 0: all families are clean, and each fault was caught."""
    good = True
    for tool in tools:
        mine = {r["workload"]: r["verdict"] for r in rows if r["setup"] == tool}
        clean = sum(mine.get(f"kernels/{file_of(n)}") == "clean" for n in names)
        seeded = mine.get("kernels/seeded_fault", "not tried")
        say(f"{tool}: {clean} of {len(names)} families clean, seeded fault {seeded}")
        good = good and clean == len(names) and ("int8" not in names or seeded == "caught")
    return 0 if good else 1
