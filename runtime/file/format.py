"""The engine file.

::

    offset  size
         0     8  magic  89 4F 50 54 44 4E 4E 0A   (not text; a line-ending conversion breaks it)
         8     2  major version of the format, little-endian as all numbers
        10     2  minor version
        12     4  length of the header in bytes
        16     8  length of the file in bytes
        24     8  zero
        32    32  SHA-256 of bytes 0..31 and of the header
        64     …  header: canonical JSON (UTF-8, sorted keys, no spaces)
         …     …  blobs in order, from the next multiple of 4096, each at the next multiple of its alignment

The header holds the whole :class:`~optdnn.runtime.program.Program` except the blobs' contents; for each blob its dtype,
shape, offset (from the first blob), length and SHA-256. A blob is the array's little-endian C-order bytes, aligned to 4096
bytes if it is at least 64 KiB long (a mapped weight then starts on a page) and to 64 bytes otherwise. The bytes between
blobs are zero, and the file ends with the last blob. The file contains nothing to execute: no pickle, no names to import, no
host code.

One program has exactly one file, byte for byte: the reader accepts only the header text and the blob offsets that the writer would
have written. So truncated, extended, overlapping or reordered files are refused by construction. The checksums detect every
accidental change; they do not protect against forgery. Signatures do (:mod:`optdnn.runtime.file.signatures`).

Floats that JSON lacks are ``{"$float": "inf" | "-inf" | "nan"}``; a key of a user's table that starts with "$" is written
with one more "$".

Compatibility: a reader of version M.m reads every file of M.0 to M.m. A minor version may only add optional keys to the header,
or to the parameters of steps (which older readers would refuse, hence the number). Anything else needs a new major version, and
the next optdnn after it still reads the previous major version. tests/golden holds an engine of each version, which must load and
run forever.
"""

from __future__ import annotations

import hashlib
import mmap as mapping
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from optdnn.errors import EngineError, InternalError, ShapeError, UnsupportedError, UsageError
from optdnn.limits import HEADER_BYTES
from optdnn.regular_file import open_regular
from optdnn.runtime.file.atomic import write_atomic
from optdnn.runtime.file.header import BlobEntry, header_text, minor_of, parse_header
from optdnn.runtime.file.kinds import BEGINNING, kind_of
from optdnn.runtime.file.signatures import SignedBy, check_signatures, signers
from optdnn.runtime.file.validate import validate
from optdnn.runtime.mapped import MappedFile
from optdnn.runtime.program import Program, programs_of
from optdnn.types import Array, dtype_name, raw_bytes

MAGIC = b"\x89OPTDNN\n"
VERSION = (1, 7)
"""The newest format. 1.1 added the table of GPU kernels, 1.2 profiles and plans for several shapes, 1.3 plans for
values of shape inputs, 1.4 lanes, 1.5 retained buffers. 1.6 added keys inside: the waits of a launch
(``waits``), the inputs of a CPU library's step that may be empty (``empty``), the shapes of the values of a body of If, Loop or
Scan, and the calibration that plans for further sizes use to quantize (``calibration`` of a source). 1.7 added the programs of
several ranks.

A program is written in the oldest version that can hold it."""
PREFIX = struct.Struct("<8sHHIQQ")
HEADER_AT = PREFIX.size + 32
PAGE, LINE, LARGE = 4096, 64, 1 << 16
"""Alignment of the data and of large blobs, alignment of other blobs, and the least size of a large blob; in bytes."""

# ---------------------------------------------------------------- writing


def write(program: Program, path: str | os.PathLike[str]) -> None:
    """Write the engine file atomically: others see the old file or the whole new one.

    Raises OutputError if it cannot be written (nothing is left behind), InternalError for a program that is not valid.
    """
    write_atomic(path, encode(program))


def encode(program: Program) -> list[bytes | memoryview]:
    """The file's contents in pieces, blobs not copied. Raises InternalError for a program that is not valid."""
    _need_little_endian()
    try:
        validate(program)
    except EngineError as e:
        raise InternalError(f"the program is not valid: {e.message}") from e
    blobs = [_bytes_of(a) for a in program.blobs]
    offsets, data_length = place([len(b) for b in blobs])
    entries = [
        BlobEntry(a.dtype, a.shape, offset, len(raw), sha256)
        for a, offset, raw, sha256 in zip(program.blobs, offsets, blobs, digests(blobs), strict=True)
    ]
    try:
        text = header_text(program, entries).encode()
    except UnicodeEncodeError as e:
        raise InternalError(f"the program holds text that is not Unicode: {e}") from e
    if len(text) > HEADER_BYTES.value:
        raise UnsupportedError(f"the engine's header would take {len(text)} bytes", hint=HEADER_BYTES.hint)
    data_at = _data_at(len(text), len(blobs))
    version = (VERSION[0], minor_of(program))
    prefix = PREFIX.pack(MAGIC, *version, len(text), data_at + data_length, 0)
    pieces: list[bytes | memoryview] = [prefix, hashlib.sha256(prefix + text).digest(), text]
    position = HEADER_AT + len(text)
    for offset, blob in zip(offsets, blobs, strict=True):
        pieces += [bytes(data_at + offset - position), blob]
        position = data_at + offset + len(blob)
    return pieces


