"""NumPy kernels. Regions of a lowered program around a convolution; see :mod:`optdnn.runtime.reference.regions`.

Operands of half precision arrive in fp32 (:func:`optdnn.runtime.reference.run.run_kernel`). A convolution's attributes include
its stages, which refer to its own operands by their slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import ComposedKernel, Kernel, Run
from optdnn.runtime.reference.binary import cast
from optdnn.runtime.reference.conv import conv
from optdnn.runtime.reference.quantized import mean as quantized_mean
from optdnn.types import Array, DType, to_tf32


def normalized(x: Array, factors: Sequence[float], shifts: Sequence[float]) -> Array:
    """An NCHW image in fp32, times ``factors`` plus ``shifts`` of its channels, if these are given."""
    x = x.astype(np.float32)
    if factors:
        x = x * np.asarray(factors, np.float32)[:, None, None]
    return x + np.asarray(shifts, np.float32)[:, None, None] if shifts else x


def space_to_depth(
    x: Array, *, block: int, lanes: int, factors: Sequence[float] = (), shifts: Sequence[float] = ()
) -> tuple[Array, ...]:
    """NCHW image, :func:`normalized` -> [n, lanes, ceil(h / block), ceil(w / block)].

    Lane ``(dy * block + dx) * channels + c`` is channel c of pixel (dy, dx) of a block; the other lanes are zeros.
    """
    n, c, h, w = x.shape
    high, wide = -(-h // block), -(-w // block)
    padded = np.zeros((n, c, high * block, wide * block), np.float32)
    padded[:, :, :h, :w] = normalized(x, factors, shifts)
    tiles = padded.reshape(n, c, high, block, wide, block).transpose(0, 3, 5, 1, 2, 4)
    out = np.zeros((n, lanes, high, wide), np.float32)
    out[:, : block * block * c] = tiles.reshape(n, block * block * c, high, wide)
    return (out,)


def quantized_blocks(
    x: Array, *, block: int, lanes: int, before: int, width: int, scale: float, dtype: DType, zero: int = 0
) -> tuple[Array, ...]:
    """NCHW image, quantized -> blocks of pixels as channels (see :func:`space_to_depth`).

    Rows have ``width`` blocks. The first ``before`` of them are outside of the image, and elements outside are ``zero``.
    Blocks of the image that do not fit into a row are left out.
    """
    info = np.iinfo(dtype)
    steps = np.clip(np.rint(x.astype(np.float32) / np.float32(scale)), info.min - zero, info.max - zero)
    (blocks,) = space_to_depth(steps, block=block, lanes=lanes)
    out = np.zeros((*blocks.shape[:3], width))
    inside = min(blocks.shape[3], width - before)
    out[..., before : before + inside] = blocks[..., :inside]
    return ((out + zero).astype(dtype),)


def blocks_to_space(
    x: Array, *, blocks: Sequence[int], crops: Sequence[int], sizes: Sequence[int], channels: int
) -> tuple[Array, ...]:
    """Blocks of pixels ``[n, lanes, rows, columns]`` -> ``[n, channels, *sizes]``.

    Lane ``(dy * width + dx) * channels + c`` is pixel (dy, dx) of a block of ``blocks`` = (height, width) pixels. ``crops`` are
    cut off at the beginning. A line has one size.
    """
    (high, wide), (top, left) = blocks, crops
    n, _, rows, columns = x.shape
    places = x.reshape(n, high, wide, channels, rows, columns).transpose(0, 3, 4, 1, 5, 2)
    whole = places.reshape(n, channels, rows * high, columns * wide).astype(np.float32)
    h, w = (1, *sizes)[-2:]
    return (whole[:, :, top : top + h, left : left + w].reshape(n, channels, *sizes),)


def conv_blocks(
    run: Run,
    *operands: Array | None,
    blocks: Sequence[int],
    crops: Sequence[int],
    sizes: Sequence[int],
    channels: int,
    **attrs: Any,
) -> tuple[Array, ...]:
    """A convolution with channels that are blocks of pixels (see :func:`blocks_to_space`), moved to their positions in the
    image."""
    (made,) = run("Conv", operands, attrs)
    return blocks_to_space(made, blocks=blocks, crops=crops, sizes=sizes, channels=channels)


def image_conv(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    factors: Sequence[float],
    shifts: Sequence[float],
    dtype: str,
    **geometry: Any,
) -> tuple[Array, ...]:
    """The convolution of an image, :func:`normalized` and rounded to ``dtype`` (a NumPy type, or ``tfloat32``)."""
    image = normalized(x, factors, shifts)
    (rounded,) = (to_tf32(image),) if dtype == "tfloat32" else cast(image, dtype)
    return conv(rounded.astype(np.float32), w, bias, **geometry)


def conv_sum(
    run: Run,
    x0: Array,
    w0: Array,
    x1: Array,
    w1: Array,
    *rest: Array | None,
    sources: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    epilogue: Sequence[Any],
) -> tuple[Array, ...]:
    """Two convolutions, added. ``sources``: strides, pads and dilations of each. Stages read ``rest`` by slots from 1 on."""
    total, other = (
        conv(x, w, strides=strides, pads=pads, dilations=dilations)[0]
        for (x, w), (strides, pads, dilations) in zip(((x0, w0), (x1, w1)), sources, strict=True)
    )
    return run("Pointwise", [total + other, *rest], {"epilogue": epilogue, "arity": 1})


def edge_padded(
    run: Run, x: Array, *rest: Array | None, of: str, own: Sequence[str], edges: Sequence[int], **attrs: Any
) -> tuple[Array, ...]:
    """The operator ``of``, on x (N, C, ...) with its edges repeated along the spatial axes.

    ``edges``: the number of repetitions, begins, then ends.
    """
    half = len(edges) // 2
    wide = np.pad(x, [(0, 0), (0, 0), *zip(edges[:half], edges[half:], strict=True)], mode="edge")
    return run(of, [wide, *rest], {name: attrs[name] for name in own})


def paired_conv(
    run: Run, x: Array, w: Array, v: Array, b: Array, c: Array, *more: Array,
    sources: Sequence[Any], epilogue: Sequence[Any], beside: Sequence[Any],
) -> tuple[Array, ...]:  # fmt: skip
    """Two sums of convolutions of the same images, with biases b and c (C). The first one's stages read the second as operand 1.

    Each source has an image (N, I, H, W), and the weights of both sums, (C / 8, 8, I, h, w): x, w and v, and ``more``.
    """
    operands = (x, w, v, *more)
    sums = []
    for k, bias in enumerate((b, c)):
        terms = [
            conv(image, both[k].reshape(-1, *both[k].shape[2:]), strides=strides, pads=pads, dilations=dilations)[0]
            for (image, *both), (strides, pads, dilations) in zip(_threes(operands), sources, strict=True)
        ]
        sums.append(sum(terms[1:], terms[0]) + bias[:, None, None])
    (other,) = run("Pointwise", [sums[1]], {"epilogue": beside, "arity": 1})
    return run("Pointwise", [sums[0], other], {"epilogue": epilogue, "arity": 1})


def gated_conv(
    run: Run, *operands: Array, epilogue: Sequence[Any], beside: Sequence[Any], **geometry: Any
) -> tuple[Array, ...]:
    """Two convolutions of the same form, each of an image, weights and a bias. The first one's stages read the second as operand
    1."""
    first, second = (run("Conv", operands[k : k + 3], geometry)[0] for k in (0, 3))
    (other,) = run("Pointwise", [second], {"epilogue": beside, "arity": 1})
    return run("Pointwise", [first, other], {"epilogue": epilogue, "arity": 1})


def _threes(operands: Sequence[Array]) -> list[Sequence[Array]]:
    return [operands[i : i + 3] for i in range(0, len(operands), 3)]


def pooled_conv(run: Run, *operands: Array | None, **attrs: Any) -> tuple[Array, ...]:
    """A convolution, then the maximum of each 2 x 2 results (max pooling with stride 2, without padding)."""
    (y,) = run("Conv", operands, attrs)
    n, c, h, w = y.shape
    return (y[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5)),)


def pooled_image_conv(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    window: int,
    begins: tuple[int, int],
    size: tuple[int, int],
    **attrs: Any,
) -> tuple[Array, ...]:
    """:func:`image_conv`, then the maxima of ``size`` windows with stride 2; the first window begins ``begins`` before the
    image."""
    (y,) = image_conv(x, w, bias, **attrs)
    (top, left), (rows, columns) = begins, size
    far = ((rows - 1) * 2 + window, (columns - 1) * 2 + window)
    padded = np.full(
        (*y.shape[:2], *(max(f, n + p) for f, n, p in zip(far, y.shape[2:], begins, strict=True))), -np.inf, y.dtype
    )
    padded[:, :, top : top + y.shape[2], left : left + y.shape[3]] = y
    taps = [
        padded[:, :, r : r + rows * 2 - 1 : 2, c : c + columns * 2 - 1 : 2]
        for r in range(window)
        for c in range(window)
    ]
    return (np.maximum.reduce(taps),)


def mean_product(run: Run, x: Array, *rest: Array | None, **attrs: Any) -> tuple[Array, ...]:
    """The means over an image's pixels, as one pixel, then a 1 x 1 convolution. Engines of older versions use it."""
    return run("Conv", [x.mean((2, 3), keepdims=True, dtype=np.float32), *rest], attrs)


