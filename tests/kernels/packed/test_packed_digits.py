"""A few rows times packed weights in integers: plans, and the kernel on a processor that emulates warps, with norms and products around."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.host import COMPILER, WHY_NOT
from support.packed_cases import CASES, GATED, TYPES, Case, drawn, expected, operands_of, pitch_of, tiled

from optdnn.kernels.packed import digits_kernel as digits
from optdnn.kernels.packed.tiles import tiled_weights
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.packed import dequantized

GPU = of_arch("sm_90a")
SMALL = replace(GPU, multiprocessors=2)
EPSILON = 1e-3
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Of the result's type: sums themselves are far more exact."""


def run(case: Case, config: digits.Config, folder: Path, **around: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The result of the kernel on a processor, and its operands. ``around``: fields ``norm`` and ``beside`` of the problem."""
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
    """Equal but for the rounding of the result, and sums in fp32."""
    np.testing.assert_allclose(got, want, rtol=1.1 * ROUNDING[dtype], atol=3e-6 * np.abs(want).max())


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("4 bits", digits.Config(4, 2)),
        ("blocks of 32", digits.Config(2, 4, 64)),
        ("blocks of 64, bf16", digits.Config(2, 2)),
        ("blocks of 256", digits.Config(8, 4)),
        ("a last block that is not full", digits.Config(4, 2)),
        ("an odd depth", digits.Config(2, 8)),
        ("by channel", digits.Config(2, 2)),
        ("zero points that are no integers", digits.Config(4, 2)),
        ("gated", digits.Config(2, 4)),
        ("8 bits by channel", digits.Config(8, 2)),
        ("8 bits, bf16", digits.Config(4, 2)),
        ("2 bits, bf16", digits.Config(2, 2)),
    ],
)
def test_the_kernel_on_a_processor(name: str, config: digits.Config, tmp_path: Path) -> None:
    case = CASES[name]
    got, _ = run(case, config, tmp_path)
    check(got, expected(case, drawn(case)), case.dtype)
