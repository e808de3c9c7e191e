"""The harness: measures workloads in child processes with time limits, resumes, and ends within a budget.

A kind of measurement (:class:`Kind`) says what a child does for a workload: ``prepare`` (no GPU needed, many at once) and
``measure``. If a child dies or takes too long, only its workload is lost, and a new one takes its place. Rows are appended
to a file as they come; a second call with the same file continues where the first ended. Kinds that time something measure one
at a time: a child calls :func:`turn` once all that takes long is done, and then has its GPU to itself. The other children that
are set up on it are stopped meanwhile (:mod:`benchmarks.children`). ``--devices`` spreads the workloads over several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from benchmarks.children import Gate, OutOfTime, Worker
from benchmarks.models import SHARED, shared_names
from benchmarks.rows import Results, Row, command_parser, error_text, say
from benchmarks.workloads import GROUPS, Workload, chosen, parse

RENEWED = 8
"""Workloads that a child prepares before a new child replaces it: libraries do not give memory back."""


@dataclass(frozen=True)
class Job:
    """An order for a child: a workload, its variant (``setup``), the options of the command line, and a folder of its own.

    ``prepared``: the result of :attr:`Kind.prepare`."""

    workload: Workload
    setup: str
    options: argparse.Namespace
    folder: Path
    prepared: Row = field(default_factory=dict)


def one_line(row: Mapping[str, Any]) -> str:
    """The printed line of a row: its times and its verdict."""
    times = ", ".join(f"{name} {t['ms']:.4f} ms" for name, t in row.get("times", {}).items())
    shares = ", ".join(f"{share:.0%} of bandwidth" for share in row.get("of_bandwidth", {}).values())
    return " ".join(part for part in (times, shares, row.get("verdict", "")) if part)


@dataclass(frozen=True)
class Kind:
    """A kind of measurement. ``measure`` and ``prepare`` run in children and return the row's fields; both may raise.

    - ``about``: its description in one line.
    - ``groups``: the default workloads. ``adjusted``: changes the workloads as the kind needs them.
    - ``precisions``: precisions that replace the workload's own ("" keeps it).
    - ``setups``: the variants of a workload.
    - ``prepares``: whether there is anything to prepare.
    - ``timed``: one workload is measured at a time. ``at_once``: the number of children that measure concurrently.
    - ``limit_s``, ``prepare_s``: the time limits of measuring and preparing, in seconds.
    - ``fresh``: each child measures only one workload.
    - ``faulty``: whether a row is a fault, which makes the exit code 1.
    """

    name: str
    about: str
    measure: Callable[[Job], Row]
    prepare: Callable[[Job], Row] | None = None
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    groups: tuple[str, ...] = ()
    precisions: str = ""
    setups: Callable[[argparse.Namespace, Workload], list[str]] = lambda options, workload: [options.target]
    adjusted: Callable[[list[Workload]], list[Workload]] = lambda workloads: workloads
    prepares: Callable[[argparse.Namespace], bool] = lambda options: True
    timed: bool = False
    at_once: int = 1
    limit_s: float = 120.0
    prepare_s: float = 300.0
    fresh: bool = False
    target: str = "cuda:sm_90a"
    shown: Callable[[Row], str] = one_line
    faulty: Callable[[Row], bool] = lambda row: row.get("verdict") in ("wrong", "hang", "crash")


# ---------------------------------------------------------------- in a child

_waits = False
_answers: TextIO = sys.stdout


def turn() -> None:
    """In a child: report that the long preparations are done, and wait until no other process works on the GPU."""
    if _waits:
        print("READY", file=_answers, flush=True)
        sys.stdin.readline()


def release() -> None:
    """In a child: end the turn before the work ends. The others then run at the same time."""
    if _waits:
        print("DONE", file=_answers, flush=True)
        sys.stdin.readline()


def serve() -> None:
    """The loop of a child: it reads orders from stdin, one line of JSON each, and answers each with a line.

    Output of libraries goes to its log."""
    global _waits, _answers
    from benchmarks.kinds import kind_of

    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("UP", file=_answers, flush=True)
    while text := sys.stdin.readline():
        order = json.loads(text)
        _waits = order["waits"]
        try:
            kind = kind_of(order["kind"])
            (workload,) = parse(order["workload"])
            options = argparse.Namespace(**order["options"])
            job = Job(workload, order["setup"], options, Path(order["folder"]), order["prepared"])
            stage = kind.prepare if order["stage"] == "prepare" else kind.measure
            assert stage is not None
            answer = stage(job)
        except Exception as error:
            answer = {"error": error_text(error)}
        print("ANSWER " + json.dumps(answer, default=str), file=_answers, flush=True)


# ---------------------------------------------------------------- a run


class Run:
    """One run of a kind: prepares and measures each job in a child. Each GPU has its own children."""

    def __init__(self, kind: Kind, options: argparse.Namespace, results: Results, scratch: Path):
        self.kind, self.options, self.results, self.scratch = kind, options, results, scratch
        self.begin = time.monotonic()
        self.deadline = self.begin + options.budget
        self.preparers: queue.SimpleQueue[Preparer] = queue.SimpleQueue()
        self.measurers: queue.SimpleQueue[tuple[Worker, Gate]] = queue.SimpleQueue()
        devices = options.devices.split(",")
        gates = {device: Gate() for device in devices}
        for k in range(options.jobs):
            self.preparers.put(Preparer(Worker({**_threads(2), **_visible(devices[k % len(devices)])})))
        shared = _threads(max(2, (os.cpu_count() or 2) // options.at_once)) if options.at_once > 1 else {}
        for _ in range(options.at_once):
            for device in devices:
                self.measurers.put((Worker({**shared, **_visible(device)}), gates[device]))

    def row(self, workload: Workload, setup: str, name: str) -> Row | None:
        """The row of a job, or None if the budget did not suffice: then a later call measures it. Never raises."""
        row = {"workload": workload.name, "what": self.kind.name, "setup": setup}
        folder = self.scratch / f"{workload.file}-{name}"
        folder.mkdir(parents=True)
        start = time.monotonic()
        order = {
            "kind": self.options.kind, "workload": workload.name, "setup": setup, "options": _plain(self.options),
            "folder": str(folder), "prepared": {}, "waits": False,
        }  # fmt: skip
        found: Row | None = {}
        if self.kind.prepare is not None and self.kind.prepares(self.options):
            found = self._prepared({**order, "stage": "prepare"})
        if found is not None and "error" not in found:
            measured = self._measured({**order, "stage": "measure", "prepared": found, "waits": self.kind.timed})
            found = None if measured is None else {**found, **measured}
        for file in sorted(folder.rglob("*"), reverse=True):
            file.unlink() if file.is_file() or file.is_symlink() else file.rmdir()
        folder.rmdir()
        return None if found is None else {**row, **found, "took_s": round(time.monotonic() - start, 1)}

    def _granted(self, limit_s: float) -> float:
        """The seconds of a limit that the budget leaves; 0 if nothing more may begin."""
        left = self.deadline - time.monotonic()
        return max(0.0, min(limit_s, left)) if left > 1.0 else 0.0

    def _outcome(self, error: Exception, granted: float, limit_s: float, stage: str) -> Row | None:
        """The row of a job whose child did not answer, or None if the budget ended it: then a later call measures it."""
        if isinstance(error, OutOfTime):
            cut = granted < min(limit_s, 0.9 * self.options.budget)
            return None if cut else {"error": f"{stage}: no end in {granted:.3g} s", "verdict": "hang"}
        return {"error": f"{stage}: {error}", "verdict": "crash"}

    def _prepared(self, order: Row) -> Row | None:
        preparer = self.preparers.get()
        limit = max(self.kind.prepare_s, self.options.limit)
        granted = self._granted(limit)
        try:
            if not granted:
                return None
            preparer.worker.start()
            preparer.worker.send(json.dumps(order))
            found: Row = json.loads(preparer.worker.answer(("ANSWER ",), granted)[7:])
            preparer.done += 1
            if "error" in found or preparer.done % RENEWED == 0:
                preparer.worker.close()
        except Exception as error:
            preparer.worker.close()
            return self._outcome(error, granted, limit, "prepare")
        finally:
            self.preparers.put(preparer)
        return found

    def _measured(self, order: Row) -> Row | None:
        worker, gate = self.measurers.get()
        granted, limit = 0.0, self.options.limit
        try:
            with gate.shared(worker):
                granted = self._granted(limit)
                if not granted:
                    return None
                worker.start()
                text, left = _asked(worker, json.dumps(order), ("READY", "ANSWER "), granted)
            while not text.startswith("ANSWER"):
                with gate.alone():
                    text, left = _asked(worker, "GO", ("DONE", "ANSWER "), max(LEAST_S, left))
                if text.startswith("DONE"):
                    with gate.shared(worker):
                        text, left = _asked(worker, "GO", ("READY", "ANSWER "), max(LEAST_S, left))
            found: Row = json.loads(text[7:])
            if self.kind.fresh or "error" in found or found.get("verdict", "ok") not in ("ok", "right"):
                worker.close()  # after a fault, all further calls of a GPU context fail
            return found
        except Exception as error:
            worker.close()
            return self._outcome(error, granted, limit, "measure")
        finally:
            self.measurers.put((worker, gate))

    def close(self) -> None:
        """End all children."""
        while not self.measurers.empty():
            self.measurers.get()[0].close()
        while not self.preparers.empty():
            self.preparers.get().worker.close()


LEAST_S = 5.0
"""Fewest seconds that a child gets after it continues."""


def _asked(worker: Worker, text: str, beginnings: tuple[str, ...], limit_s: float) -> tuple[str, float]:
    """A child's answer to a line, and the seconds that are left."""
    begin = time.monotonic() - worker.stopped_seconds()
    worker.send(text)
    answer = worker.answer(beginnings, limit_s)
    return answer, limit_s - (time.monotonic() - worker.stopped_seconds() - begin)


