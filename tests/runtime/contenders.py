"""Openers of made-up candidates for the tests of the race. Worker processes import them.

``path`` is the parameter of the candidate.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.racing.candidates import Candidate, Opened, Sampler
from optdnn.types import Array, TensorSpec


def sleeper(candidate: Candidate, threads: int) -> Opened:
    """Computes 2 x and takes ``path`` seconds."""

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        time.sleep(float(candidate.path))
        return [feeds["x"] * 2]

    return Opened(run, ["y"], {"threads": threads, "omp": os.environ["OMP_NUM_THREADS"]})


def logger(candidate: Candidate, threads: int) -> Opened:
    """Writes "name start end" of every call (ns, the system's monotonic clock) to the file ``path``."""

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        start = time.monotonic_ns()
        time.sleep(0.002)
        with open(candidate.path, "a") as f:
            f.write(f"{candidate.name} {start} {time.monotonic_ns()}\n")
        return [feeds["x"]]

    return Opened(run, ["y"], {})


def off_by(candidate: Candidate, threads: int) -> Opened:
    """Computes 2 x + path."""
    return Opened(lambda feeds: [feeds["x"] * 2 + np.float32(candidate.path)], ["z"], {})


def two_outputs(candidate: Candidate, threads: int) -> Opened:
    return Opened(lambda feeds: [feeds["x"], feeds["x"]], ["a", "b"], {})


def half_io(candidate: Candidate, threads: int) -> Opened:
    """Takes its input in fp16."""

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        assert feeds["x"].dtype == np.float16
        return [feeds["x"] * 2]

    return Opened(run, ["y"], {}, [TensorSpec("x", np.dtype(np.float16), (3,))])


def chatty(candidate: Candidate, threads: int) -> Opened:
    """Writes to its standard output, from Python and by system calls."""
    print("hello from Python", flush=True)
    os.write(1, b"hello from C\n" * 1000)
    return sleeper(candidate, threads)


def failing(candidate: Candidate, threads: int) -> Opened:
    """Fails as ``path`` requires: "raise 0" when it is opened, "exit 3" at the third call."""
    how, _, at = candidate.path.partition(" ")
    calls = 0

    def fail() -> None:
        if how == "raise":
            raise ValueError("no such tile\nand more")
        if how == "typed":
            raise UsageError("wrong option", hint="use another")
        if how == "exit":
            print("fatal: out of cheese", file=sys.stderr, flush=True)
            os._exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    if at == "0":
        fail()

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        nonlocal calls
        calls += 1
        if calls == int(at):
            fail()
        return [feeds["x"] * 2]

    return Opened(run, ["y"], {})


def on_device(candidate: Candidate, threads: int) -> Opened:
    """Measures itself: every run takes ``path`` nanoseconds by its own clock, independent of the time that ``run`` takes."""

    def sampler(feeds: Mapping[str, Array]) -> Sampler:
        assert feeds["x"].shape == (3,)

        def taken(seconds: float | None, most: int | None, warmup: int) -> array[int]:
            return array("q", [int(candidate.path)] * (most or 20))

        return taken

    return Opened(lambda feeds: [feeds["x"] * 2], (), {}, sampler=sampler)
