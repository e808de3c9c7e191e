"""NumPy kernels. Signals and special transforms: DFT, STFT, MelWeightMatrix, Col2Im, Det, BitCast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.conv import pad_spatial, taps
from optdnn.types import FP32, Array, DType


def _complex(x: Array) -> Array:
    """(…, 1) real or (…, 2) real and imaginary to complex (…)."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _real(x: Array, dtype: DType) -> Array:
    return np.stack([x.real, x.imag], axis=-1).astype(dtype, copy=False)


def dft(
    x: Array,
    dft_length: Array | None = None,
    at: Array | None = None,
    *,
    axis: int = -2,
    inverse: bool = False,
    onesided: bool = False,
) -> tuple[Array, ...]:
    """DFT (ONNX opset 20) along ``at``, or ``axis`` if ``at`` is absent: x (…, 1 or 2).

    An inverse of a one-sided spectrum is real, (…, 1).
    """
    signal = _complex(x)
    axis = (axis if at is None else int(at.reshape(-1)[0])) % x.ndim
    if axis == x.ndim - 1:
        raise ValueError("the last axis holds real and imaginary parts")
    length = None if dft_length is None else int(dft_length.reshape(-1)[0])
    if inverse and onesided:
        return (np.fft.irfft(signal, length, axis)[..., None].astype(x.dtype, copy=False),)
    if inverse:
        return (_real(np.fft.ifft(signal, length, axis), x.dtype),)
    if onesided:
        if np.iscomplexobj(signal):
            raise ValueError("a one-sided transform of a complex signal")
        return (_real(np.fft.rfft(signal, length, axis), x.dtype),)
    return (_real(np.fft.fft(signal, length, axis), x.dtype),)


def stft(
    x: Array,
    frame_step: Array,
    window: Array | None = None,
    frame_length: Array | None = None,
    *,
    onesided: bool = True,
) -> tuple[Array, ...]:
    """STFT (ONNX opset 17): x (B, L, 1 or 2) or (B, L); result (B, frames, bins, 2)."""
    signal = _complex(x) if x.ndim == 3 else x
    step = int(frame_step.reshape(-1)[0])
    if frame_length is not None:
        length = int(frame_length.reshape(-1)[0])
    elif window is not None:
        length = len(window)
    else:
        raise ValueError("neither a window nor a frame length is given")
    if step < 1 or not 1 <= length <= signal.shape[1]:
        raise ValueError(f"frames of {length}, {step} apart, of {signal.shape[1]} samples")
    frames = np.lib.stride_tricks.sliding_window_view(signal, length, axis=1)[:, ::step]
    if window is not None:
        frames = frames * window
    if onesided and not np.iscomplexobj(frames):
        return (_real(np.fft.rfft(frames, axis=-1), x.dtype),)
    spectrum = np.fft.fft(frames, axis=-1)
    return (_real(spectrum[..., : length // 2 + 1] if onesided else spectrum, x.dtype),)


def mel_weight_matrix(
    bins: Array, dft_length: Array, sample_rate: Array, lower: Array, upper: Array, *, output_datatype: DType = FP32
) -> tuple[Array, ...]:
    """MelWeightMatrix (ONNX opset 17): (dft_length / 2 + 1, bins) triangular filters."""
    count, length, rate = (int(v.reshape(-1)[0]) for v in (bins, dft_length, sample_rate))
    low, high = (2595 * math.log10(1 + float(v.reshape(-1)[0]) / 700) for v in (lower, upper))
    mel = np.arange(count + 2) * ((high - low) / (count + 2)) + low
    edges = ((length + 1) * (700 * (10 ** (mel / 2595) - 1)) // rate).astype(np.int64)
    out = np.zeros((length // 2 + 1, count))
    for i in range(count):
        left, center, right = edges[i : i + 3].tolist()
        if left == center:
            out[center, i] = 1
        else:
            out[left : center + 1, i] = np.arange(center - left + 1) / (center - left)
        if right > center:
            out[center:right, i] = np.arange(right - center, 0, -1) / (right - center)
    return (out.astype(output_datatype),)


def col2im(
    x: Array,
    image_shape: Array,
    block_shape: Array,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> tuple[Array, ...]:
    """Col2Im (ONNX opset 18): columns (N, C * prod(block), L) added up into an image (N, C, *image_shape)."""
    image, block = image_shape.tolist(), block_shape.tolist()
    rank = len(image)
    padded = [image[i] + pads[i] + pads[rank + i] for i in range(rank)]
    out = [(padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    if min(block, default=1) < 1 or math.prod(out) != x.shape[2] or x.shape[1] % math.prod(block):
        raise ValueError(f"columns {list(x.shape)} do not make an image {image} of blocks {block}")
    columns = x.reshape(x.shape[0], x.shape[1] // math.prod(block), *block, *out)
    y = np.zeros((*columns.shape[:2], *padded), x.dtype)
    for at, where in taps(block, out, strides, dilations):
        y[where] += columns[at]
    return (pad_spatial(y, [-p for p in pads]),)


def det(x: Array) -> tuple[Array, ...]:
    """Det (ONNX opset 22) of the last two axes."""
    return (np.asarray(np.linalg.det(x), x.dtype),)


def bit_cast(x: Array, *, to: DType) -> tuple[Array, ...]:
    """BitCast (ONNX opset 26): the same bits as another type of the same size."""
    return (np.ascontiguousarray(x).view(to).reshape(x.shape),)


KERNELS: dict[str, Kernel] = {
    "DFT": dft,
    "STFT": stft,
    "MelWeightMatrix": mel_weight_matrix,
    "Col2Im": col2im,
    "Det": det,
    "BitCast": bit_cast,
}
