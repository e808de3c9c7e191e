"""Heads whose channels alternate become consecutive: the filters of the convolutions around an attention are reordered.

SuperGlue (Sarlin et al., 2020) projects by 1x1 convolutions, and splits channels as ``(features, heads)``. Each head then has to be
gathered by a copy, for queries, keys and values and for the result. If the channels of a head are consecutive, they are views.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.channel_order import filters_of
from optdnn.passes.support.facts import in_shape, operand, producer
from optdnn.passes.support.parts_of_axes import Axes, Chain, chain_of
from optdnn.passes.support.views import transposed
from optdnn.types import Array

_LAST = (0, 1, 3, 2)
"""Exchanges the tokens and the features of heads."""


@rule("ordered_heads", {"Attention"})
def ordered_heads(graph: Graph, op: Op) -> Match | Miss | None:
    """Queries, keys or values: views of a convolution whose channels are ``(features, heads)``."""
    for value in dict.fromkeys(v for v in op.inputs[:3] if v is not None):
        chain = chain_of(graph, value, alone=True)
        conv = None if chain is None or not chain.moves else producer(graph, chain.base, {"Conv"}, alone=True)
        order = None if chain is None or conv is None else _order(chain, chain.axes[-1], chain.axes[0])
        if conv is None or order is None:
            continue
        if isinstance(filters := _filters(graph, conv), Miss):
            return filters
        return Match((conv,), partial(_ordered, value, conv, filters, order))
    return None


def _ordered(value: Value, conv: Op, filters: tuple[Array, ...], order: Array, patch: Patch) -> None:
    """The heads ``value``, as views of the convolution with its filters in this order."""
    own = [patch.constant(a[order].copy(), name) for a, name in zip(filters, ("weight", "bias"), strict=False)]
    y = patch.add("Conv", [operand(conv), *own], conv.attrs, src=conv.src)
    batch, heads, tokens, features = patch.type(value).static_shape
    patch.replace(value, transposed(patch, in_shape(patch, y, (batch, heads, features, tokens)), _LAST))


@rule("ordered_results", {"Conv"}, looks_far=True)
def ordered_results(graph: Graph, op: Op) -> Match | Miss | None:
    """The convolution of an attention's result whose channels are joined as ``(features, heads)``."""
    chain = chain_of(graph, operand(op), alone=True)
    if chain is None or not chain.moves or producer(graph, chain.base, {"Attention"}) is None:
        return None
    order = _order(chain, chain.axes[0], chain.axes[-1])
    if order is None:
        return None
    if graph.sole_user(operand(op)) is None:
        return Miss("its operand is read elsewhere, in the order of its channels")
    if isinstance(filters := _filters(graph, op), Miss):
        return filters
    shape = graph.type(operand(op)).static_shape

    def build(patch: Patch) -> Value:
        x = in_shape(patch, transposed(patch, chain.base, _LAST), shape)
        own = [patch.constant(np.ascontiguousarray(filters[0][:, order]), "weight"), *op.inputs[2:]]
        return patch.add("Conv", [x, *own], op.attrs)

    return Match((op,), build)


def _filters(graph: Graph, conv: Op) -> tuple[Array, ...] | Miss:
    if conv.attrs.epilogue or conv.attrs.prologue:
        return Miss("the convolution has stages")
    return filters_of(graph, conv)


def _order(chain: Chain, heads: Axes, image: Axes) -> Array | None:
    """The channels of ``image`` [batch, channels, …], head by head. ``heads``: the axes [batch, heads, tokens, features].

    None if they have this order, or if the views do more than to split the channels and to move their parts."""
    if len(heads) != 4 or len(image) < 3:
        return None
    channels, wanted = image[1], (*heads[1], *heads[3])
    if sorted(channels) != sorted(wanted) or channels == wanted:
        return None
    if heads[0] != image[0] or heads[2] != tuple(part for axis in image[2:] for part in axis):
        return None
    sizes = [chain.sizes[part] for part in channels]
    return np.arange(math.prod(sizes)).reshape(sizes).transpose([channels.index(p) for p in wanted]).reshape(-1)
