"""Dequantized values that are only moved before a quantized product: the integers are moved, and dequantized for the product.

Brevitas, and others who quantize for integer hardware, write no rounding after a max pool or a Concat: it would change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, scalar
from optdnn.passes.support.moved_values import MOVES, moved
from optdnn.passes.support.precision import no_integers
from optdnn.passes.support.quantized_values import is_dequantized, is_dequantized_data, same_scale
from optdnn.types import INT8, UINT8

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})


@rule("dequantize_after_moves", MOVES, looks_far=True)
def dequantize_after_moves(graph: Graph, op: Op) -> Match | Miss | None:
    """An operator that moves or compares elements runs on the integers, if a quantized product reads them after it."""
    data = moved(op)
    if not data or not all(is_dequantized_data(graph, v) for v in data) or not any(_products(graph, op)):
        return None
    first, *others = (graph.op(v) for v in data)
    stored = [operand(one) for one in (first, *others)]
    scale = scalar(graph, operand(first, 1))
    if scale is None or not scale > 0 or first.attrs.block_size:
        return Miss(f"{first.name} has several scales, or one that is not constant and positive")
    if any(not same_scale(graph, first, one) or one.attrs != first.attrs for one in others):
        return Miss("its operands have different scales or zero points")
    types = {graph.type(v).dtype for v in stored}
    if len(types) > 1 or not types <= {INT8, UINT8}:
        return Miss("its operands are not all of int8, or of uint8")
    if op.kind != "Resize" and no_integers(graph, op, ranged=True) is not None:
        return Miss(f"{op.kind} {op.name} has no integer form")

    def build(patch: Patch) -> None:
        taken = dict(zip(data, stored, strict=True))
        inputs = [v if v is None else taken.get(v, v) for v in op.inputs]
        names = [out.name for out in op.outputs]
        made = patch.add_op(op.kind, inputs, op.attrs, outputs=len(names), names=names)
        for value in op.values:
            floats = patch.add("DequantizeLinear", [Value(made.id, value.port), *first.inputs[1:]], first.attrs)
            patch.replace(value, floats)

    return Match((op,), build)


def _products(graph: Graph, op: Op) -> Iterator[Op]:
    """The products with dequantized constant weights that read the results of ``op``, also after further moves."""
    for value in op.values:
        for user in graph.users(value):
            if value in moved(user):
                yield from _products(graph, user)
            elif user.kind in _PRODUCTS and user.inputs[0] == value and _has_integers(graph, operand(user, 1)):
                yield user


def _has_integers(graph: Graph, weights: Value) -> bool:
    """Whether weights are dequantized constants."""
    return is_dequantized(graph, weights) and graph.constant_value(graph.op(weights).inputs[0]) is not None
