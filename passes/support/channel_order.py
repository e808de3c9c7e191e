"""Convolutions with their filters in another order, and a Split that takes parts of their channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Miss
from optdnn.passes.support.facts import operand
from optdnn.types import Array


def filters_of(graph: Graph, conv: Op) -> tuple[Array, ...] | Miss:
    """The filters of a convolution, and its bias if it has one; a Miss if they cannot be reordered."""
    arrays = [graph.constant_value(v) for v in conv.inputs[1:3] if v is not None]
    known = [a for a in arrays if a is not None]
    if len(known) < len(arrays) or conv.attrs.group != 1:
        return Miss("its filters are not constant, or they are grouped")
    return tuple(known)


def split_channels(patch: Patch, conv: Op, filters: Sequence[Array], parts: Sequence[Array], src: frozenset[str]) -> Op:
    """Add the convolution with its channels in the order of ``parts`` (numbers of channels), and the Split into these parts.

    ``filters``: of :func:`filters_of`. ``src``: the Split's nodes. Returns the Split."""
    order, names = np.concatenate(parts), ("weight", "bias")
    own = [patch.constant(a[order].copy(), name) for a, name in zip(filters, names, strict=False)]
    given: list[Value | None] = [operand(conv), *own]
    y = patch.add("Conv", [*given, *conv.inputs[len(given) :]], conv.attrs, src=conv.src)
    sizes = patch.constant(np.array([len(part) for part in parts], np.int64), "sizes")
    return patch.add_op("Split", [y, sizes], SplitAttrs(1), outputs=len(parts), src=src)
