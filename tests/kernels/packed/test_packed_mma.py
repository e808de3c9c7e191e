"""Some rows times packed weights: plans, and the kernel on a processor with emulated warps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.packed_cases import CASES, Case, check_emulated, pitch_of
from support.spills import check_spills
from support.sweep import sweep

from optdnn.kernels.packed import mma_kernel as mma
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
ALONE, SHARED = mma.Config(1, 2, 2, 2, 3), mma.Config(2, 2, 2, 2, 3, 3)
SIZES = {
    "9 rows": (Case(9, 72, 1100, zeros="uint8"), SHARED),
    "16 rows, a wide block": (Case(16, 300, 512, block=32), mma.Config(2, 8, 1, 4, 4, 2)),
    "33 rows": (Case(33, 96, 640, "uint8", 64), mma.Config(1, 4, 2, 2, 4)),
    "65 rows": (Case(65, 40, 400, dtype="bfloat16", scale="bfloat16"), ALONE),
    "130 rows, in parts": (Case(130, 64, 1536, stages=(("add",), ("relu",))), SHARED),
    "odd columns": (Case(12, 61, 333, block=16), ALONE),
}


def run(case: Case, config: mma.Config, folder: Path) -> None:
    p = case.problem
    assert mma.refuse(p, config) is None
    made = mma.launch(p, config, of_arch("sm_90a"), pitch_of(case), p.columns)
    check_emulated(case, made, mma.workspace(p, config), render.mma(p.dtype), folder)


@needs_compiler
@pytest.mark.parametrize("name", sweep(CASES, "blocks of 16", "8 bits, bf16", "gated"))
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    run(CASES[name], ALONE, tmp_path)


@needs_compiler
@pytest.mark.parametrize("name", sweep(SIZES, "9 rows", "65 rows"))
def test_sizes_on_a_processor(name: str, tmp_path: Path) -> None:
    run(*SIZES[name], tmp_path)


def test_refusals() -> None:
    p = Case(16).problem
    assert mma.refuse(Case(257).problem, ALONE) == "it is for up to 256 rows, not 257"
    assert mma.refuse(p, mma.Config(3, 2, 2, 2, 3)) == "not a tile of this kernel"
    assert "bytes of shared memory exceed" in str(mma.refuse(Case(64).problem, mma.Config(1, 2, 4, 2, 4)))
    assert "do not fit the registers" in str(mma.refuse(Case(64, block=16).problem, mma.Config(2, 2, 2, 4, 3)))
    assert mma.refuse(p, SHARED) == "4 chunks are too few for 3 blocks"


def test_estimates_share_k_where_tiles_are_few() -> None:
    gpu = of_arch("sm_90a")
    for rows in (16, 64, 200):
        p = Case(rows, 4096, 4096).problem
        best = mma.candidates(p, gpu)[0]
        assert np.prod(mma.grid(p, best)) >= 96
        assert 4e-6 < mma.estimate(p, best, gpu) < 40e-6


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_do_not_spill(arch: str) -> None:
    cases = Case(16, 4096, 4096), Case(64, 4096, 4096, "uint8", 0, dtype="bfloat16", scale="bfloat16")
    for case in cases if arch in ("sm_80", "sm_90a") else cases[:1]:  # the others compile the same text
        (config, *_) = mma.candidates(case.problem, of_arch("sm_90a"))
        check_spills(mma.recipe(case.problem, config, arch))
