"""ONNX Runtime's attention over a cache, GroupQueryAttention, and packed operands, as compositions of ONNX's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, TensorScatterAttrs, merge_heads, split_heads
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, require_rank, required
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.ops.index import SplitAttrs
from optdnn.ops.restate import count
from optdnn.types import INT64


def unpacked(e: Emit, x: Ref, parts: int) -> list[Ref]:
    """An interleaved (batch, heads, length, parts, size) tensor as ``parts`` tensors (batch, heads, length, size)."""
    require_rank(e.type(x), 5, "packed query, key and value")
    if e.type(x).dims[3] != parts:
        raise ShapeError(f"{parts} packed tensors are due, not {e.type(x)}")
    found = []
    for k in range(parts):
        one = emit(e, "Gather", x, np.asarray(k), axis=3)
        found.append(emit(e, "Transpose", one, perm=(0, 2, 1, 3)))
    return found


def group_query_attention(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """GroupQueryAttention: new keys and values are written into the cache after the valid positions of each row of the batch.

    Row b holds ``seqlens_k[b] + 1 - length`` positions (none in a first call). The returned cache has the length of the given one,
    or total_sequence_length if that is larger. With sliding_window_cache, a cache of any length holds the last positions only.
    """
    _check_supported(node)
    heads, groups = int(required(node, "num_heads")), int(required(node, "kv_num_heads"))
    x, seqlens, total = node.input(0), node.input(5), node.input(6)
    if x is None or seqlens is None or total is None:
        raise ShapeError("GroupQueryAttention needs query, seqlens_k and total_sequence_length")
    q, k, v = _heads(node, e, x, heads, groups)
    q, k = _normalized(node, e, q, k)
    length = e.type(q).dims[2]
    steps = emit(e, "Shape", q, start=2, end=3)
    zero, one = np.array([0], np.int64), np.array([1], np.int64)
    ends = emit(e, "Add", _int64(e, seqlens, flat=True), one)
    held = emit(e, "Max", emit(e, "Sub", ends, steps), zero)  # none in a first call, whose rows are padded on the right
    offsets = np.arange(length) if isinstance(length, int) else _range(e, steps)
    column = emit(e, "Unsqueeze", held, one)
    positions = emit(e, "Add", column, offsets)  # (batch, length)
    if node.get("do_rotary", 0):
        q, k = _rotated(node, e, q, k, positions)
    window = int(node.get("local_window_size", -1))
    written, first = held, None
    if node.get("sliding_window_cache", 0):
        written, first = _resident(node, e, held, ends, window)
    k, v = (
        _cached(e, new, past, written, total if first is None else None)
        for new, past in ((k, node.input(3)), (v, node.input(4)))
    )
    scale = node.get("scale")
    seen = AttentionAttrs(
        float(scale) if scale else None,
        is_causal=True,
        softcap=float(node.get("softcap", 0.0)),
        left_window_size=window - 1 if window > 0 else -1,
    )
    sinks: Any = node.input(11)
    if sinks is None and node.get("smooth_softmax", 0):
        sinks = np.zeros(heads, e.type(q).dtype)
    filled = emit(e, "Add", written, steps)
    y = merge_heads(e, e.op("Attention", [q, k, v, None, None, None, filled, sinks], seen)[0])
    if not any(node.outputs[1:]):
        return (y,)
    pairs = ((k, node.input(3)), (v, node.input(4)))
    present = [_present(e, c, past, total) if first is None else _last_rows(e, c, past, first) for c, past in pairs]
    return (y, *present)[: len(node.outputs)]


def _check_supported(node: NodeSpec) -> None:
    """Raise Unsupported for options and operands of GroupQueryAttention that have no form here."""
    for name in ("qk_output", "k_quant_type", "v_quant_type"):
        if node.get(name, 0) not in (0, "NONE"):
            raise Unsupported(f"{name}={node.get(name)}")
    for i, name in ((10, "attention_bias"), (12, "k_scale"), (13, "v_scale")):
        if node.input(i) is not None:
            raise Unsupported(f"the operand {name}")


def _rotated(node: NodeSpec, e: Emit, q: Ref, k: Ref, positions: Ref) -> tuple[Ref, Ref]:
    """Queries and keys, rotated by the angles of their positions: ``positions``, unless the node has an operand for them."""
    given, cos, sin = node.input(9), node.input(7), node.input(8)
    at = positions if given is None else _int64(e, given)
    if cos is None or sin is None:
        raise ShapeError("GroupQueryAttention with do_rotary needs cos_cache and sin_cache")
    turns = [emit(e, "Gather", c, at, axis=0) for c in (cos, sin)]
    half, size = e.type(cos).dims[1], e.type(q).dims[3]
    features = 2 * half if isinstance(half, int) and isinstance(size, int) and 2 * half != size else 0
    attrs = RotaryAttrs(bool(node.get("rotary_interleaved", 0)), features)
    (q,), (k,) = (e.op("RotaryEmbedding", [y, *turns], attrs) for y in (q, k))
    return q, k


def _normalized(node: NodeSpec, e: Emit, q: Ref, k: Ref) -> tuple[Ref, Ref]:
    """Query and key; each head is normalized if the node has weights for it (Qwen 3)."""
    weights = node.input(14), node.input(15)
    if weights == (None, None):
        return q, k
    if None in weights:
        raise ShapeError("GroupQueryAttention has q_norm_weight without k_norm_weight, or the other way round")
    epsilon = float(node.get("qk_norm_epsilon", 1e-6))
    q, k = (emit(e, "RMSNormalization", y, w, axis=-1, epsilon=epsilon) for y, w in zip((q, k), weights, strict=True))
    return q, k


def _heads(node: NodeSpec, e: Emit, x: Ref, heads: int, groups: int) -> list[Ref]:
    """Query, key and value as (batch, heads, length, size)."""
    key, value = node.input(1), node.input(2)
    if key is None and value is None:
        width = e.type(x).dims[2]
        if not isinstance(width, int) or width % (heads + 2 * groups):
            raise ShapeError(f"{e.type(x)} does not hold {heads} heads of queries and {groups} of keys and values")
        size = width // (heads + 2 * groups)
        sizes = np.array([heads * size, groups * size, groups * size], np.int64)
        parts: Sequence[Ref] = e.op("Split", [x, sizes], SplitAttrs(axis=2), outputs=3)
    elif key is None or value is None:
        raise ShapeError("GroupQueryAttention has a key without a value, or the other way round")
    else:
        parts = [x, key, value]
    return [split_heads(e, part, n) for part, n in zip(parts, (heads, groups, groups), strict=True)]


def _resident(node: NodeSpec, e: Emit, held: Ref, ends: Ref, window: int) -> tuple[Ref, Ref]:
    """For a cache that holds the last positions only: how many it holds before the call, and the first of its rows that it still
    holds afterward. ``held``, ``ends``: the number of all positions before and after the call. All have a number per sample.

    Of T positions, a cache of C rows holds all while they fit. Then it drops ``G = C - window + 1`` at a time.
    """
    past = node.input(3)
    if past is None or node.input(4) is None or window < 1:
        raise ShapeError("sliding_window_cache=1 needs past_key, past_value and local_window_size")
    rows = e.type(past).dims[2]
    if isinstance(rows, int) and rows < window:
        raise ShapeError(f"a cache of {rows} positions for a window of {window}")
    one, capacity = np.array([1], np.int64), emit(e, "Shape", past, start=2, end=3)
    group = emit(e, "Sub", capacity, np.array([window - 1], np.int64))

    def kept(count: Ref) -> Ref:
        beyond = emit(e, "Max", emit(e, "Sub", count, capacity), np.array([0], np.int64))
        groups = emit(e, "Div", emit(e, "Sub", emit(e, "Add", beyond, group), one), group)
        return emit(e, "Sub", count, emit(e, "Mul", groups, group))

    before = kept(held)
    filled = emit(e, "Add", before, emit(e, "Sub", ends, held))
    return before, emit(e, "Sub", filled, kept(ends))


def _last_rows(e: Emit, cache: Ref, past: Ref | None, first: Ref) -> Ref:
    """As many rows of the cache as ``past`` has, from ``first`` (batch) on; behind the last one, that row is repeated."""
    assert past is not None
    rows = count(e, emit(e, "Shape", past, start=2, end=3))
    places = emit(e, "Add", emit(e, "Unsqueeze", first, np.array([1])), rows)
    last = emit(e, "Sub", emit(e, "Shape", cache, start=2, end=3), np.array([1], np.int64))
    places = emit(e, "Unsqueeze", emit(e, "Min", places, last), np.array([2]))
    by_row = emit(e, "Transpose", cache, perm=(0, 2, 1, 3))
    return emit(e, "Transpose", emit(e, "GatherND", by_row, places, batch_dims=1), perm=(0, 2, 1, 3))


def _cached(e: Emit, new: Ref, past: Ref | None, held: Ref, total: Ref | None) -> Ref:
    """The cache with room for all new positions, which are written at ``held``: (batch, heads, past + length, size).

    If ``total`` is known not to exceed the cache, the cache itself has room and is written in place.
    """
    if past is None:
        return new
    known, capacity = None if total is None else e.value(total), e.type(past).dims[2]
    if known is not None and isinstance(capacity, int) and int(known.reshape(-1)[0]) <= capacity:
        return e.op("TensorScatter", [past, new, held], TensorScatterAttrs(axis=2))[0]
    room = emit(e, "Mul", new, np.zeros((), e.type(new).dtype))
    buffer = emit(e, "Concat", past, room, axis=2)
    return e.op("TensorScatter", [buffer, new, held], TensorScatterAttrs(axis=2))[0]


def _present(e: Emit, cache: Ref, past: Ref | None, total: Ref) -> Ref:
    """The cache at the length that the operator returns."""
    if past is None:
        return cache
    known = e.value(total)
    lengths = e.type(past).dims[2], e.type(cache).dims[2]
    if known is not None and (lengths[0] == lengths[1] or known.reshape(-1)[0] == lengths[1]):
        return cache
    end = emit(e, "Max", _int64(e, total, flat=True), emit(e, "Shape", past, start=2, end=3))
    return emit(e, "Slice", cache, np.array([0], np.int64), end, np.array([2], np.int64))


def _int64(e: Emit, x: Ref, flat: bool = False) -> Ref:
    y = x if e.type(x).dtype == INT64 else emit(e, "Cast", x, to=INT64)
    return emit(e, "Reshape", y, np.array([-1], np.int64)) if flat and len(e.type(y).dims) != 1 else y


def _range(e: Emit, count: Ref) -> Any:
    end = emit(e, "Squeeze", count, np.array([0], np.int64))
    return emit(e, "Range", np.asarray(0, np.int64), end, np.asarray(1, np.int64))
