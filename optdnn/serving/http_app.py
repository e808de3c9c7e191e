"""The HTTP end of the protocol, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from optdnn import limits
from optdnn.serving.http_messages import HEADER_LENGTH, HttpRequest, http_answer, read_json
from optdnn.serving.refusals import Refusal, TooLarge, WrongMedia, refusal_of
from optdnn.serving.service import Service

log = logging.getLogger("optdnn.serve")
Handler = Callable[[Request], Awaitable[Response]]
AT_ONCE = 1 << 24
"""Most bytes of memory that a request gets for its announced length alone. It gets more as bytes arrive."""
CLIENT_GONE = 499
"""The status, seen by nobody but the metrics, of a request whose client went away."""


def http_app(service: Service, *, replica: bool = False) -> Starlette:
    """The application: the routes of the protocol, of its extensions, and of the metrics.

    ``replica``: one of several servers behind one address. It has no routes that would change or show this one alone.
    """
    ends = HttpEnds(service)
    region, cuda = "/v2/systemsharedmemory/region/{region}", "/v2/cudasharedmemory/region/{region}"
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/v2", ends.server),
        ("GET", "/v2/health/live", ends.live),
        ("GET", "/v2/health/ready", ends.ready),
        *_of_model("GET", "", ends.metadata),
        *_of_model("GET", "/ready", ends.model_ready),
        *_of_model("POST", "/infer", ends.infer),
        ("POST", "/v2/repository/index", ends.index),
    ]
    own: list[tuple[str, str, Handler]] = [
        ("POST", "/v2/repository/models/{model}/load", ends.load),
        ("POST", "/v2/repository/models/{model}/unload", ends.unload),
        ("GET", "/v2/systemsharedmemory/status", ends.region_status),
        ("GET", region + "/status", ends.region_status),
        ("POST", region + "/register", ends.register),
        ("POST", "/v2/systemsharedmemory/unregister", ends.unregister),
        ("POST", region + "/unregister", ends.unregister),
        ("GET", "/v2/cudasharedmemory/status", ends.cuda_status),
        ("GET", cuda + "/status", ends.cuda_status),
        ("POST", cuda + "/register", ends.register_cuda),
        ("POST", "/v2/cudasharedmemory/unregister", ends.unregister_cuda),
        ("POST", cuda + "/unregister", ends.unregister_cuda),
        ("GET", "/metrics", ends.metrics),
    ]
    table += [] if replica else own
    routes = [Route(path, answered(handler), methods=[method]) for method, path, handler in table]
    return Starlette(routes=routes, exception_handlers={404: no_such_route, 405: no_such_route})


async def no_such_route(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that the protocol does not have: JSON, as clients of it read."""
    status = getattr(error, "status_code", 404)
    told = f"there is no {request.method} {request.url.path}; a request goes by POST to /v2/models/NAME/infer"
    return as_json({"error": told}, status)


def _of_model(method: str, end: str, handler: Handler) -> list[tuple[str, str, Handler]]:
    return [
        (method, "/v2/models/{model}" + end, handler),
        (method, "/v2/models/{model}/versions/{version}" + end, handler),
    ]


