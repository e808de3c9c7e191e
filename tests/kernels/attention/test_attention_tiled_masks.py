"""Masks per query whose tiles TMA loads: refusals, first choices, and rows that are padded for it. test_attention_hopper.py runs the launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.attention_cases import merged
from support.net import Net
from support.sequence_cases import attention
from support.simulated import check_simulated, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.attention import hopper_config
from optdnn.kernels.attention import hopper_kernel as hopper
from optdnn.kernels.attention.hopper_config import Config
from optdnn.kernels.attention.problem import Problem
from optdnn.ops.unary import FakeQuantizeAttrs
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.program import Program

H200 = gpu_facts.of_arch("sm_90a")
BIAS = merged(8, 12, 512, 64, mask=(0, 512 * 512, 512), mask_aligned=True)
TILE = Config(2, 128, 3, persistent=True, turns=True, tiled=True)
ALONE = "a mask comes with its tile's values, which need another stage than the values of the tile before"


@pytest.mark.parametrize(
    ("problem", "config", "because"),
    [
        (replace(BIAS, mask=(0, 0, 0)), TILE, "tiles are of masks per query, and not for rounded weights"),
        (
            replace(BIAS, grids=(None, FakeQuantizeAttrs(scale=1 / 255, low=0, high=255))), replace(TILE, turns=False),
            "tiles are of masks per query, and not for rounded weights",
        ),
        (BIAS, replace(TILE, keys=80), "a tile of a mask has 80 keys (a multiple of 32 is needed)"),
        (replace(BIAS, keys=49), Config(1, 64, 1, tiled=True), "rows of 49 keys leave most of a tile of a mask empty"),
        (replace(BIAS, mask_aligned=False), TILE, "TMA needs rows of the mask that begin at multiples of 16 bytes"),
        (BIAS, Config(1, 64, 1, tiled=True), ALONE),
        (BIAS, Config(2, 64, 2, split=True, tiled=True), ALONE),
    ],
)  # fmt: skip
def test_refusals(problem: Problem, config: Config, because: str) -> None:
    assert hopper.refuse(problem, config) == because


def test_few_tiles_may_have_a_stage_each() -> None:
    assert hopper.refuse(BIAS, TILE) is None
    short = replace(BIAS, keys=128)
    assert hopper.refuse(short, Config(1, 128, 1, tiled=True)) is None
    assert hopper.refuse(short, Config(1, 64, 2, tiled=True)) is None


def test_the_launch_has_a_map_of_the_mask() -> None:
    made = hopper.launch(replace(BIAS, batch=6, mask=(12 * 512 * 512, 512 * 512, 512), mask_period=3), TILE, H200)
    (found,) = (m for m in made.maps if m.operand == "mask")
    assert (found.shape, found.box) == ((512, 512, 12, 3), (64, 64, 1, 1))
    assert found.strides == (1024, 1024 * 512, 1024 * 512 * 12)
    assert not [p for p in made.pointers if p.operand == "mask"]
    (shared,) = (m for m in hopper.launch(BIAS, replace(TILE, keys=96), H200).maps if m.operand == "mask")
    assert (shared.shape, shared.box) == ((512, 512, 12, 1), (32, 64, 1, 1))
    assert hopper_config.shared_bytes(BIAS, TILE) == 1024 + 128 * 2 * 128 + 3 * 128 * (2 * 128 + 2 * 128)


def test_first_choices() -> None:
    """Measured on an H200, with tiles and with loads of threads: 8 x 12 heads x 512 tokens 23.3 and 30.6 us, 16 heads x 2048 tokens x 128
    features 77.2 and 104.6."""
    long = merged(1, 16, 2048, 128, mask=(0, 2048 * 2048, 2048), mask_aligned=True)
    for problem, with_tiles, without in ((BIAS, 23.3, 30.6), (long, 77.2, 104.6)):
        first, plain = (hopper.candidates(p, H200)[0] for p in (problem, replace(problem, mask_aligned=False)))
        assert (first.tiled, plain.tiled) == (True, False)
        assert hopper.estimate(problem, first, H200) * 1e6 == pytest.approx(with_tiles, rel=0.15)
        assert hopper.estimate(problem, plain, H200) * 1e6 == pytest.approx(without, rel=0.15)
    assert not any(c.tiled for c in hopper.candidates(merged(8, 12, 49, 32, mask=(0, 49 * 56, 56)), H200, limit=1000))


def rows_of_masks(program: Program) -> int:
    """Elements between two rows of the mask of the only attention."""
    (step,) = (s for s in program.steps if s.params["op"]["kind"] in ("Attention", "PeriodicAttention"))
    return int(step.params["reads"][3][3][2])


@pytest.mark.parametrize("mask", ["full", "bool", "windows"])
def test_rows_that_the_build_writes_are_padded(mask: str) -> None:
    """Constants, and masks made of booleans."""
    program = check_simulated(attention(mask=mask, length=77, count=2), "fp16")
    assert rows_of_masks(program) == 80
    assert "Copy" not in kinds(program)


def given(batch: int, heads: int, tokens: int, masks: tuple[int, int]) -> Graph:
    """Attention with a computed mask of an odd number of keys."""
    n = Net()
    q, k, v = (n.op("Relu", n.input(batch, heads, tokens, 64, name=name)) for name in "qkv")
    mask: Any = n.op("Sin", n.input(*masks, tokens, tokens, name="mask"))
    return n.done(n.op("Attention", q, k, v, mask))


def test_a_computed_mask_is_copied_to_padded_rows_where_that_pays() -> None:
    program = lowered(given(4, 12, 1569, (4, 1)), "fp16", io_dtype="fp16")
    assert rows_of_masks(program) == 1576
    program = lowered(given(1, 2, 101, (1, 2)), "fp16", io_dtype="fp16")
    assert rows_of_masks(program) == 101


def test_padded_rows_hold_the_mask() -> None:
    assert rows_of_masks(check_simulated(given(2, 16, 333, (1, 1)), "fp16")) == 336
