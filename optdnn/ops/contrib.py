"""ONNX Runtime's own operators (domain com.microsoft) in the terms of ONNX's: imported as compositions of other kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, merge_heads, split_heads
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, require_rank, required
from optdnn.ops.contrib_cache import group_query_attention, unpacked
from optdnn.ops.contrib_quantized import QUANTIZED
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.index import SplitAttrs
from optdnn.ops.restate import MICROSOFT, as_standard, needs, refuse_attributes, refuse_operands
from optdnn.types import INT64


def _scalar(e: Emit, like: Ref, value: float) -> Any:
    return np.asarray(value, e.type(like).dtype)


# ---------------------------------------------------------------- products and activations


def _fused_matmul(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    refuse_attributes(node, "transBatchA", "transBatchB")
    operands = []
    for ref, flag in zip(needs(node, 0, 1), ("transA", "transB"), strict=True):
        rank = len(e.type(ref).dims)
        if node.get(flag, 0) and rank > 1:
            ref = emit(e, "Transpose", ref, perm=(*range(rank - 2), rank - 1, rank - 2))
        operands.append(ref)
    y = emit(e, "MatMul", *operands)
    alpha = float(node.get("alpha", 1.0))
    return (y if alpha == 1.0 else emit(e, "Mul", y, _scalar(e, y, alpha)),)


def _bias_gelu(approximate: str) -> FromOnnx:
    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        (x,) = needs(node, 0)
        bias = node.input(1)
        return (emit(e, "Gelu", x if bias is None else emit(e, "Add", x, bias), approximate=approximate),)

    return from_onnx


def _quick_gelu(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return (emit(e, "Swish", *needs(node, 0), alpha=float(node.get("alpha", 1.702))),)


def _activated(base: str) -> FromOnnx:
    """FusedConv and FusedGemm: the operator, an added tensor (FusedConv), and an activation."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        params = [float(v) for v in node.get("activation_params") or ()]
        names = ("activation_alpha", "activation_beta", "activation_gamma")
        params += [float(node.attrs[n]) for n in names if n in node.attrs]
        own = {k: v for k, v in node.attrs.items() if not k.startswith("activation")}
        (y,) = as_standard(base, node, e, inputs=node.inputs[:3], attrs=own)
        if node.input(3) is not None:
            y = emit(e, "Add", y, node.inputs[3])
        return (_activation(e, y, str(node.get("activation", "")), params),)

    return from_onnx


def _activation(e: Emit, x: Ref, name: str, params: Sequence[float]) -> Ref:
    if name == "":
        return x
    if name in ("Relu", "Tanh", "Sigmoid"):
        return emit(e, name, x)
    if name == "LeakyRelu":
        return emit(e, name, x, alpha=params[0] if params else 0.01)
    if name == "HardSigmoid" and len(params) == 2:
        return emit(e, name, x, alpha=params[0], beta=params[1])
    if name == "Clip" and len(params) == 2:
        return emit(e, name, x, *(_scalar(e, x, p) for p in params))
    raise Unsupported(f"the activation {name} with {len(params)} parameters")


# ---------------------------------------------------------------- normalization


