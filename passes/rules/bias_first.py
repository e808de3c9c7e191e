"""A bias that is added after a residual is added before it, so that the kernel of the product adds it.

ONNX Runtime's optimizer moves the bias of a product into SkipLayerNormalization, which adds it after the residual.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.linear import LINEAR
from optdnn.types import Array, is_float


@rule("bias_first", {"Add"})
def bias_first(graph: Graph, op: Op) -> Match | Miss | None:
    """``(p + r) + bias`` becomes ``(p + bias) + r`` for a product or convolution p and a constant for each of its columns."""
    bias = graph.constant_value(op.inputs[1])
    total = producer(graph, op.inputs[0], {"Add"})
    if bias is None or total is None or not is_float(op.outputs[0].type.dtype):
        return None
    for p, r in (total.inputs, total.inputs[::-1]):
        anchor = None if p is None or r is None else producer(graph, p, LINEAR, alone=True)
        if p is None or r is None or anchor is None or graph.constant_value(r) is not None:
            continue
        if graph.type(p).shape != op.outputs[0].type.shape or not _per_column(anchor, bias):
            return None
        if graph.sole_user(total.value) is None:
            return Miss(f"the result of {total.name} is used {graph.use_count(total.value)} times")
        return Match((op, total), partial(_biased, p, r, operand(op, 1)))
    return None


def _biased(p: Value, r: Value, bias: Value, patch: Patch) -> Value:
    return patch.add("Add", [patch.add("Add", [p, bias]), r])


def _per_column(anchor: Op, bias: Array) -> bool:
    """Whether a constant has one number for each column of a product, or for each channel of a convolution."""
    rank = anchor.outputs[0].type.rank or 0
    axis = -1 if anchor.kind in ("MatMul", "Gemm") else 1 - rank
    shape = bias.shape if bias.ndim >= -axis else ()
    return bias.size > 1 and bool(shape) and shape[axis] == bias.size == anchor.outputs[0].type.dims[axis]
