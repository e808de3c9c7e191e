"""Products of a few rows with a large constant matrix: a fully connected layer at batch 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from optdnn.ir.graph import Op
from optdnn.ir.strips import contiguous
from optdnn.kernels.builder import Builder, TensorView, map_dtype, products
from optdnn.kernels.conv.fused import Convolution, bias_row, conv_attrs, stage_operands
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.gemm.hopper import MatrixProduct, product_refusal
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.tactic import Offer, kernel_offers
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import FP32, Array

LARGE = 1 << 20
"""Least bytes of a matrix. Reading a smaller one takes less time than latency."""
UNIT = 8
"""Columns that kernels on tensor cores store at a time. Fewer columns of fp32 would be copied from their result."""


class Gemv(MatrixProduct):
    """MatMul and Gemm of one to four rows of 16-bit floats with a constant matrix of a megabyte or more. A single fp32 row of any
    number of columns (the actions of a policy) may have a small matrix."""

    name = "gemv"
    row_invariant: ClassVar[bool] = False
    """More rows run by another tactic, which sums in another order."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if products(b, op) not in ("float16", "bfloat16"):
            return f"the kernel takes 16-bit floats, not {products(b, op)}"
        if (why := product_refusal(b, op)) is not None:
            return why
        shape, weight = op.outputs[0].type.static_shape, b.weights(op)
        rows = math.prod(shape[:-1])
        if rows > gemv.MAX_ROWS:
            return f"it is for up to {gemv.MAX_ROWS} rows, not {rows}"
        uneven = rows == 1 and shape[-1] % UNIT != 0 and op.outputs[0].type.dtype == FP32
        if weight.nbytes < LARGE and not uneven:
            return "its matrix is small: latency, not reading it, takes the time"
        depth = weight.size // shape[-1]
        return f"16-byte loads need rows of a multiple of 8 elements, not {depth}" if depth % 8 else None

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> gemv.Problem:
        x, stages = c.feed.x, (("bias",), *c.ep.rendered)
        return gemv.Problem(x.shape[0], c.out.shape[1], x.shape[1], stages, map_dtype(x.dtype), c.out.dtype == FP32)

    def offers(self, problem: gemv.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        """The configurations. Each one sums a column in the same order for any number of rows."""
        return kernel_offers(gemv, problem, fitted(gpu))

    def stored(self, b: Builder, x: TensorView) -> bool:
        """One row may have any number of columns: a thread stores one of them."""
        return x.shape[0] == 1 or super().stored(b, x)

    def dense(self, b: Builder, op: Op, weight: Array) -> TensorView:
        """The matrix as a constant, shared by all plans of all tactics on this kernel."""
        columns, depth = weight.shape[:2]
        made = b.kept.once("rows", [weight], lambda: contiguous(weight.reshape(columns, depth)))
        return b.constant(made, f"{op.outputs[0].name}.weights")

    def operands(
        self, b: Builder, op: Op, c: Convolution, problem: gemv.Problem
    ) -> tuple[dict[str, TensorView], int, int]:
        """The launch's operands by name, and the pitches of the rows and of the result, in elements."""
        x, out, residual = c.feed.x, c.out, c.residual
        pitch = out.strides[0] if problem.rows > 1 else problem.columns
        if residual is not None and problem.rows > 1 and residual.strides[0] != pitch:
            residual = copied(b, op, residual, "residual", out.strides)
        weights = self.dense(b, op, c.feed.weight)
        operands = {"x": x, "weights": weights, "bias": bias_row(b, op, c.bias, problem.columns), "output": out}
        if residual is not None:
            operands["residual"] = residual
        return operands, x.strides[0] if problem.rows > 1 else problem.depth, pitch

    def launch(self, b: Builder, op: Op, c: Convolution, problem: gemv.Problem, config: gemv.Config) -> None:
        operands, x_pitch, pitch = self.operands(b, op, c, problem)
        weights = operands["weights"]
        logical = weights.view((problem.columns, problem.depth, 1, 1), (problem.depth, 1, 1, 1))
        launch = gemv.launch(problem, config, b.gpu, x_pitch, pitch)
        reads = [operands["x"], logical, operands["bias"], *stage_operands(b, c.ep, operands.get("residual"))]
        b.emit(op, launch, operands, "Conv", conv_attrs(c.feed.geometry, 1, c.ep.stages), reads, [c.out])
