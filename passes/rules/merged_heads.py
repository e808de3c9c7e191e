"""Attention whose heads are part of the batch gets its heads back: its operands are then views of the projection, without copies.

SAM and ViTDet reshape queries, keys and values to (windows * heads, positions, features), and split the result again.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer

_DEPTH = 6
"""Most views between a projection's transposed result and an attention."""


@rule("merged_heads", {"Attention"})
def merged_heads(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(attention(q, k, v), (B, H, …))`` of batch ``B * H`` and one head becomes an attention with batch B and H heads."""
    views = [op]
    while (view := graph.sole_user(views[-1].value)) is not None and view.kind in RESHAPES:
        views.append(view)
    view = views[-1]
    if len(views) == 1 or len(op.outputs) > 1 or any(v is not None for v in op.inputs[4:]):
        return None
    types = [graph.type(v) for v in op.inputs if v is not None]
    if not all(t.is_static for t in (*types, view.outputs[0].type)):
        return None
    items, heads = op.outputs[0].type.static_shape[:2]
    after = view.outputs[0].type.static_shape
    if heads != 1 or len(after) < 3 or after[0] * after[1] != items or after[1] == 1:
        return None
    if any(t.static_shape[:2] != (items, 1) for t in types):
        return Miss("its mask or its keys are shared by several heads")
    if not all(_splits(graph, operand(op, i), after[:2]) for i in range(3)):
        return None

    def build(patch: Patch) -> Value:
        inputs = [None if v is None else in_shape(patch, v, (*after[:2], *graph.type(v).dims[2:])) for v in op.inputs]
        return in_shape(patch, patch.add("Attention", inputs, op.attrs), after)

    return Match(tuple(views), build, view.value)


def _splits(graph: Graph, value: Value, lead: tuple[int, ...]) -> bool:
    """Whether a Reshape of a Transpose joined axes of these sizes into the batch, which is otherwise only moved by views."""
    for _ in range(_DEPTH):
        op = graph.op(value)
        before = producer(graph, operand(op), {"Transpose"}) if op.kind in RESHAPES else None
        if before is not None:
            dims = before.outputs[0].type.dims
            return any(dims[i : i + 2] == lead for i in range(len(dims) - 1))
        if op.kind not in (*RESHAPES, "Split", "Gather", "Slice"):
            return False
        value = operand(op)
    return False
