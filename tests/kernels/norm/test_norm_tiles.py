"""Norms in tiles: refusals and candidates of the plans, kernels that compile, and kernels on the processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.host_tiles import run_launches
from support.spills import check_launch
from support.sweep import every, sweep

from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.kernels.norm import row_norm_tiles as rows
from optdnn.kernels.norm.group_norm import group_norm_offers
from optdnn.kernels.norm.tiles import KEPT, TwoReads
from optdnn.kernels.tactic import MANY
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import ARCHS, of_arch
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

DEVICE = of_arch("sm_90a")
LARGE = clustered.Problem(1, 512 * 512, 128, 32)
LARGE_CONFIG = tiled.Config(64, 132, 512, 8)
ROWS = rows.Problem(64, 1 << 18, 1 << 12, 32)
ROWS_CONFIG = rows.Config(4, 256, 8)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(LARGE, groups=7), LARGE_CONFIG, "do not form 7 equal groups"),
        (replace(LARGE, epilogue=(("add",),)), LARGE_CONFIG, "no operands"),
        (LARGE, replace(LARGE_CONFIG, slab=44), "vectors of 8"),
        (replace(LARGE, dtype="float32"), LARGE_CONFIG, "exceed an access"),
        (replace(LARGE, groups=4), replace(LARGE_CONFIG, slab=16), "whole groups"),
        (LARGE, replace(LARGE_CONFIG, threads=2048), "threads"),
        (LARGE, replace(LARGE_CONFIG, threads=32, slab=128, lanes=2), "too few"),
        (replace(LARGE, pixels=100), LARGE_CONFIG, "100 pixels in 132 tiles"),
        (replace(LARGE, batch=1 << 24), LARGE_CONFIG, "grid"),
    ],
)
def test_tiles_of_images_refuse(problem: clustered.Problem, config: tiled.Config, reason: str) -> None:
    assert tiled.refuse(LARGE, LARGE_CONFIG) is None
    assert reason in (tiled.refuse(problem, config) or "")


def test_tiles_of_images_need_shared_memory() -> None:
    assert "bytes of shared memory" in (tiled.refuse(LARGE, LARGE_CONFIG, shared=5_000) or "")


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(ROWS, epilogue=(("bias",),)), ROWS_CONFIG, "no operands"),
        (replace(ROWS, run=3000), ROWS_CONFIG, "not whole runs and periods"),
        (replace(ROWS, period=7), ROWS_CONFIG, "not whole runs and periods"),
        (replace(ROWS, length=12 << 10, run=12), ROWS_CONFIG, "vectors of 8"),
        (replace(ROWS, dtype="float32"), ROWS_CONFIG, "exceed an access"),
        (ROWS, replace(ROWS_CONFIG, threads=100), "not a valid block"),
        (replace(ROWS, length=16, run=16), ROWS_CONFIG, "16 elements in 4 tiles"),
        (replace(ROWS, rows=1 << 30), ROWS_CONFIG, "grid"),
    ],
)
def test_tiles_of_rows_refuse(problem: rows.Problem, config: rows.Config, reason: str) -> None:
    assert rows.refuse(ROWS, ROWS_CONFIG) is None
    assert reason in (rows.refuse(problem, config) or "")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 512 * 512, 128, 32), (16, 112 * 112, 64, 64), (2, 4096, 320, 32), (1, 7, 8, 1)])
def test_every_image_and_row_has_configurations(shape: tuple[int, int, int, int], dtype: str) -> None:
    n, pixels, channels, groups = shape
    problem = clustered.Problem(n, pixels, channels, groups, dtype=dtype)
    found = tiled.candidates(problem, DEVICE, 99)
    assert found
    assert all(tiled.refuse(problem, c) is None for c in found)
    row = rows.Problem(n * groups, channels // groups * pixels, pixels, groups, dtype=dtype)
    assert rows.candidates(row, DEVICE)
    assert all(rows.refuse(row, c) is None for c in rows.candidates(row, DEVICE, 99))


def test_large_tensors_are_predicted_at_half_of_the_bandwidth() -> None:
    """An image that is larger than L2 is read twice: two thirds of the traffic is necessary."""
    for problem in (LARGE, replace(LARGE, dtype="float32"), replace(LARGE, batch=8)):
        seconds = tiled.estimate(problem, tiled.candidates(problem, DEVICE)[0], DEVICE)
        assert 0.4 < problem.bytes / DEVICE.bandwidth / seconds < 0.7


def test_few_blocks_are_slow() -> None:
    """The configuration for many images is also offered for one image, whose few tiles leave multiprocessors idle."""
    problem = clustered.Problem(1, 256 * 256, 64, 32)
    (many,) = (o.config for o in group_norm_offers(replace(problem, batch=MANY), DEVICE) if o.row_invariant)
    assert isinstance(many, tiled.Config)
    best = group_norm_offers(problem, DEVICE)[0]
    assert best.seconds is not None
    assert best.config != many
    assert tiled.estimate(problem, replace(many, tiles=8), DEVICE) > 2 * best.seconds


def test_blocks_keep_fitting_data_in_l2() -> None:
    small = TwoReads(264, 512, 16, 1 << 20, 128, 8)
    assert small.kept(DEVICE) == 0
    large = replace(small, tensor=10 * DEVICE.l2_bytes)
    assert large.kept(DEVICE) == 264 - int(264 * KEPT / 10)


# ---- compiled ------------------------------------------------------------------------------------------------------------------

COMPILED: dict[str, tuple[Any, Any]] = {
    "images": (tiled, LARGE),
    "images, swish": (tiled, replace(LARGE, epilogue=(("silu",),), dtype="bfloat16")),
    "images, parts of wider ones": (tiled, replace(LARGE, epilogue=(("silu",),), dtype="bfloat16", input_pitch=256)),
    "images of fp32": (tiled, replace(LARGE, dtype="float32")),
    "rows": (rows, ROWS),
    "rows, gelu": (rows, replace(ROWS, epilogue=(("gelu",),), dtype="bfloat16")),
    "rows of fp32": (rows, replace(ROWS, dtype="float32")),
    "rows with scales of their own": (rows, rows.Problem(4, 1 << 20)),
    "short rows": (rows, rows.Problem(4096, 768, dtype="float32")),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "arch"), every(3, [(name, ("sm_80", "sm_90a")[k % 2]) for k, name in enumerate(COMPILED)])
)
def test_candidates_compile_without_spills(name: str, arch: str) -> None:
    module, problem = COMPILED[name]
    gpu = of_arch(arch)
    for config in module.candidates(problem, gpu, 1):
        for made in module.launches(problem, config, gpu):
            check_launch(made, gpu)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("name", "arch"), [(("images", "rows")[k % 2], arch) for k, arch in enumerate(ARCHS)])
def test_tiles_compile_everywhere(name: str, arch: str) -> None:
    module, problem = COMPILED[name]
    nvrtc.compile_recipe(module.recipe(problem, module.candidates(problem, DEVICE)[0], arch))


# ---- run on the processor -------------------------------------------------------------------------------------------------------

on_host = needs_compiler


def moved(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Numbers whose means differ by channel. Some means are far from 0."""
    rng = np.random.default_rng(seed)
    offset = 30 * rng.standard_normal((*shape[:2], *(1,) * (len(shape) - 2)))
    return (rng.standard_normal(shape) + offset).astype(dtype)


