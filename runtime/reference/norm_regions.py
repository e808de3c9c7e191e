"""NumPy kernels. Regions of a lowered program around a normalization; see :mod:`optdnn.runtime.reference.regions`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.attention import rotary_embedding
from optdnn.runtime.reference.base import ComposedKernel, Kernel, Run
from optdnn.runtime.reference.norm import KERNELS as NORMS
from optdnn.runtime.reference.softmax import KERNELS as SOFTMAX
from optdnn.types import Array

ROWS = {**NORMS, **SOFTMAX}


def activated_norm(x: Array, *given: Array | None, norm: str, **attrs: Any) -> tuple[Array, ...]:
    """The normalization or softmax ``norm`` (a kind) with its scale and bias; its stages follow."""
    return ROWS[norm](x, *(a for a in given if a is not None), **attrs)[:1]


def add_norm(a: Array, b: Array, *parameters: Array | None, norm: str, **attrs: Any) -> tuple[Array, ...]:
    """``a + b``, and its normalization (``norm``: the kind) with the other operands as scale and bias."""
    total = a + b
    return (total, NORMS[norm](total, *parameters, **attrs)[0])


def norm_add_norm(
    x: Array, other: Array | None, *parameters: Array | None, norm: str, first_norm: str, **attrs: Any
) -> tuple[Array, ...]:
    """``x`` normalized (by the kind ``first_norm``; its attributes have the same prefix) plus ``other``, and the normalization of
    this sum.

    ``other`` None: nothing is added.

    Parameters: scale and bias of the second norm, then scale and bias of the first; any may be absent."""
    own, before = ([p for p in pair if p is not None] for pair in (parameters[:2], parameters[2:]))
    first = {name.removeprefix("first_"): attrs.pop(name) for name in list(attrs) if name.startswith("first_")}
    rows = NORMS[first_norm](x, *before, **first)[0]
    return (
        (rows, NORMS[norm](rows, *own, **attrs)[0])
        if other is None
        else add_norm(rows, other, *own, norm=norm, **attrs)
    )


def norm_pair(
    run: Run, *given: Array | None, norm: str, count: int, after: Sequence[Any], others: Sequence[Any], **attrs: Any
) -> tuple[Array, ...]:
    """Two normalizations ``norm`` (a kind), the first on ``count`` operands, and the stages that follow each."""
    parts, own = ((given[:count], after), (given[count:], others)), {"norm": norm, **attrs, "arity": 3}
    return tuple(run("ActivatedNorm", part, {**own, "epilogue": stages})[0] for part, stages in parts)


def rotary_norm_pair(
    cos: Array, sin: Array, *given: Array | None, norm: str, epsilon: float, tokens: bool, **attrs: Any
) -> tuple[Array, ...]:
    """Two tensors of heads (B, H, L, D), each with a scale and a bias or None: norms of each head, or of all heads of a token.

    Then rotary embeddings of both by the same angles."""
    found: list[Array] = []
    for x, scale, bias in (given[:3], given[3:]):
        assert x is not None
        rows = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) if tokens else x
        (y,) = NORMS[norm](rows, *(a for a in (scale, bias) if a is not None), axis=-1, epsilon=epsilon)[:1]
        heads = y.reshape(x.shape[0], x.shape[2], x.shape[1], -1).swapaxes(1, 2) if tokens else y
        found += rotary_embedding(heads, cos, sin, **attrs)
    return tuple(found)


def _shares(items: int, tiles: int) -> Array:
    """The start of each of ``tiles`` tiles that divide ``items`` among them, and the end of the last one; larger tiles come
    first."""
    sizes = np.full(tiles, items // tiles)
    sizes[: items % tiles] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


def group_moments(x: Array, *, groups: int, tiles: int) -> tuple[Array, ...]:
    """x (N, C, *) -> (N, groups, tiles, 2): mean and variance of each group of channels in each tile of the positions."""
    n, c = x.shape[:2]
    grouped = x.reshape(n, groups, c // groups, -1)
    bounds = _shares(grouped.shape[3], tiles)
    parts = [grouped[..., low:high] for low, high in itertools.pairwise(bounds)]
    return (np.stack([np.stack([p.mean((2, 3)), p.var((2, 3))], -1) for p in parts], 2),)


def group_apply(
    x: Array, scale: Array, bias: Array, moments: Array, *, items: int, epsilon: float = 1e-5
) -> tuple[Array, ...]:
    """Group normalization of x (N, C, *) with the moments (N, groups, tiles, 2) of tiles that divide ``items`` among them."""
    n, c = x.shape[:2]
    groups, tiles = moments.shape[1:3]
    weights = (np.diff(_shares(items, tiles)) / items).astype(x.dtype)
    means, variances = moments[..., 0], moments[..., 1]
    mean = (means * weights).sum(-1, keepdims=True)
    variance = ((variances + np.square(means - mean)) * weights).sum(-1, keepdims=True)
    y = (x.reshape(n, groups, -1) - mean) / np.sqrt(variance + x.dtype.type(epsilon))
    per_channel = (c, *(1,) * (x.ndim - 2))
    return (y.reshape(x.shape) * scale.reshape(per_channel) + bias.reshape(per_channel),)


def row_moments(
    run: Run,
    *operands: Array | None,
    of: str,
    own: Sequence[str],
    together: int,
    axis: int = 1,
    rows: int = 1,
    **attrs: Any,
) -> tuple[Array, ...]:
    """The operator ``of``, and moments of each ``together`` channels of ``rows`` rows of its result.

    ``axis``: the axis of the channels; all others are rows. The moments are the mean and the sum of squared deviations from it:
    (channels / together, groups of rows, 2).
    """
    y = run(of, operands, {name: attrs[name] for name in own})[0]
    channels = y.shape[axis]
    split = np.moveaxis(y, axis, -1).reshape(-1, rows, channels // together, together)
    parts = split.transpose(2, 0, 1, 3).reshape(channels // together, len(split), -1)
    mean = parts.mean(axis=2)
    return y, np.stack([mean, ((parts - mean[:, :, None]) ** 2).sum(axis=2)], axis=2)


def _moments_of_rows(moments: Array, channels: int, mean: bool, epsilon: float) -> tuple[Array, Array]:
    """The mean (M, 1) of each row of ``channels`` channels, and the norm's factor for the row (M, 1); from :func:`row_moments`."""
    each = channels / len(moments)
    means = moments[:, :, 0].mean(axis=0)
    squares = (moments[:, :, 1] + each * (moments[:, :, 0] - means) ** 2).sum(axis=0) / channels
    factor = 1 / np.sqrt(squares + (0 if mean else means**2) + epsilon)
    return means[:, None], factor[:, None]


