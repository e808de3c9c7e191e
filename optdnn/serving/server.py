"""The server process: its loop, its ports, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import uvicorn
import uvloop
from tritonclient.grpc import service_pb2_grpc

from optdnn import limits
from optdnn.errors import UsageError
from optdnn.serving.core import Core
from optdnn.serving.grpc_service import GrpcService
from optdnn.serving.http_app import http_app
from optdnn.serving.settings import ServeSettings

Listening = Callable[[int, int], None]
"""Is told the ports of HTTP and gRPC when all models are ready."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its handlers of signals: they are for both protocols."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: ServeSettings, listening: Listening) -> None:
    """Serve until SIGTERM or SIGINT. Raises OptdnnError where a port is taken or a model cannot be loaded."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listening))


async def _serve(settings: ServeSettings, listening: Listening) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    limits.REQUEST_JSON_BYTES.value  # noqa: B018 (a limit that is no number is an error now, not at the first request)
    http_socket = listen(settings.host, settings.http_port)
    grpc_server, grpc_port = new_grpc_server(settings)
    core = Core(settings)
    loading = asyncio.create_task(core.repository.start())
    stopped = asyncio.create_task(stop.wait())
    left = settings.drain_seconds
    try:
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return
        loading.result()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcService(core), grpc_server)
        http_server = _HttpServer(_http_config(core, settings))
        serving = asyncio.create_task(http_server.serve(sockets=[http_socket]))
        await grpc_server.start()
        listening(http_socket.getsockname()[1], grpc_port)
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        logging.getLogger("optdnn.serve").info("the server ends after its last request")
        core.repository.closing = True
        http_server.should_exit = True
        began = loop.time()
        await asyncio.gather(grpc_server.stop(settings.drain_seconds), serving)
        left = max(
            0.0, settings.drain_seconds - (loop.time() - began)
        )  # runs whose clients were sent away share the time
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(loading, return_exceptions=True)
        await core.repository.close(left)
        http_socket.close()


def _http_config(core: Core, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        http_app(core),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds),
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError where there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise _taken(host, port, error) from error


def new_grpc_server(settings: ServeSettings) -> tuple[Any, int]:
    """A gRPC server, not yet started, and its port. Raises UsageError where there can be none."""
    most = min(limits.REQUEST_BYTES.value, (1 << 31) - 1)
    options = [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{settings.grpc_port}")
    except RuntimeError as error:
        raise _taken(settings.host, settings.grpc_port, error) from error
    return server, port


def _taken(host: str, port: int, error: Exception) -> UsageError:
    why = getattr(error, "strerror", None) or "it cannot be bound"
    return UsageError(f"port {port} of {host!r} is not free: {why}", hint="--http-port 0 and --grpc-port 0 take any")
