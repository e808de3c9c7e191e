"""The processes of several ranks, connected by TCP: a star with rank 0 as the hub.

Each rank has two connections to the hub. One carries the exchanges of the ranks. The other is idle until a rank leaves; if
it ends before that, the rank is lost. Every rank then learns of it immediately: its waits end with RankError, and its callbacks
(which abort collectives on the GPU) are called.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from optdnn.errors import InternalError, RankError
from optdnn.runtime.workers.wire import receive, send
from optdnn.types import Array

JOIN_S = 60.0
"""Seconds that ranks started by a launcher wait for one another."""
LEFT_S = 7.0
"""Seconds that work continues after another rank has left in order: that rank's contribution may already have arrived."""
SAY_S = 2.0
"""Seconds that a rank with a broken connection waits for the reason."""
_BYE, _LOST = b"B", b"L"
_LENGTH = struct.Struct("<H")
Message = tuple[dict[str, Any], dict[str, Array]]


class Group:
    """The connection of one rank. ``data`` and ``alive``: the hub has one of each per other rank, another rank has one of each."""

    def __init__(self, rank: int, world: int, data: list[socket.socket], alive: list[socket.socket]):
        self.rank, self.world = rank, world
        self._data, self._alive = data, alive
        self._streams: list[Any] = [s.makefile("rwb") for s in data]
        self.lost: str | None = None
        """Why the ranks cannot continue."""
        self._left: str | None = None
        self._begun, self._ended = 0, 0
        self._closing = False
        self._said = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        for k, one in enumerate(alive):
            name = k + 1 if rank == 0 else 0
            threading.Thread(target=self._watch, args=(one, name), name="optdnn-ranks", daemon=True).start()

    # ---------------------------------------------------------------- exchange

    def exchange(self, message: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> list[Message]:
        """The messages of all ranks, in rank order; each rank calls this. Raises RankError if another rank is lost."""
        own: Message = (dict(message), dict(arrays or {}))
        try:
            if self.rank == 0:
                found = [own, *(self._receive(s) for s in self._streams)]
                for stream in self._streams:
                    for one in found:
                        send(stream, *one)
                return found
            send(self._streams[0], *own)
            return [self._receive(self._streams[0]) for _ in range(self.world)]
        except (OSError, ValueError, InternalError):
            self._said.wait(SAY_S)
            raise RankError(self.lost or "the connection to another rank broke") from None

    def gather(self, array: Array) -> list[Array]:
        """See :class:`optdnn.runtime.ranks.exchange.Exchange`."""
        return [arrays["x"] for _, arrays in self.exchange({}, {"x": array})]

    @staticmethod
    def _receive(stream: Any) -> Message:
        found = receive(stream)
        if found is None:
            raise OSError
        return found

    # ---------------------------------------------------------------- watching

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a rank is lost (immediately, if one already is)."""
        with self._lock:
            if self.lost is None:
                self._callbacks.append(callback)
                return
        callback()

    def check(self) -> None:
        """Raise RankError if a rank is lost."""
        if self.lost is not None:
            raise RankError(self.lost, hint="load the engine again")

    def begin(self) -> None:
        """Called before work in which all ranks take part. Raises RankError if a rank is lost, or has left."""
        self._begun += 1  # first: a rank that leaves from here on finds this work
        try:
            if self._left is not None:
                self.fail(self._left)  # others may have begun, and wait for this rank
            self.check()
        except RankError:
            self.end()
            raise

    def end(self) -> None:
        """Called after the work that was begun has ended, with or without success."""
        self._ended = self._begun

    def _without(self, name: int) -> None:
        """A rank has left in order: nothing more can begin, and work that continues for long waits for that rank."""
        self._left = f"rank {name} of {self.world} has left"
        begun, limit = self._begun, time.monotonic() + LEFT_S
        while self._ended != begun and not self._closing:
            if time.monotonic() > limit:
                self.fail(f"rank {name} of {self.world} left while others ran")
                return
            time.sleep(0.05)

    def fail(self, why: str) -> None:
        """Tell every rank that the ranks cannot continue."""
        with self._lock:
            if self.lost is not None or self._closing:
                return
            self.lost = why
            callbacks = list(self._callbacks)
        text = why.encode()[:60000]
        for one in self._alive:
            with contextlib.suppress(OSError):
                one.sendall(_LOST + _LENGTH.pack(len(text)) + text)
        self._said.set()
        for one in self._data:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for callback in callbacks:
            callback()

    def _watch(self, one: socket.socket, name: int) -> None:
        try:
            said = one.recv(1)
            if self._closing:
                return
            if said == _BYE:
                self._without(name)
                return
            if said == _LOST:
                size = _LENGTH.unpack(one.recv(_LENGTH.size, socket.MSG_WAITALL))[0]
                self.fail(one.recv(size, socket.MSG_WAITALL).decode(errors="replace"))
                return
        except (OSError, struct.error):
            pass
        self.fail(f"rank {name} of {self.world} ended while others ran")

    def close(self) -> None:
        """Leave; the others continue without an error."""
        with self._lock:
            self._closing = True
        for one in self._alive:
            with contextlib.suppress(OSError):
                one.sendall(_BYE)
        for stream in (*self._streams, *self._data, *self._alive):
            with contextlib.suppress(OSError, ValueError):
                stream.close()


class Hub:
    """Rank 0 before the other ranks have connected. ``token``: the secret that they must send."""

    def __init__(self, world: int, host: str = "127.0.0.1", port: int = 0, token: str | None = None):
        self.world, self.token = world, secrets.token_hex(16) if token is None else token
        try:
            self._socket = socket.create_server((host, port), backlog=2 * world)
        except OSError as error:
            raise RankError(f"rank 0 cannot listen on {host}:{port}: {error}") from error
        self._socket.settimeout(0.2)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, check: Callable[[], None] = lambda: None, limit: float = JOIN_S) -> Group:
        """Wait for the other ranks. ``check`` is called meanwhile, and may raise. Raises RankError if they do not connect."""
        found: dict[tuple[str, int], socket.socket] = {}
        end = time.monotonic() + limit
        try:
            while len(found) < 2 * (self.world - 1):
                check()
                if time.monotonic() > end:
                    missing = sorted(set(range(1, self.world)) - {r for name, r in found if name == "alive"})
                    raise RankError(f"ranks {', '.join(map(str, missing))} did not connect within {limit:g} s")
                with contextlib.suppress(TimeoutError):
                    self._admit(self._socket.accept()[0], found)
        except BaseException:
            for one in found.values():
                one.close()
            raise
        finally:
            self._socket.close()
        sides = [[found[name, r] for r in range(1, self.world)] for name in ("data", "alive")]
        return Group(0, self.world, *sides)

    def _admit(self, one: socket.socket, found: dict[tuple[str, int], socket.socket]) -> None:
        """Accept a connection of another rank. A rank of another world size ends the start on both sides."""
        one.settimeout(10)
        _without_delay(one)
        try:
            with one.makefile("rwb") as stream:
                hello, _ = Group._receive(stream)
                if not secrets.compare_digest(str(hello.get("token")), self.token):
                    one.close()
                    return
                key = (str(hello["channel"]), int(hello["rank"]))
                why = None
                if hello["world"] != self.world:
                    why = f"rank {key[1]} was started as one of {hello['world']} ranks, rank 0 as one of {self.world}"
                elif key in found or not 1 <= key[1] < self.world or key[0] not in ("data", "alive"):
                    why = f"two processes are rank {key[1]}, or it is not one of {self.world} ranks"
                send(stream, {"why": why})  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, InternalError):
            one.close()
            return
        if why is not None:
            one.close()
            raise RankError(why)
        one.settimeout(None)
        found[key] = one


def join(address: tuple[str, int], rank: int, world: int, token: str, limit: float = JOIN_S) -> Group:
    """The group of a rank other than 0. Raises RankError if rank 0 does not answer, or refuses."""
    end = time.monotonic() + limit
    sides: list[socket.socket] = []
    for channel in ("data", "alive"):
        one = _connected(address, end)
        _without_delay(one)
        with one.makefile("rwb") as stream:
            try:
                send(stream, {"token": token, "rank": rank, "world": world, "channel": channel})  # type: ignore[arg-type]
                answer, _ = Group._receive(stream)
            except (OSError, ValueError, InternalError):
                raise RankError(f"rank 0 at {address[0]}:{address[1]} refused the connection") from None
        if answer["why"] is not None:
            raise RankError(str(answer["why"]))
        one.settimeout(None)
        sides.append(one)
    return Group(rank, world, sides[:1], sides[1:])


def _connected(address: tuple[str, int], end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() > end:
                raise RankError(f"rank 0 does not answer at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.05)


def _without_delay(one: socket.socket) -> None:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def bytes_of(data: bytes) -> Array:
    """Bytes as an array, to be exchanged."""
    return np.frombuffer(data, np.uint8)
