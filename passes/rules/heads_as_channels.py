"""Depthwise convolutions of attention heads that are part of the batch filter the channels of all heads.

MViT (Fan et al., 2021) pools queries, keys and values by depthwise convolutions, with the same filters for each head. Its networks
reshape (batch, heads, positions, features) to images of ``batch * heads`` items, which copies the projection. With the filters
repeated for each head, the images are a view of it.
"""

from __future__ import annotations

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
    """A depthwise convolution of (B * H, C, …) becomes one of (B, H * C, …), if the channels of all heads are neighbors in memory."""
    view = trace(graph, operand(op)) if is_depthwise(graph, op) else None
    images, shape = sizes_of(graph, operand(op)), op.outputs[0].type.shape
    if view is None or images is None or shape is None or op.attrs.prologue or op.attrs.epilogue:
        return None
    heads = _heads(graph, view, images)
    if heads is None:
        return None
    features, places, rank = images[1], images[2:], len(images)
    weight, bias = (graph.constant_value(op.input(slot)) for slot in (1, 2))
    if op.input(2) is not None and bias is None:
        return None

    def build(patch: Patch) -> Value:
        split = in_shape(patch, view.base, (images[0] // heads, heads, -1, features))
        rows = in_shape(patch, transposed(patch, split, (0, 2, 1, 3)), (images[0] // heads, *places, heads * features))
        given = [transposed(patch, rows, channels_from_last(rank))]
        for array, name in ((weight, "filters"), (bias, "bias")):
            if array is not None:
                given.append(patch.constant(np.tile(array, (heads, *(1,) * (array.ndim - 1))), name))
        made = patch.add("Conv", given, replace(op.attrs, group=heads * features))
        rows = in_shape(
            patch, transposed(patch, made, channels_to_last(rank)), (images[0] // heads, -1, heads, features)
        )
        return in_shape(patch, transposed(patch, rows, (0, 2, 3, 1)), shape)

    return Match((op,), build)


def _heads(graph: Graph, view: View, images: tuple[int, ...]) -> int | None:
    """The number of heads, if the images are a view of (B, H, positions, C), part of a transposed (B, positions, …, H, C) with
    several B and H; else None."""
    before = tuple(n for n in view.before[:-3] if n != 1)
    if len(view.before) < 4 or len(before) > 1:
        return None
    batch, (heads, positions, features) = before[0] if before else 1, view.before[-3:]
    if not isinstance(heads, int) or heads < 2 or batch == 1 or batch * heads != images[0]:
        return None
    whole, last = View(view.base, view.before), channels_from_last(len(images))
    ways = (
        whole.reshape((images[0], *images[2:], features)).transpose(last),
        whole.swap_last().reshape(images),
    )
    if features != images[1] or all(way.moves != view.moves for way in ways):
        return None
    value = view.base
    while (part := graph.op(value)).kind in _PARTS:
        value = operand(part)
    perm = part.attrs.perm if part.kind == "Transpose" else None
    if perm is None or perm[-1] != len(perm) - 1:
        return None
    return heads if graph.type(part.value).dims[perm.index(len(perm) - 2)] == heads else None
