"""Products and attention that read an image as (B, heads, C / heads, H * W) or (B, C, H * W) read views of its tokens."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import (
    RESHAPES,
    channels_from_last,
    channels_to_last,
    operand,
    producer,
    reshape_target,
    reshaped,
    shape_of,
)
from optdnn.passes.support.image_views import (
    INEXPRESSIBLE,
    channel_axes,
    is_flat,
    is_image,
    read_as_image,
    rows_of_pixels,
)
from optdnn.types import normalize_axis


@rule("channel_attention", {"Attention"})
def channel_attention(graph: Graph, op: Op) -> Match | Miss | None:
    """Attention between channels (Restormer: Zamir et al., 2022): operands (B, heads, C / heads, H * W) become views of tokens."""
    flats = [_of_channels(graph, operand(op, slot)) for slot in range(3 if len(op.outputs) == 1 else 0)]
    users = graph.users(op.value)
    back = users[0] if len(users) == 1 and users[0].kind in RESHAPES else None
    if back is None or not flats or None in flats:
        return None
    image, before = back.outputs[0].type.shape, op.outputs[0].type.shape
    if image is None or before is None or channel_axes(image, before) != range(1, 3):
        return None
    if not read_as_image(graph, back.value):
        return Miss("no operator on images reads it")
    reshapes = [flat for flat in flats if flat is not None]
    targets = {f.id: reshape_target(*rows_of_pixels(graph, f)) for f in reshapes}
    target = reshape_target((before[0], before[3], before[1], before[2]), (image[0], *image[2:], image[1]))
    if target is None or None in targets.values():
        return INEXPRESSIBLE
    turn, turned = TransposeAttrs(channels_to_last(len(image))), TransposeAttrs(channels_from_last(len(image)))

    def build(patch: Patch) -> None:
        given = list(op.inputs)
        for slot, flat in enumerate(reshapes):
            rows = reshaped(patch, patch.add("Transpose", [operand(flat)], turn, src=flat.src), targets[flat.id] or ())
            y = patch.add("Transpose", [rows], TransposeAttrs((0, 2, 3, 1)), src=flat.src)
            norm = graph.op(operand(op, slot))
            given[slot] = y if norm.id == flat.id else patch.add(norm.kind, [y], norm.attrs, src=norm.src)
        tokens = patch.add("Transpose", [patch.add(op.kind, given, op.attrs)], TransposeAttrs((0, 3, 1, 2)))
        patch.replace(back.value, patch.add("Transpose", [reshaped(patch, tokens, target)], turned))

    norms = (graph.op(operand(op, slot)) for slot in range(3))
    return Match((op, back, *{o.id: o for o in (*norms, *reshapes)}.values()), build)


@rule("pixels_of_image", {"MatMul"})
def pixels_of_image(graph: Graph, op: Op) -> Match | Miss | None:
    """A product reads an image as (B, C, H * W), or as (B, heads, C / heads, H * W): a view of its tokens.

    The masks of queries are such products (MaskFormer: Cheng et al., 2021), and the scores of VITS (Kim et al., 2021)."""
    flats = {k: flat for k in (0, 1) if (flat := _flat(graph, op.input(k))) is not None}
    if not flats:
        return None
    targets = {k: reshape_target(*rows_of_pixels(graph, flat)) for k, flat in flats.items()}
    if None in targets.values():
        return INEXPRESSIBLE

    def build(patch: Patch) -> Value:
        given = list(op.inputs)
        for k, flat in flats.items():
            turn = TransposeAttrs(channels_to_last(len(graph.type(operand(flat)).dims)))
            turned = patch.add("Transpose", [operand(flat)], turn, src=flat.src)
            rows = reshaped(patch, turned, targets[k] or (), flat.src)
            back = TransposeAttrs(channels_to_last(len(patch.type(rows).dims)))
            given[k] = patch.add("Transpose", [rows], back, src=flat.src)
        return patch.add("MatMul", given, op.attrs)

    return Match((op, *(flat for flat in flats.values() if graph.sole_user(flat.value) is not None)), build)


def _flat(graph: Graph, value: Value | None) -> Op | None:
    """The Reshape of an image to (B, C, H * W), or one to (B, heads, C / heads, H * W) that nothing else reads; else None."""
    flat = producer(graph, value, RESHAPES)
    dims = () if flat is None else flat.outputs[0].type.shape or ()
    if flat is None or 1 in dims[1:] or len(dims) not in (3, 4):  # others need no Transpose
        return None
    return flat if is_flat(graph, flat) and (len(dims) == 3 or graph.sole_user(flat.value) is not None) else None


def _of_channels(graph: Graph, value: Value) -> Op | None:
    """The Reshape of an image to (B, heads, C / heads, H * W), directly or before a norm of its channels; else None."""
    op = graph.op(value)
    if (
        op.kind == "LpNormalization"
        and normalize_axis(op.attrs.axis, 4) == 3
        and graph.sole_user(operand(op)) is not None
    ):
        op = graph.op(operand(op))
    after = op.outputs[0].type.shape
    if op.kind not in RESHAPES or graph.sole_user(op.value) is None or after is None or len(after) != 4:
        return None
    image = operand(op)
    return op if channel_axes(shape_of(graph, image), after) == range(1, 3) and is_image(graph, image) else None
