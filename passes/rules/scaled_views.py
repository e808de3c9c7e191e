"""Removes Gathers and scales between a product and attention, so that scores of positions are a view of the product.

XLNet (with Transformer-XL's relative positions: Dai et al., 2019) shifts a product of queries with constant embeddings by Reshapes
and a Slice, takes the first columns by a Gather, and scales them. Without the Gather and the scale, the scores are a view, which
attention reads as its mask.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import VIEWS, operand, shape_of, sliced
from optdnn.passes.support.parts import neighbors
from optdnn.passes.support.paths import path_to, repeated
from optdnn.types import Array, normalize_axis

_MOST = 6
"""Most views between a product and its scale."""


@rule("consecutive_rows", {"Gather"})
def consecutive_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """A Gather of neighboring rows in ascending order becomes a Slice."""
    indices, shape = graph.constant_value(op.inputs[1]), shape_of(graph, operand(op))
    if indices is None or indices.ndim != 1 or shape is None or graph.constant_value(op.inputs[0]) is not None:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    size = shape[axis]
    rows = neighbors(indices, size) if isinstance(size, int) else None
    return None if rows is None else Match((op,), lambda patch: sliced(patch, operand(op), *rows, axis))


@rule("scaled_view", {"Mul"})
def scaled_view(graph: Graph, op: Op) -> Match | Miss | None:
    """A number times a view of a product with a constant: the constant is multiplied by the number instead."""
    for slot in (0, 1):
        array = graph.constant_value(op.inputs[1 - slot])
        if array is None or array.size != 1 or op.inputs[slot] is None:
            continue
        chain = path_to(graph, operand(op, slot), VIEWS | {"Slice"}, alone=True, most=_MOST)
        source = graph.op(operand(chain[-1]) if chain else operand(op, slot))
        factor = graph.constant_value(source.inputs[1]) if source.kind == "MatMul" else None
        same = graph.type(operand(op, slot)).shape == op.outputs[0].type.shape
        if factor is None or not chain or not same or source.attrs.epilogue or graph.sole_user(source.value) is None:
            continue
        scaled = (factor * array.reshape(-1)[0]).astype(factor.dtype)

        def build(patch: Patch, source: Op = source, scaled: Array = scaled, chain: list[Op] = chain) -> Value:
            y = patch.add("MatMul", [source.inputs[0], patch.constant(scaled, "scaled")], source.attrs)
            return repeated(patch, y, chain)

        return Match((op, *chain, source), build)
    return None
