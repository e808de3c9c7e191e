"""A choice between two values that was written as arithmetic becomes Where."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rewrite
from optdnn.types import BOOL, Array, is_float


class SelectIsWhere(Rewrite):
    """``c * x + (1 - c) * y`` with a mask c of zeros and ones is ``where(c, x, y)``: how tf2onnx writes SelectV2.

    The mask is a Cast of a boolean, its complement a Cast of that one's Not; or both are constants, and the hidden part is one
    number. (Where the product meets an infinity or NaN that the mask hides, it gives NaN, and Where does not.)
    """

    name = "select_is_where"
    kinds = frozenset({"Add"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not is_float(op.outputs[0].type.dtype):
            return None
        for kept, hidden in (op.inputs, op.inputs[::-1]):
            assert kept is not None
            assert hidden is not None
            found = _constant(graph, kept, hidden) or _cast(graph, kept, hidden)
            if found is None or graph.sole_user(kept) is None:
                continue
            condition, x, y, product = found
            if graph.type(x).shape != op.outputs[0].type.shape:
                return Miss("the mask enlarges what it hides")

            def build(patch: Patch, c: Value | Array = condition, x: Value = x, y: Value | Array = y) -> Value:
                mask = c if isinstance(c, Value) else patch.constant(c, "mask")
                low = y if isinstance(y, Value) else patch.constant(y, "hidden")
                return patch.add("Where", [mask, x, low])

            return Match((op, product), build)
        return None


_Found = tuple["Value | Array", Value, "Value | Array", Op]
"""The condition, what is kept, what stands for what is hidden, and the product with the mask."""


def _factors(graph: Graph, value: Value) -> list[tuple[Value, Value]]:
    """The two ways to see a Mul as mask and value."""
    op = graph.op(value)
    if op.kind != "Mul":
        return []
    a, b = op.inputs
    assert a is not None
    assert b is not None
    return [(a, b), (b, a)]


def _constant(graph: Graph, kept: Value, hidden: Value) -> _Found | None:
    low = graph.constant_value(hidden)
    if low is None:
        return None
    for m, x in _factors(graph, kept):
        mask = graph.constant_value(m)
        if mask is None or not ((mask == 0) | (mask == 1)).all() or mask.all() or not mask.any():
            continue
        wide, values = np.broadcast_arrays(mask, low)
        rest = np.unique(values[wide == 0])
        if values[wide == 1].any() or rest.size != 1 or wide.shape != mask.shape:
            return None
        return mask.astype(BOOL), x, rest.reshape(()).astype(low.dtype), graph.op(kept)
    return None


def _cast(graph: Graph, kept: Value, hidden: Value) -> _Found | None:
    for m, x in _factors(graph, kept):
        condition = _boolean(graph, m)
        if condition is None:
            continue
        for n, y in _factors(graph, hidden):
            other = _boolean(graph, n)
            if other is not None and graph.op(other).kind == "Not" and graph.op(other).inputs[0] == condition:
                return condition, x, y, graph.op(kept)
            if other is not None and graph.op(condition).kind == "Not" and graph.op(condition).inputs[0] == other:
                return condition, x, y, graph.op(kept)
    return None


def _boolean(graph: Graph, value: Value) -> Value | None:
    """The boolean that was cast to this number."""
    op = graph.op(value)
    source = op.inputs[0] if op.kind == "Cast" else None
    return source if source is not None and graph.type(source).dtype == BOOL else None
