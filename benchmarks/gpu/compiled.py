"""torch.compile beside eager and optdnn, for as many of the target rows as compile within the time there is.

    python benchmarks/gpu/compiled.py --out compile.json --budget 480

Several rows compile at once (max-autotune, weights frozen; each in a process of its own); when all have, or their time is over,
they are measured one at a time, with nothing else running: torch.compile, eager (the anchor by which a later run's drift shows) and
optdnn, each as a CUDA graph, in turns. A row that was not compiled in time is a row that says so. Compile times are therefore those
of a machine that is shared by the rows. Where there are several GPUs the rows are dealt to them; measured is one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from targets import HERE, ROWS, Row, child, facts, gpus, line

ORDER = (
    "lstm:1", "lstm:32", "bert_base:1", "bert_base:32", "vit_b_16:1", "vit_b_16:32", "vgg16:1", "resnet50:1", "mobilenet_v2:1",
    "mobilenet_v2:128", "resnet50:128", "resnet50:32", "efficientnet_b0:1", "resnet50:8", "efficientnet_b0:128", "densenet121:1",
)  # fmt: skip
"""Rows by when they begin to compile: the quickest first, so that as many as can be are ready in time."""


class Process:
    """A measuring process (``measure_row.py``) that is given one order."""

    def __init__(self, order: Mapping[str, Any], log: Path, environment: Mapping[str, str]):
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "measure_row.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.send(json.dumps(order))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.put(text)
        self._lines.put(None)

    def send(self, text: str) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()

    def answer(self, beginnings: tuple[str, ...], limit: float) -> str:
        """Its next line that begins so. Raises TimeoutError, or RuntimeError where it ended before."""
        end = time.monotonic() + limit
        while True:
            try:
                text = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if text is None:
                raise RuntimeError(f"the process ended: {self._log.read_text()[-400:]}")
            if text.startswith(beginnings):
                return text

    def end(self) -> None:
        """End it, with the compiler's processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def compiled(row: Row, folder: Path, options: argparse.Namespace, deadline: float) -> tuple[Any, dict[str, Any]]:
    """The row's process, ready to be measured (or None), and what is known already; never raises."""
    if time.monotonic() >= deadline:
        return None, {"error": "not begun in time"}
    process = None
    try:
        built = child(row, folder, options)
        order = {
            "row": asdict(row),
            "folder": str(folder),
            "engines": [e for e, found in built.items() if "error" not in found],
            "torch": ["eager", "compile"],
            "turn": options.turn,
            "rounds": options.rounds,
            "flush_l2": False,
            "wait": True,
        }
        cache = {k: v for k, v in os.environ.items() if k == "TORCHINDUCTOR_CACHE_DIR"}  # goes on where a run was cut
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(options.threads), "OMP_NUM_THREADS": "2"}
        if options.gpus:
            threads["CUDA_VISIBLE_DEVICES"] = options.gpus[ROWS.index(row) % len(options.gpus)]
        process = Process(
            order, folder / f"{row.name}.log", {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **cache, **threads}
        )
        text = process.answer(("READY", "ANSWER "), deadline - time.monotonic())
        if not text.startswith("READY"):
            raise RuntimeError(json.loads(text[7:]).get("error", "?"))
        return process, {"engines": built}
    except Exception as error:
        if process is not None:
            process.end()
        if isinstance(error, TimeoutError):
            return None, {"error": "torch.compile had not ended when its time was over"}
        return None, {"error": f"{type(error).__name__}: {error}"[:600]}


def measured(process: Process, known: dict[str, Any], limit: float) -> dict[str, Any]:
    """The row's results; never raises."""
    try:
        process.send("GO")
        answer: dict[str, Any] = json.loads(process.answer(("ANSWER ",), limit)[7:])
        for name, found in known["engines"].items():
            answer.setdefault("candidates", {})[name] = {**answer.get("candidates", {}).get(name, {}), **found}
        return answer
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        process.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="rows whose name begins so, e.g. bert_base:32")
    parser.add_argument("--budget", type=float, default=480, help="seconds for all")
    parser.add_argument("--reserve", type=float, default=8, help="of these, seconds that measuring a row takes")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--at-once", type=int, default=max(2, cores * 3 // 8), help="rows that compile at once")
    parser.add_argument("--threads", type=int, help="processes of torch's compiler for each")
    parser.add_argument("--turn", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--arch", default="cuda:sm_90a")
    parser.add_argument("--engines", default="ours")
    parser.add_argument("--timing-cache")
    parser.add_argument("--tune", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("compile.json"))
    options = parser.parse_args()
    options.at_once = min(options.at_once, len(ORDER))
    options.threads = options.threads or max(2, cores * 3 // 2 // options.at_once)
    options.gpus = gpus()
    begin = time.monotonic()
    options.deadline = time.perf_counter() + options.budget
    rows = [next(r for r in ROWS if r.precision == "fp16" and f"{r.model}:{r.batch}" == name) for name in ORDER]
    rows = [r for r in rows if not options.only or any(r.name.startswith(o) for o in options.only)]
    # Those that take longest will hardly all be ready.
    deadline = begin + options.budget - options.reserve * min(len(rows), max(4, 2 * options.at_once))
    report: dict[str, Any] = {
        **facts(),
        "l2": "warm",
        "at_once": options.at_once,
        "threads": options.threads,
        "cores": cores,
        "gpus": len(options.gpus),
        "rows": [],
    }
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    resumed = {"resumed": True} if kept and Path(kept).exists() else {}  # compile times are then no whole ones
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ThreadPoolExecutor(options.at_once) as pool:
        made = [(row, pool.submit(compiled, row, Path(name), options, deadline)) for row in rows]
        for row, future in made:
            process, _ = future.result()
            print(
                f"{time.monotonic() - begin:6.1f} s  {row.name}: {'compiled' if process else 'not compiled'}",
                flush=True,
            )
        for row, future in made:
            process, found = future.result()
            if process is not None:
                found = measured(process, found, max(5.0, begin + options.budget - time.monotonic()))
            report["rows"].append({"name": row.name, **asdict(row), **resumed, **found})
            print(f"{time.monotonic() - begin:6.1f} s  {line(report['rows'][-1])}", flush=True)
            report["seconds"] = round(time.monotonic() - begin, 1)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