def place(lengths: Sequence[int]) -> tuple[list[int], int]:
    """The places of blobs of these lengths: (offsets from the start of the data, length of the data)."""
    offsets, end = [], 0
    for n in lengths:
        start = _up(end, PAGE if n >= LARGE else LINE)
        offsets.append(start)
        end = start + n
    return offsets, end


def _data_at(header_length: int, n_blobs: int) -> int:
    """The offset of the data: the first page after the header; without blobs the file ends with the header."""
    end = HEADER_AT + header_length
    return _up(end, PAGE) if n_blobs else end


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _bytes_of(array: Array) -> memoryview:
    try:
        dtype_name(array.dtype)
    except ShapeError as e:
        raise InternalError(f"a blob has {e.message}") from e
    return raw_bytes(array)


def digests(blobs: Sequence[memoryview]) -> list[str]:
    """SHA-256 of each blob in hexadecimal; several threads share the work (hashlib releases the interpreter's lock)."""
    if sum(map(len, blobs)) <= 1 << 20:
        return [hashlib.sha256(blob).hexdigest() for blob in blobs]
    with ThreadPoolExecutor(min(len(blobs), 8, os.cpu_count() or 1), "optdnn-sha256") as pool:
        # The longest first, so that no thread is left with a long one at the end.
        order = sorted(range(len(blobs)), key=lambda i: -len(blobs[i]))
        jobs = {i: pool.submit(hashlib.sha256, blobs[i]) for i in order}
    return [jobs[i].result().hexdigest() for i in range(len(blobs))]


# ---------------------------------------------------------------- reading


