"""Views of rows of floats: rows with one pitch, or rows over a few axes."""

from __future__ import annotations

import math

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, row_major, up
from optdnn.kernels.pointwise.strides import merge
from optdnn.types import DType

ACCESS = 16
"""Bytes of an access. Rows that are not contiguous begin at multiples of it."""
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv"})
"""Kinds that read rows by TMA: rows begin at multiples of 16 bytes, or are copied first."""
MOST_AXES = 4
"""Most axes of the rows that a norm reads, after merging."""
VIEWS = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})
DEPTH = 6
"""Most views between rows and a product."""


def walked(x: TensorView) -> tuple[tuple[int, int], ...] | None:
    """(size, stride) of the axes of the rows, merged; None if there are too many, or if the elements of a row are not contiguous."""
    if x.strides[-1] != 1 and x.shape[-1] != 1:
        return None
    in_order = [math.prod(x.shape[i + 1 : -1]) for i in range(len(x.shape) - 1)]
    sizes, (_, strides) = merge(x.shape[:-1], [in_order, x.strides[:-1]])
    return tuple(zip(sizes, strides, strict=True)) if len(sizes) <= MOST_AXES else None


def access(dtype: DType) -> int:
    """Elements of an access."""
    return ACCESS // dtype.itemsize


def aligned(x: TensorView) -> bool:
    """Whether rows begin at multiples of :data:`ACCESS` bytes, and are contiguous or have a walk (:func:`walked`)."""
    unit = access(x.dtype)
    if x.dense:
        return x.offset % unit == 0
    walk = walked(x)
    return walk is not None and not any(n % unit for n in (x.offset, *(stride for _, stride in walk)))


def row_pitch(x: TensorView) -> int | None:
    """Elements from a row to the next one (0: rows have no gaps); None if that is not constant, or rows are not :func:`aligned`."""
    if not aligned(x):
        return None
    walk = () if x.dense else walked(x) or ()
    return None if len(walk) > 1 else sum(stride for _, stride in walk)


def result_strides(b: Builder, *results: Value, merged: bool = False) -> tuple[int, ...] | None:
    """Strides of results of one shape: rows are padded to 16 bytes if a product reads them, so that the product needs no copy. None:
    without gaps, or in a reserved place. ``merged``: also rows of several axes that a Reshape merges for the product. Their parts
    begin at any places."""
    t = b.graph.type(results[0])
    shape, unit = t.static_shape, access(t.dtype)
    if t.layout or t.dtype.itemsize != 2 or not shape or any(v in b.reserved for v in results):
        return None
    first = next((k for v in results if (k := _first_of_row(b.graph, v, merged=merged)) is not None), None)
    if first is None or (length := math.prod(shape[first:])) % unit == 0:
        return None
    return (*(s * up(length, unit) for s in row_major(shape[:first])), *row_major(shape[first:]))


def _first_of_row(graph: Graph, value: Value, *, merged: bool) -> int | None:
    """The axis from which on the elements are a row that a product reads, as they are or ``merged`` by a Reshape (patches of 14 x 14
    pixels have 588 features); None if no product reads the value."""
    shape = graph.type(value).static_shape
    if _multiplied(graph, value, len(shape) - 1, DEPTH):
        return len(shape) - 1
    for user in graph.users(value) if merged else ():
        after = graph.type(user.value).static_shape if user.kind == "Reshape" else ()
        if after and _multiplied(graph, user.value, len(after) - 1, DEPTH - 1):
            return next((k for k in range(len(shape) - 1) if math.prod(shape[k:]) == after[-1]), None)
    return None


def _multiplied(graph: Graph, value: Value, axis: int, depth: int) -> bool:
    """Whether a product or convolution reads the value, directly or through views that keep the features of ``axis`` together."""
    for user in graph.users(value) if depth else ():
        if user.kind in PRODUCTS and user.inputs[0] == value:
            return True
        after = _axis_after(graph, user, axis) if user.kind in VIEWS else None
        if after is not None and _multiplied(graph, user.value, after, depth - 1):
            return True
    return False


def _axis_after(graph: Graph, view: Op, axis: int) -> int | None:
    """The axis of a view's result with the features of ``axis``; None if the view splits or merges them."""
    before, after = (graph.type(v).static_shape for v in (view.inputs[0] or view.value, view.value))
    if view.kind == "Transpose":
        perm = tuple(view.attrs.perm or reversed(range(len(before))))
        return perm.index(axis)
    inner = math.prod(before[axis + 1 :])
    found = [i for i, n in enumerate(after) if n == before[axis] and math.prod(after[i + 1 :]) == inner]
    return found[-1] if found else None
