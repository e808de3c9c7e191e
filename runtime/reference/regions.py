"""NumPy kernels. Regions of a lowered program: the meaning of a launch that no single graph operator describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.attention import attention, rotary_embedding, tensor_scatter
from optdnn.runtime.reference.base import ComposedKernel, Kernel, Run
from optdnn.runtime.reference.binary import cast
from optdnn.runtime.reference.norm import lp_normalization
from optdnn.runtime.reference.packed_rnn import unpack_matrix
from optdnn.runtime.reference.quantized import bounded
from optdnn.runtime.reference.resize import resize
from optdnn.runtime.reference.rnn import KERNELS as CELLS
from optdnn.runtime.reference.softmax import masked_softmax
from optdnn.types import FP32, Array, DType


def copy(x: Array) -> tuple[Array, ...]:
    """Operand 0. The views of the launch rearrange it, and its result's type rounds it."""
    return (x,)


def copies(*operands: Array) -> tuple[Array, ...]:
    """All operands, each as by :func:`copy`."""
    return operands


def frames(
    x: Array,
    *,
    axis: int,
    first: int,
    distance: int,
    step: int,
    count: int,
    taps: int,
    along: int,
    fill: float = 0,
) -> tuple[Array, ...]:
    """Slice t of ``taps`` takes positions ``first + t * distance + i * step`` along ``axis``, for i in 0 .. ``count``.

    Positions beyond the operand have the value ``fill``. The slices form an axis of the result, before axis ``along``.
    """
    parts = []
    for tap in range(taps):
        at = first + tap * distance + step * np.arange(count)
        inside = (at >= 0) & (at < x.shape[axis])
        part = np.take(x, np.where(inside, at, 0), axis)
        part[(*(slice(None),) * axis, ~inside)] = fill
        parts.append(part)
    return (np.stack(parts, along),)


def resized_picture(
    x: Array,
    shift: Array | None = None,
    *,
    sizes: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    **modes: Any,
) -> tuple[Array, ...]:
    """Images as fp32, resized along height and width, then cropped to ``lengths`` pixels from ``starts`` on; plus ``shift`` per
    channel."""
    (y,) = resize(x.astype(FP32), sizes=np.array(sizes), axes=(2, 3), **modes)
    rows, columns = (slice(start, start + n) for start, n in zip(starts, lengths, strict=True))
    kept = y[..., rows, columns]
    return (kept if shift is None else kept + shift.reshape(-1, 1, 1),)


def zeros(*, shape: Sequence[int]) -> tuple[Array, ...]:
    """int32 zeros."""
    return (np.zeros(tuple(shape), np.int32),)


def rotary_pair(x: Array, cos: Array, sin: Array, y: Array, **attrs: Any) -> tuple[Array, ...]:
    """Rotary embeddings of x and y by the same angles."""
    return (*rotary_embedding(x, cos, sin, **attrs), *rotary_embedding(y, cos, sin, **attrs))