def separable_conv(run: Run, *given: Array | None, operands: int, through: str, **attrs: Any) -> tuple[Array, ...]:
    """A convolution (attributes ``first_...``) of the first ``operands`` operands, rounded to the type ``through``.

    Then a second convolution (``second_...``) of the result and the other operands.
    """
    return chained_conv(run, *given, operands=operands, through=through, **attrs)[1:]


def chained_conv(run: Run, *given: Array | None, operands: int, through: str, **attrs: Any) -> tuple[Array, ...]:
    """:func:`separable_conv`; the first convolution's result, rounded to the type ``through``, is returned before the second
    one's."""
    (between,) = run("Conv", given[:operands], prefixed(attrs, "first_"))
    (rounded,) = cast(between, through)
    middle = rounded.astype(np.float32)
    return middle, *run("Conv", [middle, *given[operands:]], prefixed(attrs, "second_"))


def chained_quantized(run: Run, *given: Array | None, operands: int, kept: bool, **attrs: Any) -> tuple[Array, ...]:
    """A QuantizedConv of the first ``operands`` operands, and another one of its result; ``kept``: both results are returned."""
    (middle,) = run("QuantizedConv", given[:operands], prefixed(attrs, "first_"))
    last = run("QuantizedConv", [middle, *given[operands:]], prefixed(attrs, "second_"))
    return (middle, *last) if kept else last


