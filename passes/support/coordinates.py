"""Places in images: their arithmetic stays in fp32, as at 1,000 pixels fp16 has steps of half a pixel.

A network computes them from its inputs, from integers and from what a layer predicts. Only the layer rounds.
"""

from __future__ import annotations

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.fuse_pointwise import is_pointwise
from optdnn.passes.support.facts import shape_of
from optdnn.types import is_float

PLACES = {"GridSample": 1}
"""Kind -> the operand that holds places."""
CARRIES = frozenset({"AffineGrid", "CumSum", "ReduceSum"})
"""Kinds, besides pointwise ones, movement and products of short rows, that compute places of places."""
SHORT = 4
"""Most elements of a row by which places are multiplied: homogeneous coordinates."""


def coordinates(graph: Graph) -> dict[int, str]:
    """Op id -> the reason, for operators that compute the places at which an image is read."""
    found: dict[int, str] = {}
    for op in graph.of_kind(*PLACES):
        name = op.outputs[0].name
        for i in _chain(graph, op.inputs[PLACES[op.kind]]):
            found.setdefault(i, f"it computes places that {op.kind} {name} reads")
    return found


def _chain(graph: Graph, places: Value | None) -> list[int]:
    """The operators that compute a value, without those that only move what a layer predicts."""
    seen, wanted = dict[int, Op](), [places]
    while wanted:
        value = wanted.pop()
        op = None if value is None else graph.op(value)
        if op is not None and op.id not in seen and _computes_places(graph, op):
            seen[op.id] = op
            wanted += op.inputs
    kept: list[int] = []
    for op in graph.order():
        if op.id in seen and not (op.definition.traits.movement and not _wide(graph, op, kept)):
            kept.append(op.id)
    return kept


def _wide(graph: Graph, op: Op, kept: list[int]) -> bool:
    """Whether an operand is an input of the network, or computed in fp32."""
    return any(v is not None and (v.op in kept or graph.op(v).kind == "Input") for v in op.inputs)


def _computes_places(graph: Graph, op: Op) -> bool:
    """Whether its result is a place if its operands are."""
    if op.kind in STRUCTURAL or not is_float(op.outputs[0].type.dtype):
        return False
    if op.kind == "MatMul":
        row = (shape_of(graph, op.inputs[0]) or (None,))[-1]
        return isinstance(row, int) and row <= SHORT
    return is_pointwise(op) or op.definition.traits.movement or op.kind in CARRIES
