"""MatMulInteger and ConvInteger with a zero point that is known only at run time (dynamic quantization) get tensor cores.

With data ``a``, zero points ``p`` and ``q`` and constant weights ``w``, the operators sum ``(a - p)(w - q)``. A kernel of 8-bit
products sums ``a w``. Two small terms remain. The first is ``p`` times the sums of ``w - q``, which are constants. The second is
``q`` times the sums of the data, which columns of ones next to the weights compute. Padding holds ``p``: there, only the weights
inside the image count. An earlier pass (:mod:`optdnn.passes.dynamic_quantization`) gives most products another form. Products reach
this rule if ``w - q`` exceeds 8 bits, or if their sums are scaled in other ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import resolved
from optdnn.ops.quantized import QuantizedConvAttrs, RequantizeAttrs
from optdnn.ops.requantize import LARGEST
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import is_filled, operand, sliced
from optdnn.runtime.reference.conv import conv
from optdnn.types import FP32, INT32, Array, is_float

ONES = 8
"""The number of columns of ones. One would be enough; eight keep rows aligned."""


@dataclass(frozen=True)
class _Weights:
    """Weights as int8, output channels first, and their zero points (float64, one per channel)."""

    stored: Array
    zero: Array

    @property
    def centered(self) -> Array:
        """The weights minus their zero points, float64."""
        return self.stored - self.zero.reshape(-1, *[1] * (self.stored.ndim - 1))


def _weights(graph: Graph, op: Op) -> _Weights | None:
    """The constant weights of ``op``; None if they are not constant, or are no matrix for MatMulInteger."""
    array, zero = graph.constant_value(op.inputs[1]), graph.constant_value(op.input(3))
    if array is None or (op.input(3) is not None and zero is None):
        return None
    if op.kind == "MatMulInteger":
        if array.ndim != 2:
            return None
        array = array.T
    points = np.zeros(1) if zero is None else zero.astype(np.float64).reshape(-1)
    if array.dtype == np.uint8:
        array, points = array.astype(np.int16) - 128, points - 128
    return _Weights(np.ascontiguousarray(array.astype(np.int8)), np.broadcast_to(points, len(array)))


def _reads_floats(graph: Graph, value: Value) -> bool:
    """Whether every reader of ``value`` first converts it to floats."""
    for user in graph.users(value):
        if user.kind == "Cast" and is_float(user.attrs.to):
            continue
        if user.kind != "Pointwise" or user.attrs.prologue:
            return False
        slots = {-1 if i == 0 else i for i, v in enumerate(user.inputs) if v == value}
        read = [s for s in user.attrs.epilogue if slots.intersection(s.args)]
        if not all(s.kind == "Cast" and is_float(s.attrs.to) for s in read):
            return False
    return True


def _refusal(graph: Graph, op: Op, w: _Weights | None) -> str | None:
    """The reason why ``op`` stays, or None."""
    if w is None:
        return "its weights are not constant, or have more than two axes"
    point = op.input(2)
    if point is not None and graph.type(point).dims not in ((), (1,)):
        return "its data have a zero point per row"
    if not op.outputs[0].type.is_static:
        return "its size is not fixed"
    if (graph.type(operand(op)).rank or 0) < 2 or w.stored.ndim > 4:
        return f"its weights have {w.stored.ndim} axes, its data {graph.type(operand(op)).rank}"
    if op.kind == "ConvInteger" and op.attrs.group > 1 and w.zero.any():
        return "its weights have zero points and groups"
    return None if _reads_floats(graph, op.value) else "its sums are read as integers"


@rule("integer_product", {"MatMulInteger", "ConvInteger"})
def integer_product(graph: Graph, op: Op) -> Match | Miss | None:
    """A product of 8-bit integers with constant weights whose sums are read as floats."""
    w = _weights(graph, op)
    reason = _refusal(graph, op, w)
    if reason is not None or w is None:
        return Miss(reason or "")

    def build(patch: Patch) -> Value:
        count, axis = len(w.stored), 1 if op.kind == "ConvInteger" else -1
        ones = np.ones((ONES, *w.stored.shape[1:]), np.int8)
        both = _sums(patch, op, np.concatenate([w.stored, ones]) if w.zero.any() else w.stored)
        total = sliced(patch, both, 0, count, axis) if w.zero.any() else both
        if op.input(2) is not None and not is_filled(graph.known(op.input(2)), 0):
            point = _float(patch, operand(op, 2))
            sums = patch.constant(_sums_of_weights(graph, op, w))
            total = patch.add("Sub", [total, patch.add("Mul", [point, sums])])
        if w.zero.any():
            shape = [-1, *[1] * (w.stored.ndim - 2)] if op.kind == "ConvInteger" else [-1]
            one = sliced(patch, both, count, count + 1, axis)
            zeros = patch.constant(w.zero.astype(np.float32).reshape(shape))
            total = patch.add("Sub", [total, patch.add("Mul", [one, zeros])])
        return patch.add("Cast", [total], CastAttrs(INT32), name=op.outputs[0].name)

    return Match((op,), build)


def _float(patch: Patch, value: Value) -> Value:
    return patch.add("Cast", [value], CastAttrs(FP32))


def _sums(patch: Patch, op: Op, stored: Array) -> Value:
    """Add a product that computes the exact sums of ``a w`` as fp32; padding counts as 0."""
    channel = np.stack([np.ones(len(stored)), np.zeros(len(stored))], 1).astype(np.float32)
    operands = [operand(op), patch.constant(stored), patch.constant(channel)]
    plain: dict[str, Any] = {"low": -LARGEST, "high": LARGEST, "output_dtype": FP32}
    if op.kind == "MatMulInteger":
        return patch.add("QuantizedMatMul", operands, RequantizeAttrs(**plain))
    a = resolved(op.attrs, patch.graph.type(operand(op)), patch.graph.type(operand(op, 1)))
    geometry = {k: getattr(a, k) for k in ("strides", "pads", "dilations", "group")}
    return patch.add("QuantizedConv", operands, QuantizedConvAttrs(**plain, **geometry))


def _sums_of_weights(graph: Graph, op: Op, w: _Weights) -> Array:
    """The factor of the data's zero point: the sums of the weights that lie inside the image, fp32."""
    sums: Array
    if op.kind == "MatMulInteger":
        sums = w.centered.sum(1)
        return sums.astype(np.float32)
    a = resolved(op.attrs, graph.type(operand(op)), graph.type(operand(op, 1)))
    if not any(a.pads):
        sums = w.centered.reshape(len(w.stored), -1).sum(1).reshape(-1, *[1] * (w.stored.ndim - 2))
        return sums.astype(np.float32)
    image = np.ones((1, *graph.type(operand(op)).static_shape[1:]))
    geometry = {k: getattr(a, k) for k in ("strides", "pads", "dilations", "group")}
    sums = conv(image, w.centered, **geometry)[0]
    return sums.astype(np.float32)
