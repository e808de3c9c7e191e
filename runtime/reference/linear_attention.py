"""Linear attention: a matrix per head that each token decays, corrects and reads."""

from __future__ import annotations

import numpy as np

from optdnn.types import Array


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    past: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float,
    update_rule: str,
) -> tuple[Array, Array]:
    """Token after token, in fp32 or wider.

    Shapes: query (B, T, Hq * K), key (B, T, Hk * K), value (B, T, H * V), past (B, H, K, V), decay (B, T, H) or (B, T, H * K), beta
    (B, T, H) or (B, T, 1). Hk is H or Hq. Returns the output (B, T, max(Hq, H) * V) and the state after the last token. Heads that
    share a key or a state stand side by side."""
    heads, wide = kv_num_heads, np.promote_types(value.dtype, np.float32)
    batch, length = value.shape[:2]
    size = query.shape[2] // q_num_heads
    q, k, v = (
        x.astype(wide).reshape(batch, length, n, -1)
        for x, n in ((query, q_num_heads), (key, key.shape[2] // size), (value, heads))
    )
    k = np.repeat(k, heads // k.shape[2], axis=2) if k.shape[2] else k
    widths = (size, v.shape[3])
    state = np.zeros((batch, heads, *widths), wide) if past is None else past.astype(wide)
    together = max(q_num_heads, heads)
    q = np.repeat(q, together // q_num_heads, axis=2)
    made = np.zeros((batch, length, together, widths[1]), wide)
    kept = None if decay is None else np.exp(decay.astype(wide)).reshape(batch, length, heads, -1)
    rates = None if beta is None else np.broadcast_to(beta.astype(wide), (batch, length, heads))
    for t in range(length):
        if kept is not None:
            state = state * kept[:, t, :, :, None]
        new = v[:, t]
        if rates is not None:
            new = (new - np.einsum("bhkv,bhk->bhv", state, k[:, t])) * rates[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        made[:, t] = np.einsum("bhkv,bhk->bhv", np.repeat(state, together // heads, axis=1), q[:, t]) * scale
    held = value.dtype if past is None else past.dtype
    return made.reshape(batch, length, -1).astype(value.dtype), state.astype(held)


KERNELS = {"LinearAttention": linear_attention}
