"""Transpose, Reshape, Transpose become one Transpose between two Reshapes.

MobileViT (Mehta and Rastegari, 2022) cuts an image into patches in two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.heads_as_channels import heads_as_channels
from optdnn.passes.rules.ordered_channels import ordered_channels
from optdnn.passes.rules.widths import other_axis
from optdnn.passes.support.facts import (
    RESHAPES,
    VIEWS,
    channels_from_last,
    channels_to_last,
    integers,
    ints,
    operand,
    producer,
    reshaped,
)
from optdnn.passes.support.image_views import is_image, read_as_image
from optdnn.passes.support.parts_of_axes import chain_along, chain_of, one_turn
from optdnn.passes.support.views import transposed
from optdnn.types import Array

Shape = tuple[int, ...]
ROW, MOST_TRACED = 8, 1 << 22
"""Rows of a multiple of ``ROW`` elements are moved as a whole; most elements of one item of the batch whose places are computed."""


@rule("view_chain", {"Transpose"})
def view_chain(graph: Graph, op: Op) -> Match | Miss | None:
    """Transpose, Reshape, Transpose: the axes are split as far as both need, permuted once, and joined again.

    Otherwise the Reshape in the middle would copy the transposed tensor. A Reshape before or after the chain is absorbed."""
    middle = producer(graph, op.inputs[0], RESHAPES, alone=True)
    first = None if middle is None else producer(graph, middle.inputs[0], {"Transpose"}, alone=True)
    if middle is None or first is None:
        return None
    before = producer(graph, first.inputs[0], RESHAPES, alone=True)
    x = operand(first if before is None else before)
    if first.attrs.perm is None or op.attrs.perm is None or 0 in op.outputs[0].type.dims:
        return None
    if before is None and first.attrs.perm == channels_to_last(len(first.attrs.perm)) and is_image(graph, x):
        return None  # layouts remove the first Transpose
    if op.attrs.perm == channels_from_last(len(op.attrs.perm)) and read_as_image(graph, op.value):
        return None  # layouts remove the last Transpose
    if not all(t.is_static for t in (graph.type(x), first.outputs[0].type, op.outputs[0].type)):
        return None
    reader = graph.sole_user(op.value)
    after = reader if reader is not None and reader.kind in RESHAPES else None
    views = [o for o in (before, first, middle, op, after) if o is not None]
    chain = chain_along(graph, operand(first), [first, middle, op])
    if chain is None:
        return _rows_in_order(graph, x, views) or Miss("the axes before and after its Reshape have no common parts")
    copied = any(q != p + 1 for axis in chain.axes[2] for p, q in pairwise(axis))
    if not copied and before is None:
        return None  # the chain makes one copy at most
    sizes, perm = one_turn(chain.sizes, chain.parts, chain.taken, _starts(graph.type(x).static_shape, chain.sizes))
    if graph.type(x).dims[:1] == (1,):  # the batch stays in front
        sizes, perm = (1, *sizes), (0, *(p + 1 for p in perm))

    def build(patch: Patch) -> Value:
        turned = patch.add("Transpose", [_in_shape(patch, x, sizes)], TransposeAttrs(perm))
        return _in_shape(patch, turned, views[-1].outputs[0].type.static_shape)

    return Match(tuple(reversed(views)), build)


def _rows_in_order(graph: Graph, x: Value, views: Sequence[Op]) -> Match | None:
    """One Gather of whole rows in place of ``views``, and of later Transposes of rows: windows of 7 by 7 pixels become a grid of
    7 by 7 (MaxViT). None if the views divide rows, or move the batch."""
    rows = _rows_after(graph, x, views)
    if rows is None:
        return None
    while (longer := _to_next_turn(graph, views)) is not views and (found := _rows_after(graph, x, longer)) is not None:
        rows, views = found, longer
    return Match(tuple(reversed(views)), partial(_gathered, x, rows, views[-1].outputs[0].type.static_shape))


def _to_next_turn(graph: Graph, views: Sequence[Op]) -> Sequence[Op]:
    """The views, and the Transpose that alone reads their result, perhaps after a Reshape; the views alone if there is none."""
    user, more = graph.sole_user(views[-1].value), list[Op]()
    if user is not None and user.kind in RESHAPES:
        more = [user]
        user = graph.sole_user(user.value)
    return views if user is None or user.kind != "Transpose" else [*views, *more, user]


def _gathered(x: Value, rows: Array, shape: Shape, patch: Patch) -> Value:
    batch, *_, width = patch.type(x).static_shape
    table = _in_shape(patch, x, (batch, len(rows), width))
    return _in_shape(patch, patch.add("Gather", [table, patch.constant(rows, "rows")], GatherAttrs(1)), shape)


def _rows_after(graph: Graph, x: Value, views: Sequence[Op]) -> Array | None:
    """The row of ``x`` at each place after ``views``, as its number in an item of the batch; None if they move no whole rows."""
    shape = graph.type(x).static_shape
    if len(shape) < 2:
        return None
    batch, width = shape[0], shape[-1]
    if width % ROW or math.prod(shape) > batch * MOST_TRACED:
        return None
    places = np.arange(math.prod(shape[1:])).reshape(1, *shape[1:])
    for op in views:
        t = op.outputs[0].type
        if not t.is_static or t.static_shape[:1] != (batch,) or (op.kind == "Transpose" and op.attrs.perm[0] != 0):
            return None
        places = places.transpose(op.attrs.perm) if op.kind == "Transpose" else places.reshape(1, *t.static_shape[1:])
    rows = places.reshape(-1, width)
    whole = not (rows[:, 0] % width).any() and bool((rows == rows[:, :1] + np.arange(width)).all())
    return rows[:, 0] // width if whole else None


@rule("image_chain", VIEWS)
def image_chain(graph: Graph, op: Op) -> Match | None:
    """Views of an image, some between Transposes: the image is transposed to channels last, and then at most once more.

    YOLO12 cuts the image into areas, and each area's channels into heads; HaloNet joins the heads with the batch. If the views end
    in the image's own order, only a Reshape remains."""
    users = graph.users(op.value)
    if not users or all(user.kind in VIEWS for user in users):
        return None
    chain = chain_of(graph, op.value)
    if chain is None or len(chain.moves) < 2 or len(chain.axes[0]) < 4:
        return None
    last, turns = channels_to_last(len(chain.axes[0])), sum(perm is not None for perm in chain.moves)
    if chain.moves[0] == last or not is_image(graph, chain.base):
        return None
    shapes, taken = chain.shapes(chain.sizes), chain.taken
    if taken == chain.parts:
        return Match((op,), lambda patch: _in_shape(patch, chain.base, shapes[-1]))
    if turns < 2 and not set(chain.axes[0][0]) < set(chain.axes[-1][0]):
        return None  # `image_to_tokens` knows one Transpose that joins nothing to the batch
    if not chain.axes[0][1] or taken[-1] != chain.axes[0][1][-1]:
        return None
    given = [p for axis in last for p in chain.axes[0][axis]]
    pixel = chain.axes[0][1][0]  # there may be gaps between pixels
    sizes, perm = one_turn(chain.sizes, given, taken, {given[0], pixel})

    def build(patch: Patch) -> Value:
        rows = patch.add("Transpose", [chain.base], TransposeAttrs(last))
        return _in_shape(patch, transposed(patch, _in_shape(patch, rows, sizes), perm), shapes[-1])

    return Match((op,), build)


