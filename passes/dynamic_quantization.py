"""Dynamic quantization (ONNX Runtime's) takes the form of static quantization: a range, QuantizeLinear and DequantizeLinear.

DynamicQuantizeLinear becomes a DynamicRange, which computes scale and zero point, and a QuantizeLinear.
``Cast(MatMulInteger(q, w)) * (scale * step)`` becomes a MatMul of DequantizeLinears. In this form, biases and activations become
stages of the product. Later, :mod:`optdnn.passes.fold_quantized` makes it a product of integers with exact sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.epilogue import channel_vector
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.centered import centered
from optdnn.passes.support.facts import non_negative, operand, producer
from optdnn.types import FP32, UINT8, Array

ONE = ((), (1,))
"""Shapes of one element."""


@rule("dynamic_range", {"DynamicQuantizeLinear"})
def dynamic_range(graph: Graph, op: Op) -> Match | Miss | None:
    """The range and the rounding become separate operators: rounding is pointwise, and fuses with other pointwise operators.

    The zero point of data that are never negative is 0, and a convolution pads them with zeros.
    """
    if not op.outputs[0].type.is_static:
        return Miss("its size is not fixed")
    if 0 in op.outputs[0].type.static_shape:
        return Miss("it has no elements")

    def build(patch: Patch) -> None:
        names = [o.name for o in op.outputs]
        found = patch.add_op("DynamicRange", op.inputs, names=(names[1:] or [f"{names[0]}_scale"]), outputs=2)
        parameters = [Value(found.id, 0), Value(found.id, 1)]
        if non_negative(graph, operand(op)):
            parameters[1] = patch.constant(np.zeros((), UINT8), f"{names[0]}_zero_point")
        rounded = patch.add("QuantizeLinear", [operand(op), *parameters], QuantizeAttrs(UINT8, 0), name=names[0])
        patch.replace_each(op.values, (rounded, *parameters))

    return Match((op,), build)


@dataclass(frozen=True)
class _Factors:
    """The operators that convert integer sums to floats: ``cast``, and ``scaled``, a product with two scales.

    ``data`` and ``other`` are the scales of the first and of the second operand."""

    cast: Op
    scaled: Op
    data: Value
    other: Value


def _factors(graph: Graph, op: Op) -> _Factors | str:
    """The operators that convert the sums, or the reason why there are none."""
    cast = graph.sole_user(op.value)
    if cast is None or cast.kind != "Cast" or cast.attrs.to != FP32:
        return "its sums are read as integers"
    scaled = graph.sole_user(cast.value)
    if scaled is None or scaled.kind != "Mul":
        return "its sums are not scaled"
    (both,) = (v for v in scaled.inputs if v != cast.value)
    product = producer(graph, both, {"Mul"})
    if product is None or scaled.outputs[0].type != cast.outputs[0].type:
        return "its sums are not multiplied by the product of two scales"
    first, second = product.inputs
    assert first is not None
    assert second is not None
    quantizer = producer(graph, op.inputs[0], {"DynamicQuantizeLinear", "QuantizeLinear"})
    if graph.constant_value(first) is not None or (quantizer is not None and second in _scales(quantizer)):
        first, second = second, first
    if graph.type(first).dims not in ONE:
        return "its data have a scale per row"
    return _Factors(cast, scaled, first, second)


def _scales(quantizer: Op) -> tuple[Value | None, ...]:
    """The scale of a DynamicQuantizeLinear or QuantizeLinear."""
    return (Value(quantizer.id, 1),) if quantizer.kind == "DynamicQuantizeLinear" else (quantizer.inputs[1],)


@dataclass(frozen=True)
class _Weights:
    """Constant weights minus their zero points, and their scales: one, or one per channel of the result."""

    centered: Array
    scale: Array


def _weights(graph: Graph, op: Op, scale: Value) -> _Weights | str:
    """The constant weights of a product, or the reason why they are not 8-bit weights with a scale per channel."""
    array, zero, steps = (graph.constant_value(v) for v in (op.inputs[1], op.input(3), scale))
    assert array is not None
    if op.kind == "MatMulInteger" and array.ndim != 2:
        return f"its weights have {array.ndim} axes"
    if steps is None or (op.input(3) is not None and zero is None):
        return "the scale or zero point of its weights is not constant"
    axis = 0 if op.kind == "ConvInteger" else 1
    if steps.size > 1 and channel_vector(steps, op.outputs[0].type.static_shape, _CHANNELS[op.kind]) is None:
        return "the scales of its weights are not one per channel"
    stored = centered(array, zero, axis)
    if stored is None:
        return "its weights minus their zero points exceed 8 bits"
    return _Weights(stored, steps.reshape(-1) if steps.size > 1 else steps.reshape(()))


_CHANNELS = {"ConvInteger": 1, "MatMulInteger": -1}
"""Kind -> axis of the result's channels."""


def _refusal(graph: Graph, op: Op, other: Value, constant: bool) -> str | None:
    """Why a product cannot become one of DequantizeLinears, or None. ``other``: the scale of the second operand."""
    if op.input(2) is not None and graph.type(operand(op, 2)).dims not in ONE:
        return "its data have a zero point per row"
    if not op.outputs[0].type.is_static or len(graph.type(operand(op)).dims) < 2:
        return "its size is not fixed, or its data are one row"
    if constant:
        return None
    if op.kind == "ConvInteger" or len(graph.type(operand(op, 1)).dims) < 2:
        return "its weights are computed"
    one = all(v is None or graph.type(v).dims in ONE for v in (other, op.input(3)))
    return None if one else "its second operand is computed, and has scales or zero points per column"


@rule("dynamic_product", {"ConvInteger", "MatMulInteger"})
def dynamic_product(graph: Graph, op: Op) -> Match | Miss | None:
    """A product of quantized data whose integer sums are scaled directly. If both operands are computed, the sums become floats."""
    factors = _factors(graph, op)
    if isinstance(factors, str):
        return Miss(factors)
    constant = graph.constant_value(op.inputs[1]) is not None
    if (reason := _refusal(graph, op, factors.other, constant)) is not None:
        return Miss(reason)
    weights = _weights(graph, op, factors.other) if constant else None
    if isinstance(weights, str):
        return Miss(weights)

    def build(patch: Patch) -> Value:
        plain, name = DequantizeAttrs(axis=0), factors.scaled.outputs[0].name
        data = patch.add("DequantizeLinear", [op.inputs[0], factors.data, op.input(2)], plain)
        if weights is None:
            other = patch.add("DequantizeLinear", [op.inputs[1], factors.other, op.input(3)], plain)
        else:
            stored = graph.output(operand(op, 1)).name
            constants = [patch.constant(weights.centered, stored), patch.constant(weights.scale, f"{stored}/scale")]
            axis = 1 if op.kind == "MatMulInteger" and weights.scale.ndim else 0
            other = patch.add("DequantizeLinear", constants, DequantizeAttrs(axis))
        if op.kind == "MatMulInteger":
            return patch.add("MatMul", [data, other], MatMulAttrs(), name=name)
        a = op.attrs
        return patch.add(
            "Conv", [data, other], ConvAttrs(a.strides, a.pads, a.dilations, a.group, a.auto_pad), name=name
        )

    return Match((op, factors.cast, factors.scaled), build, factors.scaled.value)


class DynamicQuantization(RulePass):
    """Products first: their data are recognized by the DynamicQuantizeLinear that makes them."""

    name = "dynamic_quantization"
    rules = (dynamic_product, dynamic_range)
