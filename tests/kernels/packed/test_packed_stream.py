"""Streams of packed weights on Hopper: plans, and the kernel on a processor that emulates warps, barriers and bulk copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.host import COMPILER, WHY_NOT
from support.packed_cases import CASES, Case, check_emulated, pitch_of
from support.sweep import sweep

from optdnn.kernels.packed import stream_kernel as stream
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import of_arch

GPU = of_arch("sm_90a")
FORMS = {
    name: CASES[name]
    for name in (
        "blocks of 16",
        "blocks of 64, bf16",
        "a last block that is not full",
        "8 bits, bf16",
        "2 bits",
        "gated",
    )
}
SMALL = replace(GPU, multiprocessors=2)
"""So few that a block has several tiles."""


def run(case: Case, config: stream.Config, folder: Path) -> None:
    p = case.problem
    made = stream.launch(p, config, SMALL, pitch_of(case), p.columns)
    check_emulated(case, made, stream.workspace(p, config), render.mma(p.dtype), folder)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", sweep(FORMS, "blocks of 16", "8 bits, bf16"))
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    case = FORMS[name]
    split = 2 if case.rows % 2 else 1
    run(case, stream.Config(3, 2, 2, 2, min(split, case.problem.chunks)), tmp_path)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case(1, 208, 1024), stream.Config(3, 2, 2, 2)),
        (Case(2, 64, 500, "uint8", 128, "uint8"), stream.Config(7, 2, 3, 2)),
        (Case(16, 80, 640, zeros="uint8"), stream.Config(7, 4, 3, 2, 3)),
        (Case(11, 40, 600, stages=(("add",),)), stream.Config(3, 2, 2, 2, 2)),
    ],
    ids=["many tiles", "more warps than pieces", "sixteen rows", "eleven rows"],
)
def test_shares_on_a_processor(case: Case, config: stream.Config, tmp_path: Path) -> None:
    run(case, config, tmp_path)


def test_what_it_refuses() -> None:
    p, config = Case().problem, stream.Config(7, 2, 3, 2)
    assert stream.refuse(p, config) is None
    assert stream.refuse(Case(17).problem, config) == "it is for up to 16 rows, not 17"
    assert stream.refuse(p, replace(config, warps=5)) == "not a tile of this kernel"
    assert stream.refuse(p, replace(config, split=8)) == "4 chunks are not shared 8 ways"
    assert "bytes of shared memory exceed" in str(stream.refuse(Case(16, 64, 14336).problem, config))


def test_the_next_blocks_have_room() -> None:
    """A multiprocessor's quarters have registers of their own: eight warps with two chunks each leave room for as many, sixteen do not."""
    p = Case(1, 14336, 4096).problem
    assert stream.resident(p, stream.Config(7, 2, 3, 2)) == 2
    assert stream.resident(p, stream.Config(15, 2, 2, 2)) == 1
    assert stream.resident(p, stream.Config(15, 1, 4, 1)) == 2


def test_estimates_follow_the_bytes() -> None:
    four, eight = (Case(1, 14336, 4096, code).problem for code in ("uint4", "uint8"))
    best = [stream.estimate(p, stream.candidates(p, GPU)[0], GPU) for p in (four, eight)]
    assert 8e-6 < best[0] < 14e-6
    assert 1.3 < best[1] / best[0] < 2.1


@pytest.mark.nvrtc
def test_kernels_do_not_spill() -> None:
    for case in (
        Case(1, 4096, 4096),
        Case(16, 4096, 4096),
        Case(4, 4096, 4096, block=32, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
        Case(1, 4096, 4096, "uint8", 0),
    ):
        for config in stream.candidates(case.problem, GPU, 2):
            (kernel,) = nvrtc.resources(stream.recipe(case.problem, config)).values()
            assert kernel.spill_bytes == kernel.stack_bytes == 0, config
