"""Roundings of rounded numbers: to the same integers, to the same grid, after a bound, or after a scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer, scalar
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.quantized_values import is_dequantized_data, same_constant, same_scale, zeros_of
from optdnn.types import FP32

_SAME = 1e-5
"""Largest difference of two scales, of the larger one: 255 steps of one are then 255 steps of the other."""


@pattern_rule("requantize_same", node("QuantizeLinear", node("DequantizeLinear", Var("integers"), name="before")))
def same_pair(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """QuantizeLinear of a DequantizeLinear with the same scale and zero point returns the integers unchanged."""
    source, before = found["integers"], found["before"]
    if graph.type(source).dtype != root.outputs[0].type.dtype or before.outputs[0].type.dtype != FP32:
        return None
    if not same_scale(graph, before, root):
        return None
    if graph.type(operand(before, 1)).dims not in ((), (1,)) and root.attrs.axis != before.attrs.axis:
        return None
    # With a scale that is zero, subnormal, infinite or NaN, the integers would be lost on the way.
    numbers = graph.constant_value(before.inputs[1])
    if numbers is None or not (np.isfinite(numbers) & (np.abs(numbers) >= np.finfo(np.float32).tiny)).all():
        return Miss("its scale is not a constant normal number")
    return Match((root,), lambda patch: source)


@pattern_rule(
    "requantize_same_grid",
    node(
        "DequantizeLinear",
        node("QuantizeLinear", node("DequantizeLinear", Var("integers"), name="first"), name="between"),
    ),
)
def same_grid(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """DequantizeLinear of rounded numbers that are on the grid already: int8 with zero point z and uint8 with z + 128 are one grid.

    ONNX Runtime turns the data of its convolutions to uint8 in this way, and back for other operators."""
    first, between = found["first"], found["between"]
    types = {graph.type(first.value), root.outputs[0].type}
    if not same_scale(graph, between, root) or len(types) > 1 or types.pop().dtype != FP32:
        return None
    if any(one.attrs.block_size for one in (first, root)) or not same_constant(graph, first.input(1), root.input(1)):
        return None
    grids = [_grid(graph, one) for one in (first, root)]
    scale = scalar(graph, operand(first, 1))
    if None in grids or grids[0] != grids[1] or scale is None or not np.isfinite(scale):
        return None
    if abs(scale) < np.finfo(np.float32).tiny:
        return Miss("its scale is not a normal number")
    return Match((root,), lambda patch: first.value)


@rule("clipped_rounding", {"QuantizeLinear"})
def clipped_rounding(graph: Graph, op: Op) -> Match | Miss | None:
    """A bound (Relu, Clip) between two roundings of one scale needs only the second one: the bound keeps the order of numbers.

    ONNX Runtime rounds the result of a convolution, and that of its activation, if scales are symmetric."""
    bound = producer(graph, op.inputs[0], {"Clip", "Relu"})
    before = None if bound is None else producer(graph, bound.inputs[0], {"DequantizeLinear"})
    first = None if before is None else producer(graph, before.inputs[0], {"QuantizeLinear"})
    if bound is None or before is None or first is None or not same_scale(graph, first, before):
        return None
    if any(graph.constant_value(v) is None for v in bound.inputs[1:] if v is not None):
        return None
    x, plain = operand(first), not any(one.attrs.block_size for one in (first, before, op))
    scale = scalar(graph, operand(op, 1))
    if not plain or scale is None or not same_constant(graph, first.input(1), op.input(1)):
        return None
    if not np.finfo(np.float32).tiny <= scale < np.inf or graph.type(x).dtype != bound.outputs[0].type.dtype:
        return Miss("its scale is not a normal number, or the types differ")
    inner, outer = (_grid(graph, one) for one in (first, op))
    if inner is None or outer is None:
        return None
    low = 0 if bound.kind == "Relu" else -np.inf
    if inner[0] > max(low, outer[0]) or inner[1] < outer[1]:
        return Miss("the first rounding has a smaller range")
    if any(graph.sole_user(one.value) is None for one in (first, before, bound)):
        return Miss("other operators read what is rounded before it")

    def build(patch: Patch) -> Value:
        y = patch.add(bound.kind, [x, *bound.inputs[1:]], bound.attrs)
        return patch.add("QuantizeLinear", [y, *op.inputs[1:]], op.attrs)

    return Match((op, bound, before, first), build)


def _grid(graph: Graph, op: Op) -> tuple[int, int] | None:
    """The smallest and the largest number that a Q or DQ of one zero point gives, in units of its scale."""
    stored = op.value if op.kind == "QuantizeLinear" else operand(op)
    dtype, zeros = graph.type(stored).dtype, zeros_of(graph, op)
    if dtype.kind not in "iu" or zeros is None or len(zeros) != 1:
        return None
    info, zero = np.iinfo(dtype), next(iter(zeros))
    return int(info.min) - zero, int(info.max) - zero


@rule("rescaled_rounding", {"QuantizeLinear"})
def rescaled_rounding(graph: Graph, op: Op) -> Match | Miss | None:
    """``round(c * round(x))`` is ``round(c * x)`` if the second scale is c times the first one: both give the same integers.

    TFLite rounds the scores of an attention before and after it scales them. Results are equal except where a value falls on the
    edge between two integers."""
    scaling = producer(graph, op.inputs[0], {"Mul", "Div"})
    found = None if scaling is None else _scaled_by(graph, scaling)
    if scaling is None or found is None:
        return None
    before, factor = found
    first = producer(graph, before.inputs[0], {"QuantizeLinear"})
    if first is None or first.outputs[0].type.dtype != op.outputs[0].type.dtype or before.attrs.block_size:
        return None
    if not same_scale(graph, first, before) or not same_constant(graph, first.input(2), op.input(2)):
        return None
    scales = [scalar(graph, one.inputs[1]) for one in (first, op)]
    if None in scales or first.attrs.block_size or op.attrs.block_size:
        return None
    inner, outer = (float(s) for s in scales if s is not None)
    if not (np.isfinite(outer) and outer > 0 and abs(inner * factor / outer - 1) < _SAME):
        return Miss("its scale is not the one before it, times the factor between")
    if any(graph.sole_user(one.value) is None for one in (first, before, scaling)):
        return Miss("other operators read what is rounded before it")
    x = operand(first)

    def build(patch: Patch) -> Value:
        constant = patch.constant(np.asarray(factor, graph.type(x).dtype), f"{scaling.outputs[0].name}.factor")
        return patch.add("QuantizeLinear", [patch.add("Mul", [x, constant]), *op.inputs[1:]], op.attrs)

    return Match((op, scaling, before, first), build)


def _scaled_by(graph: Graph, op: Op) -> tuple[Op, float] | None:
    """The DequantizeLinear whose result a Mul or Div scales by one positive number, and that number."""
    for value, other in ((operand(op), operand(op, 1)), (operand(op, 1), operand(op)))[: 2 if op.kind == "Mul" else 1]:
        before, number = producer(graph, value, {"DequantizeLinear"}), _number(graph, other)
        same = graph.type(value).shape == op.outputs[0].type.shape
        if before is not None and number is not None and number > 0 and same and is_dequantized_data(graph, value):
            return before, number if op.kind == "Mul" else 1.0 / number
    return None


def _number(graph: Graph, value: Value) -> float | None:
    """The single element of a constant, which may be stored as an integer."""
    stored = producer(graph, value, {"DequantizeLinear"})
    if stored is None:
        return scalar(graph, value)
    zero = 0.0 if stored.input(2) is None else scalar(graph, stored.input(2))
    held, scale = scalar(graph, stored.inputs[0]), scalar(graph, stored.inputs[1])
    return None if held is None or scale is None or zero is None else (held - zero) * scale
