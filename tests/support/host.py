"""Runs generated kernels on the processor: the same source, parameter block and grid of a step, with pointers to host memory."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import mmap
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.launches.plan import GRID, CudaStep, Pointer
from optdnn.runtime.program import Program
from optdnn.types import Array
from support.compiler_cache import cached
from support.host_blocks import load

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
WHY_NOT = None if COMPILER else "there is no g++ to compile the generated kernels for the processor"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")

HEADERS = ("<algorithm>", "<cstdlib>", "<cstring>", '"host_fibers.hpp"', '"host_math.hpp"', "<vector>")
"""Headers of the emulations. They are precompiled, since parsing them takes longer than compiling most kernels."""


LINKED = ("-shared", "-nodefaultlibs")
"""Without the libraries of C and C++, whose search takes as long as compiling: :func:`support.host_blocks.load` finds them."""


PLAIN = ("-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-fno-stack-protector")
"""Options that leave out what no kernel uses. It takes a tenth of the time of a compilation."""


_loaded: dict[str, ctypes.CDLL] = {}
"""Compiled libraries by their digest: cases with the same source and other operands share a library."""


def library(text: str, folder: Path, level: str, options: Sequence[str] = ()) -> ctypes.CDLL:
    """A C++17 source as a library, compiled in ``folder`` unless this process or an earlier run has compiled it. ``level``: "-O0"
    or "-Og". ``options``: the kernel's own."""

    def make() -> bytes:
        code, made = folder / "kernels.cpp", folder / "kernels.so"
        code.write_text(text, encoding="utf-8")
        _compile(level, *options, "-include", str(_precompiled(level)), *LINKED, str(code), "-lgcc", "-o", str(made))
        return made.read_bytes()

    key = hashlib.sha256(repr((text, level, *options, _surroundings())).encode()).hexdigest()
    if key not in _loaded:
        _loaded[key] = load(str(cached(f"{key}.so", make)))
    return _loaded[key]


@functools.cache
def _surroundings() -> tuple[str, ...]:
    """What a library consists of besides its source: this file's options, the headers beside it, and the compiler."""
    assert COMPILER is not None
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    return version, *(path.read_text(encoding="utf-8") for path in (Path(__file__), *sorted(HERE.glob("*.hpp"))))


