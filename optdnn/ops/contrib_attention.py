"""ONNX Runtime's attention operators as ONNX's: Attention, QAttention, MultiHeadAttention, DecoderMaskedMultiHeadAttention,
RotaryEmbedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, TensorScatterAttrs, merge_heads, split_heads
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs, require_rank, required
from optdnn.ops.contrib_cache import unpacked
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.ops.index import SplitAttrs
from optdnn.ops.restate import count, refuse_attributes, refuse_operands, typed_as
from optdnn.types import FP32, INT64


def _fill(node: NodeSpec) -> float:
    return float(node.get("mask_filter_value", -10000.0))


def _score_mask(
    node: NodeSpec, e: Emit, mask: Ref | None, bias: Ref | None, like: Ref, keys: Sequence[Ref | None]
) -> Ref | None:
    """The addend of the scores: a mask and a bias (·, ·, rows, keys). ``keys``: tensors (B, H, keys, size), one after the other.

    The mask holds the length of each sequence (B), also with the first position after these lengths (2 B), or ones and zeros:
    (B, keys) or (B, rows, keys).
    """
    added = None
    if mask is not None:
        t = e.type(mask)
        if len(t.dims) == 1:
            keep = _between(e, mask, e.type(like).dims[0], _numbers(e, keys))
        elif len(t.dims) == 2 or len(t.dims) == 3:
            keep = emit(e, "Cast", mask, to=np.dtype(bool))
        else:
            raise Unsupported(f"a mask {t}")
        flags = emit(e, "Unsqueeze", keep, np.array([1] if len(t.dims) == 3 else [1, 2]))
        added = emit(e, "Where", flags, typed_as(e, like, 0.0), typed_as(e, like, _fill(node)))
    if bias is not None:
        added = bias if added is None else emit(e, "Add", added, bias)
    return added


def _numbers(e: Emit, keys: Sequence[Ref | None]) -> Ref:
    """The positions of all keys: 0, 1, ..."""
    lengths = [emit(e, "Shape", k, start=2, end=3) for k in keys if k is not None]
    return count(e, lengths[0] if len(lengths) == 1 else emit(e, "Add", *lengths))


def _between(e: Emit, mask: Ref, batch: Any, at: Ref) -> Ref:
    """Whether each key, of position ``at``, is before the end of its sequence, and not before its first position if the mask has
    these as well."""
    t, ends = e.type(mask), emit(e, "Cast", mask, to=INT64)
    twice = isinstance(batch, int) and t.dims[0] == 2 * batch
    if isinstance(t.dims[0] - batch, int) and t.dims[0] != batch and not twice:
        raise Unsupported(f"a mask {t}, which has more than the bounds of each sequence")
    begins = None
    if twice:
        ends, begins = e.op("Split", [ends, np.array([batch, batch], np.int64)], SplitAttrs(axis=0), outputs=2)
    keep = emit(e, "Less", at, emit(e, "Unsqueeze", ends, np.array([1])))
    if begins is None:
        return keep
    return emit(e, "And", keep, emit(e, "LessOrEqual", emit(e, "Unsqueeze", begins, np.array([1])), at))


def _attend(
    node: NodeSpec, e: Emit, heads: Sequence[Ref], mask: Ref | None, past: Sequence[Ref | None], outputs: int
) -> Sequence[Ref]:
    scale, causal = node.get("scale"), bool(node.get("unidirectional", 0))
    if causal and e.type(heads[0]).dims[2] != e.type(heads[1]).dims[2]:
        causal, mask = False, _unequal_causal(e, heads[0], heads[1], mask, past)
    attrs = AttentionAttrs(float(scale) if scale else None, causal)
    y, *present = e.op("Attention", [*heads, mask, *past], attrs, outputs=outputs)
    return (merge_heads(e, y), *present)


def _unequal_causal(e: Emit, q: Ref, k: Ref, mask: Ref | None, past: Sequence[Ref | None]) -> Ref | None:
    """The mask of unidirectional attention if there may be more keys than queries.

    A query sees the keys up to its own position. As in ONNX Runtime, the last query sees all keys: it is the only query if a
    model decodes one token at a time and passes all keys.
    """
    if e.type(q).dims[2] == 1:
        return mask
    rows, keys = (emit(e, "Shape", x, start=2, end=3) for x in (q, k))
    at = row = emit(e, "Unsqueeze", count(e, rows), np.array([1]))
    if past and past[0] is not None:
        former = emit(e, "Shape", past[0], start=2, end=3)
        at, keys = emit(e, "Add", row, former), emit(e, "Add", keys, former)
    before = emit(e, "Not", emit(e, "Greater", count(e, keys), at))
    last = emit(e, "Equal", row, emit(e, "Sub", rows, np.array([1])))
    seen = emit(e, "Or", before, last)
    return emit(e, "Where", seen, typed_as(e, q, 0.0) if mask is None else mask, typed_as(e, q, -np.inf))


def attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Attention: the projection of x, and attention over it. Keys and values of earlier calls precede its own."""
    x, weights = needs(node, 0, 1)
    return _projected_attention(node, e, emit(e, "MatMul", x, weights), weights, mask=3, past=4, bias=5, held=6)


