"""The servers of HTTP and gRPC of one process, and their ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from optdnn import limits
from optdnn.errors import UsageError
from optdnn.serving.grpc_service import add_to_server
from optdnn.serving.http_app import http_app
from optdnn.serving.service import Service
from optdnn.serving.settings import ServeSettings


class _HttpServer(uvicorn.Server):
    """uvicorn without its handlers of signals: they are for both protocols."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


HEAD_BYTES = 1 << 16
"""Most bytes of the line and headers of a request."""


class _HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a bound on what its parser keeps: a head, or the trailers of a body, can have any length."""

    _kept = 0

    def data_received(self, data: bytes) -> None:
        self._kept += len(data)
        super().data_received(data)
        if self._kept > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request has more than {HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._kept = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._kept = 0
        super().on_body(body)


class Listeners:
    """Both protocols on their ports. ``shared``: other processes listen on the same ports.

    Raises UsageError where a port is taken."""

    def __init__(self, settings: ServeSettings, shared: bool = False):
        self._drain_seconds = settings.drain_seconds
        self._socket = listen(settings.host, settings.http_port, shared)
        self._grpc, self.grpc_port = new_grpc_server(settings, shared)
        self.http_port: int = self._socket.getsockname()[1]

    async def start(self, service: Service) -> asyncio.Task[None]:
        """Take requests for ``service``. Returns the task of the HTTP server."""
        add_to_server(service, self._grpc)
        config = uvicorn.Config(
            http_app(service),
            http=_HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(self._drain_seconds),
        )
        self._http = _HttpServer(config)
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        await self._grpc.start()
        return self._serving

    async def stop(self) -> None:
        """Take no further requests, and wait for the current ones, for at most ``drain_seconds`` of the settings."""
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(self._drain_seconds), self._serving)

    def close(self) -> None:
        """Close the port of HTTP."""
        self._socket.close()


def reserve(host: str, port: int) -> socket.socket:
    """A port that processes of this server share: a socket that is bound to it and does not listen.

    Raises UsageError where another program has the port."""
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
        family = alone.family
    kept = socket.socket(family)
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host, port))
    except OSError as error:
        kept.close()
        raise _taken(host, port, error) from error
    return kept


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """A listening socket. Raises UsageError where there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, reuse_port=shared)
    except (OSError, OverflowError) as error:
        raise _taken(host, port, error) from error


def new_grpc_server(settings: ServeSettings, shared: bool) -> tuple[Any, int]:
    """A gRPC server, not yet started, and its port. Raises UsageError where there can be none."""
    most = min(limits.REQUEST_BYTES.value, (1 << 31) - 1)
    options = [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", int(shared)),
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
    return UsageError(
        f"cannot listen on port {port} of {host!r}: {why}",
        hint="--http-port 0 and --grpc-port 0 take a free port; --host must be an address of this machine",
    )
