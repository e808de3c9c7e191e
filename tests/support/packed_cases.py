"""Products with packed weights in many forms: sizes, blocks, zero points, element types, epilogues."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.ir.graph import Graph
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.tiles import tiled_scales, tiled_weights
from optdnn.ops.packed_layout import PackedMatMulAttrs, packed_rows
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.reference.packed import dequantized
from optdnn.types import DTYPES, Array, bits_of, is_float
from support import emulated
from support.conv_cases import apply_stages
from support.net import Net

TYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "uint8": np.uint8,
}
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}
"""The largest error, relative to the largest magnitude."""


@dataclass(frozen=True)
class Case:
    """Fields of :class:`Problem`. ``block`` 0: one scale per channel."""

    rows: int = 1
    columns: int = 64
    depth: int = 512
    code: str = "uint4"
    block: int = 128
    zeros: str = ""
    scale: str = "float16"
    dtype: str = "float16"
    stages: tuple[render.Stage, ...] = ()

    @property
    def problem(self) -> Problem:
        """The problem of a kernel."""
        bits = bits_of(DTYPES[self.code])
        return Problem(
            self.rows, self.columns, self.depth, self.code, bits, min(self.block or self.depth, self.depth), self.scale,
            self.zeros, (("bias",), *self.stages), self.dtype,
        )  # fmt: skip

    def of_rows(self, rows: int) -> Case:
        """The same weights for another number of rows."""
        return replace(self, rows=rows)


GATED: tuple[render.Stage, ...] = (("silu",), ("mul",))
CASES = {
    "4 bits": Case(),
    "blocks of 16": Case(3, 40, 400, block=16, zeros="uint8"),
    "blocks of 32": Case(2, 48, 672, block=32),
    "blocks of 64, bf16": Case(4, 64, 448, block=64, zeros="uint8", dtype="bfloat16", scale="bfloat16"),
    "blocks of 256": Case(1, 33, 1400, block=256, zeros="uint8", scale="float32"),
    "a last block that is not full": Case(5, 50, 1000, block=128, zeros="uint8", stages=(("clip", -1.0, 0.75),)),
    "an odd depth": Case(2, 17, 333, block=32),
    "by channel": Case(8, 64, 640, block=0, stages=(("add",), ("relu",))),
    "zero points that are no integers": Case(2, 48, 512, block=32, zeros="float16"),
    "by channel, shallow": Case(3, 17, 40, block=0, zeros="uint8"),
    "gated": Case(3, 96, 768, zeros="uint8", stages=GATED),
    "8 bits by channel": Case(1, 64, 1024, "uint8", 0),
    "8 bits, bf16": Case(2, 48, 520, "uint8", 64, "uint8", "bfloat16", "bfloat16"),
    "8 bits, blocks of 16": Case(7, 30, 240, "uint8", 16, "uint8"),
    "8 bits, bf16, zero points that are no integers": Case(2, 32, 256, "uint8", 32, "float32", "float32", "bfloat16"),
    "2 bits": Case(2, 48, 1100, "uint2", 32, "uint8"),
    "2 bits, bf16": Case(1, 48, 600, "uint2", 64, "", "float32", "bfloat16"),
    "8-bit floats": Case(2, 48, 500, "fp8_e4m3", 128, "", "float32"),
    "8-bit floats, bf16": Case(1, 48, 512, "fp8_e4m3", 128, "", "float32", "bfloat16"),
}


@dataclass(frozen=True)
class Operands:
    """Random operands of a case, as ONNX has them. ``weights``: their meaning, float64 ``[columns, depth]``."""

    x: Array
    packed: Array
    scales: Array
    zeros: Array | None
    bias: Array
    residual: Array
    weights: Array


def drawn(case: Case, seed: int = 4) -> Operands:
    """Random operands. In a last block, numbers beyond K are not zero."""
    rng, p = np.random.default_rng(seed), case.problem
    dtype, blocks = DTYPES[case.code], -(-p.depth // p.block)
    stored = p.depth if p.block == p.depth else blocks * p.block
    if is_float(dtype):
        numbers: Array = rng.standard_normal((p.columns, stored)).astype(dtype)
    else:
        numbers = rng.integers(0, 1 << p.bits, (p.columns, stored), np.uint8).view(dtype)
    size = (p.columns, blocks)
    spread = 1.0 if is_float(dtype) else 0.29 * (1 << p.bits)
    scales = (rng.choice([-1, 1], size) * rng.uniform(0.5, 1.5, size) / spread / p.depth**0.5).astype(TYPES[p.scale])
    zeros: Array | None = None
    if p.zeros:
        zeros = rng.integers(0, 1 << p.bits, size).astype(TYPES[p.zeros])
        if p.zeros != "uint8":
            zeros = (zeros.astype(np.float32) + rng.choice([0.25, 0.5], size)).astype(zeros.dtype)
    packed = packed_rows(numbers, p.block)
    weights = dequantized(packed, scales, zeros, code=p.code, K=p.depth, block_size=p.block, wide=np.dtype(np.float64))
    float_type = TYPES[case.dtype]
    x = rng.standard_normal((p.rows, p.depth)).astype(float_type)
    residual = rng.standard_normal((p.rows, p.columns)).astype(float_type)
    return Operands(x, packed, scales, zeros, rng.standard_normal(p.columns).astype(np.float32), residual, weights)


def tiled(case: Case, o: Operands) -> dict[str, Array]:
    """The operands ``tiles``, ``scales`` and ``zeros`` of a launch."""
    p = case.problem
    sizes = (p.columns, p.depth, p.bits, p.block)
    found = {"tiles": tiled_weights(o.packed, p.code, p.depth, p.block), "scales": tiled_scales(o.scales, *sizes)}
    return found if o.zeros is None else {**found, "zeros": tiled_scales(o.zeros, *sizes)}


def expected(case: Case, o: Operands) -> Array:
    """The result in float64."""
    sums = o.x.astype(np.float64) @ o.weights.T
    return apply_stages(sums, case.problem.epilogue, o.bias, o.residual.astype(np.float64))


def pitch_of(case: Case) -> int:
    """The distance of rows in elements."""
    return -(-case.depth // 8) * 8


def operands_of(case: Case, o: Operands) -> dict[str, Array]:
    """The operands that a launch reads. After each row there is NaN."""
    x = np.full((case.rows, pitch_of(case)), np.nan, o.x.dtype)
    x[:, : case.depth] = o.x
    bias = np.zeros(-(-case.columns // 4) * 4, np.float32)
    bias[: case.columns] = o.bias
    return {"x": x, "bias": bias, "residual": o.residual, **tiled(case, o)}


def network(case: Case, *, rounded: bool = False) -> Graph:
    """The product of a case, a bias and its stages. ``rounded``: whether its rows may be rounded to int8."""
    p, o, n = case.problem, drawn(case), Net()
    x = n.op("Abs", n.input(p.rows, p.depth))
    constants = [None if a is None else n.graph.add_constant(a) for a in (o.packed, o.scales, o.zeros)]
    y = n.op("PackedMatMul", x, *constants, attrs=PackedMatMulAttrs(p.code, p.depth, p.block, rounded_rows=rounded))
    y = n.op("Add", y, n.const(o.bias))
    for name, *values in case.stages:
        if name == "silu":
            y = n.op("Mul", y, n.op("Sigmoid", y))
        elif name in ("add", "mul"):
            y = n.op(str(name).capitalize(), y, n.input(p.rows, p.columns, name="r"))
        else:
            y = n.op(str(name).capitalize(), y, *map(np.float32, values))
    return n.done(y)


def check_emulated(case: Case, made: Launch, workspace: tuple[int, int], instruction: str, folder: Path) -> None:
    """Compares the kernel, run on the processor, with float64. ``instruction`` is replaced by the product of the emulation.

    ``workspace``: bytes of partial sums and of counts. The kernel runs twice: the counts must be zero again after the first
    run.
    """
    p, o = case.problem, drawn(case)
    text = made.recipe.generated["generated.cuh"].replace(instruction, "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    sources = made.recipe.sources()
    names = "packed.cuh", "packed_few.cuh", "packed_sums.cuh", "packed_resident.cuh"
    headers = [name for name in names if name in sources]
    library = emulated.compiled(made.recipe, made.function, folder, rendered=rendered, headers=headers)
    partial, arrived = workspace
    held = {name: emulated.aligned(a) for name, a in operands_of(case, o).items()}
    held["output"] = emulated.aligned(np.zeros((p.rows, p.columns), TYPES[case.dtype]))
    held["partial"], held["arrived"] = emulated.aligned(np.full(partial, 0xFF, np.uint8)), np.zeros(arrived, np.uint8)
    want = expected(case, o)
    for _ in range(2):
        held["output"][...] = np.nan
        emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
        assert not held["arrived"].any()
        np.testing.assert_allclose(
            held["output"].astype(np.float64), want, rtol=0, atol=2 * TOLERANCE[case.dtype] * np.abs(want).max()
        )
