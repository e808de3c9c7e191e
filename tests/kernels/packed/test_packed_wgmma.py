"""Many rows times packed weights on Hopper: plans, and the kernel on a processor with emulated warps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.covering import covering
from support.host import needs_compiler
from support.packed_cases import (
    CASES,
    GATED,
    Case,
    check_emulated,
    pitch_of,
)
from support.spills import check_spills
from support.sweep import sweep

from optdnn.kernels.packed import wgmma_kernel as wgmma
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import MAP_BYTES

GPU = of_arch("sm_90a")


def test_the_parameter_block() -> None:
    """The maps of rows and weights come first, followed by pointers."""
    case = Case(300, 1000, 2048, zeros="uint8", stages=(("add",),))
    made = wgmma.launch(case.problem, wgmma.Config(128, 3, 2), GPU, 2048, 1000)
    rows, tiles, scales, zeros = made.maps
    assert [m.at for m in made.maps] == [0, MAP_BYTES, 2 * MAP_BYTES, 3 * MAP_BYTES]
    assert (rows.shape, rows.box) == ((2048, 300), (64, 128))
    assert (tiles.shape, tiles.strides, tiles.box) == ((256, 32, 63, 1), (512, 16384, 1032192), (256, 2, 8, 1))
    assert (scales.shape, scales.box) == ((16, 16, 63, 1), (16, 1, 8, 1))
    assert (zeros.shape, zeros.box) == ((8, 16, 63, 1), (8, 1, 8, 1))
    assert [(p.operand, p.at - 4 * MAP_BYTES) for p in made.pointers] == [("bias", 0), ("residual", 8), ("output", 16)]
    assert (made.grid, made.cluster) == ((16, 3, 1), 2)


SIZES = {
    "1 row": (Case(1, 200, 1100, zeros="uint8"), wgmma.Config(16, 3)),
    "9 rows": (Case(9, 200, 1100, zeros="uint8"), wgmma.Config(32, 3)),
    "100 rows in parts": (Case(100, 130, 1024, block=32, stages=GATED), wgmma.Config(64, 3, 2)),
    "8 bits, bf16": (Case(40, 61, 333, "uint8", 64, "", "bfloat16", "bfloat16"), wgmma.Config(32, 4)),
    "8 bits by channel": (Case(130, 128, 640, "uint8", 0, stages=(("add",), ("relu",))), wgmma.Config(128, 3, 3)),
    "2 bits": (Case(20, 48, 1500, "uint2", 32), wgmma.Config(16, 6)),
    "clusters of two": (Case(130, 61, 1024, zeros="uint8", stages=(("add",),)), wgmma.Config(128, 3, 2)),
    "clusters of three, odd": (Case(70, 61, 1300, block=64), wgmma.Config(64, 3, 3)),
    "clusters of four": (Case(96, 61, 1200, block=16, zeros="float16"), wgmma.Config(96, 3, 4)),
    "64 columns": (Case(50, 200, 1100, zeros="uint8", stages=(("add",),)), wgmma.Config(64, 3, 1, 64)),
    "64 columns, K shared": (Case(33, 61, 2000, "uint8", 64), wgmma.Config(32, 4, 4, 64)),
    "two teams": (Case(100, 130, 1024, block=32, zeros="uint8", stages=(("add",),)), wgmma.Config(96, 4, 1, 64, 2)),
    "two teams, an odd number of chunks": (Case(33, 130, 1000, "uint8", 64), wgmma.Config(48, 4, 1, 64, 2)),
    "two teams, K shared": (Case(50, 61, 1100, block=64, stages=GATED), wgmma.Config(64, 4, 2, 64, 2)),
    "two teams, K shared by three": (Case(60, 61, 1900), wgmma.Config(64, 4, 3, 64, 2)),
    "192 rows": (Case(150, 70, 700), wgmma.Config(192, 3)),
    "8-bit floats": (Case(33, 48, 500, "fp8_e4m3", 128, "", "float32"), wgmma.Config(64, 3)),
}


def run(case: Case, config: wgmma.Config, folder: Path) -> None:
    p = case.problem
    assert wgmma.refuse(p, config) is None
    made = wgmma.launch(p, config, GPU, pitch_of(case), p.columns)
    check_emulated(case, made, (0, 0), render.pixels_instruction(config.rows, p.dtype), folder)


@needs_compiler
@pytest.mark.parametrize("name", sweep(SIZES, "9 rows", "8 bits, bf16", "two teams, K shared"))
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    run(*SIZES[name], tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("line", "faulty"),
    [
        (
            "barrier_arrive(ring.empty + 8 * (stage.index < TEAMS ? stage.index + STAGES - TEAMS : stage.index - TEAMS));",
            ";",
        ),
        ("barrier_wait(ring.full + 8 * ahead.index, ahead.parity);", ""),
    ],
    ids=["stages are never free", "stages are read too early"],
)
def test_faults_of_the_ring_are_seen(line: str, faulty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Recipe.sources

    def changed(recipe: Recipe) -> dict[str, str]:
        texts = sources(recipe)
        assert line in texts[recipe.name]
        return {name: text.replace(line, faulty) for name, text in texts.items()}

    monkeypatch.setattr(Recipe, "sources", changed)
    with pytest.raises(AssertionError, match=r"missed one another|Not equal to tolerance"):
        run(*SIZES["9 rows"], tmp_path)


def test_blocks_that_share_k_are_a_cluster() -> None:
    p, config = Case(256, 4096, 4096).problem, wgmma.Config(128, 3, 2)
    made = wgmma.launch(p, config, GPU, 4096, 4096)
    assert (made.grid, made.cluster, str(config)) == ((64, 2, 1), 2, "packed128x128s3k2")
    assert made.shared == 1024 + 3 * (128 * 256 + 8192 + 1024) + 128 * 128 * 4
    assert config in wgmma.candidates(p, GPU)
    assert wgmma.candidates(Case(2048, 4096, 4096).problem, GPU)[0].split == 1


def test_refusals() -> None:
    p, eight = Case(300, depth=2048).problem, Case(300, 64, 2048, "uint8").problem
    assert wgmma.refuse(p, wgmma.Config(100, 4)) == "not a tile of this kernel"
    assert wgmma.refuse(Case(16 << 16).problem, wgmma.Config(16, 4)) == "its 1048576 rows need more than 65535 blocks"
    assert "do not fit shared memory" in str(wgmma.refuse(p, wgmma.Config(256, 4)))
    assert wgmma.refuse(Case(300).problem, wgmma.Config(64, 4, 3)) == "4 chunks and 64 rows are too few for 3 blocks"
    assert wgmma.refuse(p, wgmma.Config(48, 4, 8)) == "16 chunks and 48 rows are too few for 8 blocks"
    assert wgmma.refuse(p, wgmma.Config(48, 4, 4, 64, 2)) == "16 chunks and 48 rows are too few for 4 blocks"
    assert (
        wgmma.refuse(Case(300).problem, wgmma.Config(64, 4, 3, 64, 2)) == "4 chunks are too few for 2 teams in 3 blocks"
    )
    assert wgmma.refuse(eight, wgmma.Config(256, 4, 1, 64, 2)) == "its accumulators do not fit registers"
    assert (
        wgmma.refuse(p, wgmma.Config(64, 3, 1, 64, 2)) == "not a tile of this kernel"
    )  # the stages of a team are no whole number


@pytest.mark.parametrize("rows", [64, 256, 2048])
def test_estimates_fill_the_gpu(rows: int) -> None:
    p = Case(rows, 4096, 4096).problem
    best = wgmma.candidates(p, GPU)[0]
    assert np.prod(wgmma.grid(p, best)) >= 96
    assert 4e-6 < wgmma.estimate(p, best, GPU) < 120e-6


@pytest.mark.nvrtc
def test_kernels_do_not_spill() -> None:
    made = {}
    for rows in (40, 256, 2048):
        for case in (
            Case(rows, 4096, 4096, stages=(("add",),)),
            Case(rows, 4096, 4096, block=32, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
            Case(rows, 4096, 4096, "uint8", 0),
            CASES["8-bit floats"].of_rows(rows),
        ):
            for config in wgmma.candidates(case.problem, GPU, 1):
                made[f"{case}, {config}"] = wgmma.recipe(case.problem, config)
    for name in covering(made):
        check_spills(made[name])
