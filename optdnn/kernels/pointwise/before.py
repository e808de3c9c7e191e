"""The pointwise operator before another operator, for launches that compute both and never store its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pointwise.pointwise import single
from optdnn.ops.base import Stage
from optdnn.types import is_float


def pointwise_before(b: Builder, op: Op, *, floats: bool = True) -> Op | str:
    """The pointwise operator that computes operand 0 of ``op`` for it alone, or why there is none. ``floats``: it computes floats."""
    value = op.inputs[0]
    before = None if value is None else b.graph.op(value)
    if value is None or before is None or not before.pointwise:
        return "its operand is not the result of a pointwise operator"
    if value in b.reserved or b.graph.sole_user(value) is None:
        return "its operand has other readers"
    t = b.graph.type(value)
    if floats and not is_float(t.dtype):
        return "its operand does not hold floats"
    if 0 in t.static_shape:
        return "its operand has no elements"
    if any(v is not None and v not in b.place and b.graph.constant_value(v) is None for v in before.inputs):
        return "another launch computes the pointwise operator, and its operands are not stored"
    why = Elementwise().refuse(b, before)
    return before if why is None else f"the pointwise operator before it: {why}"


def stages_of(op: Op) -> list[Stage]:
    """The stages of a pointwise operator."""
    return list(op.attrs.epilogue) if op.kind == "Pointwise" else single(op)


def moved(stages: Sequence[Stage], by: int) -> list[Stage]:
    """The stages with ``by`` further operands inserted after the first one."""
    return [replace(s, args=tuple(a if a is None or a < 1 else a + by for a in s.args)) for s in stages]


def exchanged(stages: Sequence[Stage], slot: int) -> list[Stage]:
    """The stages with operand ``slot`` in the place of the first one, which is register 0, and the first one in its place."""
    swap = {-1: slot, slot: -1} if slot else {}
    return [replace(s, args=tuple(a if a is None else swap.get(a, a) for a in s.args)) for s in stages]
