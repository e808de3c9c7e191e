"""Rows of fp32 that are read once, with results in fp16, too, and 16-bit rows whose result is fp32: on the processor, the kernel is exact to the last
bits, and accesses have at most 16 bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.covering import covering
from support.host import needs_compiler
from support.spills import check_spills
from support.sweep import all_pairs, every

from optdnn.kernels.norm import rows_kernel as rows
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import Array

GPU = of_arch("sm_90a")
PLAIN = rows.Problem("layer_norm", 11, 96, "float32")
L2 = replace(PLAIN, operation="l2_norm", scale=False, bias=False, epsilon=0.0)
WIDENED = replace(PLAIN, dtype="float16", widened=True)
SHIFTED = 40.0
"""The mean of the rows. Sums of squares would cancel."""


def expected(problem: rows.Problem, x: Array, scale: Array, bias: Array) -> Array:
    if problem.operation == "softmax":
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)
    if problem.operation == "log_softmax":
        y = x - x.max(1, keepdims=True)
        return y - np.log(np.exp(y).sum(1, keepdims=True))
    if problem.operation == "l2_norm":
        length = np.maximum(np.sqrt(np.square(x).sum(1, keepdims=True)), problem.epsilon)
        return x / np.where(length == 0, 1, length)
    y = x - x.mean(1, keepdims=True) if problem.operation == "layer_norm" else x
    spread = np.sqrt(np.square(y).mean(1, keepdims=True) + problem.epsilon) + (problem.root_epsilon or 0.0)
    y = (x if problem.uncentered else y) / spread * scale
    y = y + bias if problem.bias else y
    return y / (1 + np.exp(-y)) if problem.epilogue else y


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "config"),
    every(
        2,
        [
            (PLAIN, rows.Config(8, 3, 4, 64)),
            (replace(PLAIN, length=301), rows.Config(64, 5, 1, 64)),
            (replace(PLAIN, epilogue=(("silu",),)), rows.Config(32, 1, 4, 64)),
            (rows.Problem("rms_norm", 11, 96, "float32", bias=False), rows.Config(32, 2, 2, 64)),
            (replace(PLAIN, epsilon=0.0, root_epsilon=0.5), rows.Config(8, 3, 4, 64)),
            (replace(PLAIN, root_epsilon=0.5, uncentered=True), rows.Config(64, 1, 4, 64)),
            (replace(PLAIN, length=301, uncentered=True, bias=False), rows.Config(64, 5, 1, 64)),
            (replace(PLAIN, operation="rms_norm", epsilon=0.0, root_epsilon=3.0), rows.Config(8, 3, 4, 64)),
            (rows.Problem("softmax", 11, 96, "float32"), rows.Config(8, 3, 4, 64)),
            (rows.Problem("log_softmax", 11, 301, "float32"), rows.Config(64, 5, 1, 64)),
            (L2, rows.Config(32, 2, 2, 64)),
            (replace(L2, epsilon=1e4), rows.Config(8, 3, 4, 64)),
            (replace(L2, dtype="float16", widened=True, length=264), rows.Config(64, 1, 8, 64)),
            (replace(PLAIN, narrow="float16"), rows.Config(8, 3, 4, 64)),
            (replace(PLAIN, narrow="float16", wide=False), rows.Config(32, 2, 2, 64)),
            (replace(PLAIN, narrow="float16", wide=False, epilogue=(("silu",),)), rows.Config(32, 1, 4, 64)),
            (replace(PLAIN, narrow="float16", length=301), rows.Config(64, 5, 1, 64)),
            (WIDENED, rows.Config(4, 3, 8, 64)),
            (replace(WIDENED, length=90), rows.Config(32, 2, 2, 64)),
        ],
    ),
)
def test_the_kernel_on_a_processor(problem: rows.Problem, config: rows.Config, tmp_path: Path) -> None:
    assert rows.refuse(problem, config) is None
    rng, shape = np.random.default_rng(0), (problem.rows, problem.length)
    memory: dict[str, Array] = {
        name: rng.standard_normal(problem.length).astype(np.float32) for name in ("scale", "bias")
    }
    memory |= {
        "input": (rng.standard_normal(shape) + SHIFTED).astype(problem.dtype),
        "output": np.zeros(shape, np.float32),
        "narrow": np.zeros(shape, np.float16),
    }
    if problem.operation == "l2_norm":
        memory["input"][3] = 0
    made = rows.launch(problem, config, GPU)
    held = {name: emulated.aligned(memory[name]) for name in made.operands}
    stages = render.epilogue(problem.epilogue, exact=True) if problem.epilogue else ""
    library = emulated.compiled(
        made.recipe,
        made.function,
        tmp_path,
        first=["vectors.cuh"],
        headers=["l2_priority.cuh", "tile_vectors.cuh"],
        rendered=stages,
    )
    emulated.run(library, made, {name: array.ctypes.data for name, array in held.items()})
    want = expected(problem, *(memory[name].astype(np.float64) for name in ("input", "scale", "bias")))
    assert ("output" in held, "narrow" in held) == (problem.wide, bool(problem.narrow))
    for name, error in (("output", 1e-5), ("narrow", 2.0**-11)):
        if name in held:
            np.testing.assert_allclose(held[name], want, rtol=0, atol=error * np.abs(want).max())


def test_accesses_have_sixteen_bytes_at_most() -> None:
    assert rows.refuse(PLAIN, rows.Config(4, 3, 8, 64)) == "8 elements exceed an access of 16 bytes"
    assert {c.lanes for c in rows.candidates(PLAIN, GPU)} == {4}
    assert (
        rows.refuse(replace(PLAIN, narrow="int8"), rows.Config(8, 3, 4, 64))
        == "results of 16-bit rows are quantized, those of fp32 rows converted to fp16"
    )
    narrow = replace(WIDENED, widened=False, narrow="float16")
    assert "those of fp32 rows converted to fp16" in str(rows.refuse(narrow, rows.Config(4, 3, 8, 64)))


def test_a_row_has_twice_the_bytes() -> None:
    half = replace(PLAIN, dtype="float16", scale=False, bias=False)
    assert replace(half, dtype="float32").bytes == 2 * half.bytes
    assert 2 * replace(half, widened=True).bytes == 3 * half.bytes


@pytest.mark.parametrize("given", [{"dtype": "float32"}, {"narrow": "int8"}, {"sum": True, "add": True}])
def test_only_one_result_of_16_bit_rows_is_fp32(given: dict[str, Any]) -> None:
    config = rows.Config(32, 2, 4, 64)
    assert rows.refuse(WIDENED, config) is None
    assert "the only result, of 16-bit rows" in str(rows.refuse(replace(WIDENED, **given), config))


@pytest.mark.parametrize(
    ("problem", "because"),
    [
        (replace(L2, root_epsilon=1.0), "only layer and RMS norms without factors"),
        (replace(PLAIN, uncentered=True, modulated=rows.Modulated(1, 96, None, 0.0)), "only layer and RMS norms"),
        (replace(PLAIN, operation="rms_norm", uncentered=True), "only a layer norm has a mean"),
    ],
)
def test_other_deviations_are_refused(problem: rows.Problem, because: str) -> None:
    assert because in str(rows.refuse(problem, rows.Config(8, 3, 4, 64)))


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("length", "dtype"), [(32, "float32"), (768, "bfloat16"), (4096, "float16"), (4096, "float32")]
)
@pytest.mark.parametrize(
    ("operation", "uncentered"), [("layer_norm", False), ("layer_norm", True), ("rms_norm", False)]
)
def test_other_deviations_compile_without_spills(operation: str, uncentered: bool, length: int, dtype: str) -> None:
    problem = rows.Problem(operation, 4096, length, dtype, root_epsilon=1e-6, uncentered=uncentered)
    check_spills(rows.recipe(problem, rows.candidates(problem, GPU)[0]), "rows")


@pytest.mark.nvrtc
@pytest.mark.parametrize("operation", rows.OPERATIONS)
def test_candidates_compile_without_spills(operation: str) -> None:
    made = {}
    for length, dtype in itertools.product([32, 96, 768, 4096], ["float32", "float16"]):
        problem = rows.Problem(operation, 4096, length, dtype, widened=dtype == "float16")
        for config in rows.candidates(problem, GPU, 2 if length in (32, 4096) else 1):
            made[f"{length}, {dtype}, {config}"] = rows.recipe(problem, config)
    for name in covering(made):
        check_spills(made[name], "rows")


@needs_compiler
@all_pairs(
    {
        "shift": [None, 192],
        "scale": [False, True],
        "residual": [False, True],
    }
)
def test_a_residual_block_on_a_processor(shift: int | None, scale: bool, residual: bool, tmp_path: Path) -> None:
    """``silu(l2(x) * scale * (factor + 1) + shift) + addend``: two images of eight rows, of which factors and shifts lie side by side."""
    stages = (("silu",), ("add",)) if residual else (("silu",),)
    problem = rows.Problem(
        "l2_norm", 16, 96, "float32", scale=scale, bias=False, epsilon=1e-12, add=residual, last=residual,
        epilogue=stages, modulated=rows.Modulated(8, 192, shift, 1.0),
    )  # fmt: skip
    config = rows.Config(32, 1, 4, 64)
    assert rows.refuse(problem, config) is None
    rng, shape = np.random.default_rng(0), (problem.rows, problem.length)
    vectors = rng.standard_normal((2, 192)).astype(np.float32)
    memory: dict[str, Array] = {
        "input": rng.standard_normal(shape).astype(np.float32),
        "addend": rng.standard_normal(shape).astype(np.float32),
        "scale": rng.standard_normal(problem.length).astype(np.float32),
        "factor": vectors, "shift": np.ascontiguousarray(vectors[:, 96:]).repeat(2, 1)[:, :192].copy(),
        "output": np.zeros(shape, np.float32),
    }  # fmt: skip
    made = rows.launch(problem, config, GPU)
    assert set(made.operands) == {"input", "output", "factor"} | {
        name for name, there in (("addend", residual), ("scale", scale), ("shift", shift)) if there
    }
    held = {name: emulated.aligned(memory[name]) for name in made.operands}
    library = emulated.compiled(
        made.recipe, made.function, tmp_path, first=["vectors.cuh"], headers=["l2_priority.cuh", "tile_vectors.cuh"],
        rendered=render.epilogue(stages, exact=True),
    )  # fmt: skip
    emulated.run(library, made, {name: array.ctypes.data for name, array in held.items()})
    x = memory["input"].astype(np.float64)
    y = x / np.linalg.norm(x, axis=1, keepdims=True) * (memory["scale"] if scale else 1.0)
    y = y * (memory["factor"][:, :96].repeat(8, 0) + 1.0) + (memory["shift"][:, :96].repeat(8, 0) if shift else 0.0)
    want = y / (1 + np.exp(-y)) + (memory["addend"] if residual else 0.0)
    np.testing.assert_allclose(held["output"], want, rtol=0, atol=1e-5)
