"""Images become rows of tokens, and rows become images, by one transposition that layouts can remove.

Transformers with convolutions between their layers (SegFormer: Xie et al., 2021; PVT, CvT) write an image (B, C, H, W) as tokens by
a Reshape to (B, C, H * W) and a Transpose, and back in the opposite order. That form needs the image in plain order. With the
Transpose on the image's side, a channels-last image has the memory order of its tokens, and nothing moves. If the Reshape splits
the image into windows (MaxViT: Tu et al., 2022) or the channels into heads (EfficientViT: Cai et al., 2022), a second Transpose
orders these, and keeps rows of channels whole. If parts of the channels are transposed after a Split (LeViT: Graham et al., 2021),
the Transpose moves in front of the Split first. Permuted pixels are moved with all of their channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.dim import Dim
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.gates import gated_rows
from optdnn.passes.rules.softmax_means import softmax_mean
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
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.passes.support.views import transposed
from optdnn.types import Shape, normalize_axis

OF_IMAGES = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize"})
"""Kinds that write or read images in channels-last order as well."""
NORMS = frozenset({"GroupNormalization", "InstanceNormalization"})
"""Kinds that run in either order, and may be between such a kind and the Reshape."""
PARTS = frozenset({"Concat", "Split", "Slice"})
"""Kinds that join images, or take parts of them, in either order."""
_BETWEEN = 4
"""Pointwise operators, norms and parts that may be between such a kind and the Reshape."""
_INEXPRESSIBLE = Miss("no constant target can express its shape")


@pattern_rule("image_to_tokens", node("Transpose", node(RESHAPES, Var("image"), name="flat", alone=True)))
def image_to_tokens(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Reshape of an image to (B, C, positions...) and a Transpose that puts C, or its last part, last: C is moved first."""
    image, flat, perm = found["image"], found["flat"], root.attrs.perm
    before, after = shape_of(graph, image), flat.outputs[0].type.shape
    channels = _turned(graph, flat, perm)
    if before is None or after is None or channels is None:
        return None
    if perm == channels_from_last(len(after)) and read_as_image(graph, root.value):
        return Miss("its result is an image already")  # `tokens_to_image` writes this form
    last = (*(k for k in range(len(after)) if k not in channels), *channels)
    target = reshape_target((before[0], *before[2:], before[1]), tuple(after[k] for k in last))
    if target is None:
        return _INEXPRESSIBLE
    turn = TransposeAttrs(channels_to_last(len(before)))
    order = tuple(last.index(p) for p in perm)

    def build(patch: Patch) -> Value:
        return transposed(patch, reshaped(patch, patch.add("Transpose", [image], turn), target), order)

    return Match((root, flat), build)


@rule("split_tokens", {"Split"})
def split_tokens(graph: Graph, op: Op) -> Match | Miss | None:
    """If all parts of an image's channels are transposed alike, one Transpose before the Split replaces these Transposes."""
    flat = producer(graph, op.inputs[0], RESHAPES, alone=True)
    values = [Value(op.id, port) for port in range(len(op.outputs))]
    users = [graph.sole_user(v) for v in values]
    turns = [u for u in users if u is not None and u.kind == "Transpose"]
    if flat is None or not turns or _turned(graph, flat, turns[0].attrs.perm) is None:
        return None
    perm = turns[0].attrs.perm
    if len(turns) < len(values) or any(t.attrs.perm != perm for t in turns):
        return Miss("its parts are not all transposed alike")
    axis = perm.index(normalize_axis(op.attrs.axis, len(perm)))

    def build(patch: Patch) -> None:
        turned = patch.add("Transpose", [flat.value], TransposeAttrs(perm))
        attrs = replace(op.attrs, axis=axis)
        parts = patch.add_op("Split", [turned, *op.inputs[1:]], attrs, outputs=len(values), src=op.src)
        for port, turn in enumerate(turns):
            patch.replace(turn.value, Value(parts.id, port))

    return Match((op, *turns), build)