def is_engine(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts like an engine. Raises OSError if it cannot be read."""
    with open(path, "rb", opener=open_regular) as f:
        return f.read(len(MAGIC)) == MAGIC


@contextmanager
def reading_engine(shown: str) -> Iterator[None]:
    """Raise UsageError if the block does not find its engine file, and EngineError if it cannot read it."""
    try:
        yield
    except FileNotFoundError as e:
        raise UsageError(f"there is no engine file {shown}") from e
    except (OSError, ValueError, MemoryError) as e:
        raise EngineError(f"{shown} cannot be read: {e}") from e


def read(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    mmap: bool = True,
    seen: Callable[[Program], None] = lambda program: None,
    signed_by: Sequence[SignedBy] = (),
) -> Program:
    """Read an engine file; blobs are read-only arrays over the mapped file (or, with ``mmap=False``, over its bytes).

    Each of ``signed_by`` and of the process's policy (:mod:`optdnn.runtime.file.signatures`) must have signed it; this is checked
    first. A signed file is read into memory: a mapped file could change after the check.

    ``verify=False`` skips the blobs' checksums and the check of the bytes between them; the header is always verified.
    ``seen`` is called with the program once the header is verified; the program then has no blobs yet.
    A mapped file must not be truncated in place while the engine lives; replacing it, as :func:`write` does, is fine. Other changes
    in place are noticed by the next run (:class:`optdnn.runtime.mapped.MappedFile`).
    Raises UsageError if the file does not exist, EngineError for anything that :func:`write` would not have written exactly so.
    """
    shown, mapped, wanted = os.fspath(path), None, signers(signed_by)
    with reading_engine(shown), open(path, "rb", opener=open_regular) as f:
        if mmap and not wanted and os.fstat(f.fileno()).st_size:
            mapped = MappedFile(f.fileno(), shown)
            data = memoryview(mapping.mmap(f.fileno(), 0, access=mapping.ACCESS_READ))
        else:
            data = memoryview(f.read())
    if wanted:
        check_signatures(shown, data, wanted)
    try:
        program = decode(data, verify=verify, seen=seen)
    except EngineError as e:
        message, hint = e.message, e.hint
        if not bytes(data[:8]).startswith(MAGIC[:4]):
            if (kind := kind_of(bytes(data[:BEGINNING]))) is not None:
                message, hint = f"this is {kind[0]}, not an optdnn engine", kind[1]
            elif shown.endswith(".onnx"):
                hint = f"it is a model: optdnn build {shown}"
        raise EngineError(f"{shown}: {message}", hint=hint) from e
    if mapped is not None:
        mapped.digests = program.digests
        for one in programs_of(program):
            one.file = mapped
    return program


def decode(data: memoryview, *, verify: bool = True, seen: Callable[[Program], None] = lambda program: None) -> Program:
    """The program in an engine file's contents. Arrays are read-only views of ``data``. Raises like :func:`read`."""
    _need_little_endian()
    text, data_at, minor = _checked_header(data)
    program, entries = parse_header(text, minor)
    seen(program)
    program.blobs, program.foreign = _blobs(entries, data, data_at, verify), True
    if verify:
        known = (bytes.fromhex(e.sha256) for e in entries)
        program.digests = tuple(zip(program.blobs, known, strict=True))
    for plan in programs_of(program)[1:]:
        plan.blobs, plan.foreign = program.blobs, True
    validate(program)
    return program


def _checked_header(data: memoryview) -> tuple[str, int, int]:
    """The header's verified text, the offset of its end, and the file's minor version."""
    if len(data) < HEADER_AT:
        if bytes(data[:8]) != MAGIC[: len(data)]:
            raise EngineError("this is not an optdnn engine")
        raise EngineError(f"the file is truncated: {len(data)} bytes")
    magic, major, minor, header_length, file_length, zero = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise EngineError("this is not an optdnn engine")
    if major != VERSION[0] or minor > VERSION[1]:
        newer = (major, minor) > VERSION
        raise EngineError(
            f"the engine has format {major}.{minor}; this version of optdnn reads {VERSION[0]}.0 to {VERSION[0]}.{VERSION[1]}",
            hint="upgrade optdnn" if newer else "rebuild the engine from its model",
        )
    if len(data) != file_length:
        what = "truncated" if len(data) < file_length else "longer than it says"
        hint = "copy it again, or build it again from its model"
        raise EngineError(f"the file is {what}: {len(data)} bytes, {file_length} expected", hint=hint)
    if zero or HEADER_AT + header_length > file_length:
        raise EngineError(f"the file's first bytes are corrupt (header of {header_length} bytes)")
    if header_length > HEADER_BYTES.value:
        raise EngineError(f"the header has {header_length} bytes", hint=HEADER_BYTES.hint)
    text = data[HEADER_AT : HEADER_AT + header_length]
    digest = hashlib.sha256(data[: PREFIX.size])
    digest.update(text)
    if digest.digest() != data[PREFIX.size : HEADER_AT]:
        raise EngineError("the header is corrupt: its checksum differs")
    try:
        decoded = str(text, "utf-8")
    except UnicodeDecodeError as e:
        raise EngineError("the header is not UTF-8") from e
    return decoded, HEADER_AT + header_length, minor


def _blobs(entries: Sequence[BlobEntry], data: memoryview, header_end: int, verify: bool) -> list[Array]:
    """Views of the blobs, with their places and (with ``verify``) contents checked."""
    offsets, total = place([e.length for e in entries])
    data_at = _data_at(header_end - HEADER_AT, len(entries))
    if offsets != [e.offset for e in entries] or data_at + total != len(data):
        raise EngineError("the blobs are not where the writer places them")
    pieces = [data[data_at + e.offset : data_at + e.offset + e.length] for e in entries]
    if verify:
        for i, (e, digest) in enumerate(zip(entries, digests(pieces), strict=True)):
            if digest != e.sha256:
                raise EngineError(f"blob {i} of {len(pieces)} is corrupt: its checksum differs")
        position = header_end
        for e in entries:
            if bytes(data[position : data_at + e.offset]).strip(b"\0"):
                raise EngineError("there is data between the blobs")
            position = data_at + e.offset + e.length
    arrays: list[Array] = []
    for piece, e in zip(pieces, entries, strict=True):
        try:
            flat = np.frombuffer(piece, np.uint8) if e.length else np.empty(0, np.uint8)
            array = flat.view(e.dtype).reshape(e.shape)
        except (ValueError, TypeError) as error:
            raise EngineError(f"a blob of {e.dtype}{list(e.shape)} cannot be made: {error}") from error
        array.flags.writeable = False
        arrays.append(array)
    return arrays


def _need_little_endian() -> None:
    if sys.byteorder != "little":
        raise EngineError("engine files need a little-endian machine")
