"""Attention whose heads are part of the batch gets its heads back: its operands are then views of the projection, without copies.

SAM and ViTDet reshape queries, keys and values to (windows * heads, positions, features), and split the result again. So do the
attentions of vit-pytorch whose projections are convolutions.
"""

from __future__ import annotations

import math

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer

_DEPTH = 6
"""Most views between a projection's transposed result and an attention."""


@rule("merged_heads", {"Attention"})
def merged_heads(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(attention(q, k, v), (…, H, …))`` of batch ``B * H`` and one head becomes an attention with batch B and H heads.

    The axes in front of H are the batch."""
    views = [op]
    while (view := graph.sole_user(views[-1].value)) is not None and view.kind in RESHAPES:
        views.append(view)
    view = views[-1]
    if len(views) == 1 or len(op.outputs) > 1 or any(v is not None for v in op.inputs[4:]):
        return None
    types = [graph.type(v) for v in op.inputs if v is not None]
    if not all(t.is_static for t in (*types, view.outputs[0].type)):
        return None
    items, one = op.outputs[0].type.static_shape[:2]
    after = view.outputs[0].type.static_shape
    heads = next((n for i, n in enumerate(after[:-1]) if i and math.prod(after[: i + 1]) == items), 1)
    if one != 1 or heads == 1:
        return None
    if any(t.static_shape[:2] != (items, 1) for t in types):
        return Miss("its mask or its keys are shared by several heads")
    lead = items // heads, heads
    turned = {v: _image(graph, v, lead) for v in op.inputs[:3] if v is not None}
    if not all(image is not None or _splits(graph, v, lead) for v, image in turned.items()):
        return None

    def build(patch: Patch) -> Value:
        inputs: list[Value | None] = []
        for v in op.inputs:
            image = None if v is None else turned.get(v)
            if v is None or image is None:
                inputs.append(None if v is None else in_shape(patch, v, (*lead, *graph.type(v).dims[2:])))
                continue
            _, _, tokens, features = graph.type(v).dims
            split = in_shape(patch, image, (*lead, features, tokens))
            inputs.append(patch.add("Transpose", [split], TransposeAttrs((0, 1, 3, 2))))
        return in_shape(patch, patch.add("Attention", inputs, op.attrs), after)

    return Match(tuple(views), build, view.value)


def _image(graph: Graph, value: Value, lead: tuple[int, int]) -> Value | None:
    """The image (B, H * features, …) whose positions are the rows of an operand; None if the operand is computed differently."""
    turn = producer(graph, value, {"Transpose"})
    split = None if turn is None or turn.attrs.perm != (0, 2, 3, 1) else producer(graph, operand(turn), RESHAPES)
    if split is None:
        return None
    dims, features = graph.type(operand(split)).dims, split.outputs[0].type.dims[1]
    return operand(split) if dims[:2] == (lead[0], lead[1] * features) else None


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


_HEADS_LAST = TransposeAttrs((0, 2, 1, 3, 4))
"""Exchanges the heads and the parts; also back."""


@rule("heads_before_parts", {"Attention"})
def heads_before_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """Attention within the parts of each image, with heads before the parts: ``(images, heads, parts, tokens, features)``.

    It was fused as attention of ``images * heads`` items, with a head for each part. In the projections, the parts are next to the
    images. So ``images * parts`` items with the true heads are views of them (NesT: Zhang et al., 2022)."""
    if len(op.outputs) > 1 or len(op.inputs) < 3 or not all(v is None for v in op.inputs[3:]):
        return None
    found = [_heads_and_parts(graph, v) for v in op.inputs[:3]]
    first = found[0]
    if first is None or any(other is None or other[1] != first[1] for other in found):
        return None
    images, heads, parts = first[1]

    def build(patch: Patch) -> Value:
        inputs = []
        for v, source in zip(op.inputs[:3], (f[0] for f in found if f is not None), strict=True):
            _, _, tokens, features = graph.type(v).dims  # type: ignore[arg-type]
            apart = in_shape(patch, source, (images, heads, parts, tokens, features))
            turned = patch.add("Transpose", [apart], _HEADS_LAST)
            inputs.append(in_shape(patch, turned, (images * parts, heads, tokens, features)))
        _, _, tokens, features = op.outputs[0].type.dims
        y = in_shape(patch, patch.add("Attention", inputs, op.attrs), (images, parts, heads, tokens, features))
        return in_shape(patch, patch.add("Transpose", [y], _HEADS_LAST), op.outputs[0].type.dims)

    return Match((op,), build)


def _heads_and_parts(graph: Graph, value: Value | None) -> tuple[Value, tuple[int, int, int]] | None:
    """The operand before a Reshape joined images and heads, and the numbers of images, heads and parts; None for other operands.

    A Transpose put the heads between images and parts, which were neighbors before it."""
    join = producer(graph, value, RESHAPES)
    if join is None or not join.outputs[0].type.is_static:
        return None
    source = operand(join)
    turn = graph.op(source)
    if turn.kind in ("Split", "Slice"):
        turn = graph.op(operand(turn))
    if turn.kind != "Transpose" or not turn.attrs.perm or not graph.type(source).is_static:
        return None
    lead, dims = join.outputs[0].type.static_shape[:2], graph.type(source).static_shape
    if len(join.outputs[0].type.dims) != 4 or len(turn.attrs.perm) != len(dims) or _is_turned(graph, operand(turn)):
        return None
    axes = [(size, axis) for size, axis in zip(dims, turn.attrs.perm, strict=True) if size > 1][:-2]
    (images, first), (heads, _), (parts, last) = (
        axes if len(axes) == 3 else (*axes, (1, -1)) if len(axes) == 2 else [(1, 0)] * 3
    )
    if min(images, heads) == 1 or lead != (images * heads, parts) or (parts > 1 and last != first + 1):
        return None
    return source, (images, heads, parts)


def _is_turned(graph: Graph, value: Value) -> bool:
    """Whether a value is a view of a Transpose's result, or of a part of one."""
    for _ in range(_DEPTH):
        op = graph.op(value)
        if op.kind not in RESHAPES:
            return op.kind in ("Slice", "Split", "Transpose")
        value = operand(op)
    return True
