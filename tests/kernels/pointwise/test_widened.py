"""Results of fp32 come from the launch that computes them: products, norms, softmax and pointwise operators before a Cast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import emulated
from support.host import COMPILER, WHY_NOT
from support.net import Net
from support.simulated import check_not_taken, check_simulated, lowered
from support.widened_cases import WIDENED, classifier, normalized

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP16

GPU = of_arch("sm_90a")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", WIDENED)
def test_the_last_launch_gives_fp32(name: str, precision: str) -> None:
    tactic, made = WIDENED[name]
    program = check_simulated(made(), precision)
    last = program.steps[-1]
    assert str(last.params["tactic"]).split()[0] == tactic
    assert program.buffers[last.outputs[0]].dtype == np.float32
    assert not any(s.params["op"]["kind"] == "Cast" for s in program.steps[1:])  # the first one casts the input


def other_reader() -> Graph:
    n = Net()
    y = n.op("LayerNormalization", n.matmul(n.input(8, 32), 64), n.positive(64), n.random(64))
    return n.done(y, n.matmul(y, 8))


def added() -> Graph:
    n = Net()
    x = n.op("Tanh", n.input(64, 64))
    return n.done(n.op("Add", n.matmul(x, 64), x))


def sum_normalized() -> Graph:
    n = Net()
    x, y = n.op("Softmax", n.input(8, 64)), n.op("Softmax", n.input(8, 64, name="y"))
    return n.done(n.op("LayerNormalization", n.op("Add", x, y), n.positive(64), n.random(64)))


@pytest.mark.parametrize(
    ("graph", "tactic", "because"),
    [
        (other_reader(), "rows_widened", "it does not cast the result of rows_half"),
        (sum_normalized(), "rows_widened", "it does not cast the result of rows_half"),
        (added(), "gemm_widened_sm90", "read a tensor of 16 bits"),
        (normalized(), "gemm_widened_sm90", "it does not cast the result of gemm_sm90"),
        (classifier(), "gemv_widened", "it does not cast the result of gemv"),
        (classifier(), "pointwise_widened", "it does not cast the result of a pointwise operator"),
        (classifier(40, 100), "gemm_widened_sm90", "its result does not lie in rows of eight"),
    ],
    ids=["another reader", "a sum is normalized", "a residual", "a norm", "many rows", "a product", "columns that do not come in eights"],
)  # fmt: skip
def test_refusals(graph: Graph, tactic: str, because: str) -> None:
    check_not_taken(graph, tactic, because)


PROBLEM = rows.Problem("layer_norm", 13, 88, full=True)


@pytest.mark.parametrize(
    "problem", [replace(PROBLEM, add=True, sum=True), replace(PROBLEM, narrow="int8"), replace(PROBLEM, epilogue=(("relu",),))]
)  # fmt: skip
def test_the_norms_kernel_refuses(problem: rows.Problem) -> None:
    config = rows.Config(16, 1, 8, 128)
    assert rows.refuse(PROBLEM, config) is None
    assert "results of fp32" in (rows.refuse(problem, config) or "")


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize(("length", "config"), [(88, rows.Config(16, 1, 8, 64)), (70, rows.Config(32, 2, 2, 32)), (9, rows.Config(8, 2, 1, 32))])  # fmt: skip
@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm", "softmax"])
def test_the_norms_kernel_on_a_processor(operation: str, length: int, config: rows.Config, tmp_path: Path) -> None:
    problem, rng = (
        rows.Problem(operation, 13, length, bias=operation == "layer_norm", full=True),
        np.random.default_rng(0),
    )
    assert rows.refuse(problem, config) is None
    made = rows.launch(problem, config, GPU)
    library = emulated.compiled(made.recipe, made.function, tmp_path, first=["vectors.cuh"])
    x, factors = rng.standard_normal((13, length)).astype(FP16), rng.standard_normal((2, length)).astype(np.float32)
    held = {"input": x, "scale": factors[0], "bias": factors[1], "output": np.full((13, length), np.nan, np.float32)}
    held = {name: emulated.aligned(held[name]) for name in made.operands}
    emulated.run(library, made, {name: array.ctypes.data for name, array in held.items()})
    wide = x.astype(np.float64)
    if operation == "softmax":
        want = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    else:
        wide = wide - wide.mean(1, keepdims=True) * (operation == "layer_norm")
        want = wide / np.sqrt(np.square(wide).mean(1, keepdims=True) + 1e-5) * factors[0]
        want = want + factors[1] * (operation == "layer_norm")
    np.testing.assert_allclose(held["output"], want, rtol=0, atol=4e-6 * np.abs(want).max())


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", WIDENED)
def test_they_compile_without_spills(name: str) -> None:
    program = lowered(WIDENED[name][1](), "fp16", target="cuda:sm_90a", no_cubins=True)
    for kernel in program.kernels:
        assert all(r.spill_bytes == 0 for r in nvrtc.resources(recipe_of(kernel)).values())
