"""Mutations of engine files inside of their header and blobs.

Lengths, offsets and digests are corrected, so a reader that checks them sees a file that optdnn could have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from random import Random
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fuzz.protobufs import mutated_model
from fuzz.trees import INTEGERS, copied, encoded, mutated_bytes, mutated_json, mutated_tree, number
from optdnn.errors import OptdnnError
from optdnn.runtime.file import format as file_format
from optdnn.runtime.file.header import OPTIONAL, PROGRAM, minor_of
from optdnn.types import DTYPES

MOST_BYTES = 1 << 16
"""The longest blob after a mutation."""


def unpacked(data: bytes) -> tuple[Any, list[bytes], int]:
    """The header as plain data, the bytes of each blob, and the minor version. Raises EngineError or another error for other
    files."""
    text, end, minor = file_format._checked_header(memoryview(data))
    plain = json.loads(text)
    at = file_format._data_at(end - file_format.HEADER_AT, len(plain["blobs"]))
    return plain, [data[at + b["offset"] : at + b["offset"] + b["length"]] for b in plain["blobs"]], minor


def packed(plain: Any, blobs: list[bytes], minor: int) -> bytes:
    """The file of a header and blobs, with the right prefix and digest of the header."""
    text = encoded(plain)
    offsets, length = file_format.place([len(b) for b in blobs])
    data_at = file_format._data_at(len(text), len(blobs))
    prefix = file_format.PREFIX.pack(file_format.MAGIC, file_format.VERSION[0], minor, len(text), data_at + length, 0)
    made = bytearray(prefix + hashlib.sha256(prefix + text).digest() + text)
    for offset, blob in zip(offsets, blobs, strict=True):
        made += bytes(data_at + offset - len(made)) + blob
    return bytes(made)


def mutated_engine(data: bytes, rng: Random) -> bytes:
    """An engine file with some parts of its header or blobs changed."""
    try:
        plain, blobs, minor = unpacked(data)
    except (OptdnnError, ValueError, TypeError, KeyError, RecursionError):
        return mutated_bytes(data, rng)
    how, before = rng.random(), plain.keys() & OPTIONAL.keys()
    if how < 0.7 or not blobs:
        plain = mutated_tree(plain, rng, skip=("meta", "blobs"))
    elif how < 0.95:
        with contextlib.suppress(
            KeyError, TypeError, AttributeError, IndexError
        ):  # an earlier mutation removed these parts
            (_change_blob if how < 0.85 else _retype)(plain, blobs, rng)
    else:
        return mutated_bytes(packed(plain, blobs, minor), rng)
    if not isinstance(plain, dict):
        return packed(plain, [], minor)
    if rng.random() < 0.9:
        _repair_blobs(plain, blobs)
    if before != plain.keys() & OPTIONAL.keys() or rng.random() < 0.1:
        minor = _minor(plain, minor)
    return packed(plain, blobs, minor)


def _minor(plain: dict[str, Any], minor: int) -> int:
    """The version in the header, if a reader supports it."""
    try:
        parts = {k: v for k, v in plain.items() if k != "blobs"}
        return minor_of(PROGRAM.read(parts, "the header", '"$' in json.dumps(parts)))
    except (OptdnnError, ValueError, RecursionError, TypeError, AttributeError):
        return minor if any(k in plain for k in OPTIONAL) else min(minor, 6)


def _change_blob(plain: dict[str, Any], blobs: list[bytes], rng: Random) -> None:
    k = rng.randrange(len(blobs))
    blobs[k] = _mutated_blob(blobs[k], rng)
    entry = plain["blobs"][k]
    if (entry["dtype"], len(entry["shape"])) == ("uint8", 1):  # consecutive bytes, possibly more or fewer than before
        entry["shape"] = [len(blobs[k])]


def _mutated_blob(blob: bytes, rng: Random) -> bytes:
    """Another ONNX model in canonical form, another JSON text, or other bytes, depending on the blob."""
    if len(blob) > 8 and blob[:1] == b"\x08":
        try:
            onnx.ModelProto.FromString(blob)
            return mutated_model(blob, rng, raw=0.0)
        except DecodeError:
            pass
    if blob[:1] in (b"{", b"["):
        return mutated_json(blob, rng)
    if rng.random() < 0.5 and blob:
        made = bytearray(blob)
        made[rng.randrange(len(made))] = rng.randrange(256)
        return bytes(made)
    return mutated_bytes(blob, rng)


def _retype(plain: dict[str, Any], blobs: list[bytes], rng: Random) -> None:
    """Another type or shape for a buffer, its blob and its ports, the same for all."""
    if not plain["buffers"]:
        return
    k = rng.randrange(len(plain["buffers"]))
    buffer = plain["buffers"][k]
    dtype, shape = buffer["dtype"], copied(buffer["shape"])
    if rng.random() < 0.4:
        dtype = rng.choice(sorted(DTYPES))
    elif isinstance(shape, list) and shape and rng.random() < 0.7:
        at = rng.randrange(len(shape))
        old = shape[at] if isinstance(shape[at], int) else 2
        shape[at] = max(0, number(old, rng)) if rng.random() < 0.8 else rng.choice(("n", "m + 1", 0))
    elif isinstance(shape, list):
        shape = [*shape, 1] if rng.random() < 0.5 else shape[1:]
    blob = buffer["blob"]
    same = [b for b in plain["buffers"] if blob is not None and b["blob"] == blob] or [buffer]
    ports = [p for side in ("inputs", "outputs") for p in plain[side] if p["buffer"] == k]
    entries = [plain["blobs"][blob]] if isinstance(blob, int) and blob < len(plain["blobs"]) else []
    for part in (*same, *ports, *entries):
        part["dtype"], part["shape"] = dtype, copied(shape)
    if rng.random() < 0.5:
        plain["arena_bytes"] = rng.choice((plain["arena_bytes"], *INTEGERS[:24]))


def _repair_blobs(plain: dict[str, Any], blobs: list[bytes]) -> None:
    """Blobs that fit their table: as many and as long as it declares, if possible; then offsets and digests."""
    entries = plain.get("blobs")
    if not isinstance(entries, list):
        return
    while len(blobs) < len(entries):
        blobs.append(b"")
    del blobs[len(entries) :]
    for k, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        size = _size(entry)
        if size is not None:
            blobs[k] = blobs[k][:size] + bytes(size - len(blobs[k][:size]))
            entry["length"] = size
        entry["sha256"] = hashlib.sha256(blobs[k]).hexdigest()
    for entry, offset in zip(entries, file_format.place([len(b) for b in blobs])[0], strict=True):
        if isinstance(entry, dict):
            entry["offset"] = offset


def _size(entry: dict[str, Any]) -> int | None:
    """The bytes of a blob by its type and shape, if these are valid and the blob is small."""
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or not isinstance(dtype, str) or dtype not in DTYPES:
        return None
    size = DTYPES[dtype].itemsize
    for d in shape:
        if type(d) is not int or d < 0:
            return None
        size *= d
        if size > MOST_BYTES:
            return None
    return size
