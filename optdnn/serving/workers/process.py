"""The server's end of a worker process.

An instance has a connection of its own, and two files in memory: the inputs of its job and the outputs. Only small messages travel.
A process that dies closes its connections: the jobs that it ran end with WorkerLost, and ``on_loss`` is called.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optdnn.errors import OptdnnError
from optdnn.runtime.workers.process import python_command, wait_or_kill
from optdnn.serving.facts import ModelFacts
from optdnn.serving.refusals import Unavailable, WorkerLost
from optdnn.serving.tensors import Job, RegionSlice, fill
from optdnn.serving.workers.base import Instance, Outcome, Worker
from optdnn.serving.workers.memory import SharedMemory, layout_of, new_file
from optdnn.serving.workers.messages import (
    error_from,
    job_message,
    layout_from,
    pair,
    receive,
    send,
)

CLOSE_SECONDS = 5.0


class ProcessInstance(Instance):
    """One thread of a worker process, seen from the server."""

    def __init__(self, end: socket.socket, lost: Callable[[], None]):
        self._end = end
        self._lost = lost
        self._inputs, self._outputs = SharedMemory(new_file()), SharedMemory(new_file())
        self._done: Callable[[Outcome], None] | None = None

    @property
    def memory(self) -> tuple[int, int]:
        """The descriptors of its memory."""
        return self._inputs.descriptor, self._outputs.descriptor

    def start(self, job: Job, done: Callable[[Outcome], None]) -> None:
        layout = layout_of(job.shapes)
        arrays = self._inputs.arrays(layout)
        fill(arrays, [part for part in job.parts if not isinstance(part[2], RegionSlice)])
        self._done = done
        try:
            send(self._end, job_message(job, layout))
        except OSError as error:
            if error.errno == errno.EMSGSIZE:  # many parts in regions: their requests run one by one then
                self._done = None
                raise
            self._lost()

    def forget(self, handles: Sequence[str]) -> None:
        try:
            send(self._end, {"forget": list(handles)})
        except OSError:
            self._lost()

    def answered(self) -> None:
        """Read the answer that has arrived, or learn that the process has died."""
        message = receive(self._end)
        if message is None:
            self._lost()
        elif "error" in message:
            self.finish(error_from(message["error"]))
        else:
            self.finish(self._outputs.arrays(layout_from(message["outputs"])))

    def finish(self, outcome: Outcome) -> None:
        """End the job, if there is one."""
        done, self._done = self._done, None
        if done is not None:
            done(outcome)

    def close(self) -> None:
        self._end.close()
        self._inputs.close()
        self._outputs.close()


class ProcessWorker(Worker):
    """A worker process. ``environment`` is added to this process's own; ``arenas`` are descriptors of memory that it reads.

    Raises Unavailable where no process can be started."""

    def __init__(
        self,
        engine: Path,
        options: Mapping[str, Any],
        instances: int,
        environment: Mapping[str, str],
        on_loss: Callable[[ProcessWorker], None],
        arenas: Sequence[int] = (),
    ):
        self._on_loss = on_loss
        self._gone = False
        self._ends: list[socket.socket] = []
        theirs: list[socket.socket] = []
        made: list[ProcessInstance] = []
        try:
            for _ in range(instances):
                ours, other = pair()
                self._ends.append(ours)
                theirs.append(other)
                made.append(ProcessInstance(ours, self._lost))
            rows = [(end.fileno(), *i.memory) for end, i in zip(theirs, made, strict=True)]
            order = {"engine": str(engine), "options": dict(options), "instances": rows}
            self._process = subprocess.Popen(
                python_command("optdnn.serving.workers.child:main", json.dumps(order)),
                stdin=subprocess.DEVNULL,
                pass_fds=[*arenas, *(descriptor for row in rows for descriptor in row)],
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C in the terminal ends the server, which ends its workers when they are done
            )
        except OSError as error:
            for instance in made:
                instance.close()
            raise Unavailable(f"no worker process can be started: {error.strerror}") from error
        finally:
            for end in theirs:
                end.close()
        self.instances: tuple[ProcessInstance, ...] = tuple(made)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> ModelFacts:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()
        first = self._ends[0]

        def readable() -> None:
            if not told.done():
                told.set_result(None)

        loop.add_reader(first, readable)
        try:
            await told
        finally:
            loop.remove_reader(first)
        message = receive(first)
        if message is None or "error" in message:
            await self.close()
            raise error_from(message["error"]) if message else self._died_loading()
        for end, instance in zip(self._ends, self.instances, strict=True):
            loop.add_reader(end, instance.answered)
        return ModelFacts.from_plain(message["facts"])

    def _died_loading(self) -> OptdnnError:
        return WorkerLost(f"the worker process ended with code {self._process.returncode} while it loaded the engine")

    def _lost(self) -> None:
        """The process has died, or has closed a connection, which is treated alike."""
        if self._gone:
            return
        self._gone = self.lost = True
        self._release()
        self._process.kill()
        self._on_loss(self)
        for instance in self.instances:
            instance.finish(WorkerLost("the process that ran this request has died; another one takes its place"))

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        for end, instance in zip(self._ends, self.instances, strict=True):
            loop.remove_reader(end)
            instance.close()

    async def close(self) -> None:
        if not self._gone:
            self._gone = True
            self._release()
            for instance in self.instances:
                instance.finish(WorkerLost("the server has ended the process that ran this request"))
        await asyncio.get_running_loop().run_in_executor(None, wait_or_kill, self._process, CLOSE_SECONDS)