def answered(handler: Handler) -> Handler:
    """``handler``, whose errors become answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.http == 500:
                log.error("%s: %s", request.url.path, refusal.message, exc_info=not isinstance(error, Refusal))
            return as_json({"error": str(refusal)}, refusal.http)

    return answer


def as_json(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")


class HttpEnds:
    """The handlers of the routes."""

    def __init__(self, service: Service):
        self._service = service

    async def server(self, request: Request) -> Response:
        return as_json(await self._service.metadata())

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if await self._service.ready() else 503)

    async def metadata(self, request: Request) -> Response:
        return as_json(await self._service.model_metadata(*_model(request)))

    async def model_ready(self, request: Request) -> Response:
        return Response(status_code=200 if await self._service.model_ready(*_model(request)) else 503)

    async def index(self, request: Request) -> Response:
        wanted = read_json(await body_of(request) or memoryview(b"{}"))
        rows = await self._service.index()
        return as_json([r for r in rows if not wanted.get("ready") or r["state"] == "READY"])

    async def load(self, request: Request) -> Response:
        parameters = read_json(await body_of(request) or memoryview(b"{}")).get("parameters")
        if parameters:
            raise Refusal("a model is loaded only from its file: load takes no parameters")
        await self._service.load(request.path_params["model"])
        return Response()

    async def unload(self, request: Request) -> Response:
        await self._service.unload(request.path_params["model"])
        return Response()

    async def register(self, request: Request) -> Response:
        wanted = read_json(await body_of(request))
        name = request.path_params["region"]
        await self._service.register(name, wanted.get("key"), wanted.get("offset", 0), wanted.get("byte_size"))
        return Response()

    async def unregister(self, request: Request) -> Response:
        await self._service.unregister(request.path_params.get("region", ""))
        return Response()

    async def region_status(self, request: Request) -> Response:
        return as_json(await self._service.region_status(request.path_params.get("region", "")))

    async def register_cuda(self, request: Request) -> Response:
        wanted = read_json(await body_of(request))
        handle = wanted.get("raw_handle")
        name, raw = request.path_params["region"], handle.get("b64") if isinstance(handle, dict) else None
        await self._service.register_cuda(name, raw, wanted.get("device_id"), wanted.get("byte_size"))
        return Response()

    async def unregister_cuda(self, request: Request) -> Response:
        await self._service.unregister_cuda(request.path_params.get("region", ""))
        return Response()

    async def cuda_status(self, request: Request) -> Response:
        return as_json(await self._service.cuda_status(request.path_params.get("region", "")))

    async def metrics(self, request: Request) -> Response:
        return Response(await self._service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def infer(self, request: Request) -> Response:
        with self._service.counted(request.path_params["model"], "http") as status:
            try:
                return await self._infer(request)
            except ClientDisconnect:
                status.append(str(CLIENT_GONE))
                raise
            except Exception as error:
                status.append(str(refusal_of(error).http))
                raise

    async def _infer(self, request: Request) -> Response:
        model, version = _model(request)
        wanted = HttpRequest(await body_of(request, self._service.buffer), request.headers.get(HEADER_LENGTH))
        async with ended_by_disconnect(request):
            outputs = await self._service.infer(wanted.call(model, version))
        pieces, headers = http_answer(model, wanted, outputs)
        return Response(b"".join(pieces) if len(pieces) > 1 else pieces[0], headers=headers)


def _model(request: Request) -> tuple[str, str]:
    """Name and version of the model in a path."""
    path: Mapping[str, str] = request.path_params
    return path["model"], path.get("version", "")


def ordinary_memory(nbytes: int) -> memoryview:
    """Memory of this process."""
    return memoryview(np.empty(nbytes, np.uint8).data)


async def body_of(request: Request, memory: Callable[[int], memoryview] = ordinary_memory) -> memoryview:
    """The body, of at most as many bytes as the server takes. ``memory`` gives memory of a number of bytes.

    Raises TooLarge, before it is read where its length is announced."""
    most = limits.REQUEST_BYTES
    if request.headers.get("content-encoding", "identity") != "identity":
        raise WrongMedia("the body is compressed", hint="send it as it is")
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced[:20]) > most.value:
        raise TooLarge(f"the request has {announced:.24} bytes", hint=most.hint)
    whole = int(announced)
    body, size = memory(min(whole, AT_ONCE)), 0
    async for piece in request.stream():
        end = size + len(piece)
        if end > most.value:
            raise TooLarge(f"the request has more than {most.value} bytes", hint=most.hint)
        if end > len(body):
            longer = memory(min(2 * end, whole if end <= whole else most.value))
            longer[:size] = body[:size]
            body = longer
        body[size:end] = piece
        size = end
    return body[:size]


@contextlib.asynccontextmanager
async def ended_by_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel what runs inside when the client goes away. Raises ClientDisconnect then."""
    mine = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        if mine is not None:
            mine.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        if mine is not None:
            mine.uncancel()
        raise ClientDisconnect from None
    finally:
        watcher.cancel()
