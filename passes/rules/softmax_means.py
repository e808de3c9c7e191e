"""Means of constants, weighted by a softmax over channels, become products of rows.

Detectors compute the distances of a box's sides so (distribution focal loss: Li et al., 2020): a softmax over the channels of an
image, and a 1x1 convolution with one filter.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import channels_from_last, channels_to_last, operand, producer, shape_of
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis


@rule("softmax_mean", {"Conv"})
def softmax_mean(graph: Graph, op: Op) -> Match | Miss | None:
    """A 1x1 convolution of one filter, after a softmax of its channels: C is moved last, and the softmax's rows are multiplied."""
    softmax, weight = producer(graph, op.inputs[0], {"Softmax"}), graph.constant_value(operand(op, 1))
    shape = None if softmax is None else shape_of(graph, softmax.value)
    if softmax is None or shape is None or normalize_axis(softmax.attrs.axis, len(shape)) != 1:
        return None
    if weight is None or weight.shape != (1, shape[1], *(1,) * (len(shape) - 2)) or op.input(2) is not None:
        return Miss("it does not have one constant 1x1 filter without bias")
    if any(op.attrs.pads) or any(s != 1 for s in op.attrs.strides) or op.attrs.prologue or op.attrs.epilogue:
        return Miss("it has padding, strides or stages")
    if graph.sole_user(softmax.value) is None:
        return Miss("the softmax is read elsewhere")
    turn, back = channels_to_last(len(shape)), TransposeAttrs(channels_from_last(len(shape)))
    before = producer(graph, softmax.inputs[0], {"Transpose"}, alone=True)
    if before is not None:  # one Transpose, which may become the view of an image as tokens (PP-YOLOE)
        order = before.attrs.perm or tuple(reversed(range(len(shape))))
        turn = tuple(order[k] for k in turn)

    def build(patch: Patch) -> Value:
        source = operand(softmax if before is None else before)
        rows = transposed(patch, source, turn)
        rows = patch.add("Softmax", [rows], SoftmaxAttrs(-1), src=softmax.src)
        matrix = patch.constant(np.ascontiguousarray(weight.reshape(-1, 1)), "weight")
        return patch.add("Transpose", [patch.add("MatMul", [rows, matrix], MatMulAttrs())], back)

    return Match((op, softmax, *([] if before is None else [before])), build)