def check(found: Array, wanted: Array) -> None:
    """The largest error: one rounding of the element type, relative to the largest magnitude."""
    bound = {"float16": 1.5e-3, "float32": 1e-5}[found.dtype.name]
    assert np.abs(found.astype(np.float64) - wanted).max() <= bound * np.abs(wanted).max()


IMAGES = {
    "one tile": ((2, 16, 5, 7), 4, tiled.Config(16, 1, 64, 8)),
    "tiles": ((2, 16, 13, 11), 4, tiled.Config(16, 6, 64, 8)),
    "slabs": ((1, 48, 9, 9), 6, tiled.Config(16, 5, 96, 8)),
    "idle threads": ((1, 40, 10, 7), 5, tiled.Config(40, 3, 64, 8)),
    "a group per slab": ((1, 80, 12, 5), 2, tiled.Config(40, 4, 64, 8)),
    "instances": ((2, 24, 6, 50), 24, tiled.Config(24, 7, 128, 4)),
    "a pixel per tile": ((1, 8, 3, 3), 2, tiled.Config(8, 9, 32, 2)),
}


@on_host
@pytest.mark.parametrize("dtype", sweep(["float16", "float32"], "float16"))
@pytest.mark.parametrize("name", IMAGES)
def test_tiles_of_images_run(name: str, dtype: str, tmp_path: Path) -> None:
    shape, groups, config = IMAGES[name]
    if dtype == "float32":
        config = replace(config, lanes=min(4, config.lanes))
    n, channels, *spatial = shape
    stages = (("relu",),)
    problem = clustered.Problem(n, int(np.prod(spatial)), channels, groups, stages, dtype, 1e-3)
    assert tiled.refuse(problem, config) is None
    x, scale, bias = moved(shape, dtype), moved((channels,), "float32", 1), moved((channels,), "float32", 2)
    image = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    out, moments = np.full_like(image, np.nan), np.full((n, groups, config.tiles, 2), np.nan, np.float32)
    memory = {"input": image, "output": out, "scale": scale, "bias": bias, "moments": moments}
    run_launches(tiled.launches(problem, config, DEVICE), memory, tmp_path)
    check(moments, run_kernel("GroupMoments", [x.astype(np.float64)], {"groups": groups, "tiles": config.tiles})[0])
    wanted = run_kernel(
        "GroupNormalization", [x.astype(np.float64), scale, bias], {"num_groups": groups, "epsilon": 1e-3}
    )
    check(np.moveaxis(out, -1, 1), np.maximum(wanted[0], 0))


