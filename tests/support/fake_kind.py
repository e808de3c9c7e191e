"""A kind of measurement that needs no GPU. The name of the workload's network selects its action."""

from __future__ import annotations

import os
import signal
import sys
import time

from benchmarks.harness import Job, Kind, release, turn
from benchmarks.rows import Row


def prepare(job: Job) -> Row:
    """A file for the second stage."""
    (job.folder / "made").write_text(job.workload.name, encoding="utf-8")
    if job.workload.short == "unbuildable":
        raise ValueError("it cannot\nbe built")
    return {"build_s": 0.5}


def measure(job: Job) -> Row:
    """The action that the name selects."""
    assert (job.folder / "made").read_text(encoding="utf-8") == job.workload.name
    print("noise without an end", end="")
    name = job.workload.short
    if name == "raises":
        raise RuntimeError("no such thing")
    if name == "exits":
        print("a last word", file=sys.stderr)
        os._exit(3)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        time.sleep(60)
    beats = []
    while name.startswith("works") and len(beats) < 250:
        beats.append(time.time())
        time.sleep(0.01)
    if beats:
        return {"beats": beats, "verdict": "right", "device": os.environ.get("CUDA_VISIBLE_DEVICES")}
    time.sleep(0.8 if name.endswith("late") else 0.0)
    if name.startswith("twice"):
        turn()
        first = [time.time()]
        time.sleep(0.2)
        first.append(time.time())
        release()
        time.sleep(0.2)
        print("work between turns")
    turn()
    begin = time.time()
    time.sleep(0.2 if name.startswith(("timed", "twice")) else 0.0)
    verdict = {"wrong": "wrong"}.get(name, "right")
    return {"times": {"ours": {"ms": 1.5}}, "interval": [begin, time.time()], "pid": os.getpid(), "verdict": verdict,
            "device": os.environ.get("CUDA_VISIBLE_DEVICES"),
            **({"first": first} if name.startswith("twice") else {})}  # fmt: skip


KIND = Kind(name="fake", about="A fake.", measure=measure, prepare=prepare, timed=True, limit_s=30.0, groups=("zoo",))
