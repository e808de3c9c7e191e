"""The table of GPU kernels in an engine file (format 1.1): kept exactly, checked strictly, absent where there are none."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import mlp

from optdnn.errors import EngineError, InternalError
from optdnn.runtime.file import format as fmt
from optdnn.runtime.file import header
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Kernel, Program, Step

RECIPE = Kernel("conv.cu", "conv", "sm_90a", {"generated.cuh": "#define N 1\n"}, ("--std=c++17",), "ab" * 32)


def with_kernels(*kernels: Kernel) -> Program:
    p = mlp()
    p.blobs = [*p.blobs, np.arange(5, dtype=np.uint8)]
    return replace(p, kernels=kernels)


def forged(change: Callable[[Any], None], minor: int = 1) -> memoryview:
    """The file of a program with one kernel, with a changed header and the right checksum."""
    data = b"".join(bytes(x) for x in fmt.encode(with_kernels(RECIPE)))
    (length,) = struct.unpack_from("<I", data, 12)
    h = json.loads(data[fmt.HEADER_AT : fmt.HEADER_AT + length])
    change(h)
    raw = header.canonical(h).encode()
    blobs = data[-(-(fmt.HEADER_AT + length) // fmt.PAGE) * fmt.PAGE :]
    end = fmt.HEADER_AT + len(raw)
    at = -(-end // fmt.PAGE) * fmt.PAGE
    prefix = fmt.PREFIX.pack(fmt.MAGIC, 1, minor, len(raw), at + len(blobs), 0)
    return memoryview(prefix + hashlib.sha256(prefix + raw).digest() + raw + bytes(at - end) + blobs)


def test_kernels_are_kept(tmp_path: Path) -> None:
    p = with_kernels(RECIPE, replace(RECIPE, cubin=len(mlp().blobs), generated={}))
    fmt.write(p, tmp_path / "e")
    assert fmt.read(tmp_path / "e").kernels == p.kernels
    assert struct.unpack_from("<HH", (tmp_path / "e").read_bytes(), 8) == (1, 1)


def test_a_program_without_kernels_is_written_as_1_0() -> None:
    assert struct.unpack_from("<HH", fmt.encode(mlp())[0], 8) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(kernels=[]), "table of kernels is empty"),
        (lambda h: h.pop("kernels"), "says that it is of format 1.1; its header is of 1.0"),
        (lambda h: h["kernels"][0].pop("source"), r"kernels\[0\] must have exactly the keys"),
        (lambda h: h["kernels"][0].update(code="x"), r"kernels\[0\] must have exactly the keys"),
        (lambda h: h["kernels"][0].update(generated={"a": 1}), r"kernels\[0\].generated.a is not a text"),
        (lambda h: h["kernels"][0].update(options="-O3"), r"kernels\[0\].options is not a list"),
        (lambda h: h["kernels"][0].update(cubin=-1), r"kernels\[0\].cubin is not an integer"),
        (lambda h: h["kernels"][0].update(cubin=99), "kernel 0 points at blob 99"),
        (lambda h: h["kernels"][0].update(cubin=0), "cubin of kernel 0 is not a run of bytes"),
    ],
)
def test_malformed_tables_are_refused(change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        fmt.decode(forged(change))


def test_format_1_0_has_no_kernels() -> None:
    with pytest.raises(EngineError, match=r"says that it is of format 1\.0; its header is of 1\.1"):
        fmt.decode(forged(lambda h: None, minor=0))


def test_a_kernel_without_its_blob_is_not_written() -> None:
    with pytest.raises(InternalError, match="points at blob 17"):
        fmt.encode(with_kernels(replace(RECIPE, cubin=17)))


def test_only_cuda_steps_may_share_an_output() -> None:
    p = mlp()
    last = p.steps[-1]
    p.steps = (*p.steps, last)
    with pytest.raises(EngineError, match="written already"):
        validate(p)
    p.steps = (*p.steps[:-2], *[Step("cuda", {}, last.inputs, last.outputs)] * 2)
    validate(p)
