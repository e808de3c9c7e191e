"""NumPy kernels. Scaled dot-product attention, rotary position embedding, and the write into a key-value cache."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.softmax import masked_softmax
from optdnn.types import Array, DType


def visible(rows: int, cols: int, offset: Array, is_causal: bool, left: int, right: int) -> Array:
    """The keys that each query sees: (B or 1, 1, rows, cols). The query of row i is at position ``offset + i``.

    ``left`` and ``right``: the number of keys before and after its own position that a query sees; -1 for all.
    """
    behind = offset.reshape(-1, 1, 1, 1) + np.arange(rows)[:, None] - np.arange(cols)
    allowed = np.ones(behind.shape, bool)
    if is_causal:
        allowed &= behind >= 0
    if left >= 0:
        allowed &= behind <= left
    if right >= 0:
        allowed &= -behind <= right
    return allowed


def _added(mask: Array, cols: int, dtype: DType) -> Array:
    """A mask of ``cols`` keys that is added to scores: -inf at hidden keys, and at trailing keys that it lacks."""
    if mask.dtype == bool:
        mask = np.where(mask, dtype.type(0), dtype.type(-np.inf))
    pad = [(0, 0)] * (mask.ndim - 1) + [(0, cols - mask.shape[-1])]
    return np.pad(mask.astype(dtype, copy=False), pad, constant_values=-np.inf)


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    lengths: Array | None = None,
    sinks: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    softmax_precision: DType | None = None,
    qk_matmul_output_mode: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> tuple[Array, ...]:
    """Attention (ONNX opset 25): q (B, H, L, D), k (B, G, S, D), v (B, G, S, E), where G divides H.

    ``mask`` (bool, or added) broadcasts to (B, H, L, P + S) from the right and may lack trailing keys; ``past_key`` and
    ``past_value`` (B, G, P, D or E) come before k and v; ``lengths`` (B): the number of keys of each sample.
    ``sinks`` (H): one more logit of each head's softmax, which no value belongs to.
    Results: y (B, H, L, E), the present keys and values, and the scores that ``qk_matmul_output_mode`` selects. A query
    that sees no key yields zeros.
    """
    rows, dtype = q.shape[2], q.dtype.type
    offset = np.zeros(1, np.int64)
    if past_key is not None and past_value is not None:
        offset = np.full(1, past_key.shape[2])
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    elif lengths is not None:
        offset = lengths.astype(np.int64) - rows
    cols = k.shape[2]
    if lengths is not None and lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > cols):
        raise ValueError(f"nonpad_kv_seqlen holds {lengths.min()} to {lengths.max()} for {cols} keys")
    allowed = visible(rows, cols, offset, is_causal, left_window_size, right_window_size)
    if lengths is not None:
        allowed = allowed & (np.arange(cols) < lengths.reshape(-1, 1, 1, 1))
    bias = np.where(allowed, dtype(0), dtype(-np.inf))
    if mask is not None:
        bias = bias + _added(mask, cols, q.dtype)
    root = dtype(np.sqrt(q.shape[-1] ** -0.5 if scale is None else scale))
    groups = q.shape[1] // k.shape[1]
    if cols == 0:  # like rows with all keys masked
        return np.zeros((*q.shape[:3], v.shape[3]), q.dtype), k, v, np.zeros((*q.shape[:3], 0), q.dtype)
    # The heads that share keys are stacked into one product.
    stacked = (q * root).reshape(q.shape[0], k.shape[1], groups * rows, q.shape[3])
    scores = np.matmul(stacked, (k * root).swapaxes(2, 3)).reshape(*q.shape[:3], cols)
    shown = scores
    if softcap > 0:
        scores = np.tanh(scores / dtype(softcap)) * dtype(softcap)
    if qk_matmul_output_mode == 1:
        shown = scores
    scores = scores + bias
    if qk_matmul_output_mode == 2:
        shown = scores
    if sinks is not None:
        column = np.broadcast_to(sinks.astype(q.dtype, copy=False)[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], axis=-1)
    p = scores if softmax_precision is None else scores.astype(softmax_precision)
    p = masked_softmax(p)[0].astype(q.dtype, copy=False)[..., :cols]
    p = np.where(np.isneginf(bias.max(axis=-1, keepdims=True)), dtype(0), p)
    if qk_matmul_output_mode == 3:
        shown = p
    y = np.matmul(p.reshape(q.shape[0], k.shape[1], groups * rows, cols), v).reshape(*q.shape[:3], v.shape[3])
    return y.astype(q.dtype, copy=False), k, v, shown


def rotary_embedding(
    x: Array, cos: Array, sin: Array, *, interleaved: bool = False, rotary_embedding_dim: int = 0, own_angles: bool = False,
    parts: int = 1,
) -> tuple[Array, ...]:  # fmt: skip
    """RotaryEmbedding (ONNX opset 23): x (B, H, S, D); cos and sin (B, S, R / 2) rotate the first R entries of each head.

    Entry i is paired with entry i + R / 2, or with its neighbor if ``interleaved``.
    With ``own_angles`` cos and sin are (B, S, R): each entry of the result uses its own angle. Each of the ``parts`` of the R
    entries forms its own pairs, with its part of the angles.
    """
    size = rotary_embedding_dim or x.shape[-1]
    turned, kept = x[..., :size], x[..., size:]

    def pairs_of(v: Array) -> tuple[Array, Array]:
        if interleaved:
            return v[..., 0::2], v[..., 1::2]
        halves = v.reshape(*v.shape[:-1], parts, 2, size // parts // 2)
        return halves[..., 0, :], halves[..., 1, :]

    def angles_of(v: Array) -> tuple[Array, Array]:
        v = v[:, None]
        if own_angles:
            return pairs_of(v)
        v = v if interleaved else v.reshape(*v.shape[:-1], parts, size // parts // 2)
        return v, v

    (c, d), (s, t) = (angles_of(v) for v in (cos, sin))
    a, b = pairs_of(turned)
    both = [c * a - s * b, t * a + d * b]
    turned = np.stack(both, axis=-1 if interleaved else -2).reshape(*x.shape[:-1], size)
    return (np.concatenate([turned, kept], axis=-1).astype(x.dtype, copy=False),)


def tensor_scatter(
    cache: Array, update: Array, write_indices: Array | None = None, *, axis: int = -2, mode: str = "linear"
) -> tuple[Array, ...]:
    """TensorScatter (ONNX opset 24): ``update`` of each sample is written into the cache from its write index on.

    Raises ValueError if it would exceed the end (mode "linear"); mode "circular" continues at the beginning.
    """
    axis %= cache.ndim
    start = np.zeros(len(cache), np.int64) if write_indices is None else write_indices.astype(np.int64)
    at = start[:, None] + np.arange(update.shape[axis])
    size = cache.shape[axis]
    if mode == "circular":
        at %= size
    elif at.size and (at.min() < 0 or at.max() >= size):
        raise ValueError(f"write indices {start.tolist()} put {update.shape[axis]} entries outside of {size}")
    shape = [1] * cache.ndim
    shape[0], shape[axis] = at.shape
    out = cache.copy()
    np.put_along_axis(out, np.broadcast_to(at.reshape(shape), update.shape), update, axis)
    return (out,)


def normalized_linear_attention(
    q: Array, k: Array, v: Array, *, epsilon: float = 0.0, scale: float = 1.0, rectified: bool = False
) -> tuple[Array, ...]:
    """NormalizedLinearAttention, in fp32 or float64: q (B, H, L, D), k (B, H, N, D), v (B, H, N, E)."""
    wide = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    left, turned, values = (x.astype(wide) for x in (q, k.swapaxes(2, 3), v))
    if rectified:
        left, turned = (np.maximum(x, 0) for x in (left, turned))
    divisor = left @ turned.sum(3, keepdims=True) + wide.type(epsilon)
    return ((wide.type(scale) * (left @ (turned @ values)) / divisor).astype(q.dtype),)


def linear_sums(k: Array, v: Array, *, span: int, rectified: bool = False) -> tuple[Array, ...]:
    """For k and v (B, H, N, C), per ``span`` tokens: sums of v's features, sums of k's features, and v^T k: (B, H, S, 2 + C, C)."""
    k, v = (x.astype(np.promote_types(x.dtype, np.float32)) for x in (k, v))
    k = np.maximum(k, 0) if rectified else k
    parts = [(k[:, :, n : n + span], v[:, :, n : n + span]) for n in range(0, k.shape[2], span)]
    rows = [[x.sum(2, keepdims=True) for x in (v, k)] + [v.swapaxes(2, 3) @ k] for k, v in parts]
    return (np.stack([np.concatenate(r, 2) for r in rows], 2),)


def linear_results(
    sums: Array, q: Array, *, epsilon: float = 0.0, scale: float = 1.0, rectified: bool = False
) -> tuple[Array, ...]:
    """Normalized linear attention of queries (B, H, N, C) from the parts of its sums (:func:`linear_sums`)."""
    total = sums.sum(2)
    wide = (np.maximum(q, 0) if rectified else q).astype(total.dtype)
    divisor = wide @ total[:, :, 1, :, None] + total.dtype.type(epsilon)
    return ((total.dtype.type(scale) * (wide @ total[:, :, 2:].swapaxes(2, 3)) / divisor).astype(q.dtype),)


KERNELS: dict[str, Kernel] = {
    "Attention": attention,
    "LinearResults": linear_results,
    "LinearSums": linear_sums,
    "NormalizedLinearAttention": normalized_linear_attention,
    "RotaryEmbedding": rotary_embedding,
    "TensorScatter": tensor_scatter,
}
