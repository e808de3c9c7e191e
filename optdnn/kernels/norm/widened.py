"""A norm or softmax of 16-bit rows and the Cast of its result to fp32 in one launch: the last rows of encoders.

The launch is emitted at the Cast. It stores the result unrounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.layout.row_places import ACCESS, result_strides, row_pitch
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.half_rows import OPERATIONS, HalfRows, emit_norm, placed, row_problem
from optdnn.kernels.norm.norm_add import FollowsNorm
from optdnn.kernels.pointwise.widened import alone, widens
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import plain_stages
from optdnn.types import FP32


class WidenedRows(FollowsNorm):
    """LayerNorm, RMSNorm, Softmax or LogSoftmax of rows, then Cast to fp32."""

    name = "rows_widened"
    conditional: ClassVar[bool] = True

    def refuse(self, b: Builder, op: Op) -> str | None:
        norm = self.before(b.graph, op)
        if norm is None or not alone(b, norm, HalfRows.name):
            return f"it does not cast the result of {HalfRows.name} to fp32"
        if (place := b.reserved.get(op.value)) is not None and (row_pitch(place) is None or place.offset % ACCESS):
            return "the rows of its result do not have a constant pitch, or do not begin at multiples of 32 bytes"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    def before(self, graph: Graph, op: Op) -> Op | None:
        norm = widens(graph, op)
        return norm if norm is not None and norm.kind in OPERATIONS else None

    def _norm(self, b: Builder, op: Op) -> Op:
        norm = self.before(b.graph, op)
        assert norm is not None
        return norm

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        norm, out = self._norm(b, op), b.result(op.value, result_strides(b, op.value))
        return placed(replace(row_problem(norm), full=True), b.operand(norm.inputs[0]), out)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        norm = self._norm(b, op)
        operands = {"input": b.operand(norm.inputs[0]), "output": b.target(op.value)}
        cast = plain_stages((Stage("Cast", (-1,), CastAttrs(FP32)),))
        attrs = {"norm": norm.kind, **attrs_dict(norm.attrs), "epilogue": cast, "arity": 3}
        made, covers = rows.launch(self.problem(b, op), config, b.gpu), replace(op, src=op.src | norm.src)
        emit_norm(b, covers, norm, made, operands, "ActivatedNorm", attrs)
