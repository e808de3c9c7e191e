"""The bytes of engine files: how to write, read and forge them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from programs import F32, program

from optdnn.runtime.file import format as fmt
from optdnn.runtime.file import header
from optdnn.runtime.program import Buffer, Program
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.steps.reference import reference_step
from optdnn.types import DTYPES


def contents(p: Program) -> bytes:
    return b"".join(fmt.encode(p))


def decode(data: bytes, **options: Any) -> Program:
    return fmt.decode(memoryview(data), **options)


def header_of(data: bytes) -> Any:
    (length,) = struct.unpack_from("<I", data, 12)
    return json.loads(data[fmt.HEADER_AT : fmt.HEADER_AT + length])


def forge(data: bytes, change: Callable[[Any], Any], text: Callable[[str], str] | None = None) -> bytes:
    """The file with a changed header, and with right lengths and checksums in the prefix."""
    (length,) = struct.unpack_from("<I", data, 12)
    start = fmt.HEADER_AT + length
    blobs = data[-(-start // fmt.PAGE) * fmt.PAGE :] if start < len(data) else b""
    h = header_of(data)
    h = change(h) or h
    new = header.canonical(h) if text is None else text(header.canonical(h))
    raw = new.encode("utf-8", "surrogatepass")
    end = fmt.HEADER_AT + len(raw)
    at = -(-end // fmt.PAGE) * fmt.PAGE if h.get("blobs") else end
    version = struct.unpack_from("<HH", data, 8)
    prefix = fmt.PREFIX.pack(fmt.MAGIC, *version, len(raw), at + len(blobs), 0)
    return prefix + hashlib.sha256(prefix + raw).digest() + raw + bytes(at - end) + blobs


def everything() -> Program:
    """A program with every kind of blob, name, attribute and number that a file can hold."""
    rng = np.random.default_rng(3)
    blobs = [(rng.standard_normal((3, 2)) * 4).astype(d) for n, d in DTYPES.items() if n != "bool"]
    blobs += [
        np.array([True, False]),
        np.float32(7).reshape(()),
        np.empty((0, 3), np.int8),
        np.asfortranarray(np.eye(3)),
    ]
    blobs += [np.arange(20_000, dtype=np.int64), np.ones(1, np.int8)]  # a large one, on its own page
    attrs = {
        "axes": (0, -1),
        "to": DTYPES["bf16"],
        "value": np.array([1.5, np.inf], DTYPES["fp16"]),
        "low": -np.inf,
        "nested": ((1, 2), ()),
        "none": None,
        "epilogue": (PlainStage("Clip", (-1, None, 2), {"alpha": 0.1}),),
    }
    p = program(
        [("Eingabe ä/:0\n☃", F32, ("batch size + 1", 3)), ("empty", np.int64, ())],
        [("y", 2 + len(blobs))],
        [reference_step("Relu", attrs, (0, -1), (2 + len(blobs), -1), ("nœud", 'quo"te'))],
        [(F32, ("batch size + 1", 3))],
        blobs,
        requires=("package:numpy",),
        arena_bytes=4096,
        meta={
            "$key": {"$$": [float("inf"), float("-inf"), -0.0, 1e-300, 2**62, None, True, "$float"]},
            "nan": float("nan"),
            "": [],
        },
    )
    p.buffers = (*p.buffers, Buffer("scratch", F32, (16, 64), offset=0), Buffer("unknown rank", F32, None))
    return p