def _rms(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if len(node.outputs) > 1 and any(node.outputs[1:]):
        raise Unsupported("the output inv_std_var")
    axis, epsilon = int(node.get("axis", -1)), float(node.get("epsilon", 1e-5))
    return (emit(e, "RMSNormalization", *needs(node, 0, 1), axis=axis, epsilon=epsilon),)


def _skip_norm(kind: str) -> FromOnnx:
    """Skip(Simplified)LayerNormalization: of x + skip (+ bias); output 3 is that sum."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        x, skip, scale = needs(node, 0, 1, 2)
        layer = kind == "LayerNormalization"
        shift, bias = (node.input(3), node.input(4)) if layer else (None, node.input(3))
        total = emit(e, "Add", x, skip)
        if bias is not None:
            total = emit(e, "Add", total, bias)
        if any(node.outputs[1:3]):
            raise Unsupported("the statistics outputs")
        operands = [total, scale, *([] if shift is None else [shift])]
        y = emit(e, kind, *operands, axis=-1, epsilon=float(node.get("epsilon", 1e-12 if layer else 1e-5)))
        return (y, None, None, total)[: len(node.outputs)]

    return from_onnx


# ---------------------------------------------------------------- attention


def _fill(node: NodeSpec) -> float:
    return float(node.get("mask_filter_value", -10000.0))


def _score_mask(node: NodeSpec, e: Emit, mask: Ref | None, bias: Ref | None, like: Ref, keys: Any) -> Ref | None:
    """What is added to the scores: ``mask`` (B) of lengths or (B, keys) of ones and zeros, and a bias (·, ·, rows, keys)."""
    added = None
    if mask is not None:
        t = e.type(mask)
        if len(t.dims) == 1:
            if not isinstance(keys, int):
                raise Unsupported("a mask of lengths with an unknown number of keys")
            column = emit(e, "Unsqueeze", emit(e, "Cast", mask, to=INT64), np.array([1]))
            keep = emit(e, "Less", np.arange(keys), column)
        elif len(t.dims) == 2:
            keep = emit(e, "Cast", mask, to=np.dtype(bool))
        else:
            raise Unsupported(f"a mask {t}")
        flags = emit(e, "Unsqueeze", keep, np.array([1, 2]))
        added = emit(e, "Where", flags, _scalar(e, like, 0.0), _scalar(e, like, _fill(node)))
    if bias is not None:
        added = bias if added is None else emit(e, "Add", added, bias)
    return added


def _attend(node: NodeSpec, e: Emit, q: Ref, k: Ref, v: Ref, mask: Ref | None, outputs: int = 1) -> Sequence[Ref]:
    scale = node.get("scale")
    attrs = AttentionAttrs(float(scale) if scale else None, bool(node.get("unidirectional", 0)))
    past = list(node.inputs[6:8]) if node.op_type == "MultiHeadAttention" else []
    y, *present = e.op("Attention", [q, k, v, mask, *past], attrs, outputs=outputs)
    return (merge_heads(e, y), *present)


def _attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    refuse_operands(node, past=4, past_sequence_length=6)
    refuse_attributes(node, "do_rotary")
    if any(node.outputs[1:]):
        raise Unsupported("the output present")
    x, weights = needs(node, 0, 1)
    heads = int(required(node, "num_heads"))
    packed = emit(e, "MatMul", x, weights)
    if node.input(2) is not None:
        packed = emit(e, "Add", packed, node.inputs[2])
    sizes = node.ints("qkv_hidden_sizes")
    if not sizes:
        width = e.type(weights).dims[1]
        if not isinstance(width, int) or width % 3:
            raise ShapeError(f"Attention weights {e.type(weights)} do not make query, key and value")
        sizes = (width // 3,) * 3
    parts = e.op("Split", [packed, np.asarray(sizes, np.int64)], SplitAttrs(axis=2), outputs=3)
    q, k, v = (split_heads(e, part, heads) for part in parts)
    mask = _score_mask(node, e, node.input(3), node.input(5), q, e.type(k).dims[2])
    return _attend(node, e, q, k, v, mask)


def _multi_head_attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if len(node.inputs) > 8 and any(v is not None for v in node.inputs[8:]):
        raise Unsupported("past_sequence_length and cache_indirection")
    if any(node.outputs[3:]):
        raise Unsupported("the output qk")
    heads = int(required(node, "num_heads"))
    if node.input(2) is None:
        if node.input(3) is not None:
            raise Unsupported("a bias beside packed query, key and value")
        q, kv = node.inputs[0], node.input(1)
        operands = unpacked(e, q, 3) if kv is None else [q, *unpacked(e, kv, 2)]
        if len(e.type(operands[0]).dims) == 3:
            operands[0] = split_heads(e, operands[0], heads)
    else:
        operands = needs(node, 0, 1, 2)
    if node.input(3) is not None:
        operands = _biased(node, e, operands)
    for i, name in enumerate(("query", "key", "value")):
        rank = len(e.type(operands[i]).dims)
        if rank == 3:
            operands[i] = split_heads(e, operands[i], heads)
        elif rank != 4 or (i == 0 and node.input(2) is not None):
            raise Unsupported(f"a {name} {e.type(operands[i])}")
    q, k, v = operands
    keys = e.type(k).dims[2]
    if node.input(6) is not None:
        keys = keys + e.type(node.inputs[6]).dims[2]
    mask = _score_mask(node, e, node.input(4), node.input(5), q, keys)
    return _attend(node, e, q, k, v, mask, len(node.outputs))


def _biased(node: NodeSpec, e: Emit, operands: list[Ref]) -> list[Ref]:
    """The bias of query, key and value lies in one vector."""
    widths = []
    for ref in operands:
        require_rank(e.type(ref), 3, "MultiHeadAttention query, key and value beside a bias")
        width = e.type(ref).dims[2]
        if not isinstance(width, int):
            raise Unsupported("a bias of an unknown width")
        widths.append(width)
    parts = e.op("Split", [node.inputs[3], np.asarray(widths, np.int64)], SplitAttrs(axis=0), outputs=3)
    return [emit(e, "Add", ref, part) for ref, part in zip(operands, parts, strict=True)]


def _rotary(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    refuse_attributes(node, "is_packed_batching")
    if float(node.get("scale", 1.0)) != 1.0:
        raise Unsupported(f"scale={node.get('scale')}")
    x, ids, cos, sin = needs(node, 0, 1, 2, 3)
    flat = len(e.type(x).dims) == 3
    size = int(node.get("rotary_embedding_dim", 0))
    if flat:
        width, half = e.type(x).dims[2], e.type(cos).dims[1]
        heads = int(node.get("num_heads", 0))
        if not heads and isinstance(width, int) and isinstance(half, int) and not size:
            heads = width // (2 * half)
        if heads < 1:
            raise ShapeError("RotaryEmbedding needs num_heads")
        x = split_heads(e, x, heads)
    if len(e.type(ids).dims) == 1:  # where the first token is
        length = e.type(x).dims[2]
        if not isinstance(length, int):
            raise Unsupported("one position for a sequence of unknown length")
        ids = emit(e, "Unsqueeze", emit(e, "Add", ids, np.arange(length)), np.array([0]))
    turns = [emit(e, "Gather", c, ids, axis=0) for c in (cos, sin)]
    (y,) = e.op("RotaryEmbedding", [x, *turns], RotaryAttrs(bool(node.get("interleaved", 0)), size))
    return (merge_heads(e, y) if flat else y,)


IMPORTERS: dict[str, FromOnnx] = {
    MICROSOFT + "FusedMatMul": _fused_matmul,
    MICROSOFT + "FusedConv": _activated("Conv"),
    MICROSOFT + "FusedGemm": _activated("Gemm"),
    MICROSOFT + "BiasGelu": _bias_gelu("none"),
    MICROSOFT + "FastGelu": _bias_gelu("tanh"),
    MICROSOFT + "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _rms,
    MICROSOFT + "SimplifiedLayerNormalization": _rms,
    MICROSOFT + "SkipLayerNormalization": _skip_norm("LayerNormalization"),
    MICROSOFT + "SkipSimplifiedLayerNormalization": _skip_norm("RMSNormalization"),
    MICROSOFT + "Attention": _attention,
    MICROSOFT + "MultiHeadAttention": _multi_head_attention,
    MICROSOFT + "GroupQueryAttention": group_query_attention,
    MICROSOFT + "RotaryEmbedding": _rotary,
    **QUANTIZED,
}
"""ONNX Runtime's operators, by name. (SimplifiedLayerNormalization is in ONNX's own domain in the files it writes.)"""