@rule("chain_to_image", VIEWS)
def chain_to_image(graph: Graph, op: Op) -> Match | None:
    """Views that end in an image, with several Transposes, or one that takes heads from the batch: one Transpose gives
    channels-last pixels, and one more the image."""
    chain, image = chain_of(graph, op.value, alone=True), op.outputs[0].type.dims
    if chain is None or len(image) < 4 or chain.taken == chain.parts:
        return None
    if sum(perm is not None for perm in chain.moves) < 2 and not set(chain.axes[-1][0]) < set(chain.axes[0][0]):
        return None  # `tokens_to_image` knows one Transpose that takes nothing from the batch
    back = channels_from_last(len(image))
    if chain.moves[-1] == back or not read_as_image(graph, op.value) or is_image(graph, chain.base):
        return None
    taken = [p for axis in channels_to_last(len(image)) for p in chain.axes[-1][axis]]
    if not chain.axes[-1][1] or chain.parts[-1] != taken[-1]:
        return None
    sizes, perm = one_turn(chain.sizes, chain.parts, taken, {axis[0] for axis in chain.axes[0] if axis})
    shape = chain.shapes(chain.sizes)[-1]
    pixels = [shape[axis] for axis in channels_to_last(len(image))]

    def build(patch: Patch) -> Value:
        rows = transposed(patch, _in_shape(patch, chain.base, sizes), perm)
        return patch.add("Transpose", [_in_shape(patch, rows, pixels)], TransposeAttrs(back))

    return Match((op,), build)


def _in_shape(patch: Patch, x: Value, shape: Sequence[int]) -> Value:
    """``x`` in this shape, with a Reshape only if it has another one."""
    return x if patch.type(x).dims == tuple(shape) else reshaped(patch, x, tuple(shape))


def _starts(shape: Shape, sizes: Sequence[int]) -> set[int]:
    """The numbers of the parts at which an axis of ``shape`` begins. ``sizes``: of all parts, in order."""
    axes = {math.prod(shape[i:]) for i in range(len(shape))}
    return {i for i in range(len(sizes)) if math.prod(sizes[i:]) in axes}


@rule("pad_before_view", {"Pad"})
def pad_before_view(graph: Graph, op: Op) -> Match | Miss | None:
    """``pad(reshape(transpose(x)))`` is ``reshape(pad(transpose(x)))`` if the Reshape keeps the padded axis: the launch that pads
    reads what the Reshape would copy."""
    view = producer(graph, op.inputs[0], {"Reshape"}, alone=True)
    pads = None if op.input(3) is not None else ints(graph, op.input(1))
    if view is None or pads is None or op.attrs.mode != "constant" or graph.op(operand(view)).kind != "Transpose":
        return None
    before, after = graph.type(operand(view)), view.outputs[0].type
    rank = len(after.dims)
    padded = [i for i in range(rank) if pads[i] or pads[rank + i]]
    if len(padded) != 1 or not before.is_static or not after.is_static:
        return None
    axis, size = padded[0], after.static_shape[padded[0]]
    source = other_axis(after.dims, axis, before.dims, size)
    if source is None or before.dims[source] != size:
        return Miss("the Reshape before it does not keep the padded axis")
    at = [0] * 2 * len(before.dims)
    at[source], at[len(before.dims) + source] = pads[axis], pads[rank + axis]

    def build(patch: Patch) -> Value:
        inputs = [operand(view), integers(patch, at, "pads"), op.input(2)]
        return _in_shape(patch, patch.add("Pad", inputs, op.attrs), op.outputs[0].type.static_shape)

    return Match((op, view), build)


class ViewChains(RulePass):
    name = "view_chains"
    rules = (ordered_channels, heads_as_channels, image_chain, chain_to_image, view_chain, pad_before_view)
