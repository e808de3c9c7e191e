"""The separable convolution: plans without a GPU, kernels through NVRTC, and each case on a GPU compared with the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import compiler_cache
from support.conv_cases import apply_stages, convolve, same
from support.fenced import run_fenced
from support.layout import compile_checks
from support.separable_cases import ADD, BIAS, CASES, RELU6
from support.traps import trapping

from optdnn.errors import InternalError
from optdnn.kernels.conv import separable_cost
from optdnn.kernels.conv import separable_kernel as separable
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.separable_kernel import Config, Problem
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")


@pytest.mark.parametrize("name", CASES)
def test_each_pixel_has_one_thread_whose_taps_lie_in_the_patch(name: str) -> None:
    problem, config = CASES[name]
    assert separable.refuse(problem, config) is None
    s, (out_h, out_w), strip_h = problem.source, problem.out_size, 16 // config.strip_w
    (patch_h, patch_w), (_, tiles_x, tiles_y) = separable.patch(problem, config), separable.tiles(problem, config)
    seen = np.zeros((out_h, out_w), int)
    inside = set()
    for warp, strip, pixel in itertools.product(range(config.warpgroups * 4), range(config.strips), range(16)):
        x = warp % config.grid_x * config.strip_w + pixel % config.strip_w
        y = (warp // config.grid_x * config.strips + strip) * strip_h + pixel // config.strip_w
        inside.add((y, x))
        last_y = y * s.stride[0] + (s.kernel[0] - 1) * s.dilation[0]
        last_x = x * s.stride[1] + (s.kernel[1] - 1) * s.dilation[1]
        assert last_y < patch_h
        assert last_x < patch_w
        for ty, tx in itertools.product(range(tiles_y), range(tiles_x)):
            at = ty * config.tile[0] + y, tx * config.tile[1] + x
            if at[0] < out_h and at[1] < out_w:
                seen[at] += 1
    assert len(inside) == config.warpgroups * 64 * config.strips
    assert (seen == 1).all()


P = Problem(2, same(14, 14, 96), 24, RELU6, ADD)
C = Config(1, 1, 16, 1, 1, 24, 32, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(P, dtype="float32"), C, "16-bit floats"),
        (replace(P, source=same(14, 14, 96, (7, 7))), C, "49 taps"),
        (replace(P, source=Source(14, 14, 96, (3, 3), (2, 2), (2, 2, 2, 2), (2, 2))), C, "a stride and a dilation"),
        (replace(P, between=(("relu",), ("bias",))), C, "do not begin with a bias"),
        (replace(P, between=(("bias",), ("add",))), C, "or add a residual"),
        (replace(P, channels=20), C, "its number of channels is not a multiple of 8"),
        (replace(P, source=Source(2, 2, 96, (3, 3))), C, "its result is empty"),
        (P, replace(C, strips=3), "not a tile"),
        (P, replace(C, grid_x=3), "do not fill"),
        (P, replace(C, columns=264), "264 columns"),
        (P, replace(C, block=48), "not a ring"),
        (P, replace(C, split=4), "cannot be split 4 ways"),
        (P, replace(C, stages=1), "one stage holds one chunk"),
        (P, replace(C, warpgroups=2, grid_x=8, strips=4, stages=9), "shared memory exceed"),
        (replace(P, source=same(999, 999, 96, dilation=(1, 130))), C, "exceeds a TMA box"),
        (P, replace(C, stages=8, blocks=3), "that many blocks"),
        (replace(P, channels=320), replace(C, parts=2, columns=160), "registers per thread"),
        (replace(P, batch=1 << 30), C, "more tiles"),
        (replace(P, source=replace(P.source, padding=(300, 1, 1, 1))), C, "its padding exceeds 255"),
    ],
)  # fmt: skip
def test_refused(problem: Problem, config: Config, reason: str) -> None:
    assert separable.refuse(P, C) is None
    assert reason in (separable.refuse(problem, config) or "")


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_candidates_can_run_and_are_ranked(batch: int) -> None:
    for size, inner, stride, out in ((112, 32, 1, 16), (56, 144, 2, 32), (7, 960, 1, 320), (14, 512, 1, 512)):
        problem = Problem(batch, Source(size, size, inner, (3, 3), (stride, stride), (1, 1, 1, 1)), out, RELU6, BIAS)
        found = separable_cost.candidates(problem, DEVICE)
        assert len(found) > 5
        assert all(separable.refuse(problem, c) is None for c in found)
        seconds = [separable_cost.estimate(problem, c, DEVICE) for c in found]
        assert seconds == sorted(seconds)
        assert seconds[0] > problem.bytes / 4.8e12
    assert separable_cost.candidates(replace(problem, dtype="float32"), DEVICE) == []


def test_packing() -> None:
    filters = separable.pack_filters(np.arange(70 * 9, dtype=np.float16).reshape(70, 1, 3, 3))
    assert filters.shape == (128, 16)
    assert (filters[69, :9] == np.arange(69 * 9, 70 * 9, dtype=np.float16)).all()
    assert not filters[70:].any()
    assert not filters[:, 9:].any()
    assert separable.pack_shifts(np.ones(70, np.float32)).tolist() == [1.0] * 70 + [0.0] * 58
    weights = separable.pack_weights(np.ones((24, 70, 1, 1), np.float16))
    assert weights.shape == (24, 72)
    assert not weights[:, 70:].any()
    with pytest.raises(InternalError, match="one input channel"):
        separable.pack_filters(np.ones((4, 2, 3, 3), np.float16))


@pytest.mark.parametrize(
    "name", ["four strips", "two parts", "5x5, stride 2", "split, two groups", "bf16", "stride 2", "relu before"]
)
@pytest.mark.nvrtc
def test_kernels_compile_without_spills(name: str) -> None:
    problem, config = CASES[name]
    recipe = separable.recipe(problem, config)
    log = compiler_cache.log(recipe)
    assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "serialized" not in log, "products wait for one another"
    (kernel,) = nvrtc.reported(recipe, log).values()
    assert kernel.registers * config.threads * config.blocks <= 65536


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    problem, config = CASES["residual"]
    made = separable.launch(problem, config, DEVICE)
    names = {"input": "pixels"}
    places = {names.get(p.operand, p.operand): p.at for p in (*made.pointers, *made.maps)}
    assert len(places) == 7
    size = f"sizeof(Params) == {len(made.parameters)}"
    compile_checks(made, places, size, f"STAGE_BYTES == {separable.stage_bytes(problem, config)}")


# ---------------------------------------------------------------- on a GPU

TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}
"""The largest error, relative to the largest magnitude: two roundings."""


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    problem, config = CASES[name]
    s, (out_h, out_w), n = problem.source, problem.out_size, problem.batch
    dtype = np.dtype(np.float16 if problem.dtype == "float16" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    pitches = [
        p or -(-c // 8) * 8
        for p, c in zip(problem.pitches, (s.channels, problem.channels, problem.channels), strict=True)
    ]
    x = np.full((n, s.height, s.width, pitches[0]), np.nan, dtype)
    x[..., : s.channels] = random(n, s.height, s.width, s.channels).astype(dtype)
    filters = (random(s.channels, 1, *s.kernel) / problem.taps**0.5).astype(dtype)
    weights = (random(problem.channels, s.channels, 1, 1) / s.channels**0.5).astype(dtype)
    shift, bias = random(s.channels), random(problem.channels)
    residual = random(n, out_h, out_w, pitches[2]).astype(dtype)
    read = x[..., : s.channels].astype(np.float32)
    y = convolve(np.maximum(read, 0) if problem.relu else read, filters.astype(np.float32), s)
    y = apply_stages(y, problem.between, shift).astype(dtype).astype(np.float32)
    added = residual[..., : problem.channels].astype(np.float32)
    want = apply_stages(y @ weights[:, :, 0, 0].astype(np.float32).T, problem.epilogue, bias, added)

    operands = {
        "input": x, "residual": residual, "bias": bias, "filters": separable.pack_filters(filters),
        "shifts": separable.pack_shifts(shift), "weights": separable.pack_weights(weights),
    }  # fmt: skip
    made = replace(separable.launch(problem, config, DEVICE), recipe=trapping(separable.recipe(problem, config)))
    found = run_fenced(made, operands, {"output": np.empty((n, out_h, out_w, pitches[1]), dtype)}, tmp_path)["output"]
    got = found[..., : problem.channels].astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[problem.dtype] * np.abs(want).max())
    assert np.isnan(found[..., problem.channels :].astype(np.float32)).all(), "nothing else is written"
