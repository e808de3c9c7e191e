"""Takes the prologue out of a product, where it is in the way of integers: floats in front would have to be rounded inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Stage
from optdnn.ops.fused import PointwiseAttrs


def split_prologue(graph: Graph, op: Op) -> None:
    """Let a Pointwise of its own do what the prologue of ``op`` does. Its result is named as that of ``op``, with "/prologue"."""
    attrs = op.attrs
    arity = op.definition.arity or 0
    x = op.inputs[0]
    stages, operands = _moved(attrs.prologue, op.inputs, [x])
    name = f"{op.outputs[0].name}/prologue"
    made = graph.add("Pointwise", operands, PointwiseAttrs(epilogue=stages), names=[name], src=op.src)
    own = [made.value, *op.inputs[1:arity]]
    own += [None] * (arity - len(own))
    epilogue, inputs = _moved(attrs.epilogue, op.inputs, own)
    while inputs and inputs[-1] is None:
        inputs.pop()
    graph.set_op(replace(op, attrs=replace(attrs, prologue=(), epilogue=epilogue), inputs=tuple(inputs)))


def _moved(
    stages: Sequence[Stage], old: Sequence[Value | None], operands: list[Value | None]
) -> tuple[tuple[Stage, ...], list[Value | None]]:
    """Stages whose operands are found in ``operands``, to which those are added that stages read."""
    first, made = len(operands), []
    for stage in stages:
        args: list[int | None] = []
        for a in stage.args:
            if a is not None and a >= 0:
                if old[a] not in operands[first:]:
                    operands.append(old[a])
                a = operands.index(old[a], first)
            args.append(a)
        made.append(replace(stage, args=tuple(args)))
    return tuple(made), operands


def split_all(graph: Graph) -> Graph:
    """A copy in which no product has a prologue, so that every value that integers may be made of exists."""
    copy = graph.copy()
    for op in copy.order():
        if getattr(op.attrs, "prologue", None):
            split_prologue(copy, op)
    return copy
