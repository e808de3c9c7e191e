"""``scaled_dot_product_attention`` of any rank as ONNX: torch.export's translator to ONNX may support only four axes."""

from __future__ import annotations

import math
from typing import Any

_BOOL = 9
"""ONNX's number for the element type of boolean masks."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Two products around a softmax, with the mask or bias added to the scores.

    ``query`` (..., L, E), ``key`` (..., S, E), ``value`` (..., S, F), ``attn_mask`` broadcasts to (..., L, S). A fully
    masked row gives zeros, as in PyTorch. ``enable_gqa``: queries have a multiple of the keys' heads.
    """
    from onnxscript import opset18 as op  # type: ignore[import-not-found, unused-ignore]

    rank, size = len(query.shape), query.shape[-1]
    if enable_gqa:
        key, value = (_repeated(op, x, rank, query.shape[-3]) for x in (key, value))
    factor = op.CastLike(op.Constant(value_float=float(size) ** -0.5 if scale is None else float(scale)), query)
    turned = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = op.Mul(op.MatMul(query, turned), factor)
    lowest = op.CastLike(op.Constant(value_float=-math.inf), query)
    if is_causal:
        length, keys = (op.Shape(x, start=rank - 2, end=rank - 1) for x in (query, key))
        later = op.Expand(lowest, op.Concat(length, keys, axis=0))
        scores = op.Add(scores, op.Trilu(later, op.Constant(value_int=1), upper=1))
    elif attn_mask is not None:
        masks = int(attn_mask.dtype) == _BOOL
        scores = op.Where(attn_mask, scores, lowest) if masks else op.Add(scores, attn_mask)
    weights = op.Softmax(scores, axis=-1)
    if attn_mask is not None:
        weights = op.Where(op.IsNaN(weights), op.CastLike(op.Constant(value_float=0.0), query), weights)
    return op.MatMul(weights, value)


def _repeated(op: Any, x: Any, rank: int, heads: int) -> Any:
    """Keys or values for as many heads as queries have."""
    copies = heads // x.shape[-3]
    many = op.Concat(*[op.Unsqueeze(x, [rank - 2])] * copies, axis=rank - 2)
    return op.Reshape(many, [*[0] * (rank - 3), heads, -1, x.shape[-1]])
