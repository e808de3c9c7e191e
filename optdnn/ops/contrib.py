"""ONNX Runtime's own operators (domain com.microsoft) in the terms of ONNX's: imported as compositions of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, merge_heads, split_heads
from optdnn.ops.base import Emit, FromOnnx, NodeSpec, Ref, Unsupported
from optdnn.ops.checks import emit, require_rank, required
from optdnn.ops.contrib_cache import group_query_attention, unpacked
from optdnn.types import FP32, INT64, UINT8

_MODERN = 21
"""The ONNX opset in whose terms nodes of this domain are restated."""


def _needs(node: NodeSpec, *slots: int) -> list[Ref]:
    missing = [i for i in slots if node.input(i) is None]
    if missing:
        raise ShapeError(f"{node.op_type} needs operand {missing[0]}")
    return [node.inputs[i] for i in slots]


def _refuse_operands(node: NodeSpec, **names: int) -> None:
    for name, i in names.items():
        if node.input(i) is not None:
            raise Unsupported(f"the operand {name}")


def _refuse_attributes(node: NodeSpec, *names: str) -> None:
    for name in names:
        if node.get(name, 0):
            raise Unsupported(f"{name}={node.get(name)}")


def _scalar(e: Emit, like: Ref, value: float) -> Any:
    return np.asarray(value, e.type(like).dtype)


# ---------------------------------------------------------------- products and activations


def _fused_matmul(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    _refuse_attributes(node, "transBatchA", "transBatchB")
    operands = []
    for ref, flag in zip(_needs(node, 0, 1), ("transA", "transB"), strict=True):
        rank = len(e.type(ref).dims)
        if node.get(flag, 0) and rank > 1:
            ref = emit(e, "Transpose", ref, perm=(*range(rank - 2), rank - 1, rank - 2))
        operands.append(ref)
    y = emit(e, "MatMul", *operands)
    alpha = float(node.get("alpha", 1.0))
    return (y if alpha == 1.0 else emit(e, "Mul", y, _scalar(e, y, alpha)),)


def _bias_gelu(approximate: str) -> FromOnnx:
    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        (x,) = _needs(node, 0)
        bias = node.input(1)
        return (emit(e, "Gelu", x if bias is None else emit(e, "Add", x, bias), approximate=approximate),)

    return from_onnx


def _quick_gelu(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return (emit(e, "Swish", *_needs(node, 0), alpha=float(node.get("alpha", 1.702))),)


def _activated(base: str) -> FromOnnx:
    """FusedConv and FusedGemm: the operator, an added tensor (FusedConv), and an activation."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        from optdnn.ops.table import IMPORTERS

        params = [float(v) for v in node.get("activation_params") or ()]
        names = ("activation_alpha", "activation_beta", "activation_gamma")
        params += [float(node.attrs[n]) for n in names if n in node.attrs]
        own = {k: v for k, v in node.attrs.items() if not k.startswith("activation")}
        plain = replace(node, op_type=base, domain="", opset=_MODERN, inputs=node.inputs[:3], attrs=own)
        (y,) = IMPORTERS[base](plain, e)
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
    return (emit(e, "RMSNormalization", *_needs(node, 0, 1), axis=axis, epsilon=epsilon),)


def _skip_norm(kind: str) -> FromOnnx:
    """Skip(Simplified)LayerNormalization: of x + skip (+ bias); output 3 is that sum."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        x, skip, scale = _needs(node, 0, 1, 2)
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
    _refuse_operands(node, past=4, past_sequence_length=6)
    _refuse_attributes(node, "do_rotary")
    if any(node.outputs[1:]):
        raise Unsupported("the output present")
    x, weights = _needs(node, 0, 1)
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
    parts = e.op("Split", [packed, np.asarray(sizes, np.int64)], _attrs("Split", axis=2), outputs=3)
    q, k, v = (split_heads(e, part, heads) for part in parts)
    mask = _score_mask(node, e, node.input(3), node.input(5), q, e.type(k).dims[2])
    return _attend(node, e, q, k, v, mask)


def _attrs(kind: str, **values: Any) -> Any:
    from optdnn.ops.table import OPDEFS

    return OPDEFS[kind].attrs(**values)


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
        operands = _needs(node, 0, 1, 2)
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
    parts = e.op("Split", [node.inputs[3], np.asarray(widths, np.int64)], _attrs("Split", axis=0), outputs=3)
    return [emit(e, "Add", ref, part) for ref, part in zip(operands, parts, strict=True)]


def _rotary(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    _refuse_attributes(node, "is_packed_batching")
    if float(node.get("scale", 1.0)) != 1.0:
        raise Unsupported(f"scale={node.get('scale')}")
    x, ids, cos, sin = _needs(node, 0, 1, 2, 3)
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


# ---------------------------------------------------------------- quantized


def _standard(name: str) -> FromOnnx:
    """The ONNX operator of the same name."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        from optdnn.ops.table import IMPORTERS

        return IMPORTERS[name](replace(node, domain="", opset=_MODERN), e)

    return from_onnx


