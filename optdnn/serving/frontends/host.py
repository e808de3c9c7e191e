"""The front ends of a server: processes that read requests and write answers. The server's process starts them, does their calls,
and replaces one that dies. Only the clients of a dead front end are affected: they lose their connections."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from optdnn.errors import OptdnnError
from optdnn.runtime.workers.process import python_command, wait_or_kill
from optdnn.serving.core import Core
from optdnn.serving.frontends.arena import Arena, new_arena
from optdnn.serving.frontends.channel import Channel
from optdnn.serving.frontends.remote import PLAIN, call_from, plain_answer, unknown
from optdnn.serving.listeners import reserve
from optdnn.serving.refusals import Unavailable
from optdnn.serving.settings import ServeSettings

log = logging.getLogger("optdnn.serve")
END_SECONDS = 5.0
"""How long a front end has to end after its last request."""


class FrontEnd:
    """The place of one front end: its memory, and the process that has it now."""

    def __init__(self, settings: dict[str, Any], gone: asyncio.Queue[FrontEnd]):
        self._settings, self._gone = settings, gone
        self.requests = new_arena()
        self._answers = Arena(new_arena())
        self._held: dict[int, memoryview] = {}
        self.spawn()

    def spawn(self) -> None:
        """Start a process. Raises Unavailable where none can be started."""
        self._end, theirs = socket.socketpair()
        descriptors = {"requests": self.requests, "answers": self._answers.descriptor, "end": theirs.fileno()}
        order = json.dumps({**descriptors, "settings": self._settings})
        try:
            self._process = subprocess.Popen(
                python_command("optdnn.serving.frontends.child:main", order),
                stdin=subprocess.DEVNULL,
                pass_fds=list(descriptors.values()),
                start_new_session=True,  # as workers: the server ends it
            )
        except OSError as error:
            self._end.close()
            raise Unavailable(f"no front end can be started: {error.strerror}") from error
        finally:
            theirs.close()

    async def serve(self, core: Core) -> None:
        """Let the process take requests. Raises OptdnnError where it cannot."""
        self._held.clear()
        self._core = core
        self._channel = await Channel.over(self._end, self._answer, lambda: self._gone.put_nowait(self))
        await self._channel.call("serve")

    async def _answer(self, method: str, arguments: Sequence[Any]) -> Any:
        if method == "infer":
            outputs = await self._core.infer(call_from(arguments[0], self.requests))
            return plain_answer(outputs, self._answers, self._held)
        if method == "free":
            for place in arguments[0]:
                self._held.pop(place, None)
        elif method == "count":
            self._core.count(*arguments)
        elif method in PLAIN:
            return await getattr(self._core, method)(*arguments)
        else:
            raise unknown(method)
        return None

    async def stop(self) -> None:
        """Let it end after its last request."""
        try:
            await self._channel.call("stop")
        except OptdnnError:  # it is gone already
            return

    def reap(self) -> None:
        """Wait for the process, whose channel is closed."""
        wait_or_kill(self._process, END_SECONDS)

    def close(self) -> None:
        """End the process, and close its memory."""
        self._process.kill()
        self._process.wait()
        os.close(self.requests)
        os.close(self._answers.descriptor)


class FrontEnds:
    """The front ends of a server, which share its ports. Raises UsageError where a port is taken."""

    def __init__(self, settings: ServeSettings):
        self._reserved = [reserve(settings.host, port) for port in (settings.http_port, settings.grpc_port)]
        self.http_port, self.grpc_port = (int(s.getsockname()[1]) for s in self._reserved)
        given = {"host": settings.host, "http_port": self.http_port, "grpc_port": self.grpc_port,
                 "drain_seconds": settings.drain_seconds}  # fmt: skip
        self._seconds = settings.drain_seconds
        self._gone: asyncio.Queue[FrontEnd] = asyncio.Queue()
        self._ends = [FrontEnd(given, self._gone) for _ in range(settings.frontends)]

    @property
    def arenas(self) -> list[int]:
        """Descriptors of the memory of requests, which workers read."""
        return [end.requests for end in self._ends]

    async def start(self, core: Core) -> asyncio.Task[None]:
        """Take requests for the models of ``core``. Returns the task that replaces front ends."""
        await asyncio.gather(*(end.serve(core) for end in self._ends))
        self._keeper = asyncio.create_task(self._replace(core))
        return self._keeper

    async def _replace(self, core: Core) -> None:
        while True:
            end = await self._gone.get()
            log.error("a front end has died")
            try:
                await asyncio.get_running_loop().run_in_executor(None, end.reap)
                end.spawn()
                await end.serve(core)
            except OptdnnError as error:
                log.error("a front end cannot be replaced: %s", error.message)
                await asyncio.sleep(1.0)
                self._gone.put_nowait(end)

    async def stop(self) -> None:
        """Take no further requests, and wait for the current ones, for at most ``drain_seconds`` of the settings."""
        self._keeper.cancel()
        await asyncio.wait([asyncio.create_task(end.stop()) for end in self._ends], timeout=self._seconds + END_SECONDS)

    def close(self) -> None:
        """End all processes, and give the ports back."""
        for end in self._ends:
            end.close()
        for port in self._reserved:
            port.close()
