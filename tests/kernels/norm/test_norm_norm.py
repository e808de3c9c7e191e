"""norm_norm: a norm of a norm's result, in one launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.sequence_cases import NORMS_OF_NORMS, norm_of_norm
from support.simulated import check_not_taken, check_simulated, kinds
from support.spills import check_spills

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP16

GPU = of_arch("sm_90a")
FIRST = rows.FirstNorm("layer_norm", scale=True, bias=True, epsilon=1e-3)
PROBLEM = rows.Problem("rms_norm", 13, 88, sum=True, bias=False, first=FIRST)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NORMS_OF_NORMS)
def test_one_launch_gives_both_results(name: str, precision: str) -> None:
    program = check_simulated(NORMS_OF_NORMS[name](), precision)
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "NormAddNorm"]
    assert len(step.outputs) == 2
    assert not {"LayerNormalization", "RMSNormalization"} & set(kinds(program))


def other(second: str = "Softmax", axis: int = -1, computed: bool = False) -> Graph:
    """A norm, followed by another operator of rows or by a norm that the kernel does not support."""
    n = Net()
    y = n.op("LayerNormalization", n.matmul(n.input(6, 32), 48), n.positive(48), n.random(48))
    if second == "Softmax":
        return n.done(n.matmul(n.op(second, y), 8))
    sizes = (6, 48)[axis:]
    scale = n.op("Exp", n.input(*sizes, name="scale")) if computed else n.positive(*sizes)
    return n.done(n.matmul(n.op(second, y, scale, attrs=LayerNormAttrs(axis, 1e-5)), 8))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (other(), "no other normalization reads its result"),
        (other("RMSNormalization", -2), "its rows are not along the last axis"),
        (other("RMSNormalization", computed=True), "its scale and bias are not constant"),
        (norm_of_norm(width=25600), "do not fit the registers of a block"),
    ],
    ids=["a softmax", "another axis", "a computed scale", "long rows"],
)
def test_refusals(graph: Graph, because: str) -> None:
    check_not_taken(graph, "norm_norm", because)


def test_the_kernel_gives_the_first_result() -> None:
    config = rows.Config(16, 1, 8, 64)
    assert rows.refuse(PROBLEM, config) is None
    assert "a norm before the addition" in (rows.refuse(replace(PROBLEM, sum=False), config) or "")
    assert "a sum needs an addend" in (rows.refuse(replace(PROBLEM, first=None), config) or "")


@needs_compiler
@pytest.mark.parametrize(("length", "config"), [(88, rows.Config(16, 1, 8, 64)), (300, rows.Config(64, 2, 4, 64))])
def test_the_kernel_on_a_processor(length: int, config: rows.Config, tmp_path: Path) -> None:
    problem, rng = replace(PROBLEM, length=length), np.random.default_rng(0)
    made = rows.launch(problem, config, GPU)
    library = emulated.compiled(
        made.recipe, made.function, tmp_path, first=["vectors.cuh"], headers=["l2_priority.cuh", "tile_vectors.cuh"]
    )
    held = {name: rng.standard_normal(length).astype(np.float32) for name in ("scale", "first_scale", "first_bias")}
    held |= {name: rng.standard_normal((13, length)).astype(FP16) for name in ("input", "sum", "output")}
    held = {name: emulated.aligned(held[name]) for name in made.operands}
    x, factor, first, shift = (
        held[name].astype(np.float64) for name in ("input", "scale", "first_scale", "first_bias")
    )
    emulated.run(library, made, {name: array.ctypes.data for name, array in held.items()})
    centered = x - x.mean(1, keepdims=True)
    rows_made = centered / np.sqrt(np.square(centered).mean(1, keepdims=True) + 1e-3) * first + shift
    want = rows_made / np.sqrt(np.square(rows_made).mean(1, keepdims=True) + 1e-5) * factor
    for name, expected in (("sum", rows_made), ("output", want)):
        np.testing.assert_allclose(held[name].astype(np.float64), expected, rtol=0, atol=1e-3 * np.abs(expected).max())


@pytest.mark.nvrtc
@pytest.mark.parametrize("length", [96, 1024, 4096])
def test_candidates_compile_without_spills(length: int) -> None:
    problem = replace(PROBLEM, rows=128, length=length)
    for config in rows.candidates(problem, GPU, 3):
        check_spills(rows.recipe(problem, config), "rows")


@pytest.mark.hopper
@pytest.mark.parametrize("name", NORMS_OF_NORMS)
def test_launches_on_a_gpu(name: str) -> None:
    assert checked_launches(NORMS_OF_NORMS[name](), "fp16")
