"""A whole round on a GPU in one command: tests, every target row side by side, growth, what a user waits for.

    python benchmarks/gpu/round.py --out round                       # under ten minutes on one H200, most of them tuning
    python benchmarks/gpu/round.py --out round --only rows,growth --tune 0
    python benchmarks/gpu/round.py --out round --keep                # and put the results into benchmarks/results, README and docs

Correctness comes first: the tests marked ``gpu``, then each candidate of a row before it is timed. Every step writes into the
folder of ``--out``, has its own share of the time, and fails alone; ``round.json`` tells how each went. Tuning starts from the
times that are kept under benchmarks/results and adds to them, so that a second round takes half the time. What takes the longest,
torch.compile, has a command of its own: ``compiled.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TIMES = RESULTS / "timing-h200.json"


WITH_GPU = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text(encoding="utf-8")]
"""Where tests are marked ``gpu``; to collect all the others would take half a minute."""


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    limit: float


def steps(out: Path, tune: float, seconds: float, times: Path) -> list[Step]:
    """The steps of a round that may take ``seconds``, in order."""
    python = [sys.executable]
    script = [*python, str(HERE / "targets.py"), "--turn", "0.03", "--row-budget", "25"]
    share = {"tests": 0.2, "rows": 0.5, "growth": 0.12, "waits": 0.18}
    limits = {name: seconds * part for name, part in share.items()}
    tuned = ["--tune", f"{tune:g}", "--timing-cache", str(times), "--engines", "ours,untuned,libraries"]
    series = ["--growth", "resnet50", "--growth", "bert_base", "--engines", "ours", "--rounds", "3"]
    commands: dict[str, list[str]] = {
        "tests": [*python, "-m", "pytest", "-q", "-n", "4", "-m", "gpu", "--tb=short", *map(str, sorted(WITH_GPU))],
        "rows": [*script, *(tuned if tune else ["--engines", "ours,libraries"]), "--rounds", "4"],
        "growth": [*script, *series],
        "waits": [*python, str(HERE / "waits.py"), "--parts", "build,load,call,retune"],
    }
    for name in ("rows", "growth"):
        commands[name] += ["--budget", f"{limits[name] - 15:.0f}"]
    for name in ("rows", "growth", "waits"):
        commands[name] += ["--out", str(out / f"{name}.json")]
    return [Step(name, command, limits[name]) for name, command in commands.items()]


def run(step: Step, out: Path) -> dict[str, Any]:
    """Run a step, with its text in a file; it and what it started end with its time."""
    start = time.perf_counter()
    with (out / f"{step.name}.txt").open("w") as text:
        process = subprocess.Popen(
            step.command, stdout=text, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            code: int | None = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tail = (out / f"{step.name}.txt").read_text(errors="replace").splitlines()[-25:]
    return {"seconds": round(time.perf_counter() - start, 1), "code": code, "limit": round(step.limit), "tail": tail}


def keep(out: Path) -> None:
    """Put the results into benchmarks/results, draw growth, and write the tables of README and docs."""
    python = sys.executable

    def measured(name: str) -> bool:
        return (out / f"{name}.json").exists()

    if measured("rows"):
        _do(python, HERE / "merge.py", RESULTS / "targets-h200.json", out / "rows.json")
        if TIMES.exists():
            _do(python, HERE / "merge.py", TIMES, TIMES)
    if measured("growth"):
        _do(python, HERE / "merge.py", RESULTS / "growth-h200.json", out / "growth.json")
        _do(python, HERE / "growth.py", RESULTS / "growth-h200.json", ROOT / "docs" / "performance" / "growth-h200.svg")
    if measured("waits"):
        new = json.loads((out / "waits.json").read_text())
        path = RESULTS / "waits-h200.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | new, indent=1) + "\n")
    _do(python, ROOT / "docs" / "generate.py")


def _do(*words: object) -> None:
    subprocess.run([str(w) for w in words], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("round"), help="a folder for what comes of it")
    parser.add_argument("--only", help="of tests, rows, growth, waits")
    parser.add_argument("--tune", type=float, default=10, metavar="S", help="seconds of tuning for each row; 0: none")
    parser.add_argument("--seconds", type=float, default=590, help="for all")
    parser.add_argument("--timing-cache", type=Path, default=TIMES)
    parser.add_argument("--keep", action="store_true", help="put the results into benchmarks/results, README and docs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.only.split(",") if options.only else None
    report: dict[str, Any] = {}
    for step in steps(options.out, options.tune, options.seconds, options.timing_cache):
        if wanted is None or step.name in wanted:
            report[step.name] = found = run(step, options.out)
            print(f"== {step.name}: code {found['code']}, {found['seconds']} s of {found['limit']}", flush=True)
            print("\n".join(found["tail"]), flush=True)
            (options.out / "round.json").write_text(json.dumps(report, indent=1) + "\n")
    if options.keep:
        keep(options.out)
    return int(any(found["code"] != 0 for found in report.values()))


if __name__ == "__main__":
    sys.exit(main())
