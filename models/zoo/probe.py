"""The effect of a layer on a few pictures, computed in float64 NumPy while the network is built.

A network with random weights is a fair test subject only if its activations stay O(1) in every layer and its output
follows its input. Trained networks have both from BatchNormalization's statistics and from learned biases; here each
layer is run once on a few small pictures (the *probe*), and its statistics and biases are set from the results
(data-dependent initialization: Mishkin & Matas, "All You Need is a Good Init", 2015). Nothing here is shared with the
kernels that optdnn runs models with: the code under test must not choose its own test data.

All arrays are float64, NCHW.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from optdnn.types import Array

MOST_BYTES = 1 << 25
"""Of the windows of a convolution's pictures that are copied together."""


def settle(x: Array) -> Array:
    """Round to 16 significant bits: another machine's order of summation then gives the same bytes."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(mantissa * 2.0**16) / 2.0**16, exponent))


def statistics(x: Array) -> tuple[Array, Array]:
    """Mean and variance (channels,) over pictures and positions.

    Each variance is drawn halfway to the mean over the channels: a deep map has few positions, and their sample
    variance is rough.
    """
    axes = (0, *range(2, x.ndim))
    mean, var = x.mean(axes), x.var(axes)
    return settle(mean), settle(0.5 * (var + var.mean()) + 1e-9)


def conv(
    x: Array, weight: Array, stride: int, padding: tuple[int, int], groups: int, dilation: int, *, small: bool
) -> Array:
    """2-d convolution. On a probe that is ``small``er than the real map the border is repeated, not zero: zeros are a
    larger part of a small map, and a variance that they lower a little in each layer is off by a large factor after
    fifty."""
    out, _, *kernel = weight.shape
    covered = [dilation * (k - 1) + 1 for k in kernel]
    windows = sliding_window_view(pad(x, padding, small), covered, axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride, ::dilation, ::dilation]
    w = weight.astype(np.float64).reshape(groups, out // groups, -1)
    each = max(1, MOST_BYTES // windows[0].nbytes)
    parts = []
    for i in range(0, len(x), each):
        part = windows[i : i + each]
        y = w @ part.transpose(1, 4, 5, 0, 2, 3).reshape(groups, w.shape[2], -1)
        parts.append(y.reshape(out, len(part), *part.shape[2:4]).transpose(1, 0, 2, 3))
    return np.concatenate(parts)


def pad(x: Array, padding: tuple[int, int], small: bool) -> Array:
    return np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)), mode="edge" if small else "constant")


def conv_transpose(x: Array, weight: Array) -> Array:
    """With windows that do not overlap: weight (in, out, k, k), stride k."""
    n, _, h, w = x.shape
    _, out, k, _ = weight.shape
    y = np.einsum("nihw,iokl->nohkwl", x, weight.astype(np.float64), optimize=True)
    return np.asarray(y.reshape(n, out, h * k, w * k))


def linear(x: Array, weight: Array, rows: int = 512) -> Array:
    """``x @ weight.T``, some rows of the weight at a time (a classifier's can be 400 MB)."""
    parts = [x @ weight[i : i + rows].T.astype(np.float64) for i in range(0, len(weight), rows)]
    return np.concatenate(parts, axis=1)


def batch_norm(x: Array, parameters: list[Array], eps: float) -> Array:
    """With scale, shift, mean and variance (channels,)."""
    scale, shift, mean, var = (p.astype(np.float64) for p in parameters)
    factor = scale / np.sqrt(var + eps)
    return x * factor[:, None, None] + (shift - mean * factor)[:, None, None]


def max_pool(x: Array, kernel: int, stride: int, padding: int, ceil: bool) -> Array:
    end = padding + (stride - 1 if ceil else 0)
    x = np.pad(x, ((0, 0), (0, 0), (padding, end), (padding, end)), constant_values=-np.inf)
    windows = sliding_window_view(x, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    return np.asarray(windows.max((-2, -1)))


def avg_pool(x: Array, kernel: int, stride: int, padding: int, *, small: bool) -> Array:
    x = pad(x, (padding, padding), small)
    windows = sliding_window_view(x, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    return np.asarray(windows.mean((-2, -1)))


def double(x: Array) -> Array:
    """Twice the size, nearest neighbor."""
    return x.repeat(2, 2).repeat(2, 3)


def stretch(x: Array, height: int, width: int) -> Array:
    """The map at another size, nearest neighbor: a classifier that reads a 7x7 map gets one from a smaller probe."""
    rows, columns = np.arange(height) * x.shape[2] // height, np.arange(width) * x.shape[3] // width
    return np.asarray(x[:, :, rows][:, :, :, columns])


def sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
