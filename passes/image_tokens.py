"""Images become rows of tokens, and rows become images, by one transposition that layouts can remove.

Transformers with convolutions between their layers (SegFormer: Xie et al., 2021; PVT, CvT) write an image (B, C, H, W) as tokens by
a Reshape to (B, C, H * W) and a Transpose, and back in the opposite order. That form needs the image in plain order. With the
Transpose on the image's side, a channels-last image has the memory order of its tokens, and nothing moves. If the Reshape splits
the image into windows (MaxViT: Tu et al., 2022) or the channels into heads (EfficientViT: Cai et al., 2022), a second Transpose
orders these, and keeps rows of channels whole. Permuted pixels are moved with
all of their channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.rules.gates import gated_rows
from optdnn.passes.rules.image_products import channel_attention, pixels_of_image
from optdnn.passes.rules.plain_siblings import plain_sibling
from optdnn.passes.rules.softmax_means import softmax_mean
from optdnn.passes.rules.video_norms import video_norm
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
    NORMS,
    channel_axes,
    is_flat,
    is_image,
    read_as_image,
    rows_of_pixels,
)
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis


@pattern_rule("image_to_tokens", node("Transpose", node(RESHAPES, Var("image"), name="flat", alone=True)))
def image_to_tokens(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Reshape of an image to (B, C, positions...) and a Transpose that puts C, or its last part, last: C is moved first."""
    image, flat, perm = found["image"], found["flat"], root.attrs.perm
    before, after = shape_of(graph, image), flat.outputs[0].type.shape
    channels = channel_axes(before, after)
    if before is None or after is None or channels is None or not is_image(graph, image):
        return None
    if perm is None or perm[-1] != channels.stop - 1:
        return None
    if perm == channels_from_last(len(after)) and read_as_image(graph, root.value):
        return Miss("its result is an image already")  # `tokens_to_image` writes this form
    last = (*(k for k in range(len(after)) if k not in channels), *channels)
    target = reshape_target((before[0], *before[2:], before[1]), tuple(after[k] for k in last))
    if target is None:
        return INEXPRESSIBLE
    turn = TransposeAttrs(channels_to_last(len(before)))
    order = tuple(last.index(p) for p in perm)

    def build(patch: Patch) -> Value:
        return transposed(patch, reshaped(patch, patch.add("Transpose", [image], turn), target), order)

    return Match((root, flat), build)


