"""Shared parts of the tactics of PackedMatMul: its problem, the tiled operands, and the meaning of a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, as_rows, map_dtype, up
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import bias_row
from optdnn.kernels.gemm.hopper import MatrixProduct, Rows
from optdnn.kernels.packed.problem import Problem, refuse
from optdnn.kernels.packed.tiles import tiled_scales, tiled_weights
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.tactic import Offer
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import DTYPES, FP32, FP64, INT32, Array, bits_of

ARITY = 4
"""Number of operands of the product: rows, weights, scales, zero points."""
OPERANDS = ("tiles", "scales", "zeros")


@dataclass(frozen=True)
class UnpackedProblem:
    """The packed weights, and the product with the weights that a launch before it unpacks."""

    packed: Problem
    product: conv_problem.Problem


def refusal(b: Builder, op: Op) -> str | None:
    """Why no kernel of this family runs the operator, or None."""
    shape, a = op.outputs[0].type.static_shape, op.attrs
    if op.inputs[0] is None or len(shape) < 2 or 0 in shape or a.K < 1:
        return "it is not a product of rows with a matrix"
    if any(v is not None and b.graph.constant_value(v) is None for v in op.inputs[1:ARITY]):
        return "its weights are not constant"
    if a.prologue:
        return "it has a prologue"
    zeros = b.graph.constant_value(op.input(3))
    if zeros is not None and zeros.dtype == np.uint8 and zeros.size and int(zeros.max()) >> bits_of(DTYPES[a.code]):
        return f"its zero points exceed the range of {a.code}"
    return refuse(described(b, op), b.arch)


def row_count(op: Op) -> int:
    """Rows of the product."""
    return math.prod(op.outputs[0].type.static_shape[:-1])


def described(b: Builder, op: Op, rows: Rows | None = None) -> Problem:
    """The product as plain data. ``rows``: views of its operands and its epilogue (None: an epilogue of the bias alone)."""
    a, shape = op.attrs, op.outputs[0].type.static_shape
    scales, zeros = _parameters(b, op)
    stages = (("bias",),) if rows is None else (("bias",), *rows.ep.rendered)
    return Problem(
        math.prod(shape[:-1]), shape[-1], a.K, a.code, bits_of(DTYPES[a.code]), min(a.block_size, a.K),
        map_dtype(scales.dtype), "" if zeros is None else map_dtype(zeros.dtype), stages, map_dtype(op.outputs[0].type.dtype),
    )  # fmt: skip


def _parameters(b: Builder, op: Op) -> tuple[Array, Array | None]:
    """Scales and zero points (None: there are none); fp64 becomes fp32."""
    scales, zeros = (b.graph.constant_value(op.input(i)) for i in (2, 3))
    assert scales is not None
    if scales.dtype == FP64:
        scales = scales.astype(FP32)
    if zeros is not None and zeros.dtype == FP64:
        zeros = zeros.astype(FP32)
    return scales, zeros


def packed_operands(b: Builder, op: Op, problem: Problem) -> dict[str, TensorView]:
    """The constants ``tiles``, ``scales`` and ``zeros`` (with zero points) of an operator; all its plans share them."""
    weights, name = b.weights(op), op.outputs[0].name
    scales, zeros = _parameters(b, op)
    sizes = (problem.columns, problem.depth, problem.bits, problem.block, op.attrs.block_rows)
    made = b.kept.once(
        "packed tiles",
        [weights],
        lambda: tiled_weights(weights, problem.code, problem.depth, problem.block),
        final=True,
    )
    found = {
        "tiles": b.constant(made, f"{name}.weights"),
        "scales": b.constant(tiled_scales(scales, *sizes), f"{name}.scales"),
    }
    if zeros is not None:
        found["zeros"] = b.constant(tiled_scales(zeros, *sizes), f"{name}.zeros")
    return found


@lru_cache(maxsize=4096)
def _estimated(kernel: ModuleType, problem: Problem, gpu: GpuFacts) -> tuple[tuple[Any, float], ...]:
    """The configurations of a kernel to time, with their predicted seconds."""
    return tuple((c, kernel.estimate(problem, c, gpu)) for c in kernel.candidates(problem, gpu))


class PackedProduct(MatrixProduct):
    """A tactic that runs a PackedMatMul in one launch. Stages that its epilogue cannot take run in a launch after it."""

    kernel: ClassVar[ModuleType]
    """The module with the launch's plans: ``candidates``, ``estimate`` and ``launch``; ``MAX_ROWS``, ``workspace`` and ``unfit`` are
    optional."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        most = getattr(self.kernel, "MAX_ROWS", None)
        if most is not None and row_count(op) > most:
            return f"it is for up to {most} rows, not {row_count(op)}"
        return self.kernel.unfit(described(b, op), b.gpu) if hasattr(self.kernel, "unfit") else None

    def one_order(self, config: Any) -> bool:
        """Whether a configuration sums a row in the same order for any number of rows."""
        return True

    def stored(self, b: Builder, x: TensorView) -> bool:
        """Always: kernels write element by element."""
        return True

    def problem(self, b: Builder, op: Op) -> Problem:
        return described(b, op, self.rows(b, op))

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return [Offer(c, seconds, self.one_order(c)) for c, seconds in _estimated(self.kernel, problem, gpu)]

    def workspace(self, problem: Problem, config: Any, gpu: GpuFacts) -> tuple[int, int]:
        """Bytes of the launch's operands ``partial`` and ``arrived`` (zeros at first); both 0 if it has none."""
        return self.kernel.workspace(problem, config) if hasattr(self.kernel, "workspace") else (0, 0)

    def shared_sums(self, b: Builder, op: Op, problem: Problem, config: Any) -> dict[str, TensorView]:
        """The operands ``partial`` and ``arrived`` if blocks share K; else none."""
        partial, arrived = self.workspace(problem, config, b.gpu)
        if not partial:
            return {}
        name = op.outputs[0].name
        return {
            "partial": b.new(f"{name}.partial", FP32, (partial // 4,)),
            "arrived": b.new(f"{name}.arrived", INT32, (arrived // 4,)),
        }

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        rows = self.rows(b, op)
        problem, out = described(b, op, rows), b.made(rows.out)
        many = problem.rows > 1
        pitch = out.strides[0] if many else problem.columns
        residual = None if rows.residual is None else b.made(rows.residual)
        if residual is not None and many and residual.strides[0] != pitch:
            residual = copied(b, op, residual, "residual", out.strides)
        x = b.made(rows.x)
        packed, bias = packed_operands(b, op, problem), bias_row(b, op, rows.ep.bias, up(problem.columns, 4))
        operands = {"x": x, **packed, "bias": bias, "output": out}
        if residual is not None:
            operands["residual"] = residual
        sums = self.shared_sums(b, op, problem, config)
        made = self.kernel.launch(problem, config, b.gpu, x.strides[0] if many else problem.depth, pitch)
        constants = [b.constant(c, "scalar") for c in rows.ep.constants]
        reads = [
            as_rows(x),
            *map(packed.get, OPERANDS),
            bias.view((problem.columns,), (1,)),
            None if residual is None else as_rows(residual),
            *constants,
        ]
        attrs = {
            "code": problem.code, "K": problem.depth, "N": problem.columns, "block_size": problem.block,
            "prologue": (), "epilogue": plain_stages(_stages(rows.ep.stages)), "arity": ARITY,
        }  # fmt: skip
        b.emit(
            op, made, operands | sums, "TiledPackedMatMul", attrs, reads, [as_rows(out)],
            scratch=[*sums.values()][:1], kept=[*sums.values()][1:],
        )  # fmt: skip
        rows.finish(b, op, out)


def _stages(stages: list[Stage]) -> list[Stage]:
    """The addition of the bias (operand 4), then the stages. Their operands 3, 4, … become 5, 6, …; registers count from the product."""
    after = [replace(s, args=tuple(None if a is None else a + 2 if a >= 0 else a - 1 for a in s.args)) for s in stages]
    return [Stage("Add", (-1, ARITY)), *after]
