"""Attention that the model holds as one operator (opset 23) gets the form of attention that exporters write out.

A mask of booleans becomes an added one, once for all layers that read it, unless its rows need padding. A constant mask becomes
causal order or a window, as far as it says no more, and one of zeros disappears. Repeated heads of keys and values are read once
per group of queries.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import SINKS, AttentionAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.attention_mask import window
from optdnn.passes.support.facts import operand
from optdnn.passes.support.repeated_heads import unrepeated
from optdnn.passes.support.views import trace
from optdnn.types import FP64, Array, Shape

ALIGNED = 8
"""Elements of 16 bits in a vector that a kernel loads."""
_MASK = 3
"""The slot of Attention's mask."""


@rule("given_mask", {"Attention"})
def given_mask(graph: Graph, op: Op) -> Match | Miss | None:
    """A mask of booleans, or one that the attributes express."""
    mask = op.inputs[_MASK] if len(op.inputs) > _MASK else None
    if mask is None:
        return None
    boolean = graph.type(mask).dtype.kind == "b"
    dtype = graph.type(operand(op)).dtype
    constant = graph.constant_value(mask)
    added = None if constant is None else _added(constant)
    attrs = None if added is None else _expressed(graph, op, added)

    if not boolean and attrs is None:
        return None
    if added is None and not _aligned(graph.type(mask).dims):
        return Miss("kernels make the mask themselves, with padded rows")

    def build(patch: Patch) -> None:
        given: Value | None = None
        if attrs is None and added is not None:
            given = patch.constant(added.astype(dtype), f"{graph.output(mask).name}.added")
        elif attrs is None:
            shown = patch.constant(np.zeros((), dtype), "shown")
            given = patch.add("Where", [mask, shown, patch.constant(np.asarray(-np.inf, dtype), "hidden")])
        inputs = [*op.inputs[:_MASK], given, *op.inputs[_MASK + 1 :]]
        made = patch.add_op("Attention", inputs, attrs or op.attrs, outputs=len(op.outputs))
        patch.replace_each(op.values, made.values)

    return Match((op,), build)


def _aligned(dims: Shape) -> bool:
    """Whether kernels read the rows of a mask in aligned vectors, or only one row of it."""
    keys = dims[-1]
    return dims[-2:-1] in ((), (1,)) or (isinstance(keys, int) and keys % ALIGNED == 0)


def _added(mask: Array) -> Array:
    """The mask in float64, as it is added to scores."""
    return np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(FP64)


def _expressed(graph: Graph, op: Op, added: Array) -> AttentionAttrs | None:
    """The attention's attributes with a constant mask in them; None if they cannot express it."""
    a: AttentionAttrs = op.attrs
    if any(v is not None for v in op.inputs[4:SINKS]):  # past keys, and numbers of keys, move the positions
        return None
    rows, keys = graph.type(operand(op)).dims[2], graph.type(operand(op, 1)).dims[2]
    if added.shape[-1] != keys:
        return None
    if not added.any():
        return a
    if a.is_causal or (a.left_window_size, a.right_window_size) != (-1, -1) or added.ndim < 2:
        return None
    sight = window(added, rows, keys)
    if sight is None:
        return None
    causal, before, after = sight
    return replace(a, is_causal=causal, left_window_size=before, right_window_size=after)


@rule("repeated_heads", {"Attention"})
def repeated_heads(graph: Graph, op: Op) -> Match | Miss | None:
    """Keys and values that are repeated for the queries of a group."""
    views = [trace(graph, operand(op, i)) for i in (1, 2)]
    alone = [None if v is None else unrepeated(graph, v) for v in views]
    if not any(alone):
        return None
    if len(op.outputs) > 1 or any(v is not None for v in op.inputs[4:6]):
        return Miss("its keys and values are joined to those of the past, or are results")
    k, v = alone
    if k is None or v is None or k.shape[1] != v.shape[1]:
        return Miss("keys and values are not repeated equally often")
    if not (k.expressible and v.expressible):
        return Miss("no target can express the heads before the repetition")

    def build(patch: Patch) -> Value:
        heads = [view.add_to(patch) for view in (k, v)]
        return patch.add("Attention", [op.inputs[0], *heads, *op.inputs[3:]], op.attrs)

    return Match((op,), build)
