"""The messages between the server and a worker process: JSON through a socket pair, never tensors."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Any

import orjson

from optdnn.errors import InputError, OptdnnError
from optdnn.serving.refusals import REFUSALS, RunFailed
from optdnn.serving.tensors import DeviceSlice, DeviceTarget, Job, RegionSlice
from optdnn.types import DTYPES, DType, dtype_name

MESSAGE_BYTES = 1 << 20
"""Longest message."""
Layout = list[tuple[str, DType, tuple[int, ...], int]]
"""Name, dtype, shape and offset of tensors in shared memory."""


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection that keeps messages apart."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    return ends


def send(end: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message. Raises OSError where the other end is gone; its errno is EMSGSIZE for a message that is too long."""
    text = orjson.dumps(message)
    if len(text) > MESSAGE_BYTES:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    end.send(text)


def receive(end: socket.socket) -> dict[str, Any] | None:
    """The next message; None where the other end is gone."""
    try:
        text = end.recv(MESSAGE_BYTES)
    except ConnectionError:
        return None
    found: dict[str, Any] | None = orjson.loads(text) if text else None
    return found


def job_message(job: Job, layout: Layout) -> dict[str, Any]:
    """A job whose arrays are in shared memory already; the worker reads and writes the parts in memory of clients itself."""
    regions = [
        (name, row, part.key, part.offset, part.nbytes)
        for name, row, part in job.parts
        if isinstance(part, RegionSlice)
    ]
    message = {"inputs": plain_layout(layout), "rows": job.rows, "regions": regions}
    device = [
        (name, row, part.handle, part.offset, part.nbytes)
        for name, row, part in job.parts
        if isinstance(part, DeviceSlice)
    ]
    if device or job.targets:
        message["device"] = device
        message["targets"] = [
            (t.name, t.row, t.rows, t.before, t.memory.handle, t.memory.offset, t.memory.nbytes) for t in job.targets
        ]
    return message


def plain_layout(layout: Layout) -> list[Any]:
    """JSON-like."""
    return [(name, dtype_name(dtype), shape, offset) for name, dtype, shape, offset in layout]


def layout_from(plain: list[Any]) -> Layout:
    """The inverse of :func:`plain_layout`."""
    return [(name, DTYPES[dtype], tuple(shape), offset) for name, dtype, shape, offset in plain]


def regions_from(plain: list[Any]) -> list[tuple[str, int, RegionSlice]]:
    """The parts of a job that lie in regions of clients."""
    return [(name, row, RegionSlice(key, offset, nbytes)) for name, row, key, offset, nbytes in plain]


def device_from(
    message: Mapping[str, Any],
) -> tuple[list[tuple[str, int, DeviceSlice | RegionSlice]], list[DeviceTarget]]:
    """The parts of a job that lie in memory of clients on the GPU, and the outputs that go there."""
    parts: list[tuple[str, int, DeviceSlice | RegionSlice]] = [
        (name, row, DeviceSlice(*where)) for name, row, *where in message.get("device", ())
    ]
    targets = [
        DeviceTarget(name, row, rows, before, DeviceSlice(*where))
        for name, row, rows, before, *where in message.get("targets", ())
    ]
    return parts, targets


def plain_error(error: BaseException) -> list[str | int | None]:
    """An error as type, message, hint and exit code."""
    kind = type(error).__name__
    if isinstance(error, OptdnnError):
        return [kind, error.message, error.hint, error.exit_code]
    return [kind, f"{type(error).__name__}: {error}"[:1000], None, OptdnnError.exit_code]


def error_from(plain: list[Any]) -> OptdnnError:
    """The inverse of :func:`plain_error`. An error that is neither InputError nor a refusal becomes RunFailed."""
    kind, message, hint, code = plain
    known: dict[str, type[OptdnnError]] = {"InputError": InputError, **REFUSALS}
    made = known.get(kind, RunFailed)(message, hint=hint)
    made.exit_code = code
    return made
