"""NumPy kernels. AffineGrid, and GridSample of any rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

_CUBIC = -0.75


def _reflected(at: Array, low: float, high: float) -> Array:
    """Coordinates mirrored at both ends until they are between them."""
    span = high - low
    if span == 0:
        return np.full_like(at, low)
    away = np.mod(at - low, 2 * span)
    return np.asarray(low + np.where(away > span, 2 * span - away, away))


class _Axis:
    """One spatial axis: how coordinates and indices outside of it are mapped into it."""

    def __init__(self, size: int, padding: str, align_corners: bool):
        self.size, self.padding = size, padding
        self.low, self.high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        self.align = align_corners

    def position(self, g: Array) -> Array:
        """The pixel coordinate of a normalized one, mapped inside unless the outside is zero."""
        at = (g + 1) / 2 * (self.size - 1) if self.align else ((g + 1) * self.size - 1) / 2
        return np.asarray(at)

    def inside(self, at: Array, mode: str) -> Array:
        if self.padding == "border" and mode != "cubic":  # the taps of cubic are mapped one by one
            return np.clip(at, 0, self.size - 1)
        if self.padding == "reflection":
            out = (at < self.low) | (at > self.high)
            return np.where(out, _reflected(at, self.low, self.high), at)
        return at

    def index(self, i: Array) -> tuple[Array, Array]:
        """Integer positions as valid indices, and whether each position has a pixel."""
        if self.padding == "reflection":
            i = np.rint(_reflected(i.astype(np.float64), self.low, self.high)).astype(np.int64)
        found = (i >= 0) & (i < self.size) if self.padding == "zeros" else np.ones(i.shape, bool)
        return np.clip(i, 0, self.size - 1), found


def _taps(at: Array, mode: str) -> list[tuple[Array, Array]]:
    """The neighbors of a coordinate along one axis: integer positions and weights."""
    if mode == "nearest":
        return [(np.rint(at).astype(np.int64), np.ones_like(at))]
    low = np.floor(at)
    t = at - low
    first = low.astype(np.int64)
    if mode == "linear":
        return [(first, 1 - t), (first + 1, t)]
    a = _CUBIC
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in (t, 1 - t)]
    far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in (t + 1, 2 - t)]
    return [(first - 1, far[0]), (first, near[0]), (first + 1, near[1]), (first + 2, far[1])]


def grid_sample(
    x: Array, grid: Array, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: bool = False
) -> tuple[Array, ...]:
    """GridSample (ONNX opset 22): x (N, C, *spatial) at grid (N, *out, rank), whose last axis runs from the last spatial one."""
    rank = x.ndim - 2
    n, channels = x.shape[:2]
    out = grid.shape[1:-1]
    y = np.zeros((n, channels, *out), x.dtype)
    for i in range(n):
        neighbors = []
        for k in range(rank):
            axis = _Axis(x.shape[2 + k], padding_mode, align_corners)
            at = axis.position(grid[i, ..., rank - 1 - k].astype(x.dtype, copy=False))
            if mode == "nearest":
                at = np.rint(at)
            neighbors.append([(*axis.index(p), w) for p, w in _taps(axis.inside(at, mode), mode)])
        for choice in itertools.product(*neighbors):
            weight = np.ones(out, x.dtype)
            for _, found, w in choice:
                weight = weight * np.where(found, w, 0).astype(x.dtype)
            where: tuple[Any, ...] = (slice(None), *(index for index, _, _ in choice))
            y[i] += x[i][where] * weight
    return (y,)


def affine_grid(theta: Array, size: Array, *, align_corners: bool = False) -> tuple[Array, ...]:
    """AffineGrid (ONNX opset 20): theta (N, rank, rank + 1), size (N, C, *spatial); result (N, *spatial, rank)."""
    batch, _, *spatial = size.reshape(-1).tolist()
    if batch != len(theta):
        raise ValueError(f"the size is for a batch of {batch}, theta for one of {len(theta)}")
    rank = len(spatial)
    lines = []
    for n in spatial:
        at = np.arange(n)
        lines.append(2 * at / max(n - 1, 1) - (n > 1) if align_corners else (2 * at + 1) / n - 1)
    points = [*np.meshgrid(*lines, indexing="ij")][::-1]
    base = np.stack([*points, np.ones(spatial)], axis=-1).astype(theta.dtype).reshape(-1, rank + 1)
    return (np.matmul(base, theta.swapaxes(1, 2)).reshape(len(theta), *spatial, rank),)


KERNELS: dict[str, Kernel] = {"AffineGrid": affine_grid, "GridSample": grid_sample}
