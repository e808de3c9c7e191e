"""Runs kernel templates without tensor cores on the processor, with the same threads, warps and shared memory."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile.nvrtc import template_files
from optdnn.types import Array
from support.host import HERE, library

_REPLACED = ("ptx.cuh", "l2_priority.cuh", "grid_meeting.cuh")
"""Headers that ``host_tiles.hpp`` and ``host_l2.hpp`` replace."""
_SHARED = re.compile(r"extern __shared__ __align__\(16\) (\w+) (\w+)\[\];")


def run_launches(launches: Sequence[Launch], memory: Mapping[str, Array], folder: Path) -> None:
    """Run launches of one recipe in order, on operands by name. fp16 or fp32."""
    recipe = launches[0].recipe
    texts = {
        name: template_files()[name].read_text(encoding="utf-8")
        for name in ("vectors.cuh", "tile_vectors.cuh", "group_sums.cuh", "group_tiles.cuh", "after_norm.cuh")
    }
    body = _inlined(template_files()[recipe.name].read_text(encoding="utf-8"), {**texts, **recipe.generated})
    body = _SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);", body).replace("#pragma unroll", "//")
    parts = [(HERE / name).read_text(encoding="utf-8") for name in ("host.hpp", "host_tiles.hpp", "host_l2.hpp")]
    for launch in launches:
        struct = re.search(rf"{launch.function}\(const __grid_constant__ (\w+)", body)
        assert struct is not None
        body += _entry(launch.function, struct.group(1))
    loaded = library("\n".join([*parts, body]).replace('extern "C" __global__', "static"), folder, "-O0")
    for launch in launches:
        block = bytearray(launch.parameters)
        assert getattr(loaded, f"bytes_{launch.function}")() == len(block)
        assert launch.shared <= 1 << 18
        for p in launch.pointers:
            block[p.at : p.at + 8] = (memory[p.operand].ctypes.data + p.offset).to_bytes(8, "little")
        raw = (ctypes.c_char * len(block)).from_buffer_copy(bytes(block))
        getattr(loaded, f"run_{launch.function}")(raw, *map(ctypes.c_uint, (*launch.grid, launch.block)))


def _inlined(text: str, texts: Mapping[str, str]) -> str:
    """The source with its headers inserted, each once."""
    seen = set(_REPLACED)

    def include(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return re.sub(r'#include "([\w.]+)"', include, texts[name]).replace("#pragma once", "")

    return re.sub(r'#include "([\w.]+)"', include, text)


def _entry(function: str, struct: str) -> str:
    return f"""
static {struct} parameters_{function};
extern "C" unsigned bytes_{function}() {{ return sizeof({struct}); }}
extern "C" void run_{function}(const void* block, unsigned gx, unsigned gy, unsigned gz, unsigned threads) {{
    gridDim = {{gx, gy, gz}};
    memcpy(&parameters_{function}, block, sizeof({struct}));
    entry = [] {{ {function}(parameters_{function}); leave(); }};
    for (unsigned z = 0; z < gz; z++) for (unsigned y = 0; y < gy; y++) for (unsigned x = 0; x < gx; x++) {{
        blockIdx = {{x, y, z}};
        arrived = 0, alive = threads;
        memset(dynamic_shared, 0xff, sizeof dynamic_shared);
        run_block(threads, true);
    }}
}}
"""
