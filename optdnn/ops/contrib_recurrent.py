"""Operators that onnxruntime-genai's builder writes around recurrent layers (Qwen 3.5, LFM 2): causal convolutions with a state,
gates, and rotary embeddings with three positions per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.attention import RotaryAttrs, merge_heads, split_heads
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs, require_rank
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.restate import MICROSOFT, as_standard, refuse_attributes, refuse_operands
from optdnn.types import FP32, Array

_ACTIVATIONS = {"none": None, "": None, "silu": "Swish", "swish": "Swish"}
_END = np.iinfo(np.int64).max


def _causal_conv(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """CausalConvWithState: a depthwise convolution of the kept positions and the new ones; the last positions are kept.

    Shapes: x (B, C, L), weights (C, 1, K), state (B, C, (K - 1) * dilation), zeros if absent."""
    refuse_attributes(
        node, "state_window", "state_update_capacity", "state_length", "input_channels", "input_channel_offset"
    )
    if int(node.get("ndim", 1)) != 1 or int(node.get("state_channels_last", -1)) != -1:
        raise Unsupported(f"ndim={node.get('ndim', 1)}, state_channels_last={node.get('state_channels_last', -1)}")
    name = str(node.get("activation", "none"))
    if name not in _ACTIVATIONS:
        raise Unsupported(f"the activation {name}")
    x, weights = needs(node, 0, 1)
    bias, past, last = node.input(2), node.input(3), bool(node.get("channels_last", 0))
    rank, channels = len(e.type(x).dims), e.type(weights).dims[0]
    taps, dilation = e.type(weights).dims[-1], int(node.get("dilation", 1))
    if rank != 3:
        raise Unsupported(f"an input of {rank} dimensions")
    if not isinstance(taps, int) or not isinstance(channels, int):
        raise Unsupported("weights of an unknown shape")
    if last:
        x, past = (v if v is None else emit(e, "Transpose", v, perm=(0, 2, 1)) for v in (x, past))
    held = (taps - 1) * dilation
    if past is None:
        pads = np.array([0, 0, held, 0, 0, 0], np.int64)
        both = emit(e, "Pad", x, pads) if held else x
    else:
        both = emit(e, "Concat", past, x, axis=2)
    operands = [both, weights] if bias is None else [both, weights, bias]
    own = {"group": channels, "dilations": [dilation], "kernel_shape": [taps]}
    (y,) = as_standard("Conv", node, e, inputs=tuple(operands), attrs=own, outputs=node.outputs[:1])
    kept = emit(e, "Slice", both, np.array([-held if held else _END]), np.array([_END]), np.array([2]))
    if _ACTIVATIONS[name]:
        y = emit(e, "Swish", y)
    if last:
        y, kept = (emit(e, "Transpose", v, perm=(0, 2, 1)) for v in (y, kept))
    return (y, kept)[: len(node.outputs)]


def _gate(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """LinearAttentionGate: ``decay_scale * softplus(a + dt_bias)`` in fp32, and the sigmoid of b."""
    a, bias, factor = needs(node, 0, 1, 2)
    dtype = e.type(a).dtype
    wide = emit(e, "Add", emit(e, "Cast", a, to=FP32), bias)
    decay = emit(e, "Cast", emit(e, "Mul", emit(e, "Softplus", wide), factor), to=dtype)
    if len(node.outputs) < 2 or not node.outputs[1]:
        return (decay,)
    (b,) = needs(node, 3)
    return decay, emit(e, "Sigmoid", b)


def _gated_norm(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """GatedRMSNorm: the RMS norm of each group of features, times an activation of the gate."""
    x, scale, gate = needs(node, 0, 1, 2)
    name = str(node.get("activation", "silu"))
    if name not in ("silu", "swish", "sigmoid"):
        raise Unsupported(f"the activation {name}")
    kept, group = [0] * (len(e.type(x).dims) - 1), e.type(scale).dims[0]
    if not isinstance(group, int):
        raise Unsupported("a scale of an unknown length")
    grouped = e.type(x).dims[-1] != group
    if grouped:
        x = emit(e, "Reshape", x, np.array([*kept, -1, group]))
    y = emit(e, "RMSNormalization", x, scale, axis=-1, epsilon=float(node.get("epsilon", 1e-6)))
    if grouped:
        y = emit(e, "Reshape", y, np.array([*kept, -1]))
    return (emit(e, "Mul", y, emit(e, "Sigmoid" if name == "sigmoid" else "Swish", gate)),)


def _gated_add(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    refuse_operands(node, gate_weight=3)
    x, y, gate = needs(node, 0, 1, 2)
    return (emit(e, "Add", x, emit(e, "Mul", y, gate)),)


def _sections(node: NodeSpec, half: int) -> Array:
    """Which of the three positions (0, 1, 2) turns each pair of features."""
    given = node.ints("mrope_section") or ()
    if len(given) != 3 or min(given) < 0 or sum(given) != half:
        raise ShapeError(f"MRotaryEmbedding has mrope_section={given} for {half} pairs of features")
    if int(node.get("mrope_layout", 0)) == 0:
        return np.repeat(np.arange(3), given)
    pairs = np.arange(half)
    chosen = np.zeros(half, np.int64)
    for k in (1, 2):
        chosen[(pairs % 3 == k) & (pairs < 3 * given[k])] = k
    return chosen


def _mrope(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """MRotaryEmbedding: rotary embedding whose pairs of features turn by one of a token's three positions (Qwen 2 VL)."""
    refuse_attributes(node, "is_packed_batching")
    if float(node.get("scale", 1.0)) != 1.0:
        raise Unsupported(f"scale={node.get('scale')}")
    x, ids, *caches = needs(node, 0, 1, 2, 3)
    require_rank(e.type(ids), 3, "MRotaryEmbedding position_ids")
    half, flat = e.type(caches[0]).dims[1], len(e.type(x).dims) == 3
    if not isinstance(half, int):
        raise Unsupported("a cache of an unknown width")
    chosen = _sections(node, half)
    if flat:
        heads = int(node.get("num_heads", 0) or 0)
        width = e.type(x).dims[2]
        if not heads and isinstance(width, int):
            heads = width // (2 * half)
        if heads < 1:
            raise ShapeError("MRotaryEmbedding needs num_heads")
        x = split_heads(e, x, heads)
    turns = [_turned(e, cache, ids, chosen) for cache in caches]
    attrs = RotaryAttrs(bool(node.get("interleaved", 0)), int(node.get("rotary_embedding_dim", 0)))
    (y,) = e.op("RotaryEmbedding", [x, *turns], attrs)
    return (merge_heads(e, y) if flat else y,)


def _turned(e: Emit, cache: Ref, ids: Ref, chosen: Array) -> Ref:
    """The rows of a cache (positions, pairs) at ``ids`` (3, B, L), each pair at its own position: (B, L, pairs)."""
    found: Any = None
    for k in range(3):
        if not (chosen == k).any():
            continue
        rows = emit(e, "Gather", cache, emit(e, "Gather", ids, np.asarray(k), axis=0), axis=0)
        found = rows if found is None else emit(e, "Where", chosen == k, rows, found)
    return found


RECURRENT: dict[str, FromOnnx] = {
    MICROSOFT + "CausalConvWithState": _causal_conv,
    MICROSOFT + "LinearAttentionGate": _gate,
    MICROSOFT + "GatedRMSNorm": _gated_norm,
    MICROSOFT + "GatedAdd": _gated_add,
    MICROSOFT + "MRotaryEmbedding": _mrope,
}
