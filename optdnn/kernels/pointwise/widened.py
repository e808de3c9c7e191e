"""Casts to fp32 that the launch before them can do: it stores what it has computed in fp32, in place of rounding it to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pointwise.pointwise import emit_pointwise, single
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.types import BF16, FP16, FP32


def widens(graph: Graph, cast: Op) -> Op | None:
    """The operator whose 16-bit result only ``cast`` reads, to make fp32 of it in the same layout."""
    source = None if cast.inputs[0] is None else graph.op(cast.inputs[0])
    if source is None or source.value != cast.inputs[0] or graph.sole_user(source.value) is not cast:
        return None
    before, after = source.outputs[0].type, cast.outputs[0].type
    widened = before.dtype in (FP16, BF16) and after.dtype == FP32 and before.layout == after.layout
    return source if widened and cast.kind == "Cast" else None


def alone(b: Builder, op: Op, name: str) -> bool:
    """Whether the tactic of this name computes the operator, and no other one beside it."""
    tactic = b.chosen.get(op.id)
    return tactic is not None and tactic.name == name and tactic.region(b, op).ops == (op,)


class WidenedPointwise(Tactic):
    """A pointwise operator, then Cast to fp32."""

    name = "pointwise_widened"
    conditional: ClassVar[bool] = True

    def refuse(self, b: Builder, op: Op) -> str | None:
        source = widens(b.graph, op)
        if source is None or source.kind == "Cast" or not alone(b, source, Elementwise.name):
            return "it does not cast the result of a pointwise operator to fp32"
        return None

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operator before it."""
        found = widens(graph, op)
        return [] if found is None else [found]

    def region(self, b: Builder, op: Op) -> Region:
        """The Cast, and the operator before it."""
        return Region(op, before=tuple(self.neighbours(b.graph, op)))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        (source,) = self.neighbours(b.graph, op)
        stages = list(source.attrs.epilogue) if source.kind == "Pointwise" else single(source)
        operands = [None if v is None else b.operand(v) for v in source.inputs]
        cast = Stage("Cast", (-1 - len(stages),), CastAttrs(FP32))
        emit_pointwise(b, replace(op, src=op.src | source.src), [*stages, cast], operands, b.target(op.value))
