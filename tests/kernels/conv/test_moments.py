"""Moments of rows and their use (``conv_moments.cuh``): the device functions on emulated warps."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from support.emulated import _text
from support.host import HERE, library
from support.sweep import sweep

from optdnn.runtime.cuda.compile.nvrtc import template_files
from optdnn.types import Array

_SOURCE = """
struct Params {
    float2* moments; const float2* given; const float* columns; int given_blocks; float epsilon;
    int pixel_count; const u8* tile; float* result; const float* sums; int tiles, batch_tiles, image_parts;
};
%s
static Params parameters;
static void tell() {
    const Params& p = parameters;
    if (threadIdx.x == 0) memcpy(memory, p.tile, TILE_ROWS * 128);
    __syncthreads();
    tell_moments<TILE_ROWS>(p, 0, OWN_BLOCK, FIRST_ROW, threadIdx.x %% 128, BEFORE);
}
static void keep() {                               // a lane's four channels of a row; the second half of memory has the moments
    const Params& p = parameters;
    const int lane = threadIdx.x, row = lane / 4;
    uint2 v;
    memcpy(&v, p.tile + row * 32 + lane %% 4 * 8, 8);
    keep_moments(1024, v, lane);
    __syncwarp();
    if (lane < 8 / MOMENT_ROWS) memcpy(p.result + 2 * lane, memory + 1024 + 8 * lane, 8);
}
#if NORMED
static void apply() {
    const Params& p = parameters;
#if IMAGE_NORM
    ImageFactor known;
    known.take(p, FIRST_ROW / (8 * p.image_parts), threadIdx.x %% 32);
    row_factors<TILE_ROWS>(p, 0, FIRST_ROW, threadIdx.x, known);
#else
    row_factors<TILE_ROWS>(p, 0, FIRST_ROW, threadIdx.x);
#endif
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float sum[1][TILE_ROWS / 2], columns[1][2];
    for (int i = 0; i < 2; i++) columns[0][i] = p.columns[threadIdx.x / 4 + 8 * i];
    for (int i = 0; i < TILE_ROWS / 2; i++) {           // wgmma's sums: channel x row
        const int channel = threadIdx.x / 4 + i / 2 %% 2 * 8, row = i / 4 * 8 + threadIdx.x %% 4 * 2 + i %% 2;
        sum[0][i] = p.sums[channel * TILE_ROWS + row];
    }
    normalize(sum, 0, columns, threadIdx.x);
    for (int i = 0; i < TILE_ROWS / 2; i++) {
        const int channel = threadIdx.x / 4 + i / 2 %% 2 * 8, row = i / 4 * 8 + threadIdx.x %% 4 * 2 + i %% 2;
        p.result[channel * TILE_ROWS + row] = sum[0][i];
    }
}
#endif
#if !IMAGE_NORM
static void add() {                                // eight rows of a residual, and the factors of a tile
    const Params& p = parameters;
    row_factors<TILE_ROWS>(p, 0, FIRST_ROW, threadIdx.x);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float scale[2];
    for (int i = 0; i < 2; i++) scale[i] = p.columns[threadIdx.x / 4 + 8 * i];
    const auto added = added_residual<4>(threadIdx.x %% 4 * 2 * 8, scale);
    for (int pixel = 0; pixel < 4; pixel++)
        for (int i = 0; i < 2; i++) {
            const int channel = threadIdx.x / 4 + i * 8, row = pixel / 2 * 8 + threadIdx.x %% 4 * 2 + pixel %% 2;
            p.result[channel * 16 + row] = added(p.sums[channel * 16 + row], pixel, i);
        }
}
#else
static void add() {}
#endif
extern "C" int run(const void* block, int what) {
    memcpy(&parameters, block, sizeof(Params));
    gridDim = {1, 1, 1}; blockIdx = {0, 0, 0};
#if !NORMED
    const auto apply = add;
#endif
    entry = what == 0 ? tell : what == 1 ? keep : what == 2 ? apply : add;
    return run_block(what == 0 ? 128 : what == 1 ? 32 : 96) ? 0 : 1;
}
"""


class _Params(ctypes.Structure):
    _fields_ = [("moments", ctypes.c_void_p), ("given", ctypes.c_void_p), ("columns", ctypes.c_void_p), ("given_blocks", ctypes.c_int),
                ("epsilon", ctypes.c_float), ("pixel_count", ctypes.c_int), ("tile", ctypes.c_void_p), ("result", ctypes.c_void_p),
                ("sums", ctypes.c_void_p), ("tiles", ctypes.c_int), ("batch_tiles", ctypes.c_int), ("image_parts", ctypes.c_int)]  # fmt: skip


def _run(
    folder: Path, what: int, rows: int, first: int = 0, block: int = 0, normed: int = 1, residual: int = 0, together: int = 1,
    before: int = 0, **fields: object,
) -> None:  # fmt: skip
    shim = (HERE / "host_warps.hpp").read_text(encoding="utf-8")
    defines = {
        "TILE_ROWS": rows,
        "FIRST_ROW": first,
        "OWN_BLOCK": block,
        "MOMENTS": 1,
        "NORMED": normed,
        "NORMED_RESIDUAL": residual,
        "MOMENT_ROWS": together,
        "IMAGE_NORM": int("image_parts" in fields),
        "BATCHED": int(before > 0),
        "BEFORE": before,
    }
    header = template_files()["conv_moments.cuh"].read_text(encoding="utf-8")
    lines = [*(f"#define {k} {v}" for k, v in defines.items()), shim, _SOURCE % _text(header)]
    loaded = library("\n".join(lines), folder, "-Og", [])
    arrays = {k: v.ctypes.data if isinstance(v, np.ndarray) else v for k, v in fields.items()}
    assert loaded.run(ctypes.byref(_Params(**arrays)), what) == 0


def _moments(x: Array) -> Array:
    mean = x.mean(-1)
    return np.stack([mean, ((x - mean[..., None]) ** 2).sum(-1)], -1)


@pytest.mark.parametrize("rows", sweep([8, 32, 40, 64, 72, 104, 144, 192, 256], 8, 40, 192))
def test_moments_of_a_tile(rows: int, tmp_path: Path) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 64)) * 2 + np.linspace(-50, 50, rows)[:, None]
    half = x.astype(np.float16)
    swizzled = np.stack([half.reshape(rows, 8, 8)[r, np.arange(8) ^ (r & 7)] for r in range(rows)])
    count = rows + 5  # the tile has the rows from 7 on; two do not exist
    stored = np.full((3, count, 2), np.nan, np.float32)
    _run(tmp_path, 0, rows, first=7, block=1, moments=stored, pixel_count=count, tile=np.ascontiguousarray(swizzled))
    np.testing.assert_allclose(stored[1, 7:], _moments(half.astype(np.float64))[: rows - 2], rtol=2e-4, atol=1e-5)
    assert np.isnan(stored[1, :7]).all()
    assert np.isnan(stored[[0, 2]]).all()


def test_moments_of_a_warps_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float16)
    found = np.empty((8, 2), np.float32)
    _run(tmp_path, 1, 8, tile=x, result=found)
    np.testing.assert_allclose(found, _moments(x.astype(np.float64)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 32, 40, 104, 256])
def test_moments_of_eight_rows_of_a_tile(rows: int, tmp_path: Path) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 64)) * 2 + np.linspace(-50, 50, rows)[:, None]
    half = x.astype(np.float16)
    swizzled = np.stack([half.reshape(rows, 8, 8)[r, np.arange(8) ^ (r & 7)] for r in range(rows)])
    count = rows + 8  # the tile has the rows from 16 on; the last eight do not exist
    stored = np.full((3, count // 8, 2), np.nan, np.float32)
    _run(
        tmp_path,
        0,
        rows,
        first=16,
        block=1,
        together=8,
        moments=stored,
        pixel_count=count,
        tile=np.ascontiguousarray(swizzled),
    )
    want = _moments(half.astype(np.float64).reshape(-1, 8 * 64))
    np.testing.assert_allclose(stored[1, 2:], want[: rows // 8 - 1], rtol=2e-4, atol=1e-5)
    assert np.isnan(stored[1, :2]).all()
    assert np.isnan(stored[[0, 2]]).all()


def test_moments_of_a_later_product_of_a_stack(tmp_path: Path) -> None:
    half = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float16)
    swizzled = np.stack([half.reshape(8, 8, 8)[r, np.arange(8) ^ (r & 7)] for r in range(8)])
    stored = np.full(
        (2, 3 * 6, 2), np.nan, np.float32
    )  # three products of six rows; the tile begins at row 2 of the last one
    _run(tmp_path, 0, 8, first=2, block=1, before=12, moments=stored, pixel_count=6, tiles=6, batch_tiles=2,
         tile=np.ascontiguousarray(swizzled))  # fmt: skip
    np.testing.assert_allclose(stored[1, 14:], _moments(half.astype(np.float64))[:4], rtol=1e-4, atol=1e-5)
    assert np.isnan(stored[1, :14]).all()
    assert np.isnan(stored[0]).all()


def test_moments_of_a_warps_eight_rows(tmp_path: Path) -> None:
    x = (np.random.default_rng(0).standard_normal((8, 16)) + np.arange(8)[:, None]).astype(np.float16)
    found = np.empty((1, 2), np.float32)
    _run(tmp_path, 1, 8, together=8, tile=x, result=found)
    np.testing.assert_allclose(found, _moments(x.astype(np.float64).reshape(1, -1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "image", "blocks", "first"),
    [(40, 200, 1, 80), (104, 24, 3, 0), pytest.param(144, 1024, 2, 1008, marks=pytest.mark.slow), (64, 8, 20, 8)],
)
def test_images_are_normalized(rows: int, image: int, blocks: int, first: int, tmp_path: Path) -> None:
    """Tiles inside of one image, over several images, and across a border. The last images end before their tiles."""
    count = (first + rows) // image * image
    rng = np.random.default_rng(blocks)
    x = rng.standard_normal((count, blocks, 64)) + 4.0 + np.arange(count)[:, None, None] / count
    given = np.ascontiguousarray(_moments(x.reshape(-1, 8, blocks, 64).transpose(2, 0, 1, 3).reshape(blocks, -1, 512)))
    sums, columns, found = (rng.standard_normal(s).astype(np.float32) for s in ((16, rows), 16, (16, rows)))
    _run(tmp_path, 2, rows, first=first, given=given.astype(np.float32), columns=columns, given_blocks=blocks, epsilon=1e-3,
         pixel_count=count, image_parts=image // 8, result=found, sums=sums)  # fmt: skip
    own = np.repeat(x.reshape(-1, image * blocks * 64), image, axis=0)[first : first + rows]
    live = len(own)
    want = (sums[:, :live] - own.mean(1) * columns[:, None]) / np.sqrt(own.var(1) + 1e-3)
    np.testing.assert_allclose(found[:, :live], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normed", [1, 2])
@pytest.mark.parametrize(
    ("rows", "blocks"), sweep([(40, 1), (40, 20), (104, 3), (144, 16), (200, 9)], (40, 20), (104, 3))
)
def test_sums_are_normalized(normed: int, rows: int, blocks: int, tmp_path: Path) -> None:
    first, count = 3, rows + 1
    rng = np.random.default_rng(blocks)
    x = rng.standard_normal((count, blocks, 64)) + 4.0
    given = np.ascontiguousarray(_moments(x).transpose(1, 0, 2).astype(np.float32))
    sums, columns, found = (rng.standard_normal(s).astype(np.float32) for s in ((16, rows), 16, (16, rows)))
    _run(tmp_path, 2, rows, first=first, normed=normed, given=given, columns=columns, given_blocks=blocks, epsilon=1e-3,
         pixel_count=count, result=found, sums=sums)  # fmt: skip
    own = x.reshape(count, -1)[first:]
    live = len(own)
    mean, spread = (own.mean(1), own.var(1)) if normed == 1 else (0.0 * own.mean(1), (own**2).mean(1))
    want = (sums[:, :live] - mean * columns[:, None]) / np.sqrt(spread + 1e-3)
    np.testing.assert_allclose(found[:, :live], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mean", [True, False])
def test_a_residual_is_normalized(mean: bool, tmp_path: Path) -> None:
    rows, blocks = 16, 12
    rng = np.random.default_rng(blocks)
    x = rng.standard_normal((rows, blocks, 64)) * 3.0 + 40.0
    given = np.ascontiguousarray(_moments(x).transpose(1, 0, 2).astype(np.float32))
    scale, found = rng.standard_normal(16).astype(np.float32), np.empty((16, rows), np.float32)
    whole = x.reshape(rows, -1)
    own = np.ascontiguousarray(whole[:, 128:144].T.astype(np.float32))
    _run(tmp_path, 3, rows, normed=0, residual=1 if mean else 2, given=given, columns=scale, given_blocks=blocks, epsilon=1e-3,
         pixel_count=rows, result=found, sums=own)  # fmt: skip
    center, spread = (whole.mean(1), whole.var(1)) if mean else (0.0, (whole**2).mean(1))
    np.testing.assert_allclose(found, (own - center) / np.sqrt(spread + 1e-3) * scale[:, None], rtol=1e-3, atol=1e-4)


def test_another_residual_is_added_as_it_is(tmp_path: Path) -> None:
    x, found = np.arange(256, dtype=np.float32).reshape(16, 16), np.empty((16, 16), np.float32)
    given, scale = np.ones((1, 16, 2), np.float32), np.full(16, 2.0, np.float32)
    _run(tmp_path, 3, 16, given=given, columns=scale, given_blocks=1, epsilon=1.0, pixel_count=16, result=found, sums=x)
    np.testing.assert_array_equal(found, x)
