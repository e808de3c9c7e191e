"""The process of a front end: HTTP and gRPC on ports that all front ends share, and calls to the server's process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop

from optdnn.serving.frontends.arena import Arena
from optdnn.serving.frontends.channel import Channel
from optdnn.serving.frontends.remote import RemoteCore, unknown
from optdnn.serving.listeners import Listeners
from optdnn.serving.malloc import keep_freed_memory
from optdnn.serving.settings import ServeSettings


async def run(order: Mapping[str, Any]) -> None:
    """Serve until the server's process is gone, or ends this one."""
    settings = ServeSettings([], **order["settings"])
    service = RemoteCore(Arena(order["requests"]), Arena(order["answers"]))
    listeners: list[Listeners] = []

    async def answer(method: str, arguments: Sequence[Any]) -> None:
        if method == "serve":
            listeners.append(Listeners(settings, shared=True))
            await listeners[0].start(service)
        elif method == "stop":
            await listeners[0].stop()
        else:
            raise unknown(method)

    end = socket.socket(fileno=order["end"])
    service.channel = await Channel.over(end, answer, lambda: os._exit(0), service.free)
    await asyncio.Event().wait()


def main() -> None:
    """The process: its argument says where it listens, and which descriptors it has."""
    keep_freed_memory()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
