"""Plans of depthwise convolutions without a GPU: packing, coverage, refusals, candidates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.conv_cases import same

from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as depthwise_tma
from optdnn.kernels.conv.problem import Source
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")
BEFORE_HOPPER = ("sm_80", "sm_86", "sm_89")


def emulate_depthwise(problem: depthwise.Problem, config: depthwise.Config, x: Any, packed: Any) -> Any:
    """The order of a thread in the kernel: rows from top to bottom, and for each row the vectors of all taps and output rows
    that need them."""
    s, (out_h, out_w) = problem.source, problem.out_size
    (kh, kw), (sh, sw), (dh, dw) = s.kernel, s.stride, s.dilation
    out = np.full((problem.batch, out_h, out_w, problem.channels), np.nan)
    blocks_c, blocks_x, blocks_y = depthwise.tiles(problem, config)
    row_count = (config.tile_h - 1) * sh + (kh - 1) * dh + 1
    for n, bc, by, bx, thread in itertools.product(
        range(problem.batch), range(blocks_c), range(blocks_y), range(blocks_x), range(config.threads)
    ):
        local, strip = thread % config.vectors, thread // config.vectors
        channels = slice((bc * config.vectors + local) * config.lanes, (bc * config.vectors + local + 1) * config.lanes)
        out_x = (bx * config.strips_x + strip % config.strips_x) * config.tile_w
        out_y = (by * config.strips_y + strip // config.strips_x) * config.tile_h
        if channels.start >= problem.channels or out_x >= out_w or out_y >= out_h:
            continue
        acc = np.zeros((config.tile_h, config.tile_w, config.lanes))
        for r, t in itertools.product(range(row_count), range(config.tile_h)):
            offset, y = r - t * sh, out_y * sh - s.padding[0] + r
            if offset < 0 or offset % dh or offset // dh >= kh or not 0 <= y < s.height:
                continue
            for tap, i in itertools.product(range(kw), range(config.tile_w)):
                column = out_x * sw - s.padding[1] + i * sw + tap * dw
                if 0 <= column < s.width:
                    acc[t, i] += x[n, y, column, channels] * packed[offset // dh * kw + tap, channels]
        for t, i in itertools.product(range(config.tile_h), range(config.tile_w)):
            if out_y + t < out_h and out_x + i < out_w:
                assert np.isnan(out[n, out_y + t, out_x + i, channels]).all()  # written once
                out[n, out_y + t, out_x + i, channels] = acc[t, i]
    return out


@pytest.mark.parametrize(
    "source",
    [
        same(7, 6, 24),
        Source(9, 11, 8, (3, 3), (2, 2), (1, 1, 1, 1)),
        Source(8, 8, 16, (5, 5), (2, 1), (2, 2, 1, 2)),
        Source(10, 9, 12, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
        Source(6, 9, 8, (3, 5), (1, 2), (0, 2, 2, 1)),
    ],
)
def test_depthwise_threads_cover_the_convolution(source: Source) -> None:
    problem = depthwise.Problem(2, source)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, source.height, source.width, source.channels))
    weight = rng.standard_normal((source.channels, 1, *source.kernel))
    out_h, out_w = problem.out_size
    (top, left, _, _), expected = source.padding, np.zeros((2, out_h, out_w, source.channels))
    padded = np.pad(x, ((0, 0), (top, 20), (left, 20), (0, 0)))
    for r, c in itertools.product(*map(range, source.kernel)):
        y0, x0 = r * source.dilation[0], c * source.dilation[1]
        part = padded[:, y0 :: source.stride[0], x0 :: source.stride[1]]
        expected += part[:, :out_h, :out_w] * weight[:, 0, r, c]
    found = depthwise.candidates(problem, DEVICE, 40)
    assert len({(c.tile_h, c.tile_w, c.lanes) for c in found}) > 3
    for config in found[:: max(1, len(found) // 4)]:
        made = emulate_depthwise(problem, config, x, depthwise.pack_weights(weight))
        np.testing.assert_allclose(made, expected, atol=1e-12, err_msg=str(config))


D = depthwise.Problem(4, same(14, 14, 64))
DC = depthwise.Config(2, 2, 8, 7, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (depthwise.Problem(4, same(14, 14, 60)), DC, "60 channels are not a multiple of 8"),
        (depthwise.Problem(4, same(14, 14, 64, (13, 13))), DC, "169 taps"),
        (depthwise.Problem(4, same(14, 14, 64, (11, 11))), DC, "3872 multiplications a thread"),
        (depthwise.Problem(4, Source(2, 2, 64, (3, 3))), DC, "output is empty"),
        (D, replace(DC, strips_y=9), "504 threads"),
        (D, replace(DC, tile_w=8), "more than 64 accumulators"),
        (depthwise.Problem(4, same(99, 99, 64, (7, 7), dilation=(3, 3))), DC, "input vectors"),
        (replace(D, batch=70000), DC, "grid is too large"),
        (replace(D, pitches=(1 << 24, 64, 0)), DC, "an image has more elements than the kernel addresses"),
        (replace(D, dtype="float32"), DC, "8 elements exceed an access of 16 bytes"),
        (
            depthwise.Problem(4, same(14, 14, 64, (7, 7)), dtype="float32"),
            replace(DC, lanes=4),
            "49 taps of fp32 exceed",
        ),
        (replace(D, dtype="float32", out="float16"), replace(DC, lanes=4), "no kernel turns float32 into float16"),
    ],
)
def test_depthwise_refuses(problem: depthwise.Problem, config: depthwise.Config, reason: str) -> None:
    assert depthwise.refuse(D, DC) is None
    assert reason in (depthwise.refuse(problem, config) or "")


def test_a_squeeze_is_finished_by_one_block_or_by_a_second_launch() -> None:
    problem = depthwise.Problem(2, same(14, 14, 64), squeeze=True)
    small, whole = depthwise.Config(1, 2, 8, 7, 2), depthwise.Config(2, 4, 8, 4, 7)
    assert depthwise.tiles(problem, small) == (1, 1, 7)
    assert depthwise.squeeze_mode(problem, small) == 1
    assert depthwise.launch(problem, small, DEVICE).operands[-1] == "sums"
    assert depthwise.launch_squeeze(problem, 7, DEVICE).operands == ("sums", "means")
    assert depthwise.squeeze_mode(problem, whole) == 2
    assert depthwise.launch(problem, whole, DEVICE).operands[-1] == "means"
    assert depthwise.squeeze_mode(D, small) == 0


T = depthwise_tma.Config(2, 4, 8, 4, 4, 8, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (depthwise.Problem(4, same(14, 14, 60)), T, "60 channels"),
        (D, replace(T, vectors=40, strips_x=1, strips_y=4), "a TMA box cannot have 320 channels"),
        (depthwise.Problem(4, same(14, 14, 64, (13, 13))), T, "too many taps"),
        (depthwise.Problem(4, same(14, 14, 64, (9, 9))), T, "not a tile"),
        (D, replace(T, strips_y=12), "not a tile"),
        (depthwise.Problem(4, same(99, 99, 64, (7, 7), dilation=(3, 3))), T, "input vectors"),
        (depthwise.Problem(4, same(999, 999, 64)), replace(T, vectors=1, strips_x=128, strips_y=1), "patch exceeds"),
        (D, replace(T, stages=9), "9 stages"),
        (depthwise.Problem(4, same(64, 64, 64, (7, 7), stride=2)), replace(T, stages=8), "shared memory exceed"),
        (D, replace(T, stages=3, blocks=5), "that many blocks"),
        (D, replace(T, blocks=4), "registers per thread"),
        (replace(D, batch=1 << 30), T, "more tiles"),
    ],
)
def test_depthwise_by_tma_refuses(problem: depthwise.Problem, config: depthwise_tma.Config, reason: str) -> None:
    assert depthwise_tma.refuse(D, T) is None
    assert reason in (depthwise_tma.refuse(problem, config) or "")


@pytest.mark.parametrize("source", [same(56, 56, 144), Source(57, 30, 96, (5, 3), (2, 1), (2, 1, 2, 1), (1, 2))])
def test_depthwise_patches_hold_all_pixels_of_their_tiles(source: Source) -> None:
    problem = depthwise.Problem(64, source)
    (sh, sw), (dh, dw), (kh, kw) = source.stride, source.dilation, source.kernel
    for config in depthwise_tma.candidates(problem, DEVICE):
        last = (
            (config.strips_y * config.tile_h - 1) * sh + (kh - 1) * dh,
            (config.strips_x * config.tile_w - 1) * sw + (kw - 1) * dw,
        )
        made = depthwise_tma.launch(problem, config, DEVICE)
        assert made.maps[0].box == (config.vectors * config.lanes, last[1] + 1, last[0] + 1, 1)
        slabs, x, y = depthwise_tma.tiles(problem, config)
        assert slabs * config.vectors * config.lanes >= problem.channels
        assert made.grid[0] % slabs == 0
        assert made.grid[0] <= slabs * x * y * problem.batch


@pytest.mark.parametrize("arch", BEFORE_HOPPER)
def test_candidates_before_hopper_fit_a_block_and_need_no_tma(arch: str) -> None:
    gpu = gpu_facts.of_arch(arch)
    assert "capability 8.0 do not have" in (depthwise_tma.refuse(D, T, capability=(8, 0)) or "")
    assert depthwise_tma.candidates(D, DEVICE)
    assert depthwise_tma.candidates(D, gpu) == []
    wide = depthwise.Problem(2, same(8, 8, 2048, (7, 7)))
    config = depthwise.Config(1, 1, 160, 1, 1)
    assert "exceed 101376" in (depthwise.refuse(wide, config, shared=101376) or "")
    assert depthwise.refuse(wide, config) is None
    for problem in (D, wide, replace(wide, squeeze=True)):
        found = depthwise.candidates(problem, gpu)
        assert found
        assert all(depthwise.shared_bytes(problem, c) <= gpu.shared_per_block for c in found)