ONE_LAUNCH = {
    "registers": ((2, 16, 5, 7), 4, clustered.Config(8, 1, 64, 8)),
    "registers of idle threads": ((1, 40, 8, 5), 5, clustered.Config(40, 1, 64, 8)),
    "groups beside vectors": ((1, 48, 9, 9), 16, clustered.Config(24, 1, 96, 4)),
    "shared memory": ((2, 40, 31, 9), 4, clustered.Config(40, 1, 64, 8)),
    "instances": ((2, 24, 6, 20), 24, clustered.Config(24, 1, 128, 4)),
    "one pixel": ((1, 8, 1, 1), 2, clustered.Config(8, 1, 32, 2)),
}


@on_host
@pytest.mark.parametrize(("dtype", "added"), sweep([("float16", True), ("float32", False)], ("float16", True)))
@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_block_keeps_an_image(name: str, dtype: str, added: bool, tmp_path: Path) -> None:
    shape, groups, config = ONE_LAUNCH[name]
    if dtype == "float32":
        config = replace(config, lanes=min(4, config.lanes))
    n, channels, *spatial = shape
    pitch = channels if added else None
    problem = clustered.Problem(n, int(np.prod(spatial)), channels, groups, (), dtype, 1e-3, added_pitch=pitch)
    assert clustered.refuse(problem, config) is None
    assert (clustered.held(problem, config) == 0) == (name == "shared memory")
    x, scale, bias = moved(shape, dtype), moved((channels,), "float32", 1), moved((channels,), "float32", 2)
    vectors = moved((n, channels), dtype, 5)
    image = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    out = np.full_like(image, np.nan)
    memory = {"input": image, "output": out, "scale": scale, "bias": bias, "added": vectors}
    run_launches([clustered.launch(problem, config, DEVICE)], memory, tmp_path)
    total = x.astype(np.float64) + (vectors[:, :, None, None] if added else 0)
    wanted = run_kernel("GroupNormalization", [total, scale, bias], {"num_groups": groups, "epsilon": 1e-3})
    check(np.moveaxis(out, -1, 1), wanted[0])


def test_a_grid_of_clusters_that_do_not_run_at_once_takes_longer() -> None:
    problem = clustered.Problem(1, 4096, 320, 32)
    eight, sixteen = clustered.Config(40, 8, 512, 8), clustered.Config(40, 16, 512, 8)
    fits = replace(problem, channels=280, groups=28)
    assert DEVICE.clusters_at_once(16) == 7
    assert clustered.estimate(problem, sixteen, DEVICE) > 1.1 * clustered.estimate(fits, sixteen, DEVICE)
    assert clustered.estimate(problem, eight, DEVICE) < 1.05 * clustered.estimate(fits, eight, DEVICE)


