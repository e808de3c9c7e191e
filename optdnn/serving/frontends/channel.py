"""Calls between the server's process and a front end: lines of JSON through a socket pair, in both directions, never tensors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, cast

import orjson

from optdnn.serving.refusals import Refusal, Unavailable, refusal_of
from optdnn.serving.workers.messages import error_from, plain_error

Answer = Callable[[str, Sequence[Any]], Awaitable[Any]]
"""Does a call of the other end: its method and arguments -> its value, as JSON has them."""


class Channel(asyncio.Protocol):
    """One end of the connection. ``gone`` is called when the other end is closed; unanswered calls then raise Unavailable.
    ``unclaimed`` gets the value of a call that was canceled meanwhile."""

    def __init__(self, answer: Answer, gone: Callable[[], None], unclaimed: Callable[[Any], None] = lambda value: None):
        self._answer, self._gone, self._unclaimed = answer, gone, unclaimed
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._rest = b""
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def over(cls, end: socket.socket, *given: Any) -> Channel:
        """A channel over one end of a socket pair; ``given`` are the arguments of its making."""
        _, made = await asyncio.get_running_loop().create_unix_connection(lambda: cls(*given), sock=end)
        return made

    async def call(self, method: str, *arguments: Any) -> Any:
        """The value of a method of the other end. A call that is canceled here is canceled there.

        Raises the refusal that it ends with."""
        number = next(self._numbers)
        self._write(["call", number, method, arguments])
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            if self._transport is not None:
                self._write(["cancel", number])
            raise
        finally:
            del self._waiting[number]

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method whose value nobody waits for."""
        if self._transport is not None:
            self._write(["tell", 0, method, arguments])

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, message: list[Any]) -> None:
        if self._transport is None:
            raise Unavailable("the other process of the server is gone")
        try:
            text = orjson.dumps(message)
        except orjson.JSONEncodeError as error:  # it comes from JSON or protobuf, whose values only nest deeper
            raise Refusal("the request has values that are nested too deeply") from error
        self._transport.write(text + b"\n")

    # ------------------------------------------------------------------ called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._received(*orjson.loads(line))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the other process of the server is gone"))
        for task in tuple(self._running.values()):
            task.cancel()
        self._gone()

    def _received(self, kind: str, number: int, *rest: Any) -> None:
        if kind in ("call", "tell"):
            task = asyncio.create_task(self._do(kind, number, *rest))
            if kind == "call":
                self._running[number] = task
        elif kind == "cancel":
            if (running := self._running.get(number)) is not None:
                running.cancel()
        else:
            self._ended(kind, self._waiting.get(number), *rest)

    def _ended(self, kind: str, future: asyncio.Future[Any] | None, value: Any) -> None:
        """A call of this end has a value or an error."""
        if future is None or future.done():
            if kind == "value":
                self._unclaimed(value)
        elif kind == "error":
            future.set_exception(error_from(value))
        else:
            future.set_result(value)

    async def _do(self, kind: str, number: int, method: str, arguments: Sequence[Any]) -> None:
        try:
            message = ["value", number, await self._answer(method, arguments)]
        except Exception as error:
            message = ["error", number, plain_error(refusal_of(error))]
        finally:
            if kind == "call":
                del self._running[number]
        if kind == "call" and self._transport is not None:
            self._write(message)