@pattern_rule("tokens_to_image", node(RESHAPES, node("Transpose", Var("tokens"), name="swap", alone=True)))
def tokens_to_image(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Transpose of tokens (B, positions..., C) that puts C before the positions, and a Reshape to an image: C is moved last."""
    tokens, perm = found["tokens"], found["swap"].attrs.perm
    before, after = found["swap"].outputs[0].type.shape, root.outputs[0].type.shape
    channels = channel_axes(after, before)
    if before is None or after is None or channels is None:
        return None
    if perm is None or perm[channels.stop - 1] != len(perm) - 1:
        return None
    if perm == channels_to_last(len(perm)) and is_image(graph, tokens):
        return Miss("its rows are an image already")  # `channel_attention` writes this form
    if not read_as_image(graph, root.value):
        return Miss("no operator on images reads it")
    last = (*(k for k in range(len(before)) if k not in channels), *channels)
    target = reshape_target(tuple(before[k] for k in last), (after[0], *after[2:], after[1]))
    if target is None:
        return INEXPRESSIBLE
    turn = TransposeAttrs(channels_from_last(len(after)))
    order = tuple(perm[k] for k in last)

    def build(patch: Patch) -> Value:
        return patch.add("Transpose", [reshaped(patch, transposed(patch, tokens, order), target)], turn)

    return Match((root, found["swap"]), build)


@rule("joined_pixels", {"Concat"})
def joined_pixels(graph: Graph, op: Op) -> Match | Miss | None:
    """The pixels of several images side by side, (B, C, H * W) each (YOLO's levels): C is moved last before the Concat."""
    shape = op.outputs[0].type.shape
    if shape is None or len(op.inputs) < 2 or normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
        return None
    flats = [f for v in op.inputs if (f := producer(graph, v, RESHAPES, alone=True)) is not None and is_flat(graph, f)]
    if not flats:
        return None
    if len(flats) < len(op.inputs):
        return Miss("not all of its operands are pixels of images that nothing else reads")
    targets = [reshape_target(*rows_of_pixels(graph, flat)) for flat in flats]
    if None in targets:
        return INEXPRESSIBLE

    def build(patch: Patch) -> Value:
        parts = []
        for flat, target in zip(flats, targets, strict=True):
            turn = TransposeAttrs(channels_to_last(len(graph.type(operand(flat)).dims)))
            rows = patch.add("Transpose", [operand(flat)], turn, src=flat.src)
            parts.append(reshaped(patch, rows, target or (), flat.src))
        joined = patch.add("Concat", parts, replace(op.attrs, axis=1))
        return patch.add("Transpose", [joined], TransposeAttrs((0, *range(2, len(shape)), 1)))

    return Match((op, *flats), build)


@rule("norm_of_view", RESHAPES)
def norm_of_view(graph: Graph, op: Op) -> Match | Miss | None:
    """A norm of channels moves after a Reshape of the positions, if another reader of its operand has the same Reshape."""
    norm = producer(graph, op.inputs[0], NORMS, alone=True)
    if norm is None or shape_of(graph, norm.value) is None or shape_of(graph, op.value) is None:
        return None
    dims, before = op.outputs[0].type.dims, norm.outputs[0].type.dims
    users = graph.users(operand(norm))
    twin = next((u for u in users if u.kind in RESHAPES and u.outputs[0].type.shape == dims), None)
    if twin is None or len(dims) < 3 or dims[:2] != before[:2]:
        return None

    def build(patch: Patch) -> Value:
        return patch.add(norm.kind, [twin.value, *norm.inputs[1:]], norm.attrs, src=norm.src | op.src)

    return Match((op, norm), build)


@pattern_rule(
    "moved_pixels",
    node(RESHAPES, node("Transpose", node(RESHAPES, Var("image"), name="split", alone=True), name="swap", alone=True)),
)
def moved_pixels(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A permutation of pixels, such as into patches and back (MobileViTv2: Mehta and Rastegari, 2022): C is moved last.

    A norm of channels before the permutation moves after it, next to the convolution that reads the pixels.
    """
    image, perm = found["image"], found["swap"].attrs.perm
    before, after = shape_of(graph, image), root.outputs[0].type.shape
    middle = found["split"].outputs[0].type.shape
    if before is None or middle is None or after is None or perm is None or perm[:2] != (0, 1):
        return None
    if min(len(before), len(middle), len(after)) < 4 or not before[:2] == middle[:2] == after[:2]:
        return None
    if not (is_image(graph, image) and read_as_image(graph, root.value)):
        return Miss("no operator on images computes it or reads it")
    rows = (before[0], *before[2:], before[1])
    split = reshape_target(rows, (middle[0], *middle[2:], middle[1]))
    moved = tuple(middle[p] for p in perm)
    target = reshape_target((moved[0], *moved[2:], moved[1]), (after[0], *after[2:], after[1]))
    if split is None or target is None:
        return INEXPRESSIBLE

    norm = producer(graph, image, NORMS, alone=True)

    def build(patch: Patch) -> Value:
        pixels = image if norm is None else operand(norm)
        last = patch.add("Transpose", [pixels], TransposeAttrs(channels_to_last(len(before))))
        order = (0, *(p - 1 for p in perm[2:]), len(perm) - 1)
        y = reshaped(patch, transposed(patch, reshaped(patch, last, split), order), target)
        y = patch.add("Transpose", [y], TransposeAttrs(channels_from_last(len(after))))
        return y if norm is None else patch.add(norm.kind, [y, *norm.inputs[1:]], norm.attrs)

    return Match((root, found["swap"], found["split"], *([] if norm is None else [norm])), build)


@rule("activate_image", RESHAPES)
def activate_image(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """An activation of a convolution's tokens moves to the image, where the convolution's epilogue can absorb it."""
    user = graph.sole_user(op.value)
    turned = producer(graph, op.inputs[0], {"Transpose"}, alone=True)
    if turned is None or user is None or user.kind not in ACTIVATIONS or user.inputs[0] != op.value:
        return None
    conv = producer(graph, turned.inputs[0], {"Conv"}, alone=True)
    if conv is None:
        return None
    if (sibling := plain_sibling(graph, conv, user, context)) is not None:
        return Miss(f"without the activation, one launch computes {conv.name} and {sibling.name}")
    constants = [graph.constant_value(v) for v in user.inputs[1:] if v is not None]
    if any(c is None or c.size > 1 for c in constants):
        return Miss("the activation reads more than the tokens and scalars")

    def build(patch: Patch) -> Value:
        y = patch.add(user.kind, [op.inputs[0], *user.inputs[1:]], user.attrs, src=user.src)
        return patch.add(op.kind, [y, *op.inputs[1:]], op.attrs, src=op.src)

    return Match((user, op), build)


@rule("turned_units", {"Transpose"})
def turned_units(graph: Graph, op: Op) -> Match | None:
    """A Transpose that moves axes of one element, too, moves only the channels of an image, and a Reshape does the rest.

    Streaming speech networks keep a line as (batch, 1, time, channels), or as (time, batch of 1, channels) for an LSTM."""
    x, perm = operand(op), op.attrs.perm
    before, after = shape_of(graph, x), op.outputs[0].type.shape
    if perm is None or before is None or after is None or len(perm) < 3 or 1 not in before:
        return None
    last, first = channels_to_last(len(perm)), channels_from_last(len(perm))

    def moved(order: Sequence[int]) -> list[int]:
        return [k for k in order if before[k] != 1]

    if moved(perm) in ([], sorted(moved(perm))):
        return None
    rows = (perm[0], *perm[2:], perm[1])
    departs = perm != last and moved(perm) == moved(last) and is_image(graph, x)
    if departs:
        target = reshape_target(tuple(before[k] for k in last), after)
    elif perm != first and moved(rows) == sorted(moved(rows)) and read_as_image(graph, op.value):
        target = reshape_target(before, tuple(before[k] for k in rows))
    else:
        return None
    if target is None:
        return None
    sizes: tuple[int, ...] = target

    def build(patch: Patch) -> Value:
        if departs:
            return reshaped(patch, transposed(patch, x, last), sizes)
        return transposed(patch, reshaped(patch, x, sizes), first)

    return Match((op,), build)


class ImageTokens(RulePass):
    name = "image_tokens"
    rules = (
        image_to_tokens,
        tokens_to_image,
        joined_pixels,
        norm_of_view,
        video_norm,
        moved_pixels,
        activate_image,
        turned_units,
        channel_attention,
        pixels_of_image,
        gated_rows,
        softmax_mean,
    )
