"""Runs kernels on mma.sync on the processor: the same source, parameter block and grid; warps are emulated (``host_warps.hpp``)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.launches.plan import MAP_BYTES, MAP_ITEM, CudaStep, Pointer
from optdnn.runtime.program import Program
from optdnn.types import Array
from support.host import HERE, library

_RUN = """
static Params parameters;
extern "C" unsigned parameter_bytes() { return sizeof(Params); }
extern "C" void of_clusters(unsigned blocks) { cluster_blocks = blocks; }
extern "C" void reserves(unsigned bytes) { reserved = bytes; }
extern "C" int run(const void* block, unsigned gx, unsigned gy, unsigned gz, unsigned threads) {
    gridDim = {gx, gy, gz}, blockDim = {threads, 1, 1};
    memcpy(&parameters, block, sizeof(Params));
    entry = [] { ENTRY(parameters); };
    for (unsigned z = 0; z < gz; z++) for (unsigned y = 0; y < gy; y++) for (unsigned x = 0; x < gx; x += cluster_blocks)
        if (!run_cluster(x, y, z, threads)) return 1;
    return 0;
}
"""


def _text(source: str) -> str:
    kept = (line for line in source.splitlines() if not line.startswith(("#include", "#pragma once")))
    return re.sub(r"#pragma unroll.*", "", "\n".join(kept))


def compiled(
    recipe: Recipe, entry: str, folder: Path, *, headers: Sequence[str] = (), rendered: str = "", options: Sequence[str] = (),
    first: Sequence[str] = (), inside: Sequence[str] = (),
) -> ctypes.CDLL:  # fmt: skip
    """The kernel ``entry`` of a recipe as a library.

    ``headers``: headers of the recipe that are included in front of the kernel. ``first``: headers before the constants of the
    kernel. ``inside``: headers whose text replaces their ``#include``. ``rendered``: parts of the generated header besides its
    constants, without instructions, which the shim defines.
    """
    texts = recipe.sources()
    defines = "\n".join(line for line in texts["generated.cuh"].splitlines() if line.startswith("#define"))
    source = texts[recipe.name]
    for name in inside:
        source = source.replace(f'#include "{name}"', texts[name])
    kernel = _text(source).replace('extern "C" ', "static ")
    for align in (16, 128, 1024):
        kernel = kernel.replace(f"extern __shared__ __align__({align}) u8 shared[];", "u8* const shared = memory;")
    shim = (HERE / "host_warps.hpp").read_text(encoding="utf-8")
    before = [shim, *(_text(texts[name]) for name in first), defines] if first else [defines, shim]
    texts |= {"l2_priority.cuh": (HERE / "host_l2.hpp").read_text(encoding="utf-8")}
    parts = [*before, rendered, *(_text(texts[name]) for name in headers), kernel, _RUN.replace("ENTRY", entry)]
    defined = [o for o in recipe.options if o.startswith("-D")]
    return library("\n".join(parts), folder, "-Og", [*defined, *options])


class MatrixProducts:
    """The generated products on tensor cores (``matmul_mma.cu``) of a program; used like :class:`support.host.HostKernels`."""

    def __init__(self, program: Program, folder: Path):
        self.program = program
        self._libraries = {}
        for number, kernel in enumerate(program.kernels):
            if kernel.template == "matmul_mma.cu":
                (own := folder / f"kernel{number}").mkdir()
                self._libraries[number] = _generated(recipe_of(kernel), kernel.function, own)

    def runs(self, step: CudaStep) -> bool:
        """Whether the step's kernel is one of these products."""
        return step.launch.kernel in self._libraries

    def run(self, step: CudaStep, memory: Sequence[Array]) -> None:
        """Run a step's launch; ``memory`` holds the flat arrays of its operands (inputs, then outputs)."""
        loaded, launch = self._libraries[step.launch.kernel], step.launch
        held = [aligned(x) for x in memory]
        block = bytearray(launch.parameters.ljust(loaded.parameter_bytes(), b"\0"))
        for r in launch.relocations:
            assert isinstance(r, Pointer)
            block[r.at : r.at + 8] = (held[r.operand].ctypes.data + r.offset).to_bytes(8, "little")
        sizes = (ctypes.c_uint(n) for n in (*launch.grid, launch.block))
        assert not loaded.run((ctypes.c_char * len(block)).from_buffer(block), *sizes), "threads missed one another"
        for x, own in zip(memory, held, strict=True):
            x[...] = own


def _generated(recipe: Recipe, entry: str, folder: Path) -> ctypes.CDLL:
    """The kernel of a generated text, as a library."""
    texts = recipe.sources()
    item = re.search(r"#define ITEM (\d)", texts["generated.cuh"])
    assert item is not None
    machine = (HERE / "host_machine.hpp").read_text(encoding="utf-8").split("static void __syncwarp")[0]
    text = re.sub(r"^DEVICE void multiply.*?^}", "", texts["generated.cuh"], flags=re.MULTILINE | re.DOTALL)
    text = text.replace('#include "matmul_mma.cuh"', _text(texts["matmul_mma.cuh"])).replace('extern "C" ', "static ")
    shared = "extern __shared__ __align__(128) float shared[];"
    assert shared in text
    text = text.replace(shared, "float* const shared = reinterpret_cast<float*>(memory);")
    shim = (
        (HERE / "host_warps.hpp").read_text(encoding="utf-8").split("struct Narrow {")[0]
    )  # general.cuh defines this itself
    before = [f"#define OPERAND_ITEM {item[1]}", shim, machine, _text(texts["general.cuh"])]
    return library(
        "\n".join([*before, text, _RUN.replace("ENTRY", entry)]),
        folder,
        "-Og",
        [o for o in recipe.options if o.startswith("-D")],
    )


def run(loaded: ctypes.CDLL, made: Launch, addresses: Mapping[str, int]) -> None:
    """Run the launch on these operands, which begin at multiples of 16 bytes."""
    size = loaded.parameter_bytes()
    assert size - len(made.parameters) in range(8), "the parameter block and the kernel's struct differ in size"
    block = bytearray(made.parameters.ljust(size, b"\0"))
    for place in made.pointers:
        block[place.at : place.at + 8] = (addresses[place.operand] + place.offset).to_bytes(8, "little")
    for m in made.maps:
        numbers = (addresses[m.operand] + m.offset, *m.shape, *m.strides, *m.box, m.swizzle | MAP_ITEM[m.dtype] << 32)
        block[m.at : m.at + MAP_BYTES] = np.array(numbers, np.uint64).tobytes().ljust(MAP_BYTES, b"\0")
    sizes = (ctypes.c_uint(n) for n in (*made.grid, made.block))
    loaded.of_clusters(made.cluster)
    loaded.reserves(made.shared)
    failed = loaded.run((ctypes.c_char * len(block)).from_buffer(block), *sizes)
    assert not failed, "threads missed one another, a copy was never waited for, or shared memory was exceeded"


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 16 bytes, like device memory."""
    raw = np.empty(array.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def change_source(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, times: int = 1) -> None:
    """Replace ``old`` by ``new`` in the source file ``name`` of kernels; it must stand there ``times`` times."""
    sources = Recipe.sources

    def changed(recipe: Recipe) -> dict[str, str]:
        texts = sources(recipe)
        assert texts[name].count(old) == times
        return {**texts, name: texts[name].replace(old, new)}

    monkeypatch.setattr(Recipe, "sources", changed)
