"""Gathers and folds of windows that do not overlap become a Reshape and a Transpose.

PyTorch exports ``unfold`` as a Gather along each axis of an image, with a table of indices (window, offset). If the windows do not
overlap and cover the image, the table holds every index of the axis once: it is a transposed count. ``fold`` is exported as a
Col2Im.

transformers reads the mask of a language model by the positions of all queries and keys, which is exported as a GatherND. PyTorch's
dynamo exporter writes an upsampling to exact nearest pixels as a GatherND of the pixels, with the image's axes first. It writes a
list of positions (Falcon's keys and values among the heads) as a GatherND of rows.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, ints, operand, reshape_target, reshaped, shape_of, sizes_of, sliced
from optdnn.passes.support.parts import neighbors
from optdnn.passes.support.views import transposed
from optdnn.types import Array, Shape, normalize_axis

_INEXPRESSIBLE = Miss("no constant target can express its shape")


@rule("grid_gather", {"Gather"})
def grid_gather(graph: Graph, op: Op) -> Match | Miss | None:
    """A Gather of all elements of an axis whose indices are ``arange(size)``, reshaped and transposed."""
    x, indices = operand(op), graph.constant_value(op.inputs[1])
    before = shape_of(graph, x)
    if indices is None or indices.ndim < 2 or before is None:
        return None
    axis = normalize_axis(op.attrs.axis, len(before))
    order = _digits(indices, before[axis])
    if order is None:
        return None
    split = (*before[:axis], *(indices.shape[k] for k in order), *before[axis + 1 :])
    target = reshape_target(before, split)
    if target is None:
        return _INEXPRESSIBLE
    moved = [order.index(k) + axis for k in range(len(order))]
    perm = (*range(axis), *moved, *range(axis + len(order), len(split)))

    def build(patch: Patch) -> Value:
        return transposed(patch, reshaped(patch, x, target), perm)

    return Match((op,), build)


@rule("grid_gather_nd", {"GatherND"})
def grid_gather_nd(graph: Graph, op: Op) -> Match | Miss | None:
    """A GatherND of all elements of the first axes, in order or transposed, and repeated along further axes of its indices."""
    x, indices = operand(op), graph.constant_value(op.inputs[1])
    before = shape_of(graph, x)
    if indices is None or before is None or op.attrs.batch_dims or indices.ndim < 2:
        return None
    depth = indices.shape[-1]
    indexed, rest = [n for n in before[:depth] if isinstance(n, int) and n > 0], before[depth:]
    if len(indexed) < depth:
        return None
    rows = np.zeros(indices.shape[:-1], np.int64)
    for k, n in enumerate(indexed):
        rows = rows * n + indices[..., k] % n
    once = rows
    for k in range(rows.ndim):
        if rows.size and (rows == rows.take([0], k)).all():
            once = once.take([0], k)
    order = _digits(once, math.prod(indexed))
    if order is None:
        return None
    split = (*(once.shape[k] for k in order), *rest)
    target, whole = reshape_target(before, split), [*rows.shape, *(n for n in rest if isinstance(n, int))]
    if target is None or (once.shape != rows.shape and len(whole) < rows.ndim + len(rest)):
        return _INEXPRESSIBLE
    perm = (*(order.index(k) for k in range(len(order))), *range(len(order), len(split)))

    def build(patch: Patch) -> Value:
        y = transposed(patch, reshaped(patch, x, target), perm)
        return y if once.shape == rows.shape else patch.add("Expand", [y, integers(patch, whole, "shape")])

    return Match((op,), build)


@rule("neighboring_rows", {"GatherND"})
def neighboring_rows(graph: Graph, op: Op) -> Match | None:
    """A GatherND of neighboring rows in ascending order, or of one row, is a Slice (``x[..., [-2], :]`` after torch.export)."""
    x, indices = operand(op), graph.constant_value(op.inputs[1])
    before = shape_of(graph, x)
    if indices is None or before is None or op.attrs.batch_dims or indices.ndim != 2 or indices.shape[1] != 1:
        return None
    rows = neighbors(indices[:, 0], before[0]) if isinstance(before[0], int) else None
    return None if rows is None else Match((op,), lambda patch: sliced(patch, x, *rows, 0))


@rule("repeated_pixels", {"GatherND"})
def repeated_pixels(graph: Graph, op: Op) -> Match | None:
    """A GatherND of all pixels of images [H, W, N, C], each repeated to a block of pixels, is a Resize to nearest pixels."""
    x, indices = operand(op), graph.constant_value(op.inputs[1])
    before = sizes_of(graph, x)
    if indices is None or before is None or op.attrs.batch_dims or len(before) != 4 or 0 in before:
        return None
    if (
        indices.ndim != 3
        or indices.shape[-1] != 2
        or any(n % m for n, m in zip(indices.shape, before[:2], strict=False))
    ):
        return None
    factors = [n // m for n, m in zip(indices.shape, before[:2], strict=False)]
    places = np.meshgrid(*(np.arange(m * k) // k for m, k in zip(before, factors, strict=False)), indexing="ij")
    if factors == [1, 1] or not np.array_equal(indices % before[:2], np.stack(places, -1)):
        return None
    images = (2, 3, 0, 1)
    nearest = ResizeAttrs(coordinate_transformation_mode="asymmetric", nearest_mode="floor")

    def build(patch: Patch) -> Value:
        scales = patch.constant(np.array([1, 1, *factors], np.float32), "scales")
        return transposed(patch, patch.add("Resize", [transposed(patch, x, images), None, scales], nearest), images)

    return Match((op,), build)


def _digits(indices: Array, size: object) -> tuple[int, ...] | None:
    """The axes of ``indices`` by descending stride, if they are ``arange(size)``, reshaped and transposed; else None."""
    if not isinstance(size, int) or indices.size != size or size == 0:
        return None
    steps = [np.diff(indices, axis=k).flat[0] if n > 1 else size for k, n in enumerate(indices.shape)]
    order = tuple(int(k) for k in np.argsort([-int(s) for s in steps], kind="stable"))
    counted = np.arange(size).reshape([indices.shape[k] for k in order])
    wanted = counted.transpose([order.index(k) for k in range(len(order))])
    return order if np.array_equal(indices % size, wanted) else None


@rule("grid_fold", {"Col2Im"})
def grid_fold(graph: Graph, op: Op) -> Match | Miss | None:
    """A Col2Im whose windows do not overlap and cover the image."""
    x, a = operand(op), op.attrs
    before, after = shape_of(graph, x), op.outputs[0].type.shape
    block = ints(graph, op.inputs[2])
    if before is None or after is None or block is None or any(not isinstance(n, int) for n in after[1:]):
        return None
    sizes = tuple(int(n) for n in after[2:])  # type: ignore[arg-type]
    if tuple(a.strides) != block or any(a.pads) or any(d != 1 for d in a.dilations):
        return Miss("its windows overlap, or leave elements out")
    if any(n % k for n, k in zip(sizes, block, strict=True)) or math.prod(sizes) != math.prod(block) * before[2]:
        return Miss("its windows do not cover the image")
    windows = [n // k for n, k in zip(sizes, block, strict=True)]
    split: Shape = (before[0], after[1], *block, *windows)
    rank = len(block)
    perm = (0, 1, *(i for k in range(rank) for i in (2 + rank + k, 2 + k)))
    transposed = tuple(split[p] for p in perm)
    first, last = reshape_target(before, split), reshape_target(transposed, after)
    if first is None or last is None:
        return _INEXPRESSIBLE

    def build(patch: Patch) -> Value:
        return reshaped(patch, patch.add("Transpose", [reshaped(patch, x, first)], TransposeAttrs(perm)), last)

    return Match((op,), build)