@on_host
@pytest.mark.parametrize("dtype", sweep(["float16", "float32"], "float16"))
@pytest.mark.parametrize(("pitches", "each"), [((24, 32), True), ((16, 24), False), ((40, 40), True)])
def test_parts_of_wider_images_and_vectors_run(
    pitches: tuple[int, int], each: bool, dtype: str, tmp_path: Path
) -> None:
    n, channels, pixels, groups = 2, 16, 150, 4
    config = tiled.Config(channels, 6, 64, 4)
    problem = clustered.Problem(n, pixels, channels, groups, (), dtype, 1e-3, *pitches, 24 if each else 0)
    x, vectors = moved((n, channels, pixels), dtype), moved((n, 24), dtype, 5)
    scale, bias = moved((channels,), "float32", 1), moved((channels,), "float32", 2)
    image, out = np.full((n, pixels, pitches[0]), np.nan, dtype), np.full((n, pixels, pitches[1]), np.nan, dtype)
    image[..., :channels] = np.moveaxis(x, 1, -1)
    moments = np.full((n, groups, config.tiles, 2), np.nan, np.float32)
    memory = {"input": image, "added": vectors, "output": out, "scale": scale, "bias": bias, "moments": moments}
    run_launches(tiled.launches(problem, config, DEVICE), memory, tmp_path)
    total = x.astype(np.float64) + vectors[: n if each else 1, :channels, None]
    wanted = run_kernel("GroupNormalization", [total, scale, bias], {"num_groups": groups, "epsilon": 1e-3})
    check(np.moveaxis(out, -1, 1)[:, :channels], wanted[0])
    assert np.isnan(out[..., channels:]).all()


ROW_CASES = {
    "one tile": ((2, 12, 5, 8), 4, rows.Config(1, 32, 8)),
    "one tile of a large block": ((2, 4, 30, 20), 2, rows.Config(1, 128, 4)),
    "tiles": ((2, 12, 9, 8), 4, rows.Config(5, 64, 4)),
    "odd images": ((2, 6, 5, 7), 3, rows.Config(3, 32, 1)),
    "long tiles": ((1, 4, 64, 40), 2, rows.Config(3, 64, 8)),
}


@on_host
@pytest.mark.parametrize("dtype", sweep(["float16", "float32"], "float16"))
@pytest.mark.parametrize("name", ROW_CASES)
def test_tiles_of_rows_run(name: str, dtype: str, tmp_path: Path) -> None:
    shape, groups, config = ROW_CASES[name]
    if dtype == "float32":
        config = replace(config, lanes=min(4, config.lanes))
    n, channels, *spatial = shape
    pixels = int(np.prod(spatial))
    problem = rows.Problem(n * groups, channels // groups * pixels, pixels, groups, (), dtype, 1e-3)
    assert rows.refuse(problem, config) is None
    x, scale, bias = moved(shape, dtype), moved((channels,), "float32", 1), moved((channels,), "float32", 2)
    out, moments = np.full_like(x, np.nan), np.full((n * groups, config.tiles, 2), np.nan, np.float32)
    memory = {"input": x, "output": out, "scale": scale, "bias": bias, "moments": moments}
    run_launches(rows.launches(problem, config, DEVICE), memory, tmp_path)
    wanted = run_kernel(
        "GroupNormalization", [x.astype(np.float64), scale, bias], {"num_groups": groups, "epsilon": 1e-3}
    )
    check(out, wanted[0])


@on_host
@pytest.mark.parametrize("tiles", [1, 3])
def test_rows_with_scales_of_their_own_run(tiles: int, tmp_path: Path) -> None:
    x, scale, bias = moved((5, 200), "float16"), moved((200,), "float32", 1), moved((200,), "float32", 2)
    problem = rows.Problem(5, 200, epsilon=1e-3)
    out, moments = np.full_like(x, np.nan), np.full((5, tiles, 2), np.nan, np.float32)
    memory = {"input": x, "output": out, "scale": scale, "bias": bias, "moments": moments}
    run_launches(rows.launches(problem, rows.Config(tiles, 32, 8), DEVICE), memory, tmp_path)
    check(out, run_kernel("LayerNormalization", [x.astype(np.float64), scale, bias], {"epsilon": 1e-3})[0])


@pytest.mark.parametrize(("length", "run"), [(4, 4), (1, 1), (128, 16), (49, 49)])
def test_short_rows_take_one_launch_of_a_few_microseconds(length: int, run: int) -> None:
    """The group norm of a detector's last level, with small images. Threads without elements do not slow others down."""
    problem = rows.Problem(32, length, run, 32)
    best = rows.candidates(problem, DEVICE)[0]
    assert best.tiles == 1
    assert 2e-6 < rows.estimate(problem, best, DEVICE) < 5e-6
