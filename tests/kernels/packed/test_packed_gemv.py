"""A few rows times packed weights: tiles, plans, and the kernel on a processor with emulated warps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.packed_cases import CASES, TOLERANCE, TYPES, Case, drawn, expected, operands_of, pitch_of, tiled
from support.spills import check_spills
from support.sweep import sweep

from optdnn.kernels.packed import dense_kernel as dense
from optdnn.kernels.packed import gemv_kernel as gemv
from optdnn.kernels.packed.problem import Problem, refuse
from optdnn.kernels.packed.tiles import chunk_depth, groups_of, set_shift
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.packed import numbers_of, tiled_matmul

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@pytest.mark.parametrize("name", CASES)
def test_meanings_of_tiles_and_rows_agree(name: str) -> None:
    case = CASES[name]
    p, o = case.problem, drawn(case)
    made = tiled(case, o)
    assert made["tiles"].shape == (p.tiles, p.chunks, 1024)
    x = np.eye(p.depth, dtype=np.float32)
    (found,) = tiled_matmul(
        x, made["tiles"], made["scales"], made.get("zeros"), code=p.code, K=p.depth, N=p.columns, block_size=p.block
    )
    np.testing.assert_allclose(found.T, o.weights, rtol=1e-6, atol=1e-7)


def test_a_lane_reads_the_elements_for_mma_sync() -> None:
    """The elements of lane 4 g + t: of channels g and g + 8, for every 16 elements of K, the pairs from 2 t and from 2 t + 8
    on, in the halves of a word."""
    case = Case(columns=32, depth=256)
    o = drawn(case)
    numbers = numbers_of(o.packed, "uint4", 256, 128).view(np.uint8)
    words = tiled(case, o)["tiles"].view("<u4").reshape(2, 2, 2, 8, 4, 4)
    for tile, chunk, half, g, t, word in (
        (0, 0, 0, 0, 0, 0),
        (1, 1, 1, 5, 2, 3),
        (0, 1, 0, 7, 3, 1),
        (1, 0, 1, 2, 1, 2),
    ):
        for pair in range(4):
            k = chunk * 128 + (word * 2 + pair // 2) * 16 + pair % 2 * 8 + t * 2
            bits = int(words[tile, chunk, half, g, t, word]) >> (4 * pair)
            row = numbers[tile * 16 + half * 8 + g]
            assert (bits & 15, bits >> 16 & 15) == (row[k], row[k + 1])


def test_chunks_share_scales() -> None:
    assert set_shift(4096, 4, 128) == set_shift(4096, 4, 16) == set_shift(4096, 8, 64) == 0
    assert set_shift(4096, 4, 256) == set_shift(4096, 8, 128) == 1
    assert set_shift(4096, 8, 256) == 2
    assert set_shift(4096, 4, 4096) == set_shift(100, 4, 100) == 31


def test_a_scale_is_of_whole_products() -> None:
    for bits in (2, 4, 8):
        products = chunk_depth(bits) // 16
        assert [groups_of(bits, block) for block in (16, 32, 64)] == [products, products // 2, max(1, products // 4)]
        assert {groups_of(bits, depth) for depth in range(17, 4096) if depth & (depth - 1)} == {1}, (
            "a block for each row"
        )


def run(case: Case, config: gemv.Config, folder: Path) -> None:
    p, o = case.problem, drawn(case)
    assert gemv.refuse(p, config) is None
    made = gemv.launch(p, config, of_arch("sm_90a"), pitch_of(case), p.columns)
    text = made.recipe.generated["generated.cuh"].replace(render.mma(p.dtype), "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    library = emulated.compiled(
        made.recipe, made.function, folder, rendered=rendered, headers=["packed.cuh", "packed_few.cuh"]
    )
    held = {name: emulated.aligned(a) for name, a in operands_of(case, o).items()}
    held |= {"output": np.full((p.rows, p.columns), np.nan, TYPES[case.dtype])}
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    want = expected(case, o)
    np.testing.assert_allclose(
        held["output"].astype(np.float64), want, rtol=0, atol=TOLERANCE[case.dtype] * np.abs(want).max()
    )


@needs_compiler
@pytest.mark.parametrize(
    "name",
    sweep(
        CASES,
        "a last block that is not full",
        "8 bits, bf16",
        "gated",
    ),
)
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run(case, gemv.Config(2, 4, 1) if case.rows > 4 else gemv.Config(1, 8, 2), tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(Case(8, 80, 12000), gemv.Config(2, 2, 4), id="rows in parts", marks=pytest.mark.slow),
        pytest.param(Case(1, 144, 2048, "uint8", 64), gemv.Config(4, 2, 2), id="four tiles"),
    ],
)
def test_tiles_on_a_processor(case: Case, config: gemv.Config, tmp_path: Path) -> None:
    if case.rows == 8:
        assert gemv.part_of(case.problem, config) < case.problem.chunks
    run(case, config, tmp_path)


@needs_compiler
@pytest.mark.parametrize("name", sweep(CASES, "blocks of 16", "an odd depth", "8 bits, bf16", "2 bits"))
def test_weights_unpacked_on_a_processor(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    p, o, made = case.problem, drawn(case), dense.launch(case.problem, of_arch("sm_90a"))
    held = {name: emulated.aligned(a) for name, a in tiled(case, o).items()}
    held["output"] = emulated.aligned(np.full((p.columns, dense.pitch(p)), np.nan, TYPES[case.dtype]))
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=["packed.cuh"])
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    found = held["output"].astype(np.float64)
    assert np.isfinite(found).all(), "columns beyond K are stored, too"
    np.testing.assert_allclose(
        found[:, : p.depth], o.weights, rtol=TOLERANCE[case.dtype], atol=1e-3 * np.abs(o.weights).max()
    )


def test_refusals() -> None:
    p = Case().problem
    assert refuse(p, "sm_80") is None
    assert "compiled for" in str(refuse(p, "sm_75"))
    assert "no instruction that converts 8-bit floats" in str(refuse(CASES["8-bit floats"].problem, "sm_86"))
    assert "its weights are fp4_e2m1" in str(refuse(Problem(1, 8, 64, "fp4_e2m1", 4, 32), "sm_90a"))
    assert "16-bit floats, not float32" in str(refuse(Problem(1, 8, 64, "uint4", 4, 32, dtype="float32"), "sm_90a"))
    assert "at least 16 are needed" in str(refuse(Problem(1, 8, 8, "uint4", 4, 8), "sm_90a"))
    config = gemv.Config(1, 8, 4)
    assert gemv.refuse(Case(9).problem, config) == "it is for up to 8 rows, not 9"
    assert gemv.refuse(p, gemv.Config(3, 8, 4)) == "not a tile of this kernel"
    assert "does not fit shared memory" in str(gemv.refuse(Case(8, depth=65536).problem, gemv.Config(1, 8, 8)))
    assert "do not fit the registers" in str(
        gemv.refuse(Case(block=16, zeros="float16").problem, gemv.Config(4, 16, 2))
    )
    assert "accumulators do not fit" in str(gemv.refuse(Case(code="uint8").problem, gemv.Config(4, 8, 1)))


def test_estimates_follow_the_bytes() -> None:
    gpu = of_arch("sm_90a")
    four, eight = Case(1, 4096, 14336).problem, Case(1, 4096, 14336, "uint8").problem
    best = gemv.candidates(four, gpu)[0]
    assert 7e-6 < gemv.estimate(four, best, gpu) < 12e-6
    assert 1.3 < gemv.estimate(eight, gemv.candidates(eight, gpu)[0], gpu) / gemv.estimate(four, best, gpu) < 2.1


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_do_not_spill(arch: str) -> None:
    """Configurations of untuned builds, for the usual kinds of weights."""
    cases = [
        *((CASES["8-bit floats"],) if arch not in ("sm_80", "sm_86") else ()),
        Case(4, 4096, 4096, block=32, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
        Case(1, 4096, 4096),
        Case(1, 4096, 4096, "uint8", 0),
    ]
    for case in cases if arch in ("sm_80", "sm_90a") else cases[:1]:  # the others compile the same text
        (config, *_) = gemv.candidates(case.problem, of_arch("sm_90a"))
        check_spills(gemv.recipe(case.problem, config, arch))
        check_spills(dense.recipe(case.problem, arch))
