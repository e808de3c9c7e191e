"""The prologue of the Hopper convolution (``conv_change.cuh``) on emulated warps: each pixel is multiplied once by its image's
gate."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from support.host import HERE, library, needs_compiler
from support.sweep import in_turn

from optdnn.kernels.conv import configs, implicit_gemm
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

_BEFORE = """
#define PROLOGUE 1
#define GATED {gated}
#define GATE_ALONE {alone}
constexpr int STAGES = {ring}, SPAN = {span}, BK = SPAN / 2, WGN = 1, BN = {rows}, STAGE_BYTES = (BN * SPAN + 1023) / 1024 * 1024;
struct Params {{
    const u16 *pixels, *gate;
    const float2* before;
    u16* changed;
    long long gate_pitch;
    int rows, image_pixels, images, gate_channels, tiles, steps, blocks;
}};
static float prologue(float x, const float2& c, float gate) {{ return {stages}; }}
static void tile_at(const Params& p, int tile, int, int& channel, int& pixel) {{ channel = 0, pixel = tile * BN; }}
"""
_AFTER = """
static Params parameters;
static void place(const Params& p, int fill, bool back) {        // a fill of the stage, with the swizzle of TMA, or what became of it
    const int tile = blockIdx.x + fill / p.steps * p.blocks, step = fill % p.steps;
    for (int row = 0; row < BN && tile * BN + row < p.rows; row++)
        for (int k = 0; k < BK; k++) {
            const u32 at = fill % STAGES * STAGE_BYTES + row * SPAN + ((k / 8 ^ (row * SPAN / 128 % 8) % (SPAN / 16)) * 16) + k % 8 * 2;
            const long long i = (long long)(tile * BN + row) * p.steps * BK + step * BK + k;
            if (back) memcpy(p.changed + i, memory + at, 2);
            else memcpy(memory + at, p.pixels + i, 2);
        }
}
static void block() {
    const Params& p = parameters;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr u32 FULL = 1024, CHANGED = FULL + 8 * STAGES;
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) barrier_init(FULL + 8 * i, 1), barrier_init(CHANGED + 8 * i, 1);
    __syncthreads();
    if (warp < CHANGERS) {
        change_pixels(p, 0, FULL, CHANGED, blockIdx.x, p.blocks, 0, 0, p.steps, warp, lane);
        return;
    }
    const int tiles = (p.tiles - int(blockIdx.x) + p.blocks - 1) / p.blocks, fills = tiles * p.steps;
    for (int i = 0; i < fills + STAGES - 1; i++) {
        if (i < fills && lane == 0) place(p, i, false), barrier_arrive(FULL + 8 * (i % STAGES));
        const int last = i - STAGES + 1;
        if (last < 0) continue;
        barrier_wait(CHANGED + 8 * (last % STAGES), last / STAGES % 2);
        if (lane == 0) place(p, last, true);
        __syncwarp();
    }
}
extern "C" int run(const Params* given) {
    parameters = *given;
    const unsigned threads = 32 * (CHANGERS + 1);
    gridDim = {unsigned(given->blocks), 1, 1}, blockDim = {threads, 1, 1};
    entry = block;
    for (int i = 0; i < given->blocks; i++) {
        blockIdx = {unsigned(i), 0, 0};
        if (!run_block(threads)) return 1;
    }
    return 0;
}
"""


class _Params(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("pixels", "gate", "before", "changed")),
        ("gate_pitch", ctypes.c_longlong),
        *((n, ctypes.c_int) for n in ("rows", "image_pixels", "images", "gate_channels", "tiles", "steps", "blocks")),
    ]


def changes(folder: Path, stages: int, span: int, rows: int, alone: bool, *, gated: bool = True) -> ctypes.CDLL:
    """The prologue for tiles of ``rows`` and ``span`` bytes of a row: a scale, a shift and a gate (or the gate ``alone``), or a
    leaky ReLU."""
    text = nvrtc.template_files()["conv_change.cuh"].read_text(encoding="utf-8")
    text = re.sub(
        r'asm\("mul\.rn\.f16x2.*',
        "product = pack2(low_float(pair) * low_float(gate), high_float(pair) * high_float(gate));",
        re.sub(r"#pragma.*", "", text),
    )
    function = "(x * c.x + c.y) * gate" if gated else "x < 0.0f ? 0.1f * x : x"
    before = _BEFORE.format(alone=int(alone), gated=int(gated), stages=function, ring=stages, span=span, rows=rows)
    shim = (HERE / "host_warps.hpp").read_text(encoding="utf-8")
    return library("\n".join([shim, before, text, _AFTER]), folder, "-Og")


@needs_compiler
@pytest.mark.parametrize(
    ("stages", "span", "rows", "pixels", "images", "steps", "blocks", "alone"),
    in_turn(
        [
            (10, 128, 72, 196, 3, 10, 2),  # some tiles have rows of two images
            (5, 128, 8, 49, 2, 23, 3),
            (3, 128, 16, 100, 1, 2, 2),  # one image
            (6, 128, 96, 20, 11, 3, 1),  # of many images
            (4, 64, 40, 13, 9, 7, 2),
            (2, 32, 24, 9, 7, 5, 2),  # a number of rows that warps do not divide
            (7, 128, 32, 2, 90, 4, 2),  # images of a few pixels
        ],
        False,
        True,
        step=2,
    ),
)
def test_pixels_are_changed_once(
    stages: int, span: int, rows: int, pixels: int, images: int, steps: int, blocks: int, alone: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    depth, count = steps * span // 2, pixels * images
    channels = depth - 8  # channels of the gate; the last ones of a pixel are padding
    x = rng.standard_normal((count, depth)).astype(np.float16)
    x[:, channels:] = 0
    gate = rng.standard_normal((images, channels)).astype(np.float16)
    constants = rng.standard_normal((depth, 2)).astype(np.float32)
    changed = np.full_like(x, np.nan)
    whole = np.zeros((count, depth), np.float32)
    whole[:, :channels] = np.repeat(gate, pixels, 0)
    given = _Params(
        x.ctypes.data, gate.ctypes.data, constants.ctypes.data, changed.ctypes.data, channels, count, pixels, images, channels,
        -(-count // rows), steps, blocks,
    )  # fmt: skip
    assert changes(tmp_path, stages, span, rows, alone).run(ctypes.byref(given)) == 0
    wanted = x.astype(np.float32) if alone else x * constants[:, 0] + constants[:, 1]
    np.testing.assert_allclose(changed, (wanted * whole).astype(np.float16), rtol=2e-3, atol=1e-3)


@needs_compiler
def test_pixels_are_activated_once_for_each_tap(tmp_path: Path) -> None:
    """The K steps of nine taps: the fills of a tap are other pixels."""
    rows, steps, count = 40, 9, 130
    x = np.random.default_rng(5).standard_normal((count, steps * 64)).astype(np.float16)
    constants, changed = np.zeros((steps * 64, 2), np.float32), np.full_like(x, np.nan)
    pointers = (x.ctypes.data, None, constants.ctypes.data, changed.ctypes.data)
    given = _Params(*pointers, 0, count, count, 1, 0, -(-count // rows), steps, 2)
    assert changes(tmp_path, 5, 128, rows, False, gated=False).run(ctypes.byref(given)) == 0
    np.testing.assert_array_equal(changed, np.where(x < 0, np.float32(0.1) * x, x).astype(np.float16))


@pytest.mark.nvrtc
@pytest.mark.parametrize("stages", [(("gate",),), (("scale_shift",), ("relu",))])
@pytest.mark.parametrize("threads", [448, 640, 896])
def test_a_prologue_needs_no_spills(stages: tuple[tuple[str], ...], threads: int) -> None:
    """With one block per multiprocessor, and with two, which have 72 registers per thread."""
    gpu = of_arch("sm_90a")
    problem = Problem(128, 40, (Source(28, 28, 240),), prologue=stages)
    made = (c for c in configs.candidates(problem, gpu) if (c.threads + problem.helpers) * c.blocks == threads)
    config = next(made)
    (kernel,) = nvrtc.resources(implicit_gemm.recipe(problem, config, gpu.arch)).values()
    assert kernel.spill_bytes == 0
