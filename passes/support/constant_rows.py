"""Rows of matrices that are computed from constants, but are too large to become constants: masks of long sequences."""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.fused import plain_attrs
from optdnn.passes.support.facts import RESHAPES, operand, scalar, shape_of
from optdnn.passes.support.views import keeps_last_two
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

POINTWISE = frozenset(
    {
        *("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"),
        *("Abs", "Add", "Cast", "Identity", "Max", "Min", "Mul", "Neg", "Sub", "Where"),
    }
)


def constant_rows(graph: Graph, value: Value, first: int, stop: int) -> Array | None:
    """The rows from ``first`` to ``stop`` (along the last axis but one) of a value, broadcastable to it.

    None if the value depends on an input, or on an operator that is not known here."""
    array = graph.constant_value(value)
    if array is not None:
        return array[..., first:stop, :] if array.ndim > 1 and array.shape[-2] != 1 else array
    op = graph.op(value)
    if not op.outputs[value.port].type.is_static:
        return None
    dims = op.outputs[value.port].type.static_shape
    if op.kind in RESHAPES and keeps_last_two(shape_of(graph, operand(op)), dims) and math.prod(dims[:-2]) == 1:
        made = constant_rows(graph, operand(op), first, stop)
        return None if made is None else made.reshape(made.shape[-2:])
    if op.kind == "Expand":
        return constant_rows(graph, operand(op), first, stop)
    if op.kind == "Trilu":
        made, given = constant_rows(graph, operand(op), first, stop), op.input(1)
        diagonal = 0.0 if given is None else scalar(graph, given)
        if made is None or diagonal is None:
            return None
        above = np.arange(dims[-1]) - np.arange(first, stop)[:, None]
        return np.where(above >= diagonal if op.attrs.upper else above <= diagonal, made, np.zeros((), made.dtype))
    if op.kind not in POINTWISE:
        return None
    operands = [None if v is None else constant_rows(graph, v, first, stop) for v in op.inputs]
    if any(a is None for a in operands):
        return None
    (made,) = run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs), [op.outputs[0].type.dtype])
    return made
