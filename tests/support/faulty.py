"""An opener of engines that fails if OpenVINO gets a product and a Softsign. FAULT selects the fault: "SIGSEGV open", "SIGFPE
run", "hang run", "SIGKILL turn". Worker processes import it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from optdnn.runtime.racing.candidates import Candidate, Opened, Sampler, open_engine
from optdnn.types import Array


def opener(candidate: Candidate, threads: int) -> Opened:
    how, _, when = os.environ["FAULT"].partition(" ")
    data = Path(candidate.path).read_bytes()
    hit = all(part in data for part in (b'"openvino"', b"MatMul", b"Softsign"))

    def fail(now: str) -> None:
        if hit and when == now:
            if how == "hang":
                time.sleep(60)
            os.kill(os.getpid(), signal.Signals[how])

    fail("open")
    opened = open_engine(candidate, threads)

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        fail("run")
        return opened.run(feeds)

    def sampler(feeds: Mapping[str, Array]) -> Sampler:
        def taken(seconds: float | None, most: int | None, warmup: int) -> array[int]:
            fail("turn")
            return array("q", [10**6 * (1 if hit else 2)])

        return taken

    return dataclasses.replace(opened, run=run, poisoned=None, sampler=sampler)
