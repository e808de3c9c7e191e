"""Moves the prologue of a product into an op of its own: a product of integers cannot compute floats before it multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Stage
from optdnn.ops.fused import PointwiseAttrs


def split_prologue(graph: Graph, op: Op) -> None:
    """Move the prologue of ``op`` into a Pointwise before it. Its result has the name of the result of ``op`` and "/prologue"."""
    attrs = op.attrs
    arity = op.definition.arity or 0
    stages, operands = _renumbered(attrs.prologue, op.inputs, [op.inputs[0]])
    name = f"{op.outputs[0].name}/prologue"
    pointwise = graph.add("Pointwise", operands, PointwiseAttrs(epilogue=stages), names=[name], src=op.src)
    own = [pointwise.value, *op.inputs[1:arity]]
    own += [None] * (arity - len(own))
    epilogue, inputs = _renumbered(attrs.epilogue, op.inputs, own)
    while inputs and inputs[-1] is None:
        inputs.pop()
    graph.set_op(replace(op, attrs=replace(attrs, prologue=(), epilogue=epilogue), inputs=tuple(inputs)))


def _renumbered(
    stages: Sequence[Stage], old: Sequence[Value | None], operands: list[Value | None]
) -> tuple[tuple[Stage, ...], list[Value | None]]:
    """Stages that read from ``operands`` instead of ``old``. The values that they read are appended to ``operands``."""
    first = len(operands)

    def slot(a: int | None) -> int | None:
        if a is None or a < 0:
            return a
        if old[a] not in operands[first:]:
            operands.append(old[a])
        return operands.index(old[a], first)

    return tuple(replace(stage, args=tuple(map(slot, stage.args))) for stage in stages), operands


def split_all(graph: Graph) -> Graph:
    """A copy of the graph in which no product has a prologue, so that every value that can be quantized exists."""
    copy = graph.copy()
    for op in copy.order():
        if getattr(op.attrs, "prologue", None):
            split_prologue(copy, op)
    return copy
