"""Engines in threads of the server's own process: nothing is copied between processes, and a crash ends the server."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.loading import load
from optdnn.runtime.engine import Engine
from optdnn.serving.datatypes import check_served
from optdnn.serving.facts import ModelFacts, facts_of
from optdnn.serving.tensors import Job, fill, pad
from optdnn.serving.workers.base import Instance, Outcome, Worker

Order = tuple[Job, Callable[[Outcome], None]]


class ThreadInstance(Instance):
    """A thread with a context of the engine."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop):
        self._context = engine.context()
        self._loop = loop
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="optdnn-serve", daemon=True).start()

    def start(self, job: Job, done: Callable[[Outcome], None]) -> None:
        self._orders.put((job, done))

    def end(self) -> None:
        """Let the thread end after its last job."""
        self._orders.put(None)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            job, done = order
            self._loop.call_soon_threadsafe(done, self._run(job))

    def _run(self, job: Job) -> Outcome:
        try:
            feeds = {name: np.empty(shape, dtype) for name, (dtype, shape) in job.shapes.items()}
            fill(feeds, job.parts)
            pad(feeds, job.rows)
            results: Mapping[str, Any] = self._context.run(feeds)
        except Exception as error:
            return error
        return results


class ThreadWorker(Worker):
    """An engine in this process."""

    def __init__(self, engine: Path, options: Mapping[str, Any], instances: int):
        self._path, self._options, self._count = engine, options, instances
        self.instances: tuple[ThreadInstance, ...] = ()

    async def ready(self) -> ModelFacts:
        loop = asyncio.get_running_loop()

        def loaded() -> tuple[tuple[ThreadInstance, ...], ModelFacts]:
            engine = load(self._path, **self._options)
            check_served((*engine.inputs, *engine.outputs))
            facts = facts_of(engine)
            return tuple(ThreadInstance(engine, loop) for _ in range(self._count)), facts

        self.instances, facts = await loop.run_in_executor(None, loaded)
        return facts

    async def close(self) -> None:
        for instance in self.instances:
            instance.end()
