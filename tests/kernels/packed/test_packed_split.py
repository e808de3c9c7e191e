"""Some rows times packed weights, K split over warps: plans, and the kernel on a processor that emulates warps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import emulated
from support.conv_cases import apply_stages
from support.host import COMPILER, WHY_NOT
from support.packed_cases import (
    CASES,
    GATED,
    TOLERANCE,
    TYPES,
    Case,
    check_emulated,
    drawn,
    operands_of,
    pitch_of,
    tiled,
)
from support.sweep import sweep

from optdnn.kernels.packed import split_kernel as split
from optdnn.kernels.packed.tiles import tiled_weights
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import GpuFacts, named, of_arch
from optdnn.runtime.reference.packed import dequantized

H200 = named("h200")
SMALL = replace(H200, multiprocessors=1)
"""Blocks of one multiprocessor have many tiles."""
ALONE = split.Config(1, 1, 4, 2)
SIZES = {
    "9 rows": (Case(9, 72, 1100, zeros="uint8"), split.Config(5, 2, 6, 3)),
    "16 rows, a wide block": (Case(16, 300, 1024, block=32), split.Config(7, 1, 8, 4)),
    "16 rows, long rings": (Case(16, 40, 2300), split.Config(3, 2, 4, 4)),
    "10 rows": (Case(10, 96, 640, "uint8", 64), split.Config(3, 1, 4, 2)),
    "bf16": (Case(15, 40, 600, dtype="bfloat16", scale="bfloat16"), ALONE),
    "more chunks than turns": (Case(12, 64, 1536, stages=(("add",), ("relu",))), split.Config(4, 1, 4, 3)),
    "odd columns": (Case(12, 61, 633, block=16), ALONE),
}


def run(case: Case, config: split.Config, folder: Path) -> None:
    p = case.problem
    made = split.launch(p, config, SMALL, pitch_of(case), p.columns)
    check_emulated(case, made, (0, 0), render.mma(p.dtype), folder)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(CASES, "blocks of 16", "8 bits, bf16", "gated"))
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    case = CASES[name].of_rows(11)
    half = -(-case.problem.tiles // 2)
    run(replace(case, depth=max(case.depth, 1025)), split.Config(half, min(half, 2), 4, 3), tmp_path)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(SIZES, "9 rows", "10 rows"))
def test_sizes_on_a_processor(name: str, tmp_path: Path) -> None:
    run(*SIZES[name], tmp_path)


PAIRS = {
    "two turns": (Case(11, 120, 1700, stages=GATED), split.Config(8, 2, 6, 3)),
    "zero points": (Case(16, 100, 640, zeros="uint8", stages=GATED), split.Config(4, 1, 4, 2)),
    "bf16": (Case(9, 61, 1024, "uint8", dtype="bfloat16", scale="bfloat16", stages=GATED), split.Config(2, 2, 8, 2)),
}


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", PAIRS)
def test_two_products_on_a_processor(name: str, tmp_path: Path) -> None:
    case, config = PAIRS[name]
    check_pair(case, config, tmp_path)


def check_pair(case: Case, config: split.Config, folder: Path) -> None:
    """The product of a case times a second one, beside float64."""
    p, o = replace(case.problem, beside=(("bias",), ("relu",))), drawn(case)
    made = split.launch(p, config, SMALL, pitch_of(case), p.columns)
    text = made.recipe.generated["generated.cuh"].replace(render.mma(p.dtype), "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    headers = ["packed.cuh", "packed_sums.cuh"]
    library = emulated.compiled(made.recipe, made.function, folder, rendered=rendered, headers=headers)
    found = operands_of(case, o) | {f"beside_{n}": a for n, a in tiled(case, o).items()}
    second = o.packed ^ np.uint8(0x5A)
    found["beside_tiles"] = tiled_weights(second, p.code, p.depth, p.block)
    found["beside_bias"] = np.pad(drawn(case, 5).bias, (0, -p.columns % 4))
    found["output"] = np.full((p.rows, p.columns), np.nan, TYPES[case.dtype])
    held = {n: emulated.aligned(a) for n, a in found.items()}
    emulated.run(library, made, {n: held[n].ctypes.data for n in made.operands})
    weights = [dequantized(w, o.scales, o.zeros, code=p.code, K=p.depth, block_size=p.block, wide=np.dtype(np.float64)) for w in (o.packed, second)]  # fmt: skip
    y, z = (o.x.astype(np.float64) @ w.T for w in weights)
    want = apply_stages(y, p.epilogue, o.bias, np.maximum(z + found["beside_bias"][: p.columns], 0))
    got = held["output"].astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * TOLERANCE[case.dtype] * np.abs(want).max())


def test_what_it_refuses() -> None:
    large, pairs = Case(16, 14336, 4096), split.Config(7, 2, 6, 3)

    def why(config: split.Config, case: Case = large, gpu: GpuFacts = H200) -> str | None:
        return split.refuse(case.problem, config, gpu)

    assert why(pairs) is None
    assert why(pairs, large.of_rows(17)) == "it is for up to 16 rows, not 17"
    assert why(split.Config(9, 1, 4, 2)) == "not a tile of this kernel"
    assert why(split.Config(2, 1, 4, 2, 2), gpu=of_arch("sm_80")) == "sm_80 has no clusters"
    assert "bytes of shared memory exceed" in str(why(split.Config(2, 1, 16, 4), replace(large, block=16)))
    assert why(split.Config(7, 2, 8, 2)) == "its sums do not fit the registers"
    assert why(split.Config(8, 1, 8, 2), replace(large, block=64)) == "its blocks have fewer than 8 tiles"
    assert why(split.Config(2, 1, 12, 2, 2), Case(16, 4096, 2048)) == "16 chunks are not shared by 24 warps"
    two = replace(large.problem, beside=(("bias",),))
    assert split.refuse(two, split.Config(7, 2, 12, 2), H200) == "tiles of two matrices come in pairs"
    assert split.refuse(two, split.Config(8, 1, 12, 2), H200) == "its sums do not fit the registers"
    assert split.unfit(large.problem, H200) is None
    assert split.unfit(Case(16, 64, 256).problem, H200) == "2 chunks are not shared by 4 warps"


def test_multiprocessors_have_equally_many_blocks() -> None:
    for columns, config, blocks in (
        (14336, split.Config(7, 2, 6, 2), 132),
        (28672, split.Config(7, 2, 6, 2), 264),
        (4096, split.Config(4, 2, 8, 2, 2), 132),
        (640, split.Config(1, 1, 8, 2, 2), 80),
    ):
        made = split.launch(Case(16, columns, 4096).problem, config, H200, 4096, columns)
        assert (made.grid, made.cluster, made.block) == ((blocks, 1, 1), config.split, config.threads)
        assert made.waits == ("cluster" if config.split > 1 else "nothing")
    two = replace(Case(16, 14336, 4096).problem, beside=(("bias",),))
    assert split.launch(two, split.Config(8, 2, 6, 2), H200, 4096, 14336).grid == (264, 1, 1)
    assert str(split.Config(4, 2, 8, 2, 2)) == "split4t2w8a2k2"


@pytest.mark.parametrize(
    ("case", "beside", "best"),
    [
        (Case(16, 14336, 4096), False, "split7t2w12a2"),
        (Case(16, 4096, 4096), False, "split4t2w8a2k2"),
        (Case(16, 2048, 2048), False, "split2t2w8a2k2"),
        (Case(16, 14336, 4096, "uint8"), False, "split7t2w12a2"),
        (Case(16, 14336, 4096, stages=GATED), True, "split8t2w6a2"),
    ],
)
def test_what_is_predicted_to_be_fastest(case: Case, beside: bool, best: str) -> None:
    """It was within 1 % of the fastest of those that an H200 timed."""
    p = replace(case.problem, beside=(("bias",),) if beside else None)
    assert str(split.candidates(p, H200, 1)[0]) == best


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case(16, 14336, 4096), split.Config(7, 2, 6, 2)),
        (Case(16, 4096, 14336), split.Config(4, 2, 8, 2, 2)),
        (Case(16, 14336, 4096, zeros="uint8"), split.Config(7, 2, 12, 2)),
        (Case(16, 4096, 4096, block=32, dtype="bfloat16", scale="bfloat16"), split.Config(4, 1, 8, 2, 2)),
        (Case(16, 4096, 4096, "uint8", 0), split.Config(6, 2, 12, 2)),
    ],
)
def test_kernels_do_not_spill(case: Case, config: split.Config) -> None:
    (kernel,) = nvrtc.resources(split.recipe(case.problem, config, H200)).values()
    assert kernel.spill_bytes == kernel.stack_bytes == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "config", [split.Config(8, 2, 6, 2), split.Config(8, 2, 12, 2), split.Config(4, 2, 8, 2)], ids=str
)
def test_two_products_do_not_spill(config: split.Config) -> None:
    p = replace(Case(16, 14336, 4096, stages=GATED).problem, beside=(("bias",),))
    (kernel,) = nvrtc.resources(split.recipe(p, config, H200)).values()
    assert kernel.spill_bytes == kernel.stack_bytes == 0
