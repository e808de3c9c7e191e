"""A few rows times packed weights in integers: plans, and the kernel on a processor with emulated warps, with norms and second
products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.packed_cases import CASES, GATED, TYPES, Case, drawn, expected, operands_of, pitch_of, tiled
from support.spills import check_spills

from optdnn.kernels.packed import digits_kernel as digits
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.tactics import PackedDigits
from optdnn.kernels.packed.tiles import tiled_weights
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import NAMED, GpuFacts, of_arch
from optdnn.runtime.reference.packed import dequantized

GPU = of_arch("sm_90a")
SMALL = replace(GPU, multiprocessors=2)
EPSILON = 1e-3
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The relative rounding of the result's type. Sums are far more exact."""


def run(case: Case, config: digits.Config, folder: Path, **around: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The kernel's result on a processor, and its operands. ``around``: fields ``norm`` and ``beside`` of the problem."""
    p, o = replace(case.problem, **around), drawn(case)
    assert digits.refuse(p, config, SMALL) is None
    made = digits.launch(p, config, SMALL, pitch_of(case), p.columns, epsilon=EPSILON)
    text = made.recipe.generated["generated.cuh"].replace(render.mma("uint8"), "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    headers = ["packed.cuh", "packed_digits.cuh"]
    options = ["-DOPERAND_ITEM=1", "-DPIXELS_UNSIGNED"]
    library = emulated.compiled(made.recipe, made.function, folder, rendered=rendered, headers=headers, options=options)
    found = operands_of(case, o)
    rng = np.random.default_rng(1)
    found |= {f"beside_{n}": a for n, a in tiled(case, o).items()}
    found["beside_tiles"] = tiled_weights(o.packed ^ np.uint8(0x5A), p.code, p.depth, p.block)
    found["beside_bias"] = np.pad(rng.standard_normal(p.columns).astype(np.float32), (0, -p.columns % 4))
    found["scale"] = rng.standard_normal(p.depth).astype(np.float32)
    found["output"] = np.full((p.rows, p.columns), np.nan, TYPES[case.dtype])
    held = {n: emulated.aligned(a) for n, a in found.items()}
    emulated.run(library, made, {n: held[n].ctypes.data for n in made.operands})
    return held["output"].astype(np.float64), held


def check(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """Equal except for the rounding of the result, and of sums in fp32."""
    np.testing.assert_allclose(got, want, rtol=1.1 * ROUNDING[dtype], atol=3e-6 * np.abs(want).max())


@needs_compiler
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("4 bits", digits.Config(4, 2)),
        pytest.param("blocks of 32", digits.Config(2, 4), marks=pytest.mark.slow),
        ("blocks of 64, bf16", digits.Config(2, 2)),
        pytest.param("blocks of 256", digits.Config(8, 4), marks=pytest.mark.slow),
        ("a last block that is not full", digits.Config(4, 2)),
        pytest.param("an odd depth", digits.Config(2, 8), marks=pytest.mark.slow),
        pytest.param("by channel", digits.Config(2, 2), marks=pytest.mark.slow),
        pytest.param("zero points that are no integers", digits.Config(4, 2), marks=pytest.mark.slow),
        pytest.param("gated", digits.Config(2, 4), marks=pytest.mark.slow),
        pytest.param("8 bits by channel", digits.Config(8, 2), marks=pytest.mark.slow),
        ("8 bits, bf16", digits.Config(4, 2)),
    ],
)
def test_the_kernel_on_a_processor(name: str, config: digits.Config, tmp_path: Path) -> None:
    case = CASES[name]
    got, _ = run(case, config, tmp_path)
    check(got, expected(case, drawn(case)), case.dtype)


AROUND: dict[str, tuple[Case, digits.Config, bool, tuple[render.Stage, ...] | None]] = {
    "norm": (Case(1, 80, 1000, zeros="uint8"), digits.Config(8, 2), True, None),
    "norm, residual, seven rows": (Case(7, 64, 640, stages=(("add",),)), digits.Config(4, 2), True, None),
    "gated": (Case(2, 72, 512, stages=GATED), digits.Config(4, 2), False, (("bias",),)),
    "norm, gated, bf16": (
        Case(3, 208, 768, "uint8", zeros="uint8", dtype="bfloat16", scale="bfloat16", stages=GATED),
        digits.Config(8, 4), True, (("bias",), ("relu",)),
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", AROUND)
def test_norms_and_second_products_on_a_processor(name: str, tmp_path: Path) -> None:
    case, config, norm, beside = AROUND[name]
    got, held = run(case, config, tmp_path, norm=norm, beside=beside)
    p, o = case.problem, drawn(case)
    x = o.x.astype(np.float64)
    if norm:
        x = x / np.sqrt(np.square(x).mean(1, keepdims=True) + EPSILON) * held["scale"]
    more: dict[str, Any] = {"code": p.code, "K": p.depth, "block_size": p.block, "wide": np.dtype(np.float64)}
    weights = [dequantized(w, o.scales, o.zeros, **more) for w in (o.packed, o.packed ^ np.uint8(0x5A))]
    y, z = (x @ w.T + b[: p.columns] for w, b in zip(weights, (o.bias, held["beside_bias"]), strict=True))
    if beside is not None:
        y = y / (1 + np.exp(-y)) * (np.maximum(z, 0) if ("relu",) in beside else z)
    elif p.residual:
        y = y + o.residual.astype(np.float64)
    check(got, y, case.dtype)


@needs_compiler
def test_a_nan_spoils_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 16, 512)
    x = drawn(case).x.copy()
    x[1, 300] = np.inf
    held = drawn(case)
    monkeypatch.setitem(globals(), "drawn", lambda _: replace(held, x=x))
    got, _ = run(case, digits.Config(4, 2), tmp_path)
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


def test_refusals() -> None:
    p, config = Case(1, 4096, 4096).problem, digits.Config(8, 4)
    assert digits.refuse(p, config, GPU) is None
    assert digits.refuse(replace(p, rows=9), config, GPU) == "it is for up to 8 rows, not 9"
    assert (
        digits.refuse(CASES["8-bit floats"].problem, config, GPU)
        == "its weights are fp8_e4m3, not integers of 4 or 8 bits"
    )
    assert "at least 32 are needed" in str(digits.refuse(CASES["blocks of 16"].problem, config, GPU))
    assert "its weights are uint2" in str(digits.refuse(CASES["2 bits"].problem, config, GPU))
    assert "multiple of 8 elements" in str(digits.refuse(replace(p, depth=4100, norm=True), config, GPU))
    assert digits.refuse(p, digits.Config(3, 4), GPU) == "not a tile of this kernel"
    assert digits.refuse(Case().problem, config, GPU) == "4 chunks are too few for 8 warps"
    assert (
        digits.refuse(replace(p, block=32, zeros="float16"), digits.Config(16, 8), GPU)
        == "its chunks in flight do not fit the registers"
    )
    assert "of shared memory exceed" in str(digits.refuse(replace(p, rows=8, depth=14336), config, GPU))
    assert digits.unfit(p, GPU) is None
    assert digits.unfit(replace(p, rows=9), GPU) == "it is for up to 8 rows, not 9"


@pytest.mark.parametrize("gpu", NAMED, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("rows", "depth"), [(1, 2048), (8, 14336)])
def test_what_is_proposed_fits_the_gpu(rows: int, depth: int, gpu: GpuFacts) -> None:
    """The cost model's facts are an H200's, the limits are each GPU's own."""
    problem = Problem(rows, 2048, depth, "uint4", 4, 64)
    offers = PackedDigits().offers(problem, gpu)
    assert not [o.name for o in offers if digits.refuse(problem, o.config, gpu) is not None]


def test_wide_results_take_more_blocks() -> None:
    assert digits.groups(Case(1, 14336, 4096).problem, GPU) == GPU.multiprocessors
    head = Case(1, 128256, 4096).problem
    assert digits.groups(head, GPU) == 2 * GPU.multiprocessors
    assert digits.tiles_of(head, GPU) <= digits.MOST_TILES


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_do_not_spill(arch: str) -> None:
    wide = Case(1, 14336, 4096, stages=GATED).problem
    for p in (
        wide,
        replace(wide, norm=True, beside=(("bias",),)),
        replace(Case(4, 4096, 4096, "uint8", 32, "uint8", dtype="bfloat16", scale="bfloat16").problem, norm=True),
    ):
        check_spills(digits.recipe(p, digits.candidates(p, of_arch(arch))[0], of_arch(arch)))
