"""The protocol between the race and its worker processes: frames over a pipe.

A frame is the magic ``OPTW``, the length of a JSON header (u32), the length of a payload (u64), the header, the payload.
Arrays travel in the payload, described in the header under "arrays". Both ends are one version of optdnn on one machine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from optdnn.errors import InternalError
from optdnn.types import DTYPES, Array, dtype_name

_FRAME = struct.Struct("<4sIQ")
_MAGIC = b"OPTW"


def send(stream: BinaryIO, message: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
    """Write one frame. Raises OSError (BrokenPipeError) when the other end is gone."""
    pieces, table = [], []
    for name, a in (arrays or {}).items():
        table.append([name, dtype_name(a.dtype), list(a.shape)])
        pieces.append(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
    header = json.dumps({**message, "arrays": table}).encode()
    stream.write(_FRAME.pack(_MAGIC, len(header), sum(map(len, pieces))))
    stream.write(header)
    for piece in pieces:
        stream.write(piece)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """Read one frame: (message, arrays), or None at the end of the stream, also when it ends within a frame."""
    head = stream.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    magic, header_length, payload_length = _FRAME.unpack(head)
    if magic != _MAGIC:
        raise InternalError("a worker wrote something that is no frame")
    header = stream.read(header_length)
    if len(header) < header_length:
        return None
    message = json.loads(header)
    arrays: dict[str, Array] = {}
    for name, dtype, shape in message.pop("arrays"):
        arrays[name] = array = np.empty(shape, DTYPES[dtype])
        payload_length -= array.nbytes
        if not _fill(stream, array):
            return None
    if payload_length:
        raise InternalError("a worker's frame is not as long as its arrays")
    return message, arrays


def _fill(stream: BinaryIO, array: Array) -> bool:
    """Read an array's elements; False where the stream ends before."""
    rest = memoryview(array.reshape(-1).view(np.uint8).data)
    while rest:
        count = stream.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            return False
        rest = rest[count:]
    return True
