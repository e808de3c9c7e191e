"""Runs kernels on mma.sync on the processor: the very source, parameter block and grid, warps emulated (``host_warps.hpp``)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.launches.plan import MAP_BYTES
from support.host import HERE, library

_RUN = """
static Params parameters;
extern "C" unsigned parameter_bytes() { return sizeof(Params); }
extern "C" int run(const void* block, unsigned gx, unsigned gy, unsigned gz, unsigned threads) {
    gridDim = {gx, gy, gz}, blockDim = {threads, 1, 1};
    memcpy(&parameters, block, sizeof(Params));
    entry = [] { ENTRY(parameters); };
    for (unsigned z = 0; z < gz; z++) for (unsigned y = 0; y < gy; y++) for (unsigned x = 0; x < gx; x++) {
        blockIdx = {x, y, z};
        if (!run_block(threads)) return 1;
    }
    return 0;
}
"""


def _text(source: str) -> str:
    kept = (line for line in source.splitlines() if not line.startswith(("#include", "#pragma once")))
    return re.sub(r"#pragma unroll.*", "", "\n".join(kept))


def compiled(
    recipe: Recipe, entry: str, folder: Path, *, headers: Sequence[str] = (), rendered: str = "", options: Sequence[str] = (),
    first: Sequence[str] = (),
) -> ctypes.CDLL:  # fmt: skip
    """The kernel ``entry`` of a recipe as a library. ``headers``: which of its headers are taken besides, ``first``: those that
    the kernel includes before its constants, ``rendered``: what of the generated one besides its constants (its instructions are
    the shim's)."""
    texts = recipe.sources()
    defines = "\n".join(line for line in texts["generated.cuh"].splitlines() if line.startswith("#define"))
    kernel = _text(texts[recipe.name]).replace('extern "C" ', "static ")
    for align in (16, 128, 1024):
        kernel = kernel.replace(f"extern __shared__ __align__({align}) u8 shared[];", "u8* const shared = memory;")
    shim = (HERE / "host_warps.hpp").read_text(encoding="utf-8")
    before = [shim, *(_text(texts[name]) for name in first), defines] if first else [defines, shim]
    parts = [*before, rendered, *(_text(texts[name]) for name in headers), kernel, _RUN.replace("ENTRY", entry)]
    defined = [o for o in recipe.options if o.startswith("-D")]
    return library("\n".join(parts), folder, "-O1", [*defined, *options])


def run(loaded: ctypes.CDLL, made: Launch, addresses: Mapping[str, int]) -> None:
    """The launch on these operands, which begin at multiples of 16 bytes. Tensor maps are of 16-bit numbers."""
    size = loaded.parameter_bytes()
    assert size - len(made.parameters) in range(8), "the parameter block and the kernel's struct differ in size"
    block = bytearray(made.parameters.ljust(size, b"\0"))
    for place in made.pointers:
        block[place.at : place.at + 8] = (addresses[place.operand] + place.offset).to_bytes(8, "little")
    for m in made.maps:
        numbers = (addresses[m.operand] + m.offset, *m.shape, *m.strides, *m.box, m.swizzle)
        block[m.at : m.at + MAP_BYTES] = np.array(numbers, np.uint64).tobytes().ljust(MAP_BYTES, b"\0")
    sizes = (ctypes.c_uint(n) for n in (*made.grid, made.block))
    failed = loaded.run((ctypes.c_char * len(block)).from_buffer(block), *sizes)
    assert not failed, "threads missed one another, or a copy was never waited for"


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 16 bytes, as device memory is."""
    raw = np.empty(array.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
