"""Pointwise operators, alone or fused, on one generated kernel."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, row_major
from optdnn.kernels.layout.row_places import access, result_strides
from optdnn.kernels.layout.views import order_read, settle
from optdnn.kernels.pointwise.expressions import CPP, EXPRESSIONS
from optdnn.kernels.pointwise.pointwise import emit_pointwise, single
from optdnn.kernels.tactic import Tactic

SHORTEST = 8
"""Rows up to this length are not padded: a copy of a few coordinates is part of another launch."""


class Elementwise(Tactic):
    """Any pointwise operator or DAG of pointwise operators, with any strides and any shapes that broadcast."""

    name = "pointwise"

    def refuse(self, b: Builder, op: Op) -> str | None:
        stages = op.attrs.epilogue if op.kind == "Pointwise" else single(op)
        missing = sorted({s.kind for s in stages} - EXPRESSIONS.keys())
        if missing:
            return f"there is no expression for {', '.join(missing)}"
        types = [b.graph.type(v).dtype for v in op.inputs if v is not None] + [op.outputs[0].type.dtype]
        unknown = sorted({t.name for t in types} - {t.name for t in CPP})
        return f"there is no arithmetic on {', '.join(unknown)}" if unknown else None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, in rows padded for products, or in the order of a view after it; a cast to the operand's own type is a
        view of the operand."""
        if self._nothing(b, op):
            settle(b, op, 0, b.operand(op.inputs[0]))
        else:
            b.target(op.value, self.strides(b, op))

    @staticmethod
    def strides(b: Builder, op: Op) -> tuple[int, ...] | None:
        """The strides of a new buffer for the result; None for those of its type."""
        long = op.outputs[0].type.static_shape[-1:] > (SHORTEST,)
        return (result_strides(b, op.value, merged=True) if long else None) or _order(b, op) or _columns(b, op)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        if self._nothing(b, op):
            return
        stages = list(op.attrs.epilogue) if op.kind == "Pointwise" else single(op)
        inputs = list(op.inputs)
        if op.kind == "Cast" and inputs[0] is not None and b.graph.op(inputs[0]).kind == "Layout":
            inputs[0] = b.graph.op(inputs[0]).inputs[0]  # one kernel changes type and order
        operands = [None if v is None else b.operand(v) for v in inputs]
        emit_pointwise(b, op, stages, operands, b.target(op.value))

    @staticmethod
    def _nothing(b: Builder, op: Op) -> bool:
        """Whether the operator is a cast to its operand's own type, or one that the copy before it has made."""
        t, x = op.outputs[0].type, op.inputs[0]
        if op.kind != "Cast" or x is None:
            return False
        made = op.value in b.place and b.place.get(x) == b.place[op.value]
        return made or (b.graph.type(x).dtype == t.dtype and not t.layout)


def _columns(b: Builder, op: Op) -> tuple[int, ...] | None:
    """On Hopper, strides of a matrix that products read as their second operand, with contiguous columns, if these have whole vectors
    and rows do not: TMA reads either order, but no rows at odd places, which would be copied. None for others."""
    t, users, unit = op.outputs[0].type, b.graph.users(op.value), access(op.outputs[0].type.dtype)
    shape = t.static_shape
    if not b.arch.startswith("sm_90") or t.layout or t.dtype.itemsize != 2 or len(shape) < 2:
        return None
    if shape[-1] % unit == 0 or shape[-2] % unit:
        return None
    if any(u.kind != "MatMul" or u.inputs[1] != op.value or u.inputs[0] == op.value for u in users):
        return None
    *outer, column, row = row_major((*shape[:-2], shape[-1], shape[-2]))
    return (*outer, row, column)


def _order(b: Builder, op: Op) -> tuple[int, ...] | None:
    """Strides that make a Transpose after the operator a view, if it moves whole vectors; None without one."""
    t = op.outputs[0].type
    if t.layout or t.static_shape[-1:] == () or t.static_shape[-1] % access(t.dtype):
        return None
    read = order_read(b, op.value)
    return read if read is not None and read[-1] == 1 else None
