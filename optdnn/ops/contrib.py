"""ONNX Runtime's own operators (domain com.microsoft), imported as compositions of ONNX's kinds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs
from optdnn.ops.contrib_attention import (
    attention,
    decoder_attention,
    multi_head_attention,
    quantized_attention,
    rotary_embedding,
)
from optdnn.ops.contrib_cache import group_query_attention
from optdnn.ops.contrib_fused import FUSED
from optdnn.ops.contrib_images import IMAGES
from optdnn.ops.contrib_quantized import QUANTIZED
from optdnn.ops.contrib_recurrent import RECURRENT
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.restate import MICROSOFT, as_standard, typed_as
from optdnn.types import FP32

# ---------------------------------------------------------------- products and activations


def _fused_matmul(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Each operand may have its last two axes swapped; with ``transBatch``, its first axis comes before the batch axes."""
    operands = []
    for ref, which in zip(needs(node, 0, 1), "AB", strict=True):
        rank = len(e.type(ref).dims)
        batched = rank > 2 and node.get("transBatch" + which, 0)
        order = [*range(1, rank - 1), 0, rank - 1] if batched else [*range(rank)]
        if node.get("trans" + which, 0) and rank > 1:
            order[-2:] = order[:-3:-1]
        if order != [*range(rank)]:
            ref = emit(e, "Transpose", ref, perm=tuple(order))
        operands.append(ref)
    y = emit(e, "MatMul", *operands)
    alpha = float(node.get("alpha", 1.0))
    return (y if alpha == 1.0 else emit(e, "Mul", y, typed_as(e, y, alpha)),)


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
        return emit(e, name, x, *(typed_as(e, x, p) for p in params))
    raise Unsupported(f"the activation {name} with {len(params)} parameters")


# ---------------------------------------------------------------- normalization


def _rms(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if len(node.outputs) > 1 and any(node.outputs[1:]):
        raise Unsupported("the output inv_std_var")
    axis, epsilon = int(node.get("axis", -1)), float(node.get("epsilon", 1e-5))
    return (emit(e, "RMSNormalization", *needs(node, 0, 1), axis=axis, epsilon=epsilon),)


def _statistics(e: Emit, x: Ref, layer: bool, epsilon: float) -> tuple[Ref, Ref]:
    """The mean of each row, and the reciprocal of its deviation (from 0 for a norm without means), in fp32."""
    wide, last = emit(e, "Cast", x, to=FP32), np.array([-1])
    mean = emit(e, "ReduceMean", wide, last, keepdims=True)
    apart = emit(e, "Sub", wide, mean) if layer else wide
    square = emit(e, "ReduceMean", emit(e, "Mul", apart, apart), last, keepdims=True)
    deviation = emit(e, "Sqrt", emit(e, "Add", square, np.array(epsilon, np.float32)))
    return mean, emit(e, "Reciprocal", deviation)


def _skip_norm(kind: str) -> FromOnnx:
    """Skip(Simplified)LayerNormalization: the norm of x + skip (+ bias); output 3 is this sum."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        x, skip, scale = needs(node, 0, 1, 2)
        layer = kind == "LayerNormalization"
        shift, bias = (node.input(3), node.input(4)) if layer else (None, node.input(3))
        total = emit(e, "Add", x, skip)
        if bias is not None:
            total = emit(e, "Add", total, bias)
        operands = [total, scale, *([] if shift is None else [shift])]
        epsilon = float(node.get("epsilon", 1e-12 if layer else 1e-5))
        y = emit(e, kind, *operands, axis=-1, epsilon=epsilon)
        statistics = _statistics(e, total, layer, epsilon) if any(node.outputs[1:3]) else (None, None)
        return (y, *statistics, total)[: len(node.outputs)]

    return from_onnx


IMPORTERS: dict[str, FromOnnx] = {
    MICROSOFT + "FusedMatMul": _fused_matmul,
    MICROSOFT + "TransposeMatMul": _fused_matmul,
    MICROSOFT + "FusedConv": _activated("Conv"),
    MICROSOFT + "FusedGemm": _activated("Gemm"),
    MICROSOFT + "BiasGelu": _bias_gelu("none"),
    MICROSOFT + "FastGelu": _bias_gelu("tanh"),
    MICROSOFT + "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _rms,
    MICROSOFT + "SimplifiedLayerNormalization": _rms,
    MICROSOFT + "SkipLayerNormalization": _skip_norm("LayerNormalization"),
    MICROSOFT + "SkipSimplifiedLayerNormalization": _skip_norm("RMSNormalization"),
    MICROSOFT + "Attention": attention,
    MICROSOFT + "QAttention": quantized_attention,
    MICROSOFT + "MultiHeadAttention": multi_head_attention,
    MICROSOFT + "DecoderMaskedMultiHeadAttention": decoder_attention,
    MICROSOFT + "GroupQueryAttention": group_query_attention,
    MICROSOFT + "RotaryEmbedding": rotary_embedding,
    **FUSED,
    **IMAGES,
    **QUANTIZED,
    **RECURRENT,
}
"""ONNX Runtime's operators, by name. (SimplifiedLayerNormalization is in ONNX's own domain in the files it writes.)"""
