"""The first runs of a finished program, in the GPU worker: launch by launch, then as the graph that users will run.

Inputs are made up. All memory of the program is between fences. A fault (a hang, a crash, a write outside of the buffers) is
reported with its step if the step is known: each launch runs alone before their graph is replayed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.cuda.launches.chain import ENQUEUED, Item
from optdnn.runtime.cuda.launches.plan import CudaStep
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import FencedArena
from optdnn.runtime.cuda.trials.timer import (
    UNWRITTEN,
    GpuTimer,
    KernelCrashes,
    KernelHangs,
    MemoryCorrupted,
    limit_of,
    need_intact,
    wait,
)
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array

LEAST = 3
"""The least number of replays, however long they take."""
TOGETHER = 4
"""Replays that are enqueued before the host waits for them."""


class ResultsDiffer(RunError):
    """The replays of a graph differ from the results of its launches one by one."""


class FirstRuns:
    """A program that is loaded for its first runs. Raises RunError, EngineError if it cannot be loaded."""

    def __init__(self, timer: GpuTimer, program: Program):
        self.timer, self.program = timer, program
        self.arena = FencedArena(program.arena_bytes)
        self.runner = CudaRunner(program, LoadOptions(trust_cubins=True, pool=timer.pool))
        self.context = self.runner.context(self.arena)
        self.arena.fill(UNWRITTEN)
        self.context.stage(self._inputs())
        self.seconds = 0.0
        self.wanted: list[bytes] = []
        self.at: int | None = None
        """The number of the step that runs alone."""

    def _inputs(self) -> list[Array]:
        """Made-up inputs, in the program's order; integers with bounds are within them."""
        specs = self.runner.signature.inputs
        feeds = random_feeds(specs, seed=1)
        for spec in specs:
            if spec.name in self.runner.signature.bounds:
                low, high, _ = self.runner.signature.bounds[spec.name]
                if isinstance(low, int) and isinstance(high, int):
                    feeds[spec.name] = np.clip(feeds[spec.name], low, max(low, high))
        return self.runner.signature.arrays(feeds)

    def singly(self) -> bool:
        """Run twice, launch by launch, each waited for. Returns whether the results of both runs are equal to the bit.

        Raises KernelHangs, KernelCrashes or MemoryCorrupted; :attr:`at` is then the faulty step (None: unknown).
        """
        begin = time.monotonic()
        self.wanted = self._one_by_one()
        self.seconds = time.monotonic() - begin
        same = self._one_by_one() == self.wanted
        if not self.arena.intact(UNWRITTEN):
            self.arena.fill(UNWRITTEN)
            self._one_by_one(watched=True)
            self.at = None
            raise MemoryCorrupted("it writes outside of its buffers, but not in every run")
        return same

    def _one_by_one(self, *, watched: bool = False) -> list[bytes]:
        """One run; ``watched``: the fences are checked after each launch."""
        memory, stream = self.context.memory, self.context.stream
        memory.copy_in(stream.handle)
        wait(stream)
        for k, item in enumerate(self.context.items({})):
            self.at = k
            self._alone(item)
            if watched:
                need_intact(self.arena)
        memory.copy_out(stream.handle)
        wait(stream)
        return self._results()

    def _alone(self, item: Item) -> None:
        if not isinstance(item, ENQUEUED):
            item()  # an operator on the CPU; the GPU is idle
            return
        try:
            item.enqueue(self.context.stream.handle)
            wait(self.context.stream)
        except KernelHangs:
            raise
        except RunError as error:  # a launch that fails here fails for every user
            raise KernelCrashes(error.message) from error

    def _results(self) -> list[bytes]:
        p = self.program
        return [
            self.context.memory.pinned(i).tobytes()
            for _, i in p.outputs
            if i not in self.runner.on_host and p.buffers[i].nbytes
        ]

    def replay(self, most: int, seconds: float, *, same: bool) -> int:
        """Replay the graph ``most`` times, or as often as ``seconds`` allow, half of them while another stream's kernels run;
        returns the number of replays. ``same``: the results must equal those of the single launches to the bit.

        Raises KernelHangs, KernelCrashes, MemoryCorrupted or ResultsDiffer.
        """
        memory, stream, graph = self.context.memory, self.context.stream, self.context.graph()
        begin, done = time.monotonic(), 0
        while done < most and (done < LEAST or time.monotonic() - begin < seconds):
            count = min(TOGETHER, most - done) if done else 1
            memory.copy_in(stream.handle)
            for k in range(done, done + count):
                if k >= most // 2:
                    self.timer.disturb()
                graph.replay(stream)
            memory.copy_out(stream.handle)
            wait(stream, limit_of(count * self.seconds))
            done += count
            if same and self._results() != self.wanted:
                raise ResultsDiffer("its results differ from those of its single launches")
        wait(self.timer.stream)
        need_intact(self.arena)
        return done

    def step(self, k: int | None) -> dict[str, Any]:
        """A step, for a message: its number, operator, ONNX nodes and tactic."""
        if k is None:
            return {"step": None, "kind": "", "nodes": [], "tactic": ""}
        parsed = self.runner.steps[k]
        kind = parsed.meaning.kind if isinstance(parsed, CudaStep) else self.program.steps[k].executor
        tactic = parsed.tactic if isinstance(parsed, CudaStep) else ""
        return {"step": k, "kind": kind, "nodes": list(self.program.steps[k].src), "tactic": tactic}
