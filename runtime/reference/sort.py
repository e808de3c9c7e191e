"""NumPy kernels. Selecting and ordering: TopK, NonZero, Unique, Compress, ReverseSequence."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

MANY = 64
"""With at least this many rows, whole rows are sorted at once."""


def top_k(x: Array, k: Array, *, axis: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, ...]:
    """TopK (ONNX opset 24): values and indices, best first even if ``sorted`` is 0; of equal values the first comes first."""
    count, size = int(k.reshape(-1)[0]), x.shape[axis]
    if not 0 <= count <= size:
        raise ValueError(f"k is {count}, of {size} values")
    if 8 * count < size and x.size < MANY * size and not (x.dtype.kind == "f" and np.isnan(x).any()):
        indices = _few_of_many(x, count, axis, largest)
        return np.take_along_axis(x, indices, axis), indices
    if largest:  # descending and stable: the ascending order of the mirrored array, mirrored
        order = size - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    indices = np.take(order, np.arange(count), axis)
    return np.take_along_axis(x, indices, axis), indices.astype(np.int64, copy=False)


def _few_of_many(x: Array, count: int, axis: int, largest: bool) -> Array:
    """The indices of the best ``count`` elements along an axis (the first among equals), without sorting the others."""
    rows = np.moveaxis(x, axis, -1)
    found = np.empty((*rows.shape[:-1], count), np.int64)
    for i in np.ndindex(*rows.shape[:-1]) if count else ():
        row = rows[i]
        place = len(row) - count if largest else count - 1
        least = np.partition(row, place)[place]
        better = np.flatnonzero(row > least if largest else row < least)
        equal = np.flatnonzero(row == least)[: count - len(better)]
        chosen = np.sort(np.concatenate([better, equal]))
        mirrored = chosen[::-1] if largest else chosen
        order = np.argsort(row[mirrored], kind="stable")
        found[i] = mirrored[order[::-1] if largest else order]
    return np.moveaxis(found, -1, axis)


def non_zero(x: Array) -> tuple[Array, ...]:
    """NonZero (ONNX opset 13): (rank, number of nonzero elements), in row-major order."""
    if x.ndim == 0:
        return (np.zeros((0, int(bool(x))), np.int64),)
    return (np.stack(np.nonzero(x)).astype(np.int64, copy=False),)


def unique(x: Array, *, axis: int | None = None, sorted: bool = True) -> tuple[Array, ...]:
    """Unique (ONNX opset 11): values, first indices, inverse indices and counts; unsorted: in order of appearance."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    y, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        y, first, inverse, counts = np.take(y, order, axis), first[order], rank[inverse], counts[order]
    return y, *(v.astype(np.int64, copy=False) for v in (first, inverse, counts))


def compress(x: Array, condition: Array, *, axis: int | None = None) -> tuple[Array, ...]:
    """Compress (ONNX opset 11): the slices along ``axis`` (None: of the flattened input) for which the condition holds."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    if len(condition) > x.shape[axis]:
        raise ValueError(f"{len(condition)} conditions for {x.shape[axis]} slices")
    return (np.take(x, np.flatnonzero(condition), axis),)


def reverse_sequence(x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0) -> tuple[Array, ...]:
    """ReverseSequence (ONNX opset 10): the first ``lengths[i]`` steps of sample i in reverse."""
    steps = x.shape[time_axis]
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= steps):
        raise ValueError(f"sequence lengths {lengths.tolist()} for {steps} steps")
    t = np.arange(steps)
    at = np.where(t < lengths[:, None], lengths[:, None] - 1 - t, t)  # batch, time
    shape = [1] * x.ndim
    shape[batch_axis], shape[time_axis] = at.shape
    order = at if batch_axis < time_axis else at.T
    return (np.take_along_axis(x, order.reshape(shape), time_axis),)


def farthest_points(x: Array, nearest: Array, first: Array, *, count: int) -> tuple[Array, ...]:
    """``count`` points of each cloud, one after another: the one that is farthest from the nearest point chosen before."""
    found, chosen, clouds = first, [], np.arange(len(x))
    for _ in range(count):
        distance = np.square(x - x[clouds, found][:, None]).sum(axis=-1)
        nearest = np.where(distance < nearest, distance, nearest)
        found = nearest.argmax(axis=-1)
        chosen.append(found)
    return (np.stack(chosen, axis=1).astype(np.int64),)


KERNELS: dict[str, Kernel] = {
    "FarthestPoints": farthest_points,
    "TopK": top_k,
    "NonZero": non_zero,
    "Unique": unique,
    "Compress": compress,
    "ReverseSequence": reverse_sequence,
}
