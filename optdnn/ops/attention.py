"""Scaled dot-product attention, rotary position embedding, and the write into a key-value cache.

Heads are a separate axis, (batch, heads, length, size): 3-D operands are imported with a Reshape and a Transpose, which
passes can sink or cancel. Position ids become a Gather of the caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.dim import DimLike, bounds
from optdnn.errors import ShapeError
from optdnn.ops.attention_export import export_attention, export_rotary, export_tensor_scatter
from optdnn.ops.base import EXACT, MOVEMENT, PRODUCT_TOL, Attrs, Call, Cost, ProductAttrs, Result, promote_types
from optdnn.ops.checks import agree, agree_all, elements, emit, extent, per_element, require_rank, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, NodeSpec, Ref, read_attrs
from optdnn.ops.fused import product_flops
from optdnn.types import DType, TensorType, broadcast_dims, is_float, normalize_axis

MULTIPLIED = (0, 1, 2, 4, 5)
"""Slots of the operands that Attention multiplies: queries, keys and values, past keys and values."""
LENGTHS, SINKS = 6, 7
"""Slots of the number of keys of each sample, and of the sinks (H,), which ONNX's operator does not have: the softmax of each
head has one more logit, which no value belongs to (gpt-oss: OpenAI, 2025)."""


@dataclass(frozen=True)
class AttentionAttrs(ProductAttrs):
    """``scale``: None for 1 / sqrt(head size); ``softcap`` 0: none. Windows of -1 are unbounded.

    ``qk_matmul_output_mode``: output 3 holds the scores of the product (0), after softcap (1), after addition of the mask
    (2), or after softmax (3).
    """

    scale: float | None = None
    is_causal: bool = False
    softcap: float = 0.0
    softmax_precision: DType | None = None
    qk_matmul_output_mode: int = 0
    left_window_size: int = -1
    right_window_size: int = -1


@dataclass(frozen=True)
class RotaryAttrs(Attrs):
    """``rotary_embedding_dim`` 0: all of the head.

    ``own_angles``: each feature has its own angle. Otherwise each pair has one, as in ONNX's operator.
    ``parts``: the rotated features consist of this many equal parts. Pairs are formed within each part, and the angles of the
    parts follow one another.
    """

    interleaved: bool = False
    rotary_embedding_dim: int = 0
    own_angles: bool = False
    parts: int = 1


@dataclass(frozen=True)
class TensorScatterAttrs(Attrs):
    """``mode`` is "linear" or "circular"."""

    axis: int = -2
    mode: str = "linear"


# ---------------------------------------------------------------- inference


def infer_attention(call: Call) -> Result:
    a: AttentionAttrs = call.attrs
    q, k, v = (call.type(i) for i in range(3))
    promote_types([q, k], "Attention")
    for i, name in enumerate(("Q", "K", "V", "", "past_key", "past_value")):
        if name and call.has(i):
            require_rank(call.type(i), 4, f"Attention {name}")
            if not is_float(call.type(i).dtype):
                raise ShapeError(f"Attention {name} is {call.type(i)}; it must be floating-point")
    batch, heads, rows, size = q.dims
    shared, cols = k.dims[1:3]
    agree(k.dims[0], batch, "Attention: the batches of Q and K differ")
    agree(v.dims[0], batch, "Attention: the batches of Q and V differ")
    agree(k.dims[3], size, "Attention: the head sizes of Q and K differ")
    agree(v.dims[1], shared, "Attention: the heads of K and V differ")
    agree(v.dims[2], cols, "Attention: the lengths of K and V differ")
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise ShapeError(f"Attention: {shared} heads of K and V do not divide the {heads} of Q")
    if call.has(4) != call.has(5):
        raise ShapeError("Attention needs past_key and past_value, or neither")
    total = cols
    if call.has(4):
        if call.has(6):
            raise ShapeError(
                "Attention with past_key and nonpad_kv_seqlen; only one may give the positions of the keys"
            )
        past = call.type(4).dims[2]
        for t, own, name in ((call.type(4), k, "past_key"), (call.type(5), v, "past_value")):
            wanted = (*own.dims[:2], past, own.dims[3])
            agree_all(t.dims, wanted, f"Attention {name} is {t} with {own}")
        total = past + cols
    if call.has(3):
        _check_mask(call.type(3), (batch, heads, rows, total), q)
    if call.has(6):
        require_rank(call.type(6), 1, "Attention nonpad_kv_seqlen")
        agree(call.type(6).dims[0], batch, "Attention nonpad_kv_seqlen has one length per sample")
    if call.has(SINKS):
        sinks = call.type(SINKS)
        require_rank(sinks, 1, "Attention sinks")
        agree(sinks.dims[0], heads, "Attention sinks are one number per head")
        promote_types([q, sinks], "Attention")
    if not 0 <= a.qk_matmul_output_mode <= 3:
        raise ShapeError(f"Attention qk_matmul_output_mode is {a.qk_matmul_output_mode}; it must be 0, 1, 2 or 3")
    if min(a.left_window_size, a.right_window_size) < -1:
        raise ShapeError("Attention window sizes must be -1 or more")
    keys = k.with_shape((batch, shared, total, size))
    values = v.with_shape((batch, shared, total, v.dims[3]))
    y = q.with_shape((batch, heads, rows, v.dims[3]))
    return Result((y, keys, values, q.with_shape((batch, heads, rows, total)))[: call.n_outputs])


def _check_mask(mask: TensorType, scores: Sequence[DimLike], q: TensorType) -> None:
    if mask.dtype.kind != "b" and mask.dtype != q.dtype:
        raise ShapeError(f"Attention attn_mask is {mask}; it must be bool or of Q's type, {q}")
    if not 1 <= len(mask.dims) <= 4:
        raise ShapeError(f"Attention attn_mask is {mask}; it must have 1 to 4 dimensions")
    cols = scores[-1]
    if bounds(mask.dims[-1] - cols)[0] > 0:
        raise ShapeError(f"Attention attn_mask is {mask}, for {cols} keys")
    shown = ", ".join(map(str, scores))
    for d, s in zip(reversed(mask.dims[:-1]), reversed(scores[:-1]), strict=False):
        if d != 1:
            agree(d, s, f"Attention attn_mask {mask} does not broadcast to [{shown}]")


def _infer_rotary(call: Call) -> Result:
    x, cos, sin = (call.type(i) for i in range(3))
    require_rank(x, 4, "RotaryEmbedding input")
    promote_types((x, cos, sin), "RotaryEmbedding")
    size: DimLike = call.attrs.rotary_embedding_dim or x.dims[3]
    if isinstance(size, int) and (size % 2 or (isinstance(x.dims[3], int) and size > x.dims[3])):
        raise ShapeError(f"RotaryEmbedding of {size} entries of {x}; it must be an even number of them")
    if call.attrs.parts < 1 or (isinstance(size, int) and size % (2 * call.attrs.parts)):
        raise ShapeError(
            f"RotaryEmbedding of {size} entries in {call.attrs.parts} parts; each must be an even number of them"
        )
    for t, name in ((cos, "cos_cache"), (sin, "sin_cache")):
        require_rank(t, 3, f"RotaryEmbedding {name}")
        broadcast_dims(t.dims[:1], x.dims[:1])
        agree(t.dims[1], x.dims[2], f"RotaryEmbedding {name} {t} does not fit the length of {x}")
        if call.attrs.own_angles:
            agree(t.dims[2], size, f"RotaryEmbedding {name} {t} does not hold {size} angles")
        else:
            agree(t.dims[2] * 2, size, f"RotaryEmbedding {name} {t} does not hold half of {size} angles")
    return Result((x,))


def _infer_tensor_scatter(call: Call) -> Result:
    cache, update = call.type(0), call.type(1)
    promote_types((cache, update), "TensorScatter")
    require_rank(update, len(cache.dims), "TensorScatter update")
    axis = normalize_axis(call.attrs.axis, len(cache.dims), "TensorScatter axis")
    if axis == 0:
        raise ShapeError("TensorScatter axis is the batch's")
    if call.attrs.mode not in ("linear", "circular"):
        raise ShapeError(f"TensorScatter mode is {call.attrs.mode!r}; it must be linear or circular")
    for i, (d, c) in enumerate(zip(update.dims, cache.dims, strict=True)):
        if i != axis:
            agree(d, c, f"TensorScatter update {update} does not fit the cache {cache}")
        elif bounds(d - c)[0] > 0:
            raise ShapeError(f"TensorScatter update {update} is longer than the cache {cache}")
    if call.has(2):
        require_rank(call.type(2), 1, "TensorScatter write_indices")
        agree(call.type(2).dims[0], cache.dims[0], "TensorScatter write_indices has one entry per sample")
    return Result((cache,))


# ---------------------------------------------------------------- import


def split_heads(e: Emit, x: Ref, heads: int) -> Ref:
    """(batch, length, heads * size) to (batch, heads, length, size)."""
    shape = e.type(x).shape
    whole = shape[-1] if shape else None
    size = whole // heads if isinstance(whole, int) else -1  # no size can be inferred in an empty batch
    return emit(e, "Transpose", emit(e, "Reshape", x, np.array([0, 0, heads, size])), perm=(0, 2, 1, 3))


def merge_heads(e: Emit, x: Ref) -> Ref:
    """(batch, heads, length, size) to (batch, length, heads * size)."""
    shape = e.type(x).shape
    inner = [shape[1], shape[3]] if shape else []
    size = math.prod(d for d in inner if isinstance(d, int)) if inner and all(isinstance(d, int) for d in inner) else -1
    return emit(e, "Reshape", emit(e, "Transpose", x, perm=(0, 2, 1, 3)), np.array([0, 0, size]))


def _import_attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    given = {k: v for k, v in node.attrs.items() if k != "softmax_precision" or v}  # 0: none
    attrs = read_attrs(AttentionAttrs)(replace(node, attrs=given))
    operands = list(node.inputs)
    if len(operands) > SINKS:
        raise ShapeError(f"Attention has {len(operands)} operands; ONNX knows {SINKS}")
    ranks = {len(e.type(r).dims) for r in operands[:3]}
    n = len(node.outputs)
    if ranks == {3}:
        own, shared = int(required(node, "q_num_heads")), int(required(node, "kv_num_heads"))
        for i, heads in enumerate((own, shared, shared)):
            width = e.type(operands[i]).dims[2]
            if heads < 1 or (isinstance(width, int) and width % heads):
                raise ShapeError(f"Attention: {heads} heads do not divide the width {width} of operand {i}")
            operands[i] = split_heads(e, operands[i], heads)
        y, *rest = e.op("Attention", operands, attrs, outputs=n)
        return (merge_heads(e, y), *rest)
    if ranks != {4}:
        raise ShapeError("Attention needs Q, K and V of 3 dimensions or of 4")
    return e.op("Attention", operands, attrs, outputs=n)


def _import_rotary(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, cos, sin = node.inputs[:3]
    ids = node.input(3)
    if ids is not None:
        cos, sin = (emit(e, "Gather", c, ids, axis=0) for c in (cos, sin))
    flat = len(e.type(x).dims) == 3
    if flat:
        heads = int(node.get("num_heads", 0))
        if heads < 1:
            raise ShapeError("RotaryEmbedding of 3 dimensions needs the attribute num_heads")
        x = split_heads(e, x, heads)
    (y,) = e.op("RotaryEmbedding", [x, cos, sin], read_attrs(RotaryAttrs)(node))
    return (merge_heads(e, y) if flat else y,)


# ---------------------------------------------------------------- definitions


def _cost_attention(call: Call, result: Result) -> Cost:
    """The products, and six operations per score: scale, mask and softmax."""
    columns = extent(call.type(1).dims[2]) + (extent(call.type(4).dims[2]) if call.has(4) else 0.0)
    return Cost(product_flops(call, result) + 6 * extent(*call.type(0).dims[:3]) * columns)


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "Attention",
        infer_attention,
        AttentionAttrs,
        _import_attention,
        export_attention,
        cost=_cost_attention,
        tol=PRODUCT_TOL,
    ),
    OpDef("RotaryEmbedding", _infer_rotary, RotaryAttrs, _import_rotary, export_rotary, cost=per_element(3)),
    OpDef(
        "TensorScatter",
        _infer_tensor_scatter,
        TensorScatterAttrs,
        to_onnx=export_tensor_scatter,
        cost=lambda call, result: Cost(elements(call.type(1))),
        tol=EXACT,
        traits=MOVEMENT,
    ),
)
