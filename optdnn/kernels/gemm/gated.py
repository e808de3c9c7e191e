"""Products whose results are multiplied by a gate: a computed factor per image and channel.

Transformers for diffusion compute gates from the time step, and have one after each attention and each perceptron:
``x + gate * (f(x) W)``. The launch reads a tile's gates while it multiplies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from optdnn.ir.epilogue import Epilogue, images_of, plan_epilogue, summed_dtype
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.problem import GATED_ROWS, Problem
from optdnn.kernels.gemm.hopper import HopperGemm, rows_of
from optdnn.kernels.gemm.row_norms import refuse_order
from optdnn.kernels.pointwise.pointwise import copied_later
from optdnn.types import BF16, FP16


class GatedGemm(HopperGemm):
    """One product that multiplies its result by a gate, before or after it adds a residual."""

    name = "gemm_gated_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        ep = self.epilogue(b, op)
        if ep.gate is None:
            return "no factor per image and channel multiplies its result"
        if summed_dtype(b.graph, op) not in (FP16, BF16) or op.outputs[0].type.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        shape = op.outputs[0].type.static_shape
        images = images_of(b.graph.type(ep.gate).static_shape, shape)
        rows = math.prod(shape[:-1]) // images
        if (images > 1 or b.row_invariant) and rows % GATED_ROWS:
            return f"images of {rows} rows: {GATED_ROWS} neighboring rows must belong to one image"
        return refuse_order(op, self._order(b, op))

    def epilogue(self, b: Builder, op: Op) -> Epilogue:
        return plan_epilogue(b.graph, op, channel_axis=-1, allow_gate=True)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The product, with its gate."""
        c = super().convolution(b, op)
        assert c.ep.gate is not None
        given = b.source(c.ep.gate)
        gate = rows_of(given, aligned=False) or rows_of(copied_later(b, op, given, "gate"))
        assert gate is not None
        return replace(c, gate=gate)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        """Add the launch. Its meaning has images, so that the gate has one value for all rows of an image."""
        images = problem.pixels // problem.image_rows
        feed, residual = replace(c.feed, x=_as_images(c.feed.x, images)), c.residual
        residual = None if residual is None else _as_images(residual, images)
        c = replace(c, feeds=(feed,), residual=residual, out=_as_images(c.out, images))
        hopper_launch.emit_conv(b, op, c, problem, config)


def _as_images(x: TensorView, images: int) -> TensorView:
    """Images of 1 x 1, one per row, as ``images`` of one column."""
    pitch, rows = x.strides[0], x.shape[0] // images
    return x.view((images, x.shape[1], rows, 1), (rows * pitch, 1, pitch, pitch))
