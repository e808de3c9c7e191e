"""Attention whose heads are part of the batch gets its heads back: its operands are then views of the projection, without copies.

SAM and ViTDet reshape queries, keys and values to (windows * heads, positions, features), and split the result again. So do the
attentions of vit-pytorch whose projections are convolutions. PyTorch's MultiheadAttention, with positions in front of the batch,
joins batch and heads in the projection's result, and exchanges them with the positions.
"""

from __future__ import annotations

import math

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer
from optdnn.passes.support.paths import path_from, reader_after, value_before

_DEPTH = 6
"""Most views between a projection's transposed result and an attention."""


@rule("merged_heads", {"Attention"})
def merged_heads(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(attention(q, k, v), (…, H, …))`` of batch ``B * H`` and one head becomes an attention with batch B and H heads.

    The axes in front of H are the batch."""
    views = [op, *path_from(graph, op.value, RESHAPES)]
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


@rule("heads_of_images", {"Attention"})
def heads_of_images(graph: Graph, op: Op) -> Match | None:
    """Attention of ``B * H`` items, views of images (B, H * features, …) like its result, gets batch B and H heads (BoTNet)."""
    turn = reader_after(graph, op.value, RESHAPES)
    join = None if turn is None or turn.kind != "Transpose" else graph.sole_user(turn.value)
    if turn is None or join is None or join.kind not in RESHAPES or any(v is not None for v in op.inputs[4:]):
        return None
    types = [graph.type(v) for v in (*op.inputs[:4], operand(turn), join.value) if v is not None]
    if len(op.outputs) > 1 or not all(t.is_static for t in types):
        return None
    items, one, tokens, features = op.outputs[0].type.static_shape
    after = join.outputs[0].type.static_shape
    heads = after[1] // features if len(after) > 2 else 0
    turned = _order(graph.type(operand(turn)).static_shape, turn.attrs.perm) == ((items, tokens, features), (0, 2, 1))
    if one != 1 or heads < 2 or after[:2] != (items // heads, heads * features) or not turned:
        return None
    lead = after[0], heads
    images = [_image(graph, v, lead) for v in op.inputs[:3] if v is not None]
    mask = op.input(3)
    dims = () if mask is None else graph.type(mask).static_shape
    if None in images or (dims[:2] != (items, 1) and math.prod(dims[:-2]) != 1):
        return None

    def build(patch: Patch) -> Value:
        inputs: list[Value | None] = []
        for i, image in enumerate(images):
            assert image is not None
            _, _, positions, size = graph.type(operand(op, i)).dims
            split = in_shape(patch, image, (*lead, size, positions))
            inputs.append(patch.add("Transpose", [split], TransposeAttrs((0, 1, 3, 2))))
        if mask is not None:
            own = dims[:2] == (items, 1)
            inputs.append(in_shape(patch, mask, (*lead, *dims[2:])) if own else mask)
        y = patch.add("Attention", inputs, op.attrs)
        return in_shape(patch, patch.add("Transpose", [y], TransposeAttrs((0, 1, 3, 2))), after)

    return Match((op, turn, join), build, join.value)


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


@rule("heads_behind_positions", {"Attention"})
def heads_behind_positions(graph: Graph, op: Op) -> Match | Miss | None:
    """Attention of ``B * H`` items, views of (positions, B, H * features) like its result, gets batch B and H heads."""
    turn = reader_after(graph, op.value, RESHAPES)
    if turn is None or turn.kind != "Transpose" or len(op.outputs) > 1 or any(v is not None for v in op.inputs[4:]):
        return None
    types = [graph.type(v) for v in (*op.inputs[:4], turn.value) if v is not None]
    if not all(t.is_static for t in types):
        return None
    items, one, tokens, features = op.outputs[0].type.static_shape
    before, after = graph.type(operand(turn)).static_shape, turn.outputs[0].type.static_shape
    if one != 1 or _order(before, turn.attrs.perm) != ((items, tokens, features), (1, 0, 2)):
        return None
    found = [_rows_of_items(graph, v, items) for v in op.inputs[:3]]
    rows = [f for f in found if f is not None]
    if len(rows) < len(found) or len({heads for _, heads in rows}) > 1:
        return None
    heads, mask = rows[0][1], op.input(3)
    if mask is not None and graph.type(mask).static_shape[:2] not in ((items, 1), (1, 1)):
        return Miss("its mask is shared by several heads")
    lead = items // heads, heads

    def build(patch: Patch) -> Value:
        inputs: list[Value | None] = []
        for i, (source, _) in enumerate(rows):
            _, _, positions, size = graph.type(operand(op, i)).dims
            split = in_shape(patch, source, (positions, *lead, size))
            inputs.append(patch.add("Transpose", [split], TransposeAttrs((1, 2, 0, 3))))
        if mask is not None:
            dims = graph.type(mask).dims
            inputs.append(mask if dims[0] == 1 else in_shape(patch, mask, (*lead, *dims[2:])))
        y = patch.add("Attention", inputs, op.attrs)
        return in_shape(patch, patch.add("Transpose", [y], TransposeAttrs((2, 0, 1, 3))), after)

    return Match((op, turn), build, turn.value)


@rule("split_items", {"Attention"})
def split_items(graph: Graph, op: Op) -> Match | None:
    """Operands whose ``B * H`` items were exchanged with the positions before they were split: split first, then permuted.

    PyTorch's MultiheadAttention, exported with ONNX's Attention."""
    rows = {v: x for v in op.inputs[:3] if v is not None and (x := _exchanged(graph, v)) is not None}
    if not rows:
        return None

    def build(patch: Patch) -> Value:
        inputs: list[Value | None] = list(op.inputs)
        for i, v in enumerate(op.inputs[:3]):
            if v in rows:
                batch, heads, positions, features = graph.type(v).dims
                split = in_shape(patch, rows[v], (positions, batch, heads, features))
                inputs[i] = patch.add("Transpose", [split], TransposeAttrs((1, 2, 0, 3)))
        made = patch.add_op("Attention", inputs, op.attrs, outputs=len(op.outputs), names=[o.name for o in op.outputs])
        for i, value in enumerate(op.values[1:], 1):
            patch.replace(value, Value(made.id, i))
        return made.value

    return Match((op,), build)


def _exchanged(graph: Graph, value: Value) -> Value | None:
    """The value (positions, B * H, features) that a Transpose and Reshapes turn into an operand (B, H, positions, features)."""
    turn = producer(graph, value_before(graph, value, RESHAPES), {"Transpose"})
    if turn is None or not graph.type(value).is_static or graph.type(value).rank != 4:
        return None
    batch, heads, positions, features = graph.type(value).static_shape
    if 1 in (batch, heads):
        return None
    exchanged = _order(graph.type(operand(turn)).static_shape, turn.attrs.perm)
    return operand(turn) if exchanged == ((positions, batch * heads, features), (1, 0, 2)) else None


def _rows_of_items(graph: Graph, value: Value | None, items: int) -> tuple[Value, int] | None:
    """The value (positions, …, B, H * features) whose parts are the ``items = B * H`` of an operand, and H; None for others."""
    turn = None if value is None else producer(graph, value_before(graph, value, RESHAPES), {"Transpose"})
    join = None if turn is None else producer(graph, operand(turn), RESHAPES)
    if turn is None or join is None:
        return None
    kept, perm = _order(join.outputs[0].type.static_shape, turn.attrs.perm)
    source = graph.type(operand(join))
    if len(kept) != 3 or kept[1] != items or perm != (1, 0, 2) or not source.is_static:
        return None
    sizes = (math.prod(source.static_shape[i:]) // kept[2] for i in reversed(range(len(source.static_shape))))
    heads = next((n for n in sizes if n > 1), 1)
    return (operand(join), heads) if heads < items and items % heads == 0 else None


def _order(dims: tuple[int, ...], perm: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that are longer than 1, and their permutation."""
    order = [a for a in perm or tuple(reversed(range(len(dims)))) if dims[a] > 1]
    return tuple(n for n in dims if n > 1), tuple(sorted(order).index(a) for a in order)


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
