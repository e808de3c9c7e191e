"""Interleaved parts of a convolution's channels become consecutive: its filters are reordered, and a Split takes the parts.

YOLO's attention computes queries, keys and values with one 1x1 convolution, head by head, as an image. Views give the heads an
axis, and a Split takes the three parts of each head. If each part is consecutive, it is an image by itself, and nothing is copied.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.channel_order import filters_of, split_channels
from optdnn.passes.support.facts import in_shape, operand, producer
from optdnn.passes.support.parts_of_axes import Chain, chain_of
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis


@rule("ordered_channels", {"Split"})
def ordered_channels(graph: Graph, op: Op) -> Match | Miss | None:
    """``split(views(conv(x)))`` becomes ``views(split(conv(x)))``, where the filters of the convolution are reordered."""
    chain = chain_of(graph, operand(op), alone=True)
    conv = None if chain is None or not chain.moves else producer(graph, chain.base, {"Conv"}, alone=True)
    if chain is None or conv is None:
        return None
    channels, split = chain.axes[0][1], chain.axes[-1][normalize_axis(op.attrs.axis, len(chain.axes[-1]))]
    if len(split) != 1 or split[0] not in channels[1:]:
        return None
    filters = filters_of(graph, conv)
    if isinstance(filters, Miss):
        return filters
    if conv.attrs.epilogue or conv.attrs.prologue:
        return Miss("the convolution has stages")
    axis = channels.index(split[0])
    widths = [t.type.static_shape[normalize_axis(op.attrs.axis, len(t.type.dims))] for t in op.outputs]
    numbers = np.arange(len(filters[0])).reshape([chain.sizes[p] for p in channels])
    parts = [part.reshape(-1) for part in np.split(numbers, np.cumsum(widths)[:-1], axis)]

    def build(patch: Patch) -> None:
        images = split_channels(patch, conv, filters, parts, op.src | conv.src)
        for k, width in enumerate(widths):
            patch.replace(Value(op.id, k), _viewed(patch, Value(images.id, k), chain, split[0], width))

    return Match((op, conv), build)


def _viewed(patch: Patch, x: Value, chain: Chain, part: int, size: int) -> Value:
    """``x`` after the views of ``chain``, one of whose parts has another ``size``."""
    shapes = chain.shapes([size if p == part else n for p, n in enumerate(chain.sizes)])
    for perm, shape in zip(chain.moves, shapes[1:], strict=True):
        x = in_shape(patch, x, shape) if perm is None else transposed(patch, x, perm)
    return x
