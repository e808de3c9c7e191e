"""Operators that ONNX Runtime's tools fuse for transformers: embeddings, biases with activations, relative positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.attention import split_heads
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs, require_rank, required
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.index import SplitAttrs
from optdnn.ops.restate import MICROSOFT, as_standard, count, refuse_operands, standard, typed_as
from optdnn.types import BOOL, FP32, INT32, INT64

# ---------------------------------------------------------------- biases


def _bias_add(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, bias, skip = needs(node, 0, 1, 2)
    return (emit(e, "Add", emit(e, "Add", x, bias), skip),)


def _bias_dropout(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, bias = needs(node, 0, 1)
    total = emit(e, "Add", x, bias)
    training = node.input(4)
    if training is not None and (e.value(training) is None or np.any(e.value(training))):
        raise Unsupported("dropout of training")
    y = total if node.input(2) is None else emit(e, "Add", total, node.inputs[2])
    if len(node.outputs) > 1 and node.outputs[1]:
        raise Unsupported("the output mask")
    return (y,)


def _bias_split_gelu(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """The first half of the features times Gelu of the second half, after the bias."""
    total = emit(e, "Add", *needs(node, 0, 1))
    width = e.type(total).dims[-1]
    if not isinstance(width, int) or width % 2:
        raise ShapeError(f"BiasSplitGelu of {e.type(total)}: its last dimension must be an even number")
    half = np.array([width // 2, width // 2])
    value, gate = e.op("Split", [total, half], SplitAttrs(axis=-1), outputs=2)
    return (emit(e, "Mul", value, emit(e, "Gelu", gate, approximate="none")),)


def _gemm_fast_gelu(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    y = emit(e, "MatMul", *needs(node, 0, 1))
    if node.input(2) is not None:
        y = emit(e, "Add", y, node.inputs[2])
    return (emit(e, "Gelu", y, approximate="tanh"),)


# ---------------------------------------------------------------- embeddings


def _embedding(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """EmbedLayerNormalization: words, positions and segments, added and normalized; the length of each sequence."""
    ids, words, positions, gamma, beta = needs(node, 0, 2, 3, 5, 6)
    require_rank(e.type(ids), 2, "input_ids")
    length = e.type(ids).dims[1]
    given = node.input(8)
    if given is not None:
        rows = emit(e, "Gather", positions, given, axis=0)
    elif isinstance(length, int):
        rows = emit(e, "Gather", positions, np.arange(length), axis=0)
    else:
        ends = [np.array([k], np.int64) for k in (0, 1)]
        rows = emit(e, "Slice", positions, ends[0], emit(e, "Shape", ids, start=1, end=2), ends[0], ends[1])
    total = emit(e, "Add", emit(e, "Gather", words, ids, axis=0), rows)
    if node.input(1) is not None:
        (segments,) = needs(node, 4)
        total = emit(e, "Add", total, emit(e, "Gather", segments, node.inputs[1], axis=0))
    y = emit(e, "LayerNormalization", total, gamma, beta, axis=-1, epsilon=float(node.get("epsilon", 1e-12)))
    outputs = [y, None, total][: len(node.outputs)]
    if len(node.outputs) > 1 and node.outputs[1]:
        outputs[1] = _lengths(e, ids, node.input(7))
    return outputs


def _quantized_embedding(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """QEmbedLayerNormalization: tables, scale and bias are 8-bit integers. Operands 8 to 12: scales; 13 to 17: zero points."""
    floats: list[Ref | None] = list(node.inputs[:2])
    for k in range(5):
        table = node.input(2 + k)
        operands = [] if table is None else [table, *needs(node, 8 + k, 13 + k)]
        floats.append(
            as_standard("DequantizeLinear", node, e, inputs=tuple(operands), attrs={})[0] if operands else None
        )
    return _embedding(replace(node, inputs=(*floats, node.input(7))), e)


def _lengths(e: Emit, ids: Ref, mask: Ref | None) -> Ref:
    """The number of ones in each row of the mask; zeros without a mask, as in ONNX Runtime."""
    if mask is None:
        rows = emit(e, "Shape", ids, start=0, end=1)
        return emit(e, "Expand", np.zeros(1, np.int32), rows)
    ones = emit(e, "Cast", emit(e, "Cast", mask, to=BOOL), to=INT32)
    return emit(e, "ReduceSum", ones, np.array([1], np.int64), keepdims=False)


def _gated_positions(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """GatedRelativePositionBias: WavLM's bias of positions, times a gate that is computed from each query (Chen et al., 2022)."""
    x, x_bias, positions, weight, bias, eco = needs(node, 0, 1, 2, 3, 4, 5)
    refuse_operands(node, token_offset=6)
    q = split_heads(e, emit(e, "Add", x, x_bias), int(required(node, "num_heads")))
    width = e.type(weight).dims[1]
    if not isinstance(width, int) or width % 2:
        raise ShapeError(f"GatedRelativePositionBias weights {e.type(weight)} do not make two gates")
    both = emit(e, "Add", emit(e, "MatMul", q, weight), bias)
    both = emit(e, "Reshape", both, np.array([0, 0, 0, 2, width // 2], np.int64))
    both = emit(e, "Sigmoid", emit(e, "ReduceSum", both, np.array([-1]), keepdims=False))
    a, b = e.op("Split", [both, np.array([1, 1], np.int64)], SplitAttrs(axis=3), outputs=2)
    inner = emit(e, "Sub", emit(e, "Mul", b, eco), typed_as(e, x, 1.0))
    gate = emit(e, "Add", emit(e, "Mul", a, inner), typed_as(e, x, 2.0))
    return (emit(e, "Mul", gate, positions),)


def _relative_positions(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """RelativePositionBias: T5's rows of a table, selected by the logarithm of the distance from query to key."""
    table, queries, keys = needs(node, 0, 1, 2)
    buckets = e.type(table).dims[0]
    if not isinstance(buckets, int):
        raise Unsupported("a bias table of unknown height")
    both = bool(node.get("is_bidirectional", 0))
    half = buckets // 2 if both else buckets
    exact, reach = half // 2, int(node.get("max_distance", 128))
    if not 0 < exact < reach:
        raise Unsupported(f"{buckets} buckets of distances up to {reach}")
    rows = emit(e, "Unsqueeze", count(e, queries), np.array([1]))
    distance = emit(e, "Sub", count(e, keys), rows)
    far = emit(e, "Abs", distance) if both else emit(e, "Max", emit(e, "Neg", distance), np.array(0))
    near = emit(e, "Less", far, np.array(exact))
    share = emit(e, "Div", emit(e, "Cast", emit(e, "Max", far, np.array(1)), to=FP32), np.float32(exact))
    steps = emit(e, "Div", emit(e, "Log", share), np.float32(np.log(reach / exact)))
    large = emit(e, "Cast", emit(e, "Mul", steps, np.float32(half - exact)), to=INT64)
    large = emit(e, "Min", emit(e, "Add", large, np.array(exact)), np.array(half - 1))
    bucket = emit(e, "Where", near, far, large)
    if both:
        after = emit(e, "Cast", emit(e, "Greater", distance, np.array(0)), to=INT64)
        bucket = emit(e, "Add", bucket, emit(e, "Mul", after, np.array(half)))
    bias = emit(e, "Transpose", emit(e, "Gather", table, bucket, axis=0), perm=(2, 0, 1))
    return (emit(e, "Unsqueeze", bias, np.array([0])),)


# ---------------------------------------------------------------- small ones


def _expand_dims(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, axis = needs(node, 0, 1)
    known = e.value(axis)
    if known is None:
        raise Unsupported("an axis that is not constant")
    return (emit(e, "Unsqueeze", x, np.asarray(known, np.int64).reshape(1)),)


def _range(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Range as in ONNX, with a step of 1 if the third operand is absent."""
    start, limit = needs(node, 0, 1)
    step = e.const(np.ones((), e.type(start).dtype)) if node.input(2) is None else node.inputs[2]
    return as_standard("Range", node, e, inputs=(start, limit, step))


def _pad(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Pad as in ONNX; the pads may be a matrix of one row."""
    x, pads = needs(node, 0, 1)
    if len(e.type(pads).dims) == 2:
        pads = emit(e, "Reshape", pads, np.array([-1]))
    return as_standard("Pad", node, e, inputs=(x, pads, *node.inputs[2:]))


def _distances(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """CDist: the distance between each row of A and each row of B."""
    a, b = needs(node, 0, 1)
    for x in (a, b):
        require_rank(e.type(x), 2, "CDist operands")
    apart = emit(e, "Sub", emit(e, "Unsqueeze", a, np.array([1])), emit(e, "Unsqueeze", b, np.array([0])))
    total = emit(e, "ReduceSumSquare", apart, np.array([2], np.int64), keepdims=False)
    metric = node.get("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise Unsupported(f"metric={metric!r}")
    return (total if metric == "sqeuclidean" else emit(e, "Sqrt", total),)


def _complex_product(conjugated: bool) -> FromOnnx:
    """Products of pairs (real, imaginary) on the last axis."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        a, b = needs(node, 0, 1)
        (ar, ai), (br, bi) = (_parts(e, x) for x in (a, b))
        if conjugated:
            bi = emit(e, "Neg", bi)
        real = emit(e, "Sub", emit(e, "Mul", ar, br), emit(e, "Mul", ai, bi))
        imaginary = emit(e, "Add", emit(e, "Mul", ar, bi), emit(e, "Mul", ai, br))
        return (emit(e, "Concat", real, imaginary, axis=-1),)

    return from_onnx


def _parts(e: Emit, x: Ref) -> tuple[Any, ...]:
    return e.op("Split", [x, np.array([1, 1])], SplitAttrs(axis=-1), outputs=2)


FUSED: dict[str, FromOnnx] = {
    MICROSOFT + "BiasAdd": _bias_add,
    MICROSOFT + "BiasDropout": _bias_dropout,
    MICROSOFT + "BiasSplitGelu": _bias_split_gelu,
    MICROSOFT + "GemmFastGelu": _gemm_fast_gelu,
    MICROSOFT + "EmbedLayerNormalization": _embedding,
    MICROSOFT + "QEmbedLayerNormalization": _quantized_embedding,
    MICROSOFT + "GatedRelativePositionBias": _gated_positions,
    MICROSOFT + "RelativePositionBias": _relative_positions,
    MICROSOFT + "ExpandDims": _expand_dims,
    MICROSOFT + "CDist": _distances,
    MICROSOFT + "ComplexMul": _complex_product(False),
    MICROSOFT + "ComplexMulConj": _complex_product(True),
    MICROSOFT + "Trilu": standard("Trilu"),
    MICROSOFT + "Range": _range,
    MICROSOFT + "GatherND": standard("GatherND"),
    MICROSOFT + "Pad": _pad,
}
"""Operator -> import function."""
