"""TopK of long lines: the kernel keeps the elements of its meaning, on the processor and on a GPU; refusals; compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import HostKernels, needs_compiler
from support.simulated import lowered, simulate
from support.sweep import in_turn, sweep

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.builder import TensorView
from optdnn.kernels.index import top_rows
from optdnn.kernels.index.top_rows import Share
from optdnn.ops.sort import TopKAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.engine import Engine
from optdnn.types import DTYPES, FP16, FP32, FP64, Array, is_float, tensor

Case = tuple[tuple[int, ...], int, int, str, bool]
"""Shape, axis, the number of kept elements, element type, whether the largest are kept."""
CASES: list[Case] = [
    ((3, 1000), 1, 5, "fp32", True),
    ((2, 257), 1, 257, "fp16", False),
    ((300, 3), 0, 70, "int64", True),
    ((2, 100, 3), 1, 7, "fp64", False),
    ((2, 70, 2, 2), 1, 64, "uint8", True),
    ((5000,), 0, 1, "bf16", True),
    ((4, 66), 1, 66, "int8", False),
    ((70, 300), 1, 20, "fp32", False),
    ((1, 17000), 1, 3, "fp64", True),
    ((2, 90), 1, 40, "int16", False),
    ((1, 3000), 1, 900, "bf16", True),
    ((2, 600), 1, 300, "int32", True),
]
SHARED: list[Case] = [
    ((2, 40000), 1, 3, "fp32", True),
    ((40001, 2), 0, 70, "fp16", False),
    ((150000, 1), 0, 4000, "fp16", True),
]
"""Lines of several blocks, and a line that is read again."""
LONG: list[Case] = [
    ((1, 120000), 1, 1000, "fp32", True),
    ((64, 1000), 1, 5, "fp16", True),
    ((1024, 1024), 1, 20, "fp32", True),
    ((1, 8400), 1, 300, "fp16", True),
    ((2, 16384), 1, 1000, "fp64", True),
    ((2, 65536), 1, 4096, "int32", False),
]


def graph(case: Case, indices: bool = True) -> Graph:
    shape, axis, kept, name, largest = case
    made = Graph()
    x = made.add_input("x", tensor(DTYPES[name], *shape))
    op = made.add(
        "TopK", [x, made.add_constant(np.array([kept], np.int64))], TopKAttrs(axis, largest, True), outputs=1 + indices
    )
    made.add_output(op.value, "y")
    if indices:
        made.add_output(Value(op.id, 1), "i")
    return made


def given(case: Case, seed: int = 0) -> Array:
    """Few different values, so that many are equal; floats include NaN, both infinities and both zeros. Seed 4: all but one are
    equal."""
    shape, _, _, name, _ = case
    if seed == 4:
        x = np.full(shape, 3)
        x.flat[-1] = 5
        return x.astype(DTYPES[name])
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    low = 0 if name.startswith("u") else -20
    x = rng.integers(low, 20, shape)
    if is_float(dtype):
        x = x / 4
        odd = rng.random(shape)
        for k, value in enumerate((np.nan, np.inf, -np.inf, -0.0)):
            x[(odd > k / 50) & (odd < (k + 1) / 50)] = value
    return x.astype(dtype)


def wanted(case: Case, x: Array) -> Array:
    """The indices: equal elements in their order, NaN above all numbers."""
    _, axis, kept, name, largest = case
    key = x.astype(np.float64 if is_float(DTYPES[name]) else np.int64)
    rank = np.unique(key, return_inverse=True, equal_nan=True)[1].reshape(x.shape)
    order = np.argsort(-rank if largest else rank, axis=axis, kind="stable")
    return np.take(order, np.arange(kept), axis)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("case", "seed"), [*in_turn([(case,) for case in CASES], 0, 4), *sweep([(case, 0) for case in SHARED])], ids=str
)
def test_the_kernel_on_the_processor(case: Case, seed: int, tmp_path: Path) -> None:
    program = lowered(graph(case), "fp32")
    kernels, (step,) = HostKernels(program, tmp_path), program.steps
    assert step.params["tactic"] == "top_rows"
    parsed = parse(step, program)
    assert kernels.runs(parsed)
    x = given(case, seed)
    index = wanted(case, x)
    found = [np.zeros_like(x, shape=index.shape), np.full_like(index, -1)]
    scratch = [np.zeros(program.buffers[k].shape, program.buffers[k].dtype) for k in step.outputs[2:]]
    for _ in range(2 if scratch else 1):  # counters are zero again after a run
        kernels.run(parsed, [x, np.array([case[2]]), *found, *scratch])
    np.testing.assert_array_equal(found[1], index)
    np.testing.assert_array_equal(found[0].astype(np.float64), np.take_along_axis(x, index, case[1]).astype(np.float64))
    meant = simulate(program, {"x": x})
    np.testing.assert_array_equal(meant["i"], index)


@pytest.mark.parametrize(
    ("shape", "kept", "shared"),
    [
        ((1024, 1024), 20, Share(1, 32)),
        ((2, 1000), 5, Share(8, 4)),
        ((1024, 1024), 300, Share(4, 8)),
        ((1, 32769), 5, Share(32, 11, parts=3)),
        ((1, 120000), 1000, Share(32, 15, parts=8)),
        ((1, 150000), 4000, Share(32, 0)),
    ],
)
def test_how_blocks_and_threads_share_a_line(shape: tuple[int, ...], kept: int, shared: Share) -> None:
    x = TensorView(0, 0, shape, (shape[1], 1), FP32)
    assert top_rows.shared_by(x, 1, kept, of_arch("sm_90a")) == shared


def test_long_lines_and_many_kept_elements_are_predicted_to_take_longer() -> None:
    def us(size: int, kept: int, lines: int = 1) -> float:
        x = TensorView(0, 0, (lines, size), (size, 1), FP16)
        return top_rows.seconds(x, 1, kept, of_arch("sm_90a")) * 1e6

    times = [us(525, 30), us(8400, 300), us(30000, 1000), us(120000, 1000), us(600000, 4000)]
    assert times == sorted(times)
    assert 2 < times[0] < 4 < 20 < times[2] < 40
    assert us(1000, 30, lines=4000) > 2 * us(1000, 30)


def test_values_without_indices() -> None:
    program = lowered(graph(CASES[0], indices=False), "fp32")
    (kernel,) = program.kernels
    assert "#define INDICES 0" in str(recipe_of(kernel))


def test_refusals() -> None:
    def view(size: int, dtype: np.dtype = FP16, lines: int = 2) -> TensorView:
        return TensorView(0, 0, (lines, size), (size, 1), dtype)

    assert top_rows.refuse(view(65), 1, 65) is None
    assert top_rows.refuse(view(9000), 1, 4096) is None
    assert "at most 64 elements" in (top_rows.refuse(view(64), 1, 2) or "")
    assert "at most 4096 elements" in (top_rows.refuse(view(9000), 1, 4097) or "")
    assert "at most 2048 elements" in (top_rows.refuse(view(9000, FP64), 1, 2049) or "")
    assert "more elements than" in (top_rows.refuse(view(1 << 20, lines=1 << 11), 1, 2) or "")
    few = lowered(graph(((64, 8), 1, 2, "fp32", True)), "fp32")
    assert [s.params["tactic"] for s in few.steps] == ["each"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", [CASES[0], CASES[3], LONG[0]], ids=str)
def test_the_kernel_compiles_with_few_spills(case: Case) -> None:
    program = lowered(graph(case), "fp32", "cuda:sm_80")
    (kernel,) = program.kernels
    assert nvrtc.resources(recipe_of(kernel))["top_rows"].spill_bytes <= 64


@pytest.mark.hopper
@pytest.mark.parametrize("case", CASES + SHARED + LONG, ids=str)
def test_the_kernel_on_a_gpu(case: Case) -> None:
    context: Any = Engine(lowered(graph(case), "fp32", target="cuda:sm_90a")).context()
    for seed in range(5):
        x = given(case, seed)
        index = wanted(case, x)
        for _ in range(2):
            np.testing.assert_array_equal(context.run({"x": x})["i"], index)


def test_elements_without_an_order() -> None:
    x = TensorView(0, 0, (1000,), (1,), DTYPES["fp8_e4m3"])
    assert top_rows.refuse(x, 0, 5) == "it has no order for float8_e4m3fn"
