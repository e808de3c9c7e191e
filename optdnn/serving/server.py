"""The server process: its loop, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

import uvloop

from optdnn import limits
from optdnn.serving.core import Core
from optdnn.serving.frontends.host import FrontEnds
from optdnn.serving.listeners import Listeners
from optdnn.serving.malloc import keep_freed_memory
from optdnn.serving.settings import ServeSettings

Listening = Callable[[int, int], None]
"""Is told the ports of HTTP and gRPC when all models are ready."""


def serve(settings: ServeSettings, listening: Listening) -> None:
    """Serve until SIGTERM or SIGINT. Raises OptdnnError where a port is taken or a model cannot be loaded."""
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listening))


async def _serve(settings: ServeSettings, listening: Listening) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    limits.REQUEST_JSON_BYTES.value  # noqa: B018 (a limit that is no number is an error now, not at the first request)
    ends = FrontEnds(settings) if settings.frontends else Listeners(settings)
    core = Core(settings, ends.arenas if isinstance(ends, FrontEnds) else ())
    loading = asyncio.create_task(core.repository.start())
    stopped = asyncio.create_task(stop.wait())
    left = settings.drain_seconds
    try:
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return
        loading.result()
        serving = await ends.start(core)
        listening(ends.http_port, ends.grpc_port)
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        logging.getLogger("optdnn.serve").info("the server ends after its last request")
        core.repository.closing = True
        began = loop.time()
        await ends.stop()
        # Runs whose clients were sent away share the time.
        left = max(0.0, settings.drain_seconds - (loop.time() - began))
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(loading, return_exceptions=True)
        await core.repository.close(left)
        ends.close()
