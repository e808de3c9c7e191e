"""Products of rows with a constant matrix, and the vectors that are added to them, as passes take them apart."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.facts import operand
from optdnn.types import Array

PRODUCTS = frozenset({"MatMul", "Gemm"})


def output_axis(op: Op) -> int:
    """The axis along which output channels lie in the weights of a product or convolution; 1 minus it: input channels."""
    return 0 if op.kind in ("Conv", "PackedMatMul") or (op.kind == "Gemm" and op.attrs.transB) else 1


def added_vector(graph: Graph, op: Op) -> tuple[Value, Array] | None:
    """The operand of an addition whose other one is constant along all axes but the last: (operand, that vector)."""
    for i in (0, 1):
        value, array = operand(op, i), graph.constant_value(op.inputs[1 - i])
        if array is None or graph.type(value).shape != op.outputs[0].type.shape:
            continue
        if array.size == (array.shape[-1] if array.ndim else 1):
            return value, array.reshape(-1)
    return None


def constant_matrix(graph: Graph, op: Op) -> tuple[Value | Array, Array | None] | None:
    """The constant matrix and vector of a product without stages."""
    weight, a = operand(op, 1), op.attrs
    array, bias = graph.constant_value(weight), graph.constant_value(op.input(2))
    if array is None or array.ndim != 2 or a.prologue or a.epilogue:
        return None
    if op.kind == "MatMul":
        return weight, None
    if a.transA or a.alpha != 1.0:
        return None
    if op.input(2) is not None:
        if bias is None or a.beta != 1.0 or bias.size != (bias.shape[-1] if bias.ndim else 1):
            return None
        bias = bias.reshape(-1)
    return (np.ascontiguousarray(array.T) if a.transB else weight), bias