def excitation_gate(
    run: Run, sums: Array, *given: Array | None, through: str, pixels: int, **attrs: Any
) -> tuple[Array, ...]:
    """The means over an image's ``pixels``, of the sums of its tiles, as one pixel rounded to the type ``through``, then
    :func:`separable_conv`."""
    (means,) = cast(squeeze_finish(sums, pixels=pixels)[0], through)
    return separable_conv(run, means.astype(np.float32), *given, through=through, **attrs)


def prefixed(attrs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The attributes with names that begin with ``prefix``, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in attrs.items() if name.startswith(prefix)}


def conv_squeeze(
    run: Run, *operands: Array | None, conv: Sequence[str], of: str, tile: Sequence[int], **attrs: Any
) -> tuple[Array, ...]:
    """A convolution and the means of its images (``tile`` empty), or the sums ``[n, tiles, c]`` of tiles of ``tile`` pixels.

    ``of``: the convolution's kind; ``conv`` names its attributes. 8-bit integers have the attributes ``mean_...`` of their
    QuantizedMean; their sums are taken after the zero point is subtracted.
    """
    mean = prefixed(attrs, "mean_")
    (stored,) = run(of, operands, {name: attrs[name] for name in conv})
    if not tile:
        if mean:
            return stored, quantized_mean(stored, **mean)[0]
        return stored, stored.mean((2, 3), keepdims=True, dtype=np.float32)
    y = stored.astype(np.float32) - np.float32(mean["input_zero"]) if mean else stored
    (n, c, *size), counts = y.shape, [-(-k // t) for k, t in zip(y.shape[2:], tile, strict=True)]
    padded = np.zeros((n, c, *(k * t for k, t in zip(counts, tile, strict=True))), np.float32)
    padded[tuple(slice(k) for k in (n, c, *size))] = y
    parts = padded.reshape(n, c, *(k for pair in zip(counts, tile, strict=True) for k in pair))
    sums = parts.sum(tuple(range(3, parts.ndim, 2)), dtype=np.float32)
    return stored, sums.reshape(n, c, -1).transpose(0, 2, 1)


def squeeze_finish(sums: Array, *, pixels: int, **attrs: Any) -> tuple[Array, ...]:
    """Sums of tiles ``[n, tiles, c]`` -> means ``[n, c, 1, 1]``; for 8-bit integers, the attributes ``mean_...`` apply."""
    total = sums.sum(1, dtype=np.float32)[:, :, None, None]
    if mean := prefixed(attrs, "mean_"):
        return quantized_mean(total.astype(np.int64), **{**mean, "input_zero": 0})
    return (total / np.float32(pixels),)


KERNELS: dict[str, Kernel] = {
    "BlocksToSpace": blocks_to_space,
    "ImageConv": image_conv,
    "PooledImageConv": pooled_image_conv,
    "QuantizedBlocks": quantized_blocks,
    "SpaceToDepthImage": space_to_depth,
    "SqueezeFinish": squeeze_finish,
}

COMPOSED: dict[str, ComposedKernel] = {
    "ChainedConv": chained_conv,
    "ChainedQuantized": chained_quantized,
    "ConvBlocks": conv_blocks,
    "ConvSqueeze": conv_squeeze,
    "ConvSum": conv_sum,
    "EdgePadded": edge_padded,
    "ExcitationGate": excitation_gate,
    "GatedConv": gated_conv,
    "MeanProduct": mean_product,
    "PairedConv": paired_conv,
    "PooledConv": pooled_conv,
    "SeparableConv": separable_conv,
}
