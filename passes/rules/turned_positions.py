"""Norms of images whose axes are exchanged: positions keep their order in memory, for which the norms' kernels are made."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import is_pointwise, operand, producer


@rule("turned_positions", {"GroupNormalization", "InstanceNormalization"})
def turned_positions(graph: Graph, op: Op) -> Match | Miss | None:
    """``norm(transpose(x))`` becomes ``transpose(norm(x'))``, where only the channels of ``x'`` are moved.

    Networks of two paths (DPRNN, SepFormer) exchange the axes of an image between layers along one axis and along the other. The
    norm after them does not depend on the order of positions."""
    turn = producer(graph, operand(op), {"Transpose"})
    perm = None if turn is None else turn.attrs.perm
    if turn is None or perm is None or perm[0] != 0 or len(op.outputs) > 1:
        return None
    positions = sorted(perm[2:])
    if list(perm[2:]) == positions:
        return None
    if not all(is_pointwise(user) or user.kind == "Transpose" for user in graph.users(op.value)):
        return Miss("its result is read in this order of axes")

    def build(patch: Patch) -> Value:
        x = operand(turn)
        order = (0, perm[1], *positions)
        if order != tuple(range(len(order))):
            x = patch.add("Transpose", [x], TransposeAttrs(order))
        back = (0, 1, *(2 + positions.index(axis) for axis in perm[2:]))
        return patch.add("Transpose", [patch.add(op.kind, [x, *op.inputs[1:]], op.attrs)], TransposeAttrs(back))

    return Match((op, turn) if len(graph.users(turn.value)) == 1 else (op,), build)