def turned_heads(
    run: Run, *operands: Array | None, of: str, own: Sequence[str], channels: int, head: int, turned: int, interleaved: bool,
    parts: int = 1, **attrs: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """The operator ``of`` with a result (rows, columns, 1...). The first ``channels`` of a row are heads of ``head`` features.

    The last operand has the rotation angles for each position, (P, parts * turned / 16, 2, 8): eight cosines, eight sines. Heads
    take the ``parts`` of them in turn.
    Rows belong to the positions in turn.
    """
    *reads, angles = operands
    assert angles is not None
    y = run(of, reads, {name: attrs[name] for name in own})[0]
    cos, sin = (angles[:, :, k].reshape(1, len(angles), parts, -1) for k in range(2))
    rows = y.reshape(-1, len(angles), y.shape[1])[..., :channels]
    heads = rows.reshape(*rows.shape[:2], channels // head // parts, parts, head).transpose(3, 0, 2, 1, 4)
    found = np.stack([
        rotary_embedding(x, cos[:, :, k], sin[:, :, k], interleaved=interleaved, rotary_embedding_dim=turned)[0]
        for k, x in enumerate(heads)
    ])  # fmt: skip
    done = y.copy()
    done.reshape(len(y), -1)[:, :channels] = found.transpose(1, 3, 2, 0, 4).reshape(len(y), channels)
    return (done,)


def weights_in_parts(
    run: Run, *operands: Array | None, of: str, own: Sequence[str], at: Sequence[int], counts: Sequence[int], order: Sequence[int],
    scaled: bool = False, **attrs: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """The operator ``of``. Each operand of ``at`` is a sum of two parts, times a factor for each of its rows: after the operands
    follow the second part and the factors of each. The axis after the rows has blocks of channels; ``order`` is the place of each
    channel in its block, and ``counts`` the channels of each operand without padding. ``scaled``: scales of the other axes follow
    each factor."""
    each = 3 if scaled else 2
    count = len(operands) - each * len(at)
    reads = list(operands[:count])
    for i, (k, channels) in enumerate(zip(at, counts, strict=True)):
        rest, factor, *scales = operands[count + i * each : count + (i + 1) * each]
        first = reads[k]
        assert first is not None
        assert rest is not None
        assert factor is not None
        reads[k] = whole_weights(first, rest, factor, scales[0] if scales else None, order, channels)
    return tuple(run(of, reads, {name: attrs[name] for name in own}))


def whole_weights(
    first: Array, rest: Array, factor: Array, scale: Array | None, order: Sequence[int], channels: int
) -> Array:
    """The sum of two parts [rows, padded channels, others], times a factor [rows], and a scale [channels, others], or a
    scale [bands, channels, others], each for its part of the rows.

    ``order`` is the place of each channel in its block; without padding there are ``channels``."""
    places = [i // len(order) * len(order) + order[i % len(order)] for i in range(channels)]
    whole = np.copysign(first + rest, first)  # a negative zero has a rest of zero
    whole = np.take(whole, places, axis=factor.ndim)
    whole = whole * factor.reshape(*factor.shape, *(1,) * (whole.ndim - factor.ndim))
    if scale is not None and scale.ndim > whole.ndim - factor.ndim:
        scale = np.repeat(scale, len(whole) // max(1, len(scale)), axis=0)
    return whole if scale is None else whole * scale


def paired_product(
    run: Run, x: Array, w: Array, b: Array, v: Array, c: Array, *, epilogue: Sequence[Any], beside: Sequence[Any]
) -> tuple[Array, ...]:
    """Rows x (M, K) times two matrices of (N / 8, 8, K), each with a bias (N).

    The first product's stages read the second one's result as operand 1.
    """
    first, second = (x @ m.reshape(-1, m.shape[-1]).T + bias for m, bias in ((w, b), (v, c)))
    (other,) = run("Pointwise", [second], {"epilogue": beside, "arity": 1})
    return run("Pointwise", [first, other], {"epilogue": epilogue, "arity": 1})


def row_product(
    run: Run, x: Array, scale: Array | None, w: Array, b: Array, v: Array | None = None, c: Array | None = None,
    residual: Array | None = None, *, epilogue: Sequence[Any], beside: Sequence[Any] = (), epsilon: float = 1e-5,
) -> tuple[Array, ...]:  # fmt: skip
    """Rows x (M, K), normalized if there is a scale (K), times a matrix w (N, K), with a bias (N).

    Its stages read operand 1: the product with v (N, K) and c (N) after the stages ``beside``, or the residual (M, N).
    """
    if scale is not None:
        (x,) = run("RMSNormalization", [x, scale], {"axis": -1, "epsilon": epsilon})
    other = residual
    if v is not None:
        (other,) = run("Pointwise", [x @ v.T + c], {"epilogue": beside, "arity": 1})
    return run("Pointwise", [x @ w.T + b, other], {"epilogue": epilogue, "arity": 1})


def selected_product(run: Run, x: Array, w: Array, index: Array) -> tuple[Array, ...]:
    """Each row of x (M, K) times the matrices (N, K) that its indices (M, times) select from w."""
    y = np.empty((*index.shape, w.shape[1]), x.dtype)
    for matrix in np.unique(index):
        rows, places = np.nonzero(index == matrix)
        y[rows, places] = x[rows] @ w[matrix].T
    return (y,)


def packed_row_product(
    run: Run, x: Array, scale: Array | None, *operands: Array | None, code: str, K: int, N: int, block_size: int,
    epilogue: Sequence[Any], beside: Sequence[Any] = (), epsilon: float = 1e-5,
) -> tuple[Array, ...]:  # fmt: skip
    """:func:`row_product` with weights in tiles. Each product has four operands: tiles, scales, zero points and bias."""
    if scale is not None:
        (x,) = run("RMSNormalization", [x, scale], {"axis": -1, "epsilon": epsilon})
    own = {"code": code, "K": K, "N": N, "block_size": block_size, "prologue": (), "epilogue": (), "arity": 4}

    def product(tiles: Array | None, scales: Array | None, zeros: Array | None, bias: Any) -> Array:
        (y,) = run("TiledPackedMatMul", [x, tiles, scales, zeros], own)
        total: Array = y + bias
        return total

    other = operands[8] if len(operands) > 8 else None
    if len(operands) > 4 and operands[4] is not None:
        (other,) = run("Pointwise", [product(*operands[4:8])], {"epilogue": beside, "arity": 1})
    return run("Pointwise", [product(*operands[:4]), other], {"epilogue": epilogue, "arity": 1})


def periodic_attention(
    q: Array, k: Array, v: Array, mask: Array, *rest: Array | None, **attrs: Any
) -> tuple[Array, ...]:
    """Attention with masks that repeat along the batch."""
    return attention(q, k, v, np.tile(mask, (len(q) // len(mask), 1, 1, 1)), *rest, **attrs)


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    cos: Array | None,
    sin: Array | None,
    starts: Array | None,
    lengths: Array,
    keys: Array,
    values: Array,
    sinks: Array | None = None,
    *,
    interleaved: bool = False,
    rotary_embedding_dim: int = 0,
    **attrs: Any,
) -> tuple[Array, ...]:
    """Attention of q to the keys and values of a cache, into which k and v are written at ``starts``: the result, keys and values.

    q and k are rotated first, if cosines and sines are given.
    """
    if cos is not None and sin is not None:
        how: dict[str, Any] = {"interleaved": interleaved, "rotary_embedding_dim": rotary_embedding_dim}
        (q,), (k,) = (rotary_embedding(x, cos, sin, **how) for x in (q, k))
    (keys,), (values,) = (tensor_scatter(cache, x, starts, axis=2) for cache, x in ((keys, k), (values, v)))
    return (attention(q, keys, values, lengths=lengths, sinks=sinks, **attrs)[0], keys, values)


def channel_attention(
    q: Array, k: Array, v: Array, factors: Array, *, least: Sequence[float] = ()
) -> tuple[Array, ...]:
    """Attention between channels, q, k and v (B, H, C, N): queries and keys are divided by their norms, which are at least
    ``least``; scores are multiplied by the factor of each head."""
    if least:
        (q,), (k,) = (lp_normalization(x, epsilon=e) for x, e in zip((q, k), least, strict=True))
    return attention(q * factors[:, None, None], k, v, scale=1.0)[:1]


def channel_sums(q: Array, k: Array, *, span: int) -> tuple[Array, ...]:
    """For q and k (B, H, C, N), per ``span`` tokens: squares of q's channels, of k's channels, and q k^T: (B, H, S, 2 + C, C)."""
    q, k = (x.astype(np.promote_types(x.dtype, np.float32)) for x in (q, k))
    parts = [(q[..., n : n + span], k[..., n : n + span]) for n in range(0, q.shape[3], span)]
    squares = [[np.square(x).sum(3)[..., None, :] for x in part] for part in parts]
    return (
        np.stack([np.concatenate([*s, x @ y.swapaxes(2, 3)], 2) for s, (x, y) in zip(squares, parts, strict=True)], 2),
    )


def channel_results(sums: Array, v: Array, factors: Array, *, least: Sequence[float] = ()) -> tuple[Array, ...]:
    """Attention between channels of values (B, H, C, N) from the parts of its scores (:func:`channel_sums`)."""
    total = sums.sum(2)
    scores = total[:, :, 2:] * factors[:, None, None]
    if least:
        q, k = (np.maximum(np.sqrt(total[:, :, i]), e) for i, e in enumerate(least))
        q, k = (np.where(n == 0, 1, n).astype(n.dtype) for n in (q, k))
        scores = scores / q[..., :, None] / k[..., None, :]
    weights = np.exp(scores - scores.max(3, keepdims=True))
    return ((weights / weights.sum(3, keepdims=True) @ v.astype(weights.dtype)).astype(v.dtype),)


def factored_attention(q: Array, k: Array, v: Array, rows: Array, columns: Array, **attrs: Any) -> tuple[Array, ...]:
    """Attention with the bias ``rows[query, key row] + columns[query, key column]``: (B, H, query rows, query columns, …)."""
    bias = rows[..., :, None] + columns[..., None, :]
    return attention(q, k, v, bias.reshape(*q.shape[:3], k.shape[2]), **attrs)[:1]


def rounded_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    scale: float,
    scores: tuple[float, ...],
    weights: tuple[float, ...],
) -> tuple[Array, ...]:
    """Attention whose scores and weights are rounded to grids, each given by its step and its least and largest integer. Scores
    without a grid are not rounded."""

    def rounded(x: Array, step: float, low: float, high: float) -> Array:
        return np.clip(np.rint(x / step), low, high) * step

    x = scale * (q @ np.swapaxes(k, -1, -2))
    x = rounded(x, *scores) if scores else x if mask is None else x + mask
    x = np.exp(x - x.max(-1, keepdims=True))
    return ((rounded(x / x.sum(-1, keepdims=True), *weights) @ v).astype(v.dtype),)


def recurrence(
    gates: Array,
    r: Array,
    bias: Array | None = None,
    peepholes: Array | None = None,
    lengths: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    *,
    cell: str,
    **attrs: Any,
) -> tuple[Array, ...]:
    """One direction of a recurrent layer, or all D directions, with the products of the inputs already computed.

    gates (T, N, G * H); r (G * H, H) and its bias; peepholes of an LSTM; initial states (N, H). Results: y (T, N, H) and the
    last states (N, H). All directions: gates (T, N, D * G * H), the other operands (D, ...); y (T, D, N, H) and states (D, N, H).
    """
    if r.ndim == 3:
        return _recurrences(gates, r, bias, peepholes, lengths, initial_h, initial_c, cell=cell, **attrs)
    size = gates.shape[2]
    both = np.zeros((1, 2 * size), gates.dtype)
    if bias is not None:
        both[0, size:] = bias
    states = [initial_h, initial_c] if cell == "LSTM" else [initial_h]
    operands = [gates, None, r[None], both, lengths, *(None if s is None else s[None] for s in states)]
    if cell == "LSTM" and peepholes is not None:
        operands.append(peepholes[None])
    y, *last = CELLS[cell](*operands, **attrs)
    return (y[:, 0], *(s[0] for s in last))


def _recurrences(gates: Array, r: Array, *operands: Array | None, cell: str, **attrs: Any) -> tuple[Array, ...]:
    """All directions of a recurrent layer, in the form of :func:`recurrence`."""
    bias, peepholes, lengths, *initial = operands
    count = len(r)
    each = len(attrs["activations"]) // count
    made = []
    for d, (own, matrix) in enumerate(zip(np.split(gates, count, axis=2), r, strict=True)):
        shift, peeped, h, c = (None if x is None else x[d] for x in (bias, peepholes, *initial))
        reverse = attrs["direction"] == "reverse" or d == 1
        functions = {k: attrs[k][d * each : (d + 1) * each] for k in ("activations", "alphas", "betas")}
        given = attrs | functions | {"direction": "reverse" if reverse else "forward"}
        made.append(recurrence(own, matrix, shift, peeped, lengths, h, c, cell=cell, **given))
    y, *last = zip(*made, strict=True)
    return (np.stack(y, axis=1), *(np.stack(s) for s in last))


GATES = {"GRU": 3, "LSTM": 4}
"""Number of gates of the cells that a stack of layers may have."""


def stacked_rnn(
    x: Array,
    weights: Array,
    bias: Array,
    *initial: Array | None,
    cell: str,
    layers: int,
    hidden: int,
    inputs: int,
    reverse: bool,
) -> tuple[Array, ...]:
    """Consecutive layers with weights packed for ``rnn_sm90.cu``: output, last states of all layers, inner outputs.

    x (T, N, inputs) and the initial states (layers, N, H) keep their type: each layer reads the stored results of the previous one.
    """
    gates, dtype, at, width = GATES[cell], x.dtype, 0, inputs
    functions = ("Sigmoid", "Tanh", "Tanh")[: gates - 1]
    attrs: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": "reverse" if reverse else "forward",
        "activations": functions,
        "alphas": (0.0,) * len(functions),
        "betas": (0.0,) * len(functions),
        **({"linear_before_reset": True} if cell == "GRU" else {}),
    }
    outputs: list[Array] = []
    states: list[list[Array]] = []
    for layer in range(layers):
        matrices = []
        for columns in (width, hidden):
            size = hidden * 4 * (-(-columns // 32) * 32)
            matrices.append(unpack_matrix(weights[at : at + size], hidden, gates, columns).astype(FP32))
            at += size
        own = bias[layer].T
        both = np.zeros((2, gates, hidden), np.float32)
        both[0] = own[:gates]
        if cell == "GRU":
            both[1, 2] += own[3]
        begin = [
            None if s is None else s[layer : layer + 1].astype(FP32) for s in initial[: 2 if cell == "LSTM" else 1]
        ]
        w, r = (m[None] for m in matrices)
        y, *last = CELLS[cell](x.astype(FP32), w, r, both.reshape(1, -1), None, *begin, **attrs)
        x, width = cast(y[:, 0], dtype)[0], hidden
        outputs.append(x)
        states.append([s[0] for s in last])
    finals = [np.stack(s) for s in zip(*states, strict=True)]
    return (outputs[-1], *finals, *([np.stack(outputs[:-1])] if layers > 1 else []))


def quantized(
    run: Run,
    *operands: Array | None,
    of: str,
    own: Sequence[str],
    through: DType,
    factor: float,
    low: float,
    high: float,
    zero: int,
    narrow: DType,
    kept: bool,
    which: int = 0,
    **attrs: Any,
) -> tuple[Array, ...]:
    """The operator ``of``, its result ``which`` rounded to the type ``through`` and then to the narrower type ``narrow``.

    ``own`` names the operator's attributes among ``attrs``. ``kept``: the rounded result is a result, too.
    """
    *before, last = run(of, operands, {name: attrs[name] for name in own})[: which + 1]
    rounded = cast(last, through)[0]
    q = bounded(rounded.astype(np.float32) * np.float32(factor), low, high, zero, narrow)
    return (*before, rounded, q) if kept else (*before, q)


KERNELS: dict[str, Kernel] = {
    "CachedAttention": cached_attention,
    "ChannelAttention": channel_attention,
    "ChannelResults": channel_results,
    "ChannelSums": channel_sums,
    "Copies": copies,
    "Copy": copy,
    "Frames": frames,
    "FactoredAttention": factored_attention,
    "RoundedAttention": rounded_attention,
    "MaskedSoftmax": masked_softmax,
    "PeriodicAttention": periodic_attention,
    "Recurrence": recurrence,
    "ResizedPicture": resized_picture,
    "RotaryPair": rotary_pair,
    "StackedRNN": stacked_rnn,
    "Zeros": zeros,
}

COMPOSED: dict[str, ComposedKernel] = {
    "PackedRowProduct": packed_row_product,
    "PairedProduct": paired_product,
    "Narrowed": quantized,
    "Quantized": quantized,
    "RowProduct": row_product,
    "SelectedProduct": selected_product,
    "TurnedHeads": turned_heads,
    "WeightsInParts": weights_in_parts,
}
