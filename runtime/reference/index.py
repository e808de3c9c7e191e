"""NumPy kernels. Data movement: Concat, Split, Slice, Pad, Tile, Gather and its family, DepthToSpace, SpaceToDepth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.shape import ints
from optdnn.types import Array


def _concat(*arrays: Array, axis: int) -> tuple[Array, ...]:
    return (np.concatenate(arrays, axis=axis),)


def split_sizes(dim: int, parts: int) -> list[int]:
    """ONNX Split by ``num_outputs``: equal chunks, the last one smaller (opset 18)."""
    chunk = -(-dim // parts)
    return [max(0, min(chunk, dim - i * chunk)) for i in range(parts)]


def _split(x: Array, split: Array | None = None, *, axis: int, num_outputs: int | None) -> tuple[Array, ...]:
    if split is None:
        if num_outputs is None:
            raise ValueError("neither sizes nor num_outputs is given")
        sizes = split_sizes(x.shape[axis], num_outputs)
    else:
        sizes = ints(split)
    if min(sizes, default=0) < 0:
        raise ValueError(f"a size of {sizes} is negative")
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"sizes {sizes} do not add up to {x.shape[axis]}")
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=axis))


def _slice(
    x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> tuple[Array, ...]:
    first, last = ints(starts), ints(ends)
    which = range(len(first)) if axes is None else ints(axes)
    stride = [1] * len(first) if steps is None else ints(steps)
    index = [slice(None)] * x.ndim
    for a, b, axis, s in zip(first, last, which, stride, strict=True):
        index[axis] = slice(a, b, s)  # Python clamps as ONNX does
    return (x[tuple(index)],)


def _pad(
    x: Array, pads: Array, value: Array | None = None, axes: Array | None = None, *, mode: str
) -> tuple[Array, ...]:
    amounts = ints(pads)
    which = list(range(x.ndim)) if axes is None else ints(axes)
    if len(amounts) != 2 * len(which):
        raise ValueError(f"{len(amounts)} pads for {len(which)} axes")
    width = [(0, 0)] * x.ndim
    crop = [slice(None)] * x.ndim
    for i, axis in enumerate(which):
        before, after = amounts[i], amounts[i + len(which)]
        crop[axis] = slice(max(-before, 0), x.shape[axis] - max(-after, 0))
        width[axis] = (max(before, 0), max(after, 0))
    x = x[tuple(crop)]
    if mode == "constant":
        fill = 0 if value is None else np.reshape(value, -1)[0]
        out = np.full([n + a + b for n, (a, b) in zip(x.shape, width, strict=True)], fill, dtype=x.dtype)
        out[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, width, strict=True))] = x
        return (out,)
    if mode == "reflect" and any(max(w) >= n for w, n in zip(width, x.shape, strict=True) if any(w)):
        raise ValueError(f"reflect pads of {width} reach past the border of {list(x.shape)}")
    modes: dict[str, Any] = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    return (np.pad(x, width, mode=modes[mode]),)


def _tile(x: Array, repeats: Array) -> tuple[Array, ...]:
    return (np.tile(x, ints(repeats)),)


def _gather(x: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    return (np.take(x, indices, axis=axis),)


def _gather_nd(x: Array, indices: Array, batch_dims: int) -> tuple[Array, ...]:
    batch, chosen, depth = indices.shape[:batch_dims], indices.shape[batch_dims:-1], indices.shape[-1]
    count = math.prod(batch)
    flat = x.reshape(count, *x.shape[batch_dims:])
    index = indices.reshape(count, math.prod(chosen), depth)
    rows = np.arange(count)[:, None]
    picked = flat[(rows, *(index[..., i] for i in range(depth)))]
    return (picked.reshape((*batch, *chosen, *x.shape[batch_dims + depth :])),)


def _along(indices: Array, axis: int) -> tuple[Any, ...]:
    """Fancy index that replaces coordinate ``axis`` of each position of ``indices`` by its value."""
    grid: list[Any] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    grid[axis] = indices
    return tuple(grid)


def _gather_elements(x: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    return (x[_along(indices, axis)],)


_REDUCE: dict[str, Callable[..., Any]] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(out: Array, index: tuple[Any, ...], updates: Array, reduction: str) -> tuple[Array, ...]:
    if reduction == "none":
        out[index] = updates
    else:
        _REDUCE[reduction].at(out, index, updates)  # type: ignore[attr-defined]
    return (out,)


def _scatter_elements(x: Array, indices: Array, updates: Array, axis: int, reduction: str) -> tuple[Array, ...]:
    return _scatter(x.copy(), _along(indices, axis), updates, reduction)


def _scatter_nd(x: Array, indices: Array, updates: Array, reduction: str) -> tuple[Array, ...]:
    index = tuple(indices[..., i] for i in range(indices.shape[-1]))
    return _scatter(x.copy(), index, updates.reshape((*indices.shape[:-1], *x.shape[len(index) :])), reduction)


def _depth_to_space(x: Array, blocksize: int, mode: str) -> tuple[Array, ...]:
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        blocks = x.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return (blocks.reshape(n, c // (b * b), h * b, w * b),)


def _space_to_depth(x: Array, blocksize: int, mode: str) -> tuple[Array, ...]:
    n, c, h, w = x.shape
    b = blocksize
    blocks = x.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return (blocks.transpose(order).reshape(n, c * b * b, h // b, w // b),)


def _cumulate(fn: Callable[..., Any], first: int) -> Callable[[Array, Array, bool, bool], tuple[Array, ...]]:
    def kernel(x: Array, axis: Array, exclusive: bool, reverse: bool) -> tuple[Array, ...]:
        (a,) = ints(axis)
        x = np.flip(x, a) if reverse else x
        if exclusive:
            shifted = np.full_like(x, first)
            tail, head = [slice(None)] * x.ndim, [slice(None)] * x.ndim
            tail[a], head[a] = slice(1, None), slice(None, -1)
            shifted[tuple(tail)] = x[tuple(head)]
            x = shifted
        out = fn(x, axis=a, dtype=x.dtype)
        return (np.flip(out, a) if reverse else out,)

    return kernel


def _one_hot(indices: Array, depth: Array, values: Array, axis: int) -> tuple[Array, ...]:
    (count,) = ints(depth)
    index = np.expand_dims(indices, axis)
    axis = axis % index.ndim
    levels = np.arange(count).reshape([-1 if i == axis else 1 for i in range(index.ndim)])
    return (np.where((index == levels) | (index + count == levels), values[1], values[0]).astype(values.dtype),)


KERNELS: dict[str, Kernel] = {
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": _gather_elements,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "CumSum": _cumulate(np.cumsum, 0),
    "CumProd": _cumulate(np.cumprod, 1),
    "OneHot": _one_hot,
}
