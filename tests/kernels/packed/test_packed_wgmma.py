"""Many rows times packed weights on Hopper: plans, and that kernels compile as they should."""

from __future__ import annotations

import numpy as np
import pytest
from support.packed_cases import CASES, Case

from optdnn.kernels.packed import wgmma_kernel as wgmma
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import MAP_BYTES

GPU = of_arch("sm_90a")


def test_the_parameter_block() -> None:
    """The map of the rows stands first; pointers follow it."""
    case = Case(300, 1000, 2048, zeros="uint8", stages=(("add",),))
    made = wgmma.launch(case.problem, wgmma.Config(128, 2, 8, 2), GPU, 2048, 1000)
    (rows,) = made.maps
    assert (rows.at, rows.shape, rows.box) == (0, (2048, 300), (64, 128))
    names = ("tiles", "scales", "zeros", "bias", "residual", "output", "partial", "arrived")
    assert tuple(p.operand for p in made.pointers) == names
    assert [p.at - MAP_BYTES for p in made.pointers] == [0, 8, 16, 40, 48, 56, 64, 72]
    assert made.grid == (8, 2, 3)
    assert wgmma.workspace(case.problem, wgmma.Config(128, 2, 8, 2)) == (8 * 2 * 3 * 128 * 128 * 4, 8 * 3 * 4)


def test_what_it_refuses() -> None:
    p = Case(300, depth=2048).problem
    assert wgmma.refuse(p, wgmma.Config(100, 2, 4)) == "not a tile of this kernel"
    assert "do not fit the registers" in str(wgmma.refuse(p, wgmma.Config(256, 4, 4)))
    assert "sums do not fit" in str(wgmma.refuse(p, wgmma.Config(16, 2, 4)))
    assert wgmma.refuse(Case(300).problem, wgmma.Config(64, 4, 6, 2)) == "4 chunks are not shared 2 ways"


@pytest.mark.parametrize("rows", [64, 256, 2048])
def test_estimates_fill_the_gpu(rows: int) -> None:
    p = Case(rows, 4096, 4096).problem
    best = wgmma.candidates(p, GPU)[0]
    assert np.prod(wgmma.grid(p, best)) >= 96
    assert 4e-6 < wgmma.estimate(p, best, GPU) < 120e-6


@pytest.mark.nvrtc
@pytest.mark.parametrize("rows", [40, 256, 2048])
def test_kernels_do_not_spill(rows: int) -> None:
    for case in (
        Case(rows, 4096, 4096, stages=(("add",),)),
        Case(rows, 4096, 4096, block=32, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
        Case(rows, 4096, 4096, "uint8", 0),
        CASES["8-bit floats"].of_rows(rows),
    ):
        for config in wgmma.candidates(case.problem, GPU, 2):
            (kernel,) = nvrtc.resources(wgmma.recipe(case.problem, config)).values()
            assert kernel.spill_bytes == kernel.stack_bytes == 0, str(config)