@functools.cache
def _precompiled(level: str) -> Path:
    """A header that includes HEADERS, with its precompiled form beside it. It is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="optdnn-host-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "standard.hpp"
    header.write_text("".join(f"#include {name}\n" for name in HEADERS), encoding="utf-8")
    _compile(level, "-x", "c++-header", str(header), "-o", f"{header}.gch")
    return header


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    # With _FORTIFY_SOURCE, glibc's longjmp refuses to change the stack. With unique symbols, a template would have the constants of
    # the first library with a template of this name, whatever its macros were.
    command = [
        COMPILER,
        "-std=c++17",
        "-w",
        "-fPIC",
        "-U_FORTIFY_SOURCE",
        "-fno-gnu-unique",
        *PLAIN,
        f"-I{HERE}",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:6000]


TEMPLATES = ("general.cu", "rnn_resident.cu", "rotary.cu", "rotary_norm.cu", "sample.cu", "top_rows.cu")
"""Kernels that consist of general.cuh and generated text only."""


class HostKernels:
    """The generated kernels of a program, compiled into one library."""

    def __init__(self, program: Program, folder: Path):
        self.program = program
        parts, common = [(HERE / "host.hpp").read_text(encoding="utf-8")], ""
        for number, kernel in enumerate(program.kernels):
            if kernel.template not in TEMPLATES:
                continue
            texts = recipe_of(kernel).sources()
            common = texts["general.cuh"]
            shared = "".join(texts.get(name, "") for name in ("element.cuh", "rotary.cuh"))
            whole = shared + texts[kernel.template]
            for name in ("top_keys.cuh", "top_digits.cuh"):
                whole = whole.replace(f'#include "{name}"', texts.get(name, ""))
            body = re.sub(r"#include .*|#pragma once", "", whole)
            parts.append(_namespace(number, kernel.function, f"{texts['generated.cuh']}\n{body}"))
        machine = (HERE / "host_machine.hpp").read_text(encoding="utf-8")
        common = common.replace('#include "machine.cuh"', machine).replace("#pragma once", "")
        parts.insert(1, common.replace("#define DEVICE __device__ __forceinline__", "#define DEVICE inline"))
        self._library = library("\n".join(parts), folder, "-O0")

    def runs(self, step: CudaStep) -> bool:
        """Whether the step's kernel is one of these generated kernels."""
        return self.program.kernels[step.launch.kernel].template in TEMPLATES

    def run(self, step: CudaStep, memory: Sequence[Array]) -> None:
        """Run a step's launch; ``memory`` holds the flat arrays of its operands (inputs, then outputs)."""
        number, block = step.launch.kernel, bytearray(step.launch.parameters)
        size = getattr(self._library, f"parameter_bytes_{number}")()
        assert size - len(block) in range(8), "the parameter block and the kernel's struct differ in size"
        pointers = [(r.at, r.operand, r.offset) for r in step.launch.relocations if isinstance(r, Pointer)]
        assert len(pointers) == len(step.launch.relocations)
        block += bytes(8)
        threads = (*step.launch.grid, step.launch.block)
        if step.launch.waits == GRID:
            self._side_by_side(f"run_{number}", block, pointers, threads, memory)
            return
        for at, operand, offset in pointers:
            block[at : at + 8] = (memory[operand].ctypes.data + offset).to_bytes(8, "little")
        raw = (ctypes.c_char * len(block)).from_buffer_copy(block)
        getattr(self._library, f"run_{number}")(raw, *map(ctypes.c_uint, threads))

    def _side_by_side(
        self,
        entry: str,
        block: bytearray,
        pointers: Sequence[tuple[int, int, int]],
        threads: tuple[int, ...],
        memory: Sequence[Array],
    ) -> None:
        """Run the blocks of a launch that wait for one another: in several processes with shared memory
        (:mod:`support.host_blocks`)."""
        places = list(accumulate((-(-x.nbytes // 256) * 256 for x in memory), initial=0))
        with tempfile.TemporaryFile() as file:
            file.truncate(max(1, places[-1]))
            shared = np.frombuffer(mmap.mmap(file.fileno(), max(1, places[-1])), np.uint8)
            used = [shared[at : at + x.nbytes].view(x.dtype) for at, x in zip(places, memory, strict=False)]
            for x, own in zip(memory, used, strict=True):
                own[...] = x
            at_places = [(at, places[operand] + offset) for at, operand, offset in pointers]
            given = (self._library._name, entry, block.hex(), at_places, threads, file.fileno(), max(1, places[-1]))
            command = [sys.executable, "-I", "-S", str(HERE / "host_blocks.py"), json.dumps(given)]
            done = subprocess.run(command, pass_fds=[file.fileno()], check=False)
        assert done.returncode == 0, "a block waits for ever"
        for x, own in zip(memory, used, strict=True):
            x[...] = own


def _namespace(number: int, function: str, generated: str) -> str:
    """One kernel in a separate namespace, and the entry point that runs its grid."""
    generated = generated.replace('extern "C" ', "static ")
    generated = generated.replace(
        "extern __shared__ __align__(16) unsigned char memory[];", "u8* const memory = dynamic_memory;"
    )
    defined = "\n".join(f"#undef {name}" for name in re.findall(r"#define (\w+)", generated))
    return f"""namespace k{number} {{
{generated}
static Params parameters;
}}
{defined}
extern "C" unsigned parameter_bytes_{number}() {{ return sizeof(k{number}::Params); }}
extern "C" void run_{number}(const void* block, unsigned gx, unsigned gy, unsigned gz, unsigned threads) {{
    gridDim = {{gx, gy, gz}};
    memcpy(&k{number}::parameters, block, sizeof(k{number}::Params));
    entry = [] {{ k{number}::{function}(k{number}::parameters); }};
    for (unsigned z = 0; z < gz; z++) for (unsigned y = 0; y < gy; y++) for (unsigned x = 0; x < gx; x++) {{
        if (only_block >= 0 && x != only_block) continue;
        blockIdx = {{x, y, z}};
        run_block(threads, {str(any(call in generated for call in ("__syncthreads", "__shfl_"))).lower()});
    }}
}}
"""
