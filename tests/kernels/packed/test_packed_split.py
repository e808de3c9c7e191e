"""Some rows times packed weights, K split over warps: plans, and the kernel on a processor that emulates warps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import COMPILER, WHY_NOT
from support.packed_cases import CASES, Case, check_emulated, pitch_of
from support.sweep import sweep

from optdnn.kernels.packed import split_kernel as split
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import named, of_arch

H200 = named("h200")
ALONE, PAIRS = split.Config(1, 1, 4, 2), split.Config(3, 2, 4, 3)
SIZES = {
    "9 rows": (Case(9, 72, 1100, zeros="uint8"), PAIRS),
    "16 rows, a wide block": (Case(16, 300, 1024, block=32), split.Config(8, 1, 8, 4)),
    "16 rows, long rings": (Case(16, 40, 2300), split.Config(2, 2, 4, 6)),
    "17 rows": (Case(17, 96, 640, "uint8", 64), split.Config(4, 1, 4, 2)),
    "32 rows, bf16": (Case(32, 40, 600, dtype="bfloat16", scale="bfloat16"), ALONE),
    "more chunks than turns": (Case(12, 64, 1536, stages=(("add",), ("relu",))), split.Config(2, 1, 4, 3)),
    "odd columns": (Case(12, 61, 633, block=16), ALONE),
}


def run(case: Case, config: split.Config, folder: Path) -> None:
    p = case.problem
    assert split.refuse(p, config, H200) is None
    made = split.launch(p, config, H200, pitch_of(case), p.columns)
    check_emulated(case, made, (0, 0), render.mma(p.dtype), folder)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(CASES, "blocks of 16", "8 bits, bf16", "gated"))
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    case = CASES[name].of_rows(11)
    run(Case(**{**vars(case), "depth": max(case.depth, 1025)}), PAIRS, tmp_path)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(SIZES, "9 rows", "17 rows"))
def test_sizes_on_a_processor(name: str, tmp_path: Path) -> None:
    run(*SIZES[name], tmp_path)