@pattern_rule("tokens_to_image", node(RESHAPES, node("Transpose", Var("tokens"), name="swap", alone=True)))
def tokens_to_image(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Transpose of tokens (B, positions..., C) that puts C before the positions, and a Reshape to an image: C is moved last."""
    tokens, perm = found["tokens"], found["swap"].attrs.perm
    before, after = found["swap"].outputs[0].type.shape, root.outputs[0].type.shape
    channels = _channels(after, before)
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
        return _INEXPRESSIBLE
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
    flats = [f for v in op.inputs if (f := producer(graph, v, RESHAPES, alone=True)) is not None and _is_flat(graph, f)]
    if not flats:
        return None
    if len(flats) < len(op.inputs):
        return Miss("not all of its operands are pixels of images that nothing else reads")
    targets = [reshape_target(*_rows_of_pixels(graph, flat)) for flat in flats]
    if None in targets:
        return _INEXPRESSIBLE

    def build(patch: Patch) -> Value:
        parts = []
        for flat, target in zip(flats, targets, strict=True):
            turn = TransposeAttrs(channels_to_last(len(graph.type(operand(flat)).dims)))
            rows = patch.add("Transpose", [operand(flat)], turn, src=flat.src)
            parts.append(reshaped(patch, rows, target or (), flat.src))
        joined = patch.add("Concat", parts, replace(op.attrs, axis=1))
        return patch.add("Transpose", [joined], TransposeAttrs((0, *range(2, len(shape)), 1)))

    return Match((op, *flats), build)


def _is_flat(graph: Graph, flat: Op) -> bool:
    """Whether a Reshape turns an image into (B, C..., H * W)."""
    image, after = operand(flat), flat.outputs[0].type.dims
    before = shape_of(graph, image) or ()
    plain = len(before) > 3 and len(after) == 3 and before[:2] == after[:2]  # C may be 1
    return (plain or _channels(before, after) == range(1, len(after) - 1)) and is_image(graph, image)


def _rows_of_pixels(graph: Graph, flat: Op) -> tuple[Shape, Shape]:
    """The shapes of a channels-last image, and of its pixels (B, H * W, C...)."""
    image, after = graph.type(operand(flat)).dims, flat.outputs[0].type.dims
    return (image[0], *image[2:], image[1]), (after[0], after[-1], *after[1:-1])


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
        return _INEXPRESSIBLE

    norm = producer(graph, image, NORMS, alone=True)

    def build(patch: Patch) -> Value:
        pixels = image if norm is None else operand(norm)
        last = patch.add("Transpose", [pixels], TransposeAttrs(channels_to_last(len(before))))
        order = (0, *(p - 1 for p in perm[2:]), len(perm) - 1)
        y = reshaped(patch, transposed(patch, reshaped(patch, last, split), order), target)
        y = patch.add("Transpose", [y], TransposeAttrs(channels_from_last(len(after))))
        return y if norm is None else patch.add(norm.kind, [y, *norm.inputs[1:]], norm.attrs)

    return Match((root, found["swap"], found["split"], *([] if norm is None else [norm])), build)


@rule("channel_attention", {"Attention"})
def channel_attention(graph: Graph, op: Op) -> Match | Miss | None:
    """Attention between channels (Restormer: Zamir et al., 2022): operands (B, heads, C / heads, H * W) become views of tokens."""
    flats = [_of_channels(graph, operand(op, slot)) for slot in range(3 if len(op.outputs) == 1 else 0)]
    users = graph.users(op.value)
    back = users[0] if len(users) == 1 and users[0].kind in RESHAPES else None
    if back is None or not flats or None in flats:
        return None
    image, before = back.outputs[0].type.shape, op.outputs[0].type.shape
    if image is None or before is None or _channels(image, before) != range(1, 3):
        return None
    if not read_as_image(graph, back.value):
        return Miss("no operator on images reads it")
    reshapes = [flat for flat in flats if flat is not None]
    targets = {f.id: reshape_target(*_rows_of_tokens(graph, f)) for f in reshapes}
    target = reshape_target((before[0], before[3], before[1], before[2]), (image[0], *image[2:], image[1]))
    if target is None or None in targets.values():
        return _INEXPRESSIBLE
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


@rule("heads_of_image", {"MatMul"})
def heads_of_image(graph: Graph, op: Op) -> Match | Miss | None:
    """A product reads an image as (B, heads, C / heads, H * W), like the keys of VITS (Kim et al., 2021): a view of its tokens."""
    flats = {k: flat for k in (0, 1) if (flat := _of_channels(graph, operand(op, k))) and flat.value == op.inputs[k]}
    flats = {k: flat for k, flat in flats.items() if 1 not in flat.outputs[0].type.dims[1:]}  # others need no Transpose
    if not flats:
        return None
    targets = {k: reshape_target(*_rows_of_tokens(graph, flat)) for k, flat in flats.items()}
    if None in targets.values():
        return _INEXPRESSIBLE

    def build(patch: Patch) -> Value:
        given = list(op.inputs)
        for k, flat in flats.items():
            turn = TransposeAttrs(channels_to_last(len(graph.type(operand(flat)).dims)))
            rows = reshaped(patch, patch.add("Transpose", [operand(flat)], turn, src=flat.src), targets[k] or ())
            given[k] = patch.add("Transpose", [rows], TransposeAttrs((0, 2, 3, 1)), src=flat.src)
        return patch.add("MatMul", given, op.attrs)

    return Match((op, *flats.values()), build)


@rule("pixels_of_image", {"MatMul"})
def pixels_of_image(graph: Graph, op: Op) -> Match | Miss | None:
    """A product reads an image as (B, C, H * W): a view of its tokens.

    The masks of queries are such products (MaskFormer: Cheng et al., 2021)."""
    flats = {k: flat for k in (0, 1) if (flat := producer(graph, op.input(k), RESHAPES)) is not None}
    flats = {k: flat for k, flat in flats.items() if len(flat.outputs[0].type.shape or ()) == 3}
    flats = {k: flat for k, flat in flats.items() if _is_flat(graph, flat) and 1 not in flat.outputs[0].type.dims[1:]}
    if not flats:
        return None
    targets = {k: reshape_target(*_rows_of_pixels(graph, flat)) for k, flat in flats.items()}
    if None in targets.values():
        return _INEXPRESSIBLE

    def build(patch: Patch) -> Value:
        given = list(op.inputs)
        for k, flat in flats.items():
            turn = TransposeAttrs(channels_to_last(len(graph.type(operand(flat)).dims)))
            rows = reshaped(
                patch, patch.add("Transpose", [operand(flat)], turn, src=flat.src), targets[k] or (), flat.src
            )
            given[k] = patch.add("Transpose", [rows], TransposeAttrs((0, 2, 1)), src=flat.src)
        return patch.add("MatMul", given, op.attrs)

    return Match((op, *(flat for flat in flats.values() if graph.sole_user(flat.value) is not None)), build)


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
    return op if _channels(shape_of(graph, image), after) == range(1, 3) and is_image(graph, image) else None


def _rows_of_tokens(graph: Graph, flat: Op) -> tuple[Shape, Shape]:
    """The shapes of a channels-last image, and of its tokens with channels in heads."""
    image, after = graph.type(operand(flat)).dims, flat.outputs[0].type.dims
    return (image[0], *image[2:], image[1]), (after[0], after[3], after[1], after[2])


def _turned(graph: Graph, flat: Op, perm: tuple[int, ...] | None) -> range | None:
    """The channel axes in the result of the Reshape ``flat`` of an image, if ``perm`` puts the last channel axis last."""
    image = operand(flat)
    channels = _channels(shape_of(graph, image), flat.outputs[0].type.shape)
    if perm is None or channels is None or perm[-1] != channels.stop - 1:
        return None
    return channels if is_image(graph, image) else None


def _channels(image: Shape | None, tokens: Shape | None) -> range | None:
    """The axes of ``tokens`` that hold the channels of an ``image`` (B, C, positions...); None for other shapes.

    The Reshape from image to tokens keeps C, or splits it into parts, between batch and positions."""
    if image is None or tokens is None or len(image) < 3:
        return None
    first = 1 if tokens[:1] == image[:1] else _end(tokens, 0, image[0])
    end = None if first is None else _end(tokens, first, image[1])
    return None if first is None or end in (None, first) else range(first, end)


def _end(shape: Shape, start: int, size: int | Dim) -> int | None:
    """The first axis after ``start`` up to which ``shape`` holds ``size`` elements."""
    held: int | Dim = 1
    for end in range(start, len(shape) + 1):
        if held == size:
            return end
        held = held * shape[end] if end < len(shape) else held
    return None


def read_as_image(graph: Graph, value: Value) -> bool:
    """Whether an operator on images reads ``value``, perhaps after a few pointwise operators."""
    return any(_reads_image(graph, user, value) for user in graph.users(value))


def _reads_image(graph: Graph, op: Op, value: Value, within: int = _BETWEEN) -> bool:
    """Whether ``op``, a user of ``value``, works on images, joins ``value`` with an image, or turns an image into tokens.

    At most ``within`` activations, parts and pointwise operators with constants (a BatchNormalization before an activation) may
    precede such an operator."""
    if op.kind in OF_IMAGES | NORMS or _turns(op):
        return True
    if op.kind in ("Add", "Concat") and any(v is not None and v != value and is_image(graph, v) for v in op.inputs):
        return True
    others = [graph.constant_value(v) for v in op.inputs if v is not None and v != value]
    scaled = op.pointwise and all(c is not None for c in others)
    if within and (scaled or op.kind in PARTS | ACTIVATIONS):
        results = [Value(op.id, port) for port in range(len(op.outputs))]
        return any(_reads_image(graph, user, y, within - 1) for y in results for user in graph.users(y))
    user = graph.sole_user(op.value) if op.kind in RESHAPES else None
    return user is not None and user.kind == "Transpose" and (user.attrs.perm or (0,))[-1] == 1


@rule("activate_image", RESHAPES)
def activate_image(graph: Graph, op: Op) -> Match | Miss | None:
    """An activation of a convolution's tokens moves to the image, where the convolution's epilogue can absorb it."""
    user = graph.sole_user(op.value)
    turned = producer(graph, op.inputs[0], {"Transpose"}, alone=True)
    if turned is None or user is None or user.kind not in ACTIVATIONS or user.inputs[0] != op.value:
        return None
    if producer(graph, turned.inputs[0], {"Conv"}, alone=True) is None:
        return None
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


def _turns(op: Op) -> bool:
    """Whether a Transpose moves channels from the last axis to the second, or back."""
    if op.kind != "Transpose" or op.attrs.perm is None or len(op.attrs.perm) < 4:
        return False
    rank = len(op.attrs.perm)
    return op.attrs.perm in (channels_from_last(rank), channels_to_last(rank))


def is_image(graph: Graph, value: Value, within: int = _BETWEEN - 1) -> bool:
    """Whether an operator on images computes ``value``, with at most ``within`` pointwise operators and norms after it."""
    op = graph.op(value)
    if op.kind in OF_IMAGES or _turns(op):
        return True
    if within == 0 or op.kind in STRUCTURAL or op.input(0) is None:
        return False
    dims, sources = op.outputs[0].type.dims, [operand(op)]
    if op.definition.traits.pointwise:
        sources += [v for v in op.inputs[1:] if v is not None and graph.type(v).dims == dims]
    elif op.kind not in NORMS | PARTS:
        return False
    return any(is_image(graph, v, within - 1) for v in sources)


class ImageTokens(RulePass):
    name = "image_tokens"
    rules = (
        split_tokens,
        image_to_tokens,
        tokens_to_image,
        joined_pixels,
        norm_of_view,
        moved_pixels,
        activate_image,
        turned_units,
        channel_attention,
        heads_of_image,
        pixels_of_image,
        gated_rows,
        softmax_mean,
    )
