"""A worker process of the race: holds one candidate and runs it in its turns.

Started by :class:`optdnn.runtime.workers.process.WorkerProcess`; reads commands from its standard input and answers
on its original standard output (prints of libraries go to the standard error instead):

* ``open``: candidate, threads -> facts, outputs (their names; none if they are known only after a run), clock
* ``feeds`` (with arrays) -> outputs as arrays, of one run on them; with ``poison``, memory of earlier and of coming results is
  overwritten first
* ``turn``: warmup, seconds, most -> latencies of one turn, an int64 array "ns"
* ``energy``: -> the result of :func:`optdnn.runtime.measuring.energy.energy`, for runs on the last feeds
* ``close``: the candidate is given up; another may be opened
* ``quit``
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.measuring.energy import counters, energy
from optdnn.runtime.measuring.latency import sample
from optdnn.runtime.racing.candidates import Candidate, Opened, Sampler, converted, open_candidate
from optdnn.runtime.workers.wire import Answer, run
from optdnn.types import Array


def main() -> None:
    """Serve until the parent quits or has ended."""
    run(_Worker())


class _Worker:
    opened: Opened
    feeds: Mapping[str, Array]
    sampler: Sampler | None = None

    def do_open(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        self.do_close(message, arrays)
        start = time.perf_counter()
        self.opened = open_candidate(Candidate(**message["candidate"]), message["threads"])
        seconds = time.perf_counter() - start
        return {
            "facts": dict(self.opened.facts),
            "outputs": list(self.opened.outputs),
            "open_s": seconds,
            "clock": "host" if self.opened.sampler is None else self.opened.clock,
        }, None

    def do_close(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        self.__dict__.clear()
        return {}, None

    def do_feeds(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        self.feeds, self.sampler = converted(arrays, self.opened.inputs), None
        run = self.opened.run
        if message.get("poison") and self.opened.poisoned is not None:
            run = self.opened.poisoned
        start = time.perf_counter()
        outputs = run(self.feeds)
        seconds = time.perf_counter() - start
        settle()
        return {"seconds": seconds}, {f"{i}": np.asarray(a) for i, a in enumerate(outputs)}

    def do_turn(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        taken = self._sampled(message["seconds"], message["most"], message["warmup"])
        return {}, {"ns": np.frombuffer(taken, np.int64)}

    def do_energy(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        on_gpu = self.opened.sampler is not None and self.opened.clock == "gpu"
        return energy(lambda seconds: len(self._sampled(seconds, None, 1)), counters(gpu=on_gpu)), None

    def _sampled(self, seconds: float, most: int | None, warmup: int) -> array[int]:
        """Nanoseconds of each run: ``most`` runs, or as many as fit into the seconds."""
        run, feeds = self.opened.run, self.feeds
        if self.opened.sampler is not None:
            self.sampler = self.sampler or self.opened.sampler(feeds)
            return self.sampler(seconds, most, warmup)
        return sample(lambda: run(feeds), warmup=warmup, duration=None if most else seconds, iterations=most)
