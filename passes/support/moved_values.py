"""Values whose elements are elements of other values: which they are, and whether they are dequantized integers."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.precision import SHARES_SCALE
from optdnn.passes.support.quantized_values import is_dequantized_data

MOVES = (SHARES_SCALE | {"Resize"}) - {"Pad"}
"""Kinds whose results may be elements of their data. A Pad adds zeros, which convolutions absorb."""


def moved(op: Op) -> list[Value]:
    """The operands that the results of an operator are elements of; none if it computes other numbers."""
    if op.kind not in MOVES:
        return []
    nearest = op.kind == "Resize" and op.attrs.mode == "nearest"
    if op.kind == "Resize" and not (nearest and op.attrs.coordinate_transformation_mode != "tf_crop_and_resize"):
        return []
    return [v for v in (op.inputs if op.kind == "Concat" else op.inputs[:1]) if v is not None]


def from_integers(graph: Graph, value: Value | None) -> bool:
    """Whether a value is dequantized data, or elements of such data."""
    if value is None or is_dequantized_data(graph, value):
        return value is not None
    data = moved(graph.op(value))
    return bool(data) and all(from_integers(graph, v) for v in data)