def normed_product(
    run: Run, x: Array, moments: Array, *products: Array, mean: bool, epsilon: float, epilogue: Sequence[Any] = (),
    beside: Sequence[Any] = (), image: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    """Rows x (M, K), normalized by their moments (:func:`row_moments`), times a matrix of N rows of K, with a bias (N).

    ``image``: number of rows that are normalized together; 0: each row alone.

    ``products``: the matrix, the sums of its rows (N), and the bias; then optionally the same of a second product, which the stages
    of the first read as operand 1. The norm's scale is folded into the matrices, its shift into the biases.
    """
    if image:
        groups = moments.reshape(len(moments), len(x) // image, -1, 2)
        moments = groups.transpose(0, 2, 1, 3).reshape(-1, len(x) // image, 2)
        found = _moments_of_rows(moments, x.shape[1] * image, mean, epsilon)
        means, factor = (np.repeat(a, image, axis=0) for a in found)
    else:
        means, factor = _moments_of_rows(moments, x.shape[1], mean, epsilon)

    def product(w: Array, sums: Array, bias: Array) -> Array:
        y = x @ w.reshape(-1, w.shape[-1]).T
        result: Array = (factor * (y - means * sums if mean else y) + bias).astype(x.dtype)
        return result

    sums = [product(*products[:3])]
    if len(products) > 3:
        sums += run("Pointwise", [product(*products[3:])], {"epilogue": beside, "arity": 1})
    return run("Pointwise", sums, {"epilogue": epilogue, "arity": 1})


def normed_residual(
    run: Run, x: Array, w: Array, bias: Array, residual: Array, moments: Array, scale: Array, *, mean: bool, epsilon: float,
    epilogue: Sequence[Any],
) -> tuple[Array, ...]:  # fmt: skip
    """Rows x (M, K) times a matrix w of N rows of K, with a bias (N).

    The stages read the ``residual`` (M, N) as operand 1, normalized by its moments (:func:`row_moments`) and the ``scale`` (N). The
    norm's shift is folded into the bias.
    """
    means, factor = _moments_of_rows(moments, residual.shape[1], mean, epsilon)
    added = (factor * (residual - means if mean else residual) * scale).astype(x.dtype)
    return run("Pointwise", [(x @ w.T + bias).astype(x.dtype), added], {"epilogue": epilogue, "arity": 1})


def softmax_mean(x: Array, weights: Array) -> tuple[Array, ...]:
    """Means of ``weights`` (C, 1), weighted by the softmax of rows ``x`` (..., C)."""
    return ((SOFTMAX["Softmax"](x)[0] @ weights).astype(x.dtype),)


KERNELS: dict[str, Kernel] = {
    "ActivatedNorm": activated_norm,
    "AddNorm": add_norm,
    "GroupApply": group_apply,
    "GroupMoments": group_moments,
    "NormAddNorm": norm_add_norm,
    "RotaryNormPair": rotary_norm_pair,
    "SoftmaxMean": softmax_mean,
}

COMPOSED: dict[str, ComposedKernel] = {
    "NormPair": norm_pair,
    "NormedProduct": normed_product,
    "NormedResidual": normed_residual,
    "RowMoments": row_moments,
}
