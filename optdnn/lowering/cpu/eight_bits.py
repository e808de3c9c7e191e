"""Products of 8-bit integers on processors that do not sum them exactly.

x86 processors without VNNI or AMX multiply unsigned by signed bytes with an instruction that adds two neighboring products in 16
bits and saturates (``vpmaddubsw``). OpenVINO and ONNX Runtime use it, so large weights give wrong results there. On such a
processor the libraries get these weights as floats. They do not run operators whose weights cannot be changed that way.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.fused import plain_attrs
from optdnn.passes.integers import WEIGHTED, holds_integers
from optdnn.passes.support.facts import operand
from optdnn.passes.support.quantize import SMALL_WEIGHT
from optdnn.passes.support.quantized_values import is_dequantized
from optdnn.runtime.file.requires import bytes_saturate
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import INT8, UINT8, Array

WEIGHTS = {"MatMulInteger": 1, "ConvInteger": 1, "QLinearConv": 3, "QLinearMatMul": 3}
"""Kinds that multiply integers -> the operand slot of their weights."""
REASON = "this processor has no VNNI: sums of its products of 8-bit integers saturate"


def saturating(graph: Graph) -> dict[int, str]:
    """Op id -> reason, for each op with 8-bit products that a library may sum wrongly on this processor."""
    found: dict[int, str] = {}
    for op in graph.order():
        slot = WEIGHTS.get(op.kind)
        weights = None if slot is None else op.input(slot)
        if op.kind in WEIGHTED and all(is_dequantized(graph, v) for v in op.inputs[:2]):
            weights = graph.op(operand(op, 1)).input(0)
        if _is_large(graph, weights):
            found[op.id] = REASON
    return found if found and bytes_saturate() else {}


def with_float_weights(graph: Graph) -> Graph:
    """A copy of the graph with large dequantized weights as floats; on a processor that sums exactly, the graph itself."""
    found = [
        op for op in graph.of_kind("DequantizeLinear") if holds_integers(graph, op) and _is_large(graph, op.inputs[0])
    ]
    if not found or not bytes_saturate():
        return graph
    graph = graph.copy()
    for op in (graph.op(op.id) for op in found):
        operands = [graph.constant_value(v) for v in op.inputs]
        out = op.outputs[0]
        (floats,) = run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs), [out.type.dtype])
        graph.replace_uses(op.value, graph.add_constant(floats, graph.fresh_name(out.name), op.src))
        graph.remove_dead([op.id])
    return graph


def _is_large(graph: Graph, value: Value | None) -> bool:
    """Whether 8-bit integers may be beyond :data:`~optdnn.passes.support.quantize.SMALL_WEIGHT`.

    For unsigned integers, the distance from 128 counts, because the libraries shift them by 128."""
    if value is None or graph.type(value).dtype not in (INT8, UINT8):
        return False
    array: Array | None = graph.constant_value(value)
    if array is None:
        return True
    shift = 128 if array.dtype == UINT8 else 0
    return bool(array.size) and int(np.abs(array.astype(np.int32) - shift).max()) > SMALL_WEIGHT