@dataclass
class Preparer:
    """A child that prepares workloads one by one. ``done``: the number of workloads that it has prepared."""

    worker: Worker
    done: int = 0


def _threads(count: int) -> dict[str, str]:
    """The environment of a child that uses ``count`` cores."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    return dict.fromkeys(names, str(count))


def _visible(device: str) -> dict[str, str]:
    """The environment of a child that sees one GPU ("": all of them)."""
    return {"CUDA_VISIBLE_DEVICES": device} if device else {}


def _plain(options: argparse.Namespace) -> Row:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}


def tune_argument(parser: argparse.ArgumentParser) -> None:
    """The option ``--tune`` of kinds whose engines may be tuned."""
    text = "tune each engine for S seconds (default: the cost model chooses)"
    parser.add_argument("--tune", type=float, default=0.0, metavar="S", help=text)


def tuned_for(seconds: float) -> str:
    """The end of a setup's name: how long its engines were tuned."""
    return f" tuned {seconds:g} s" if seconds else ""


def tuning(seconds: float) -> dict[str, Any]:
    """Build options: tactics by measurement for some seconds, or (0) by the cost model."""
    return {"tactics": "auto", "budget": seconds} if seconds else {"tactics": "heuristic"}


def jobs_of(kind: Kind, options: argparse.Namespace) -> list[tuple[Workload, str]]:
    """The workloads and variants that the options ask for."""
    shared = shared_names() if os.environ.get(SHARED) else []
    every = chosen(options.workloads, options.groups.split(",") if options.groups else [], options.only, shared)
    precisions = options.precisions.split(",") if options.precisions else []
    found = [replace(w, precision=p) for p in precisions for w in every] or every
    found = found if options.workloads else kind.adjusted(found)
    return [(w, setup) for w in dict.fromkeys(found) for setup in kind.setups(options, w)]