def _dequantized(e: Emit, x: Ref, scale: Ref, zero: Ref | None) -> Ref:
    return emit(e, "DequantizeLinear", x, scale, zero, axis=0)


def _quantized(e: Emit, y: Ref, scale: Ref, zero: Ref | None, like: Ref) -> Ref:
    dtype = e.type(like).dtype if zero is None else e.type(zero).dtype
    return emit(e, "QuantizeLinear", y, scale, zero, axis=0, output_dtype=dtype)


def _qlinear(count: int, write: Callable[[NodeSpec, Emit, list[Ref]], Ref]) -> FromOnnx:
    """Operands come as (value, scale, zero point); the operator runs on floats between dequantization and quantization."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        floats = []
        for i in range(count):
            x, scale = _needs(node, 3 * i, 3 * i + 1)
            floats.append(_dequantized(e, x, scale, node.input(3 * i + 2)))
        (scale,) = _needs(node, 3 * count)
        y = write(node, e, floats)
        return (_quantized(e, y, scale, node.input(3 * count + 1), node.inputs[0]),)

    return from_onnx


def _binary(kind: str) -> FromOnnx:
    return _qlinear(2, lambda node, e, xs: emit(e, kind, *xs))


def _pooled(node: NodeSpec, e: Emit, xs: list[Ref]) -> Ref:
    _refuse_attributes(node, "channels_last")
    return emit(e, "GlobalAveragePool", *xs)


def _average_pooled(node: NodeSpec, e: Emit, xs: list[Ref]) -> Ref:
    from optdnn.ops.table import IMPORTERS

    _refuse_attributes(node, "channels_last")
    own = {k: v for k, v in node.attrs.items() if k != "channels_last"}
    plain = replace(node, op_type="AveragePool", domain="", opset=_MODERN, inputs=tuple(xs), attrs=own)
    return IMPORTERS["AveragePool"](plain, e)[0]


def _softmaxed(node: NodeSpec, e: Emit, xs: list[Ref]) -> Ref:
    from optdnn.ops.table import IMPORTERS

    plain = replace(node, op_type="Softmax", domain="", opset=int(required(node, "opset")), inputs=tuple(xs), attrs={
        k: v for k, v in node.attrs.items() if k == "axis"})  # fmt: skip
    return IMPORTERS["Softmax"](plain, e)[0]


def _quantized_gemm(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """``alpha * a_scale * b_scale * (A' B' + C)`` with int32 C, quantized where there is a scale for that."""
    a, a_scale, b, b_scale = _needs(node, 0, 1, 3, 4)
    trans_a, trans_b = bool(node.get("transA", 0)), bool(node.get("transB", 0))
    alpha, c = float(node.get("alpha", 1.0)), node.input(6)
    left = _dequantized(e, a, a_scale, node.input(2))
    rank_axis = 0 if trans_b else 1
    per_column = e.type(b_scale).dims not in ((), (1,))
    right = emit(e, "DequantizeLinear", b, b_scale, node.input(5), axis=rank_axis if per_column else 0)
    bias = None
    if c is not None:
        one = emit(e, "Reshape", a_scale, np.array([], np.int64)) if e.type(a_scale).dims else a_scale
        other = (
            b_scale if per_column or not e.type(b_scale).dims else emit(e, "Reshape", b_scale, np.array([], np.int64))
        )
        step = emit(e, "Mul", emit(e, "Mul", one, other), np.asarray(alpha, np.float32))
        bias = emit(e, "DequantizeLinear", c, step, None, axis=max(len(e.type(c).dims) - 1, 0))
    y = emit(e, "Gemm", left, right, bias, alpha=alpha, transA=trans_a, transB=trans_b)
    y_scale = node.input(7)
    return (y if y_scale is None else _quantized(e, y, y_scale, node.input(8), a),)


def _qlinear_concat(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    scale, zero, *rest = node.inputs
    if len(rest) % 3 or not rest:
        raise ShapeError(f"QLinearConcat has {len(rest)} operands after its scale and zero point")
    floats = [_dequantized(e, *rest[i : i + 3]) for i in range(0, len(rest), 3)]
    y = emit(e, "Concat", *floats, axis=int(required(node, "axis")))
    return (_quantized(e, y, scale, zero, rest[0]),)


def _scaled_product(e: Emit, a: Ref, b: Ref, zeros: Sequence[Ref | None], scale: Ref, bias: Ref | None) -> Ref:
    y = emit(e, "Mul", emit(e, "Cast", emit(e, "MatMulInteger", a, b, *zeros), to=FP32), scale)
    return y if bias is None else emit(e, "Add", y, bias)


def _dynamic_quantize_matmul(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, b, b_scale = _needs(node, 0, 1, 2)
    a, a_scale, a_zero = e.op("DynamicQuantizeLinear", [x], None, outputs=3)
    return (_scaled_product(e, a, b, [a_zero, node.input(3)], emit(e, "Mul", a_scale, b_scale), node.input(4)),)


def _matmul_integer_to_float(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    a, b, a_scale, b_scale = _needs(node, 0, 1, 2, 3)
    scale = emit(e, "Mul", a_scale, b_scale)
    return (_scaled_product(e, a, b, [node.input(4), node.input(5)], scale, node.input(6)),)


def _unpacked(packed: Any, bits: int, count: int) -> Any:
    """The last axis of bytes as numbers of ``bits`` bits, the low ones first, cut to ``count``."""
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    numbers = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:-1], -1)[..., :count]


def _matmul_n_bits(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Weights of 2, 4 or 8 bits in blocks of K, each with a scale: one byte each, dequantized by blocks."""
    _refuse_operands(node, g_idx=4)
    x, packed, scales = _needs(node, 0, 1, 2)
    k, n, block = (int(required(node, name)) for name in ("K", "N", "block_size"))
    bits = int(node.get("bits", 4))
    if bits not in (2, 4, 8):
        raise Unsupported(f"weights of {bits} bits")
    raw, zero = e.value(packed), node.input(3)
    if raw is None:
        raise Unsupported("weights that are not constant")
    blocks = -(-k // block)
    weights = _unpacked(raw.reshape(n, -1), bits, blocks * block)[:, :k]
    zeros: Any = np.full((n, blocks), 1 << (bits - 1), np.uint8)
    shape = np.array([n, blocks])
    scales = emit(e, "Reshape", scales, shape)
    if zero is not None and e.type(zero).dtype == UINT8:
        given = e.value(zero)
        if given is None:
            raise Unsupported("zero points that are not constant")
        zeros = _unpacked(given.reshape(n, -1), bits, blocks)
    elif zero is not None:
        raise Unsupported("zero points that are not packed")
    w = emit(
        e,
        "DequantizeLinear",
        np.ascontiguousarray(weights),
        scales,
        np.ascontiguousarray(zeros),
        axis=1,
        block_size=block,
    )
    y = emit(e, "MatMul", x, emit(e, "Transpose", w, perm=(1, 0)))
    return (y if node.input(5) is None else emit(e, "Add", y, node.inputs[5]),)


_M = "com.microsoft."
IMPORTERS: dict[str, FromOnnx] = {
    _M + "FusedMatMul": _fused_matmul,
    _M + "FusedConv": _activated("Conv"),
    _M + "FusedGemm": _activated("Gemm"),
    _M + "BiasGelu": _bias_gelu("none"),
    _M + "FastGelu": _bias_gelu("tanh"),
    _M + "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _rms,
    _M + "SimplifiedLayerNormalization": _rms,
    _M + "SkipLayerNormalization": _skip_norm("LayerNormalization"),
    _M + "SkipSimplifiedLayerNormalization": _skip_norm("RMSNormalization"),
    _M + "Attention": _attention,
    _M + "MultiHeadAttention": _multi_head_attention,
    _M + "GroupQueryAttention": group_query_attention,
    _M + "RotaryEmbedding": _rotary,
    _M + "QuantizeLinear": _standard("QuantizeLinear"),
    _M + "DequantizeLinear": _standard("DequantizeLinear"),
    _M + "QLinearAdd": _binary("Add"),
    _M + "QLinearMul": _binary("Mul"),
    _M + "QLinearSigmoid": _qlinear(1, lambda node, e, xs: emit(e, "Sigmoid", *xs)),
    _M + "QLinearSoftmax": _qlinear(1, _softmaxed),
    _M + "QGemm": _quantized_gemm,
    _M + "QLinearLeakyRelu": _qlinear(
        1, lambda node, e, xs: emit(e, "LeakyRelu", *xs, alpha=float(node.get("alpha", 0.01)))
    ),
    _M + "QLinearGlobalAveragePool": _qlinear(1, _pooled),
    _M + "QLinearAveragePool": _qlinear(1, _average_pooled),
    _M + "QLinearConcat": _qlinear_concat,
    _M + "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    _M + "MatMulIntegerToFloat": _matmul_integer_to_float,
    _M + "MatMulNBits": _matmul_n_bits,
}
"""ONNX Runtime's operators, by name. (SimplifiedLayerNormalization stands in ONNX's own domain in the files it writes.)"""