def quantized_attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """QAttention: like Attention, with an integer projection."""
    x, weights, x_scale, w_scale = needs(node, 0, 1, 3, 4)
    product = emit(e, "Cast", emit(e, "MatMulInteger", x, weights, node.input(6), node.input(7)), to=FP32)
    packed = emit(e, "Mul", product, emit(e, "Mul", x_scale, w_scale))
    return _projected_attention(node, e, packed, weights, mask=5, past=8, bias=9, held=10)


def _projected_attention(
    node: NodeSpec, e: Emit, packed: Ref, weights: Ref, *, mask: int, past: int, bias: int, held: int
) -> Sequence[Ref]:
    """Attention after the projection ``packed``; the integers are operand slots."""
    refuse_operands(node, past_sequence_length=held)
    refuse_attributes(node, "do_rotary", "past_present_share_buffer")
    heads = int(required(node, "num_heads"))
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
    former: list[Ref | None] = []
    if node.input(past) is not None:
        require_rank(e.type(node.inputs[past]), 5, "past of Attention")
        former = [emit(e, "Gather", node.inputs[past], np.asarray(i), axis=0) for i in (0, 1)]
    added = _score_mask(node, e, node.input(mask), node.input(bias), q, [*former[:1], k])
    wanted = len(node.outputs) > 1 and bool(node.outputs[1])
    y, *present = _attend(node, e, [q, k, v], added, former, 3 if wanted and former else 1)
    if not wanted:
        return (y,)
    rows = [emit(e, "Unsqueeze", p, np.array([0])) for p in (present or (k, v))]
    return (y, emit(e, "Concat", *rows, axis=0))


def multi_head_attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if len(node.inputs) > 8 and any(v is not None for v in node.inputs[8:]):
        raise Unsupported("past_sequence_length and cache_indirection")
    if any(node.outputs[3:]):
        raise Unsupported("the output qk")
    heads = int(required(node, "num_heads"))
    if node.input(2) is None:
        if node.input(3) is not None:
            raise Unsupported("a bias with packed query, key and value")
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
    mask = _score_mask(node, e, node.input(4), node.input(5), q, [node.input(6), k])
    return _attend(node, e, [q, k, v], mask, node.inputs[6:8], len(node.outputs))


def decoder_attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """DecoderMaskedMultiHeadAttention: attention of one token, over the keys of an encoder or over a cache.

    A shared buffer is a cache with room for all positions: the token's key and value are written at past_sequence_length."""
    if node.input(9) is not None:
        raise Unsupported("the operand cache_indirection, which beam search moves from step to step")
    past, held = node.inputs[5:7], node.input(7)
    shared = bool(node.get("past_present_share_buffer", 0)) and node.input(5) is not None
    if not shared:
        order = (*(node.input(k) for k in (0, 1, 2, 10, 3, 4)), *past)
        return multi_head_attention(replace(node, inputs=order), e)
    if any(node.outputs[3:]):
        raise Unsupported("the output qk")
    refuse_operands(node, mask_index=3, attention_bias=4)
    operands = needs(node, 0, 1, 2)
    if node.input(10) is not None:
        operands = _biased(replace(node, inputs=(*node.inputs[:3], node.inputs[10])), e, operands)
    heads = int(required(node, "num_heads"))
    q, k, v = (split_heads(e, x, heads) for x in operands)
    if held is None or None in past:
        raise ShapeError(
            "DecoderMaskedMultiHeadAttention with a shared buffer needs past_value and past_sequence_length"
        )
    at = emit(e, "Reshape", emit(e, "Cast", held, to=INT64), np.array([-1], np.int64))
    at = emit(e, "Expand", at, emit(e, "Shape", q, start=0, end=1))
    present = [
        e.op("TensorScatter", [c, new, at], TensorScatterAttrs(axis=2))[0] for c, new in zip(past, (k, v), strict=True)
    ]
    filled = emit(e, "Add", at, np.array([1], np.int64))
    scale = node.get("scale")
    attrs = AttentionAttrs(float(scale) if scale else None)
    (y,) = e.op("Attention", [q, *present, None, None, None, filled], attrs)
    return (merge_heads(e, y), *present)[: len(node.outputs)]


def _biased(node: NodeSpec, e: Emit, operands: list[Ref]) -> list[Ref]:
    """Query, key and value with their bias added; one vector holds the bias of all three."""
    widths = []
    for ref in operands:
        require_rank(e.type(ref), 3, "MultiHeadAttention query, key and value with a bias")
        width = e.type(ref).dims[2]
        if not isinstance(width, int):
            raise Unsupported("a bias of an unknown width")
        widths.append(width)
    parts = e.op("Split", [node.inputs[3], np.asarray(widths, np.int64)], SplitAttrs(axis=0), outputs=3)
    return [emit(e, "Add", ref, part) for ref, part in zip(operands, parts, strict=True)]


def rotary_embedding(node: NodeSpec, e: Emit) -> Sequence[Ref]:
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
    if len(e.type(ids).dims) == 1:  # the position of the first token
        length = e.type(x).dims[2]
        if not isinstance(length, int):
            raise Unsupported("one position for a sequence of unknown length")
        ids = emit(e, "Unsqueeze", emit(e, "Add", ids, np.arange(length)), np.array([0]))
    turns = [emit(e, "Gather", c, ids, axis=0) for c in (cos, sin)]
    (y,) = e.op("RotaryEmbedding", [x, *turns], RotaryAttrs(bool(node.get("interleaved", 0)), size))
    return (merge_heads(e, y) if flat else y,)
