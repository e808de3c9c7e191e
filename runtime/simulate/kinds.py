"""Operators that only lowered programs have: what kernels do beside ONNX's own operators, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.binary import cast
from optdnn.runtime.reference.packed_rnn import unpack_matrix
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array, is_float


def _copy(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Operand 0, rearranged and rounded by the views alone."""
    (x,) = operands
    assert x is not None
    return (x,)


def _space_to_depth(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """NCHW image, times ``factors`` plus ``shifts`` of its channels (where these are given) -> [n, lanes, ceil(h / block),
    ceil(w / block)]: lane (dy * block + dx) * channels + c, filled up with zeros."""
    (x,), block, lanes = operands, attrs["block"], attrs["lanes"]
    assert x is not None
    if factors := attrs.get("factors"):
        x = x.astype(np.float32) * np.asarray(factors, np.float32)[:, None, None]
    if shifts := attrs.get("shifts"):
        x = x.astype(np.float32) + np.asarray(shifts, np.float32)[:, None, None]
    n, c, h, w = x.shape
    high, wide = -(-h // block), -(-w // block)
    padded = np.zeros((n, c, high * block, wide * block), np.float32)
    padded[:, :, :h, :w] = x
    tiles = (
        padded.reshape(n, c, high, block, wide, block)
        .transpose(0, 3, 5, 1, 2, 4)
        .reshape(n, block * block * c, high, wide)
    )
    out = np.zeros((n, lanes, high, wide), np.float32)
    out[:, : block * block * c] = tiles
    return (out,)


def _image_conv(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The convolution of an image (operand 0) that is first multiplied by ``factors`` and shifted by ``shifts`` per channel (where
    these are given), and rounded to ``dtype``; the other attributes are the convolution's."""
    x, *rest = operands
    assert x is not None
    made = x.astype(np.float32)
    for numbers, apply in ((attrs["factors"], np.multiply), (attrs["shifts"], np.add)):
        if numbers:
            made = apply(made, np.asarray(numbers, np.float32)[:, None, None])
    (rounded,) = cast(made, attrs["dtype"])
    own = {k: v for k, v in attrs.items() if k not in ("factors", "shifts", "dtype")}
    wide = [None if a is None else a.astype(np.float32) for a in (rounded, *rest)]
    return run_kernel("Conv", wide, own)


def _frames(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Slice t of ``taps`` takes places ``first + t * distance + i * step`` along ``axis``, for i in 0 .. ``count``; beyond the
    operand there is ``fill`` (or zeros). The slices are an axis of the result, before axis ``along``."""
    (x,), axis = operands, attrs["axis"]
    assert x is not None
    parts = []
    for tap in range(attrs["taps"]):
        at = attrs["first"] + tap * attrs["distance"] + attrs["step"] * np.arange(attrs["count"])
        inside = (at >= 0) & (at < x.shape[axis])
        part = np.take(x, np.where(inside, at, 0), axis)
        part[(*(slice(None),) * axis, ~inside)] = attrs.get("fill", 0)
        parts.append(part)
    return (np.stack(parts, attrs["along"]),)


def _quantized_blocks(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """NCHW image, quantized -> blocks of pixels as channels (as "SpaceToDepthImage"), in rows of ``width`` blocks that begin with
    ``before`` of zeros."""
    (x,), info = operands, np.iinfo(attrs["dtype"])
    assert x is not None
    steps = np.clip(np.rint(x.astype(np.float32) / np.float32(attrs["scale"])), info.min, info.max)
    (blocks,) = _space_to_depth([steps], attrs)
    out = np.zeros((*blocks.shape[:3], attrs["width"]), attrs["dtype"])
    out[..., attrs["before"] : attrs["before"] + blocks.shape[3]] = blocks
    return (out,)


def _blocks_to_space(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Blocks of pixels ``[n, lanes, rows, columns]`` -> ``[n, channels, *sizes]``, then the epilogue. Lane ``(dy * width + dx) *
    channels + c`` is pixel (dy, dx) of a block; of the whole, ``crops`` are cut off at the begin. A line has one size."""
    x, *rest = operands
    assert x is not None
    (high, wide), (top, left), channels = attrs["blocks"], attrs["crops"], attrs["channels"]
    n, _, rows, columns = x.shape
    places = x.reshape(n, high, wide, channels, rows, columns).transpose(0, 3, 4, 1, 5, 2)
    whole = places.reshape(n, channels, rows * high, columns * wide).astype(np.float32)
    h, w = (1, *attrs["sizes"])[-2:]
    out = whole[:, :, top : top + h, left : left + w].reshape(n, channels, *attrs["sizes"])
    more = [None if a is None else a.astype(np.float32) for a in rest]
    return run_kernel("Pointwise", [out, *more], {"epilogue": attrs["epilogue"], "arity": 1})


def _conv_blocks(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """A convolution with its epilogue, whose channels are blocks of pixels (as "BlocksToSpace" has them)."""
    own = {name: attrs[name] for name in attrs if name not in ("blocks", "crops", "sizes", "channels")}
    (made,) = run_kernel("Conv", [None if a is None else a.astype(np.float32) for a in operands], own)
    return _blocks_to_space([made], {**attrs, "epilogue": ()})


def _conv_sum(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The convolutions of operands (0, 1) and (2, 3), added, then the epilogue. ``sources``: their strides, pads, dilations."""
    x0, w0, x1, w1, *rest = operands
    first, second = attrs["sources"]
    names = ("strides", "pads", "dilations")
    common = {"group": 1, "auto_pad": "NOTSET"}
    wide = [None if a is None else a.astype(np.float32) for a in (x1, w1)]
    (other,) = run_kernel("Conv", wide, {**dict(zip(names, second, strict=True)), **common})
    own = {**dict(zip(names, first, strict=True)), **common}
    stages = attrs["epilogue"]
    (total,) = run_kernel("Conv", [None if a is None else a.astype(np.float32) for a in (x0, w0)], own)
    total = total + other
    operands32 = [None if a is None else a.astype(np.float32) for a in (total, *rest)]
    return run_kernel("Pointwise", operands32, {"epilogue": stages, "arity": 1})


def _pooled_conv(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """A convolution with its epilogue, then the largest of each 2 x 2 results (max pooling with stride 2, without padding)."""
    (y,) = run_kernel("Conv", [None if a is None else a.astype(np.float32) for a in operands], attrs)
    n, c, h, w = y.shape
    return (y[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5)),)


def _mean_product(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The means over an image's pixels, as one pixel, then a 1 x 1 convolution with its epilogue."""
    x, *rest = [None if a is None else a.astype(np.float32) for a in operands]
    assert x is not None
    return run_kernel("Conv", [x.mean((2, 3), keepdims=True, dtype=np.float32), *rest], attrs)


def _separable_conv(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """A convolution (attributes ``first_…``) of the first ``operands`` operands, rounded to the type ``through``; then another
    (``second_…``) of the result and the other operands."""
    first, second = (
        {name.removeprefix(f"{part}_"): value for name, value in attrs.items() if name.startswith(f"{part}_")}
        for part in ("first", "second")
    )
    wide = [None if a is None else a.astype(np.float32) for a in operands]
    (between,) = run_kernel("Conv", wide[: attrs["operands"]], first)
    (rounded,) = cast(between, attrs["through"])
    return run_kernel("Conv", [rounded.astype(np.float32), *wide[attrs["operands"] :]], second)


def _masked_softmax(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Softmax over the last axis; a row of nothing but -inf gives zeros."""
    (x,) = operands
    assert x is not None
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(top), 0, top).astype(x.dtype))
    total = e.sum(axis=-1, keepdims=True)
    return (e / np.where(total == 0, 1, total).astype(x.dtype),)


def _periodic_attention(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Attention whose masks repeat along the batch."""
    q, k, v, mask, *rest = operands
    assert q is not None
    assert mask is not None
    return run_kernel(
        "Attention", [q, k, v, np.tile(mask, (len(q) // len(mask), 1, 1, 1)), *rest], attrs, [np.dtype(np.float32)] * 4
    )


def _zeros(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    return (np.zeros(tuple(attrs["shape"]), np.int32),)


def _wide(x: Array | None) -> Array | None:
    return x if x is None or x.dtype.itemsize > 2 or x.dtype.kind in "iu" else x.astype(np.float32)


def _stacked_rnn(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Layers one after the other with weights packed for ``rnn_sm90.cu``: output, last states of all layers, inner outputs."""
    x, weights, bias, *initial = operands
    assert x is not None
    assert weights is not None
    assert bias is not None
    cell, hidden, width = attrs["cell"], attrs["hidden"], attrs["inputs"]
    gates, dtype, at = {"GRU": 3, "LSTM": 4}[cell], x.dtype, 0
    given: dict[str, Any] = {"hidden_size": hidden, "direction": "reverse" if attrs["reverse"] else "forward"}
    given |= {"linear_before_reset": True} if cell == "GRU" else {}
    names = ("Sigmoid", "Tanh", "Tanh")[: gates - 1]
    given |= {"activations": names, "alphas": (0.0,) * len(names), "betas": (0.0,) * len(names), "clip": None}
    outputs: list[Array] = []
    states: list[list[Array]] = []
    for layer in range(attrs["layers"]):
        matrices = []
        for inputs in (width, hidden):
            size = hidden * 4 * (-(-inputs // 32) * 32)
            matrices.append(unpack_matrix(weights[at : at + size], hidden, gates, inputs))
            at += size
        own = bias[layer].T
        both = np.zeros((2, gates, hidden), np.float32)
        both[0] = own[:gates]
        both[1, 2] += own[3] if cell == "GRU" else 0
        begin = [None if s is None else s[layer : layer + 1] for s in initial[: 2 if cell == "LSTM" else 1]]
        stack = [x, *(m[None] for m in matrices), both.reshape(1, -1), None, *begin]
        y, *last = run_kernel(cell, [_wide(v) for v in stack], given, [np.dtype(np.float32)] * 3)
        x, width = cast(y[:, 0], dtype)[0], hidden  # the next layer reads what was stored
        outputs.append(x)
        states.append([s[0] for s in last])
    inner = np.stack(outputs[:-1]) if len(outputs) > 1 else None
    finals = [np.stack(s) for s in zip(*states, strict=True)]
    return (outputs[-1], *finals, *([] if inner is None else [inner]))


def _recurrence(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """One direction of a layer whose inputs are multiplied already: gates (T, N, G * H), R, its bias, P, lengths, states."""
    gates, r, bias, p, lens, *initial = (_wide(x) for x in operands)
    assert gates is not None
    assert r is not None
    size = gates.shape[2]
    both = np.zeros((1, 2 * size), gates.dtype)
    if bias is not None:
        both[0, size:] = bias
    cell = attrs["cell"]
    own = {k: v for k, v in attrs.items() if k != "cell"}
    begin = [None if s is None else s[None] for s in initial[: 2 if cell == "LSTM" else 1]]
    stack = [gates, None, r[None], both, lens, *begin]
    if cell == "LSTM" and p is not None:
        stack.append(p[None])
    y, *states = run_kernel(cell, stack, own, [gates.dtype] * 3)
    return (y[:, 0], *(s[0] for s in states))


def _add_norm(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The sum of the first two operands, and its normalization (``norm``: the kind) with the others as scale and bias."""
    a, b, *parameters = (_wide(x) for x in operands)
    assert a is not None
    assert b is not None
    own = {k: v for k, v in attrs.items() if k != "norm"}
    return (a + b, run_kernel(attrs["norm"], [a + b, *parameters], own, [np.dtype(np.float32)] * 3)[0])


def _dynamic_scale(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The scale and zero point of uint8 for values between the two operands and 0 (ONNX's DynamicQuantizeLinear)."""
    low, high = (np.float32(0) if x is None else x.astype(np.float32) for x in operands)
    low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    scale = (high - low) / np.float32(255)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    return (scale, np.rint(np.clip(-low / scale, 0, 255)).astype(np.uint8))


def _mean(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a QuantizedMean that another operator makes."""
    return {name.removeprefix("mean_"): value for name, value in attrs.items() if name.startswith("mean_")}


def _conv_squeeze(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """A convolution, and the means of its images (``tile`` empty) or the sums ``[n, tiles, c]`` of tiles of ``tile`` pixels.

    Of 8-bit integers (``mean_…``: the attributes of their QuantizedMean), sums are those of what lies above the zero point.
    """
    own = {name: attrs[name] for name in attrs["conv"]}
    if mean := _mean(attrs):
        (stored,) = run_kernel(attrs["of"], operands, own)
        if not attrs["tile"]:
            return stored, run_kernel("QuantizedMean", [stored], mean)[0]
        y = stored.astype(np.float32) - np.float32(mean["input_zero"])
    else:
        wide = [None if a is None else a.astype(np.float32) for a in operands]
        (stored,) = run_kernel("Conv", wide, own)
        if not attrs["tile"]:
            return stored, stored.mean((2, 3), keepdims=True, dtype=np.float32)
        y = stored
    (n, c, h, w), (th, tw) = y.shape, attrs["tile"]
    rows, columns = -(-h // th), -(-w // tw)
    padded = np.zeros((n, c, rows * th, columns * tw), np.float32)
    padded[:, :, :h, :w] = y
    sums = padded.reshape(n, c, rows, th, columns, tw).sum((3, 5), dtype=np.float32)
    return stored, sums.reshape(n, c, rows * columns).transpose(0, 2, 1)


def _squeeze_finish(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Sums of tiles ``[n, tiles, c]`` -> means ``[n, c, 1, 1]``, of 8-bit integers as QuantizedMean's attributes ``mean_…`` say."""
    (sums,) = operands
    assert sums is not None
    if mean := _mean(attrs):
        total = sums.sum(1, dtype=np.float32).astype(np.int64)[:, :, None, None]
        return run_kernel("QuantizedMean", [total], {**mean, "input_zero": 0})
    return ((sums.sum(1, dtype=np.float32) / np.float32(attrs["pixels"]))[:, :, None, None],)


def _quantized(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The operator ``of``, its first result rounded to the type ``through`` and then to 8 bits; ``kept``: both are results."""
    own, kind = {name: attrs[name] for name in attrs["own"]}, attrs["of"]
    results = OWN[kind](operands, own) if kind in OWN else run_kernel(kind, operands, own, [np.dtype(np.float32)] * 4)
    rounded = cast(results[0], attrs["through"])[0]
    x = rounded.astype(np.float32) * np.float32(attrs["factor"])
    x = np.minimum(np.maximum(x, np.float32(attrs["low"])), np.float32(attrs["high"]))
    narrow = attrs["narrow"]
    q = x.astype(narrow) if is_float(narrow) else (np.rint(x).astype(np.int64) + attrs["zero"]).astype(narrow)
    return (rounded, q) if attrs["kept"] else (q,)


OWN: dict[str, Callable[[Sequence[Array | None], Mapping[str, Any]], Sequence[Array]]] = {
    "AddNorm": _add_norm,
    "Copy": _copy,
    "Frames": _frames,
    "DynamicScale": _dynamic_scale,
    "SpaceToDepthImage": _space_to_depth,
    "BlocksToSpace": _blocks_to_space,
    "ConvBlocks": _conv_blocks,
    "Quantized": _quantized,
    "QuantizedBlocks": _quantized_blocks,
    "ConvSum": _conv_sum,
    "ImageConv": _image_conv,
    "PooledConv": _pooled_conv,
    "MeanProduct": _mean_product,
    "ConvSqueeze": _conv_squeeze,
    "SeparableConv": _separable_conv,
    "SqueezeFinish": _squeeze_finish,
    "MaskedSoftmax": _masked_softmax,
    "PeriodicAttention": _periodic_attention,
    "Recurrence": _recurrence,
    "StackedRNN": _stacked_rnn,
    "Zeros": _zeros,
}
"""Kind -> its meaning, beside those of the reference kernels."""
