"""A worker process of the race: holds one candidate and runs it when its turn comes.

Started by :class:`optdnn.runtime.workers.process.WorkerProcess`; reads commands from its standard input and answers
on what was its standard output (libraries that print reach the standard error instead):

* ``open``: candidate, threads -> facts, outputs (their names; none where they are only known after a run), clock
* ``feeds`` (with arrays) -> outputs as arrays, of one run on them; with ``poison``, memory of earlier and of coming results is
  overwritten first
* ``turn``: warmup, seconds, most -> latencies of one turn, an int64 array "ns"
* ``close``: the candidate is given up; another may be opened
* ``quit``
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from optdnn.errors import OptdnnError
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.measuring.latency import sample
from optdnn.runtime.racing.candidates import Candidate, Opened, Sampler, converted, open_candidate
from optdnn.runtime.workers.wire import receive, send
from optdnn.types import Array

PARENT_S = 1.0
"""How often a worker looks whether its parent is still there."""


def main() -> None:
    """Serve until the parent quits or is gone."""
    run(_Worker())


def run(worker: Any) -> None:
    """Let ``worker`` answer the parent's commands until it quits or is gone. A command NAME is its method do_NAME.

    The second argument of the process is the parent's number: the parent may be gone before this process looks.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the prints of a library must not disturb the frames
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), name="optdnn-parent", daemon=True).start()
    serve(sys.stdin.buffer, answers, worker)


def _end_with_parent(parent: int) -> None:
    """End a worker whose parent is gone: one that hangs in a library does not see that nobody sends commands any more."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def serve(commands: BinaryIO, answers: BinaryIO, worker: Any = None) -> None:
    """Answer every command; a failure is an answer too."""
    worker = worker or _Worker()
    while True:
        frame = receive(commands)
        if frame is None or frame[0]["command"] == "quit":
            return
        message, arrays = frame
        try:
            answer, results = getattr(worker, f"do_{message['command']}")(message, arrays)
            send(answers, {"ok": True, **answer}, results)
        except BaseException as e:
            text = e.message if isinstance(e, OptdnnError) else f"{e}".strip() or "no message"
            send(answers, {"ok": False, "error": type(e).__name__, "message": text.splitlines()[0][:500]})
            if not isinstance(e, Exception):
                return


Answer = tuple[dict[str, Any], dict[str, Array] | None]


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
            **self._clock(),
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
        run, feeds = self.opened.run, self.feeds
        seconds, most, warmup = message["seconds"], message["most"], message["warmup"]
        if self.opened.sampler is not None:
            self.sampler = self.sampler or self.opened.sampler(feeds)
            taken = self.sampler(seconds, most, warmup)
        else:
            taken = sample(lambda: run(feeds), warmup=warmup, duration=None if most else seconds, iterations=most)
        return {}, {"ns": np.frombuffer(taken, np.int64)}

    def _clock(self) -> dict[str, str]:
        return {"clock": "host" if self.opened.sampler is None else self.opened.clock}