def run(kind: Kind, options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure the jobs that are not in the file yet, within the budget. Returns exit code 1 if a row is a fault."""
    jobs = jobs_of(kind, options)
    if options.list:
        for workload, setup in jobs:
            say(f"{workload.name}  {setup}")
        return 0
    results = Results(options.out, command, again=options.again)
    left = [(w, s) for w, s in jobs if (kind.name, w.name, s) not in results.done]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        one = Run(kind, options, results, Path(scratch))
        try:
            at_most = options.jobs + options.at_once * len(options.devices.split(","))
            with ThreadPoolExecutor(at_most) as pool:
                made = {pool.submit(one.row, w, s, str(k)): (w, s) for k, (w, s) in enumerate(left)}
                for future in as_completed(made):
                    row, (workload, setup) = future.result(), made[future]
                    if row is not None:
                        results.add(row)
                        seconds = time.monotonic() - one.begin
                        say(f"{seconds:6.1f} s  {workload.name} {setup}: {row.get('error') or kind.shown(row)}")
        finally:
            one.close()
    rows = [r for r in results.rows if any((r["workload"], r["setup"]) == (w.name, s) for w, s in jobs)]
    say(summary(kind, rows, len(jobs)))
    return int(any(kind.faulty(r) for r in rows))


def summary(kind: Kind, rows: Sequence[Row], of: int) -> str:
    """How many jobs have a row, and their verdicts."""
    done = {(r["workload"], r["setup"]) for r in rows}
    verdicts = Counter(r.get("verdict") or ("failed" if "error" in r else "measured") for r in rows)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
    rest = f"; {of - len(done)} are left: call again" if of > len(done) else ""
    return f"{kind.name}: {len(done)} of {of}: {counts or 'nothing'}{rest}"


def parser_of(kind: Kind) -> argparse.ArgumentParser:
    """The options of a kind."""
    parser = command_parser(kind.name, kind.about)
    add, seconds = parser.add_argument, {"type": float, "metavar": "SECONDS"}
    add("workloads", nargs="*", metavar="WORKLOAD", help="SOURCE/NETWORK:BATCH@PRECISION (default: those of --groups)")
    add("--groups", default=",".join(kind.groups), help=f"of {', '.join(GROUPS)} (%(default)s)")
    add("--only", default="", help="parts of workloads' names, with commas")
    add("--precisions", default=kind.precisions, help="in place of the workloads' own, with commas (%(default)s)")
    add("--target", default=kind.target, help="(%(default)s)")
    add("--shared", type=Path, metavar="FOLDER", help="with fill.py and graphs/, for workloads of 'shared'")
    out = Path(f"{kind.name.rpartition('.')[2]}.jsonl")
    add("--out", type=Path, default=out, help="rows in it are not measured again (%(default)s)")
    add("--again", action="store_true", help="measure rows with an error once more")
    add("--budget", default=540.0, **seconds, help="begin nothing after this (%(default)s)")
    add(
        "--limit",
        default=kind.limit_s,
        **seconds,
        help="of measuring one (%(default)s); more also extends preparing one",
    )
    add("--jobs", type=int, default=max(2, (os.cpu_count() or 2) * 5 // 8), help="prepared at once (%(default)s)")
    add(
        "--at-once",
        type=int,
        default=kind.at_once,
        help="measured, or set up for timing, at once on each GPU (%(default)s)",
    )
    add("--devices", default="", metavar="N,N", help="the GPUs to spread over, as in CUDA_VISIBLE_DEVICES (one)")
    add("--list", action="store_true", help="only print the workloads")
    kind.arguments(parser)
    return parser
