"""Pointwise operators convert between fp32 and 16-bit floats in registers.

Inputs and outputs of networks that were trained in fp32 are fp32. At 16 bits, an operator that reads such an input, or gives such
an output, stands beside a conversion. If nothing else reads the converted value, both are one Pointwise op: a launch less, and
less traffic.

Operators beside normalizations, pools and reductions stay as they are: the launches of these may compute them too.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op
from optdnn.passes.base import Match, Miss, PassContext, RulePass
from optdnn.passes.fuse_pointwise import FuseGroup
from optdnn.passes.rules.pointwise_parts import PointwiseOfParts
from optdnn.passes.support.facts import is_pointwise, operand
from optdnn.types import BF16, FP16, FP32

HALVES = (FP16, BF16)


class Converted(FuseGroup):
    """A conversion from 16-bit floats to fp32 and the pointwise op before it, or a pointwise op and the conversions to 16-bit
    floats before it."""

    name = "converted_in_registers"

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not is_pointwise(op) or (before := _joined(graph, op)) is None:
            return None
        return FuseGroup(joins=lambda _, one: one.id in before).match(graph, op, context)


def _joined(graph: Graph, op: Op) -> set[int] | None:
    """The operators before ``op`` that may be computed with it."""
    if _converts(graph, op) == "widens":
        one = graph.op(operand(op))
        return {one.id} if is_pointwise(one) and not _beside_others(graph, one) else None
    found = {v.op for v in op.inputs if v is not None and _converts(graph, graph.op(v)) == "narrows"}
    return found if found and op.kind != "Cast" and not _beside_others(graph, op) else None


def _converts(graph: Graph, op: Op) -> str:
    """How an op converts floats: "widens" 16-bit floats to fp32, "narrows" fp32; "" for any other op."""
    if op.kind != "Cast":
        return ""
    pair = graph.type(operand(op)).dtype, op.outputs[0].type.dtype
    return (
        "widens"
        if pair[0] in HALVES and pair[1] == FP32
        else "narrows"
        if pair[0] == FP32 and pair[1] in HALVES
        else ""
    )


def _beside_others(graph: Graph, op: Op) -> bool:
    """Whether an op reads, or is read by, an operator whose launch may compute it."""
    near = [graph.op(v).kind for v in op.inputs if v is not None] + [user.kind for user in graph.users(op.value)]
    return any(kind.endswith(("Normalization", "Pool")) or kind.startswith("Reduce") for kind in near)


class FuseConversions(RulePass):
    """Runs after the assignment of precisions, which adds the conversions."""

    name = "fuse_conversions"
    rules = (PointwiseOfParts(joins=lambda graph, one: not _beside_others(graph, one)), Converted())
