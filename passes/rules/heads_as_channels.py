"""Depthwise convolutions of attention heads that are part of the batch filter the channels of all heads.

MViT (Fan et al., 2021) pools queries, keys and values by depthwise convolutions, with the same filters for each head. Its networks
reshape (batch, heads, positions, features) to images of ``batch * heads`` items, which copies the projection. With the filters
repeated for each head, the images are a view of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import (
    RESHAPES,
    channels_from_last,
    channels_to_last,
    in_shape,
    is_depthwise,
    operand,
    sizes_of,
)
from optdnn.passes.support.views import View, trace, transposed

_PARTS = RESHAPES | {"Slice"}
"""Operators that take a part of a projection, and drop axes of size 1."""


@rule("heads_as_channels", {"Conv"})
def heads_as_channels(graph: Graph, op: Op) -> Match | None:
    """A depthwise convolution of (B * H, C, …) becomes one of (B, H * C, …), if the heads of a position are neighbors."""
    view = trace(graph, operand(op)) if is_depthwise(graph, op) else None
    images, shape = sizes_of(graph, operand(op)), op.outputs[0].type.shape
    if view is None or images is None or shape is None or op.attrs.prologue or op.attrs.epilogue:
        return None
    found = _rows(graph, view, images)
    if found is None:
        return None
    heads, of_tokens = found
    batch, features, places, rank = images[0] // heads, images[1], images[2:], len(images)
    weight, bias = (graph.constant_value(op.input(slot)) for slot in (1, 2))
    if op.input(2) is not None and bias is None:
        return None

    def build(patch: Patch) -> Value:
        x = view.base
        if not of_tokens:
            split = in_shape(patch, x, (batch, heads, -1, features))
            x = transposed(patch, split, (0, 2, 1, 3))
        rows = in_shape(patch, x, (batch, *places, heads * features))
        given = [transposed(patch, rows, channels_from_last(rank))]
        for array, name in ((weight, "filters"), (bias, "bias")):
            if array is not None:
                given.append(patch.constant(np.tile(array, (heads, *(1,) * (array.ndim - 1))), name))
        made = patch.add("Conv", given, replace(op.attrs, group=heads * features))
        rows = in_shape(patch, transposed(patch, made, channels_to_last(rank)), (batch, -1, heads, features))
        return in_shape(patch, transposed(patch, rows, (0, 2, 3, 1)), shape)

    return Match((op,), build)


def _rows(graph: Graph, view: View, images: tuple[int, ...]) -> tuple[int, bool] | None:
    """(heads, whether the base of ``view`` has tokens of all heads), if the images are a view of it with several heads; else None.
    A base that has heads of tokens must be a part of a transposed tensor where the heads of a position are neighbors.

    The heads of a single picture are images without a copy, so they stay. Those of a single video would be interleaved volumes,
    which fewer kernels read."""
    items, features, *places = images
    least = 1 if len(places) > 2 else 2
    whole, last = View(view.base, view.before), view.before[-1]
    if isinstance(last, int) and last > features and last % features == 0 and items % (last // features) == 0:
        heads = last // features
        tokens = whole.reshape((items // heads, math.prod(places), heads, features)).transpose((0, 2, 1, 3))
        if items // heads >= least and _is_images(tokens, view, images):
            return heads, True
    outer = [n for n in view.before[:-3] if n != 1]
    if len(view.before) < 4 or len(outer) > 1:
        return None
    batch, apart = outer[0] if outer else 1, view.before[-3]
    if not isinstance(batch, int) or not isinstance(apart, int) or batch < least or apart < 2 or batch * apart != items:
        return None
    return (apart, False) if _is_images(whole, view, images) and _are_neighbors(graph, view.base, apart) else None


def _is_images(heads: View, view: View, images: tuple[int, ...]) -> bool:
    """Whether ``view`` gives ``images`` of ``heads`` (batch, heads, positions, features), by way of channels last or first."""
    items, features, *places = images
    last = heads.reshape((items, *places, features)).transpose(channels_from_last(len(images)))
    return view.moves in (last.moves, heads.swap_last().reshape(images).moves)


def _are_neighbors(graph: Graph, part: Value, heads: int) -> bool:
    """Whether a part of a transposed tensor has its heads from the axis before that of features."""
    while (op := graph.op(part)).kind in _PARTS:
        part = operand(op)
    perm = op.attrs.perm if op.kind == "Transpose" else None
    if perm is None or perm[-1] != len(perm) - 1:
        return False
    return bool(graph.type(op.value).dims[perm.index(len(perm) - 2)] == heads)
