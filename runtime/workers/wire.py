"""The protocol between this process and its workers: frames over a pipe, and the loop that answers them.

A frame is the magic ``OPTW``, the length of a JSON header (u32), the header, and the arrays' bytes. The header describes the arrays
under "arrays". Both ends are one version of optdnn on one machine.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from optdnn.errors import InternalError, OptdnnError
from optdnn.types import DTYPES, Array, dtype_name, raw_bytes

_FRAME = struct.Struct("<4sI")
_MAGIC = b"OPTW"
PARENT_S = 1.0
"""Seconds between a worker's checks that its parent is still alive."""
Answer = tuple[dict[str, Any], dict[str, Array] | None]
"""A message, and the arrays sent with it."""


def send(stream: BinaryIO, message: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
    """Write one frame. Raises OSError (BrokenPipeError) if the other end is closed."""
    pieces, table = [], []
    for name, a in (arrays or {}).items():
        table.append([name, dtype_name(a.dtype), list(a.shape)])
        pieces.append(raw_bytes(a))
    header = json.dumps({**message, "arrays": table}).encode()
    stream.write(_FRAME.pack(_MAGIC, len(header)))
    stream.write(header)
    for piece in pieces:
        stream.write(piece)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """Read one frame: (message, arrays), or None at the end of the stream, even if it ends within a frame."""
    head = stream.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    magic, header_length = _FRAME.unpack(head)
    if magic != _MAGIC:
        raise InternalError("a worker wrote something that is not a frame")
    header = stream.read(header_length)
    if len(header) < header_length:
        return None
    message = json.loads(header)
    arrays: dict[str, Array] = {}
    for name, dtype, shape in message.pop("arrays"):
        arrays[name] = array = np.empty(shape, DTYPES[dtype])
        if not _fill(stream, array):
            return None
    return message, arrays


def _fill(stream: BinaryIO, array: Array) -> bool:
    """Read an array's elements; False if the stream ends before."""
    rest = memoryview(array.reshape(-1).view(np.uint8).data)
    while rest:
        count = stream.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            return False
        rest = rest[count:]
    return True


def run(worker: Any) -> None:
    """Make ``worker`` answer the parent's commands until the parent quits or ends. A command NAME is its method do_NAME.

    The argument of the process is the parent's process id: the parent may end before this process checks.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of a library must not disturb the frames
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), name="optdnn-parent", daemon=True).start()
    serve(sys.stdin.buffer, answers, worker)


def _end_with_parent(parent: int) -> None:
    """End a worker whose parent has ended: a worker that hangs in a library does not notice the closed pipe."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def serve(commands: BinaryIO, answers: BinaryIO, worker: Any) -> None:
    """Answer every command; a failure is an answer, too."""
    while True:
        frame = receive(commands)
        if frame is None or frame[0]["command"] == "quit":
            return
        message, arrays = frame
        try:
            answer, results = getattr(worker, f"do_{message['command']}")(message, arrays)
            send(answers, {"ok": True, **answer}, results)
        except BaseException as e:
            text = e.message if isinstance(e, OptdnnError) else f"{e}".strip() or "no message"
            send(answers, {"ok": False, "error": type(e).__name__, "message": text.splitlines()[0][:500]})
            if not isinstance(e, Exception):
                return
