"""Where rows of floats may lie: at one pitch, or spread over a few axes."""

from __future__ import annotations

import math

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, row_major, up
from optdnn.kernels.pointwise.strides import merge
from optdnn.types import DType

ACCESS = 16
"""Bytes of an access. Rows that lie apart begin at multiples of them."""
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv"})
"""Kinds that read rows by TMA: rows begin at multiples of 16 bytes, or are copied first."""
MOST_AXES = 4
"""Axes over which the rows that a norm reads may be spread."""
VIEWS = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})
DEPTH = 6
"""Views between rows and a product at most."""


def walked(x: TensorView) -> tuple[tuple[int, int], ...] | None:
    """Sizes and strides of the axes over which rows are spread, as few as possible; None where there are too many, or where the
    elements of a row are no neighbours."""
    if x.strides[-1] != 1 and x.shape[-1] != 1:
        return None
    in_order = [math.prod(x.shape[i + 1 : -1]) for i in range(len(x.shape) - 1)]
    sizes, (_, strides) = merge(x.shape[:-1], [in_order, x.strides[:-1]])
    return tuple(zip(sizes, strides, strict=True)) if len(sizes) <= MOST_AXES else None


def access(dtype: DType) -> int:
    """Elements of an access."""
    return ACCESS // dtype.itemsize


def aligned(x: TensorView) -> bool:
    """Whether rows have no gaps, or lie where :func:`walked` finds them and begin at multiples of :data:`ACCESS`."""
    unit = access(x.dtype)
    if x.dense:
        return x.offset % unit == 0
    walk = walked(x)
    return walk is not None and not any(n % unit for n in (x.offset, *(stride for _, stride in walk)))


def row_pitch(x: TensorView) -> int | None:
    """Elements from a row to the next one (0: rows have no gaps); None where that differs, or is no multiple of 16 bytes."""
    if not aligned(x):
        return None
    walk = () if x.dense else walked(x) or ()
    return None if len(walk) > 1 else sum(stride for _, stride in walk)


def result_strides(b: Builder, *results: Value) -> tuple[int, ...] | None:
    """Strides of results of one shape: rows padded to 16 bytes where a product reads them, so that it copies nothing first. None:
    without gaps, or in a place that is given."""
    t = b.graph.type(results[0])
    shape = t.static_shape
    if (
        t.layout
        or t.dtype.itemsize != 2
        or not shape
        or shape[-1] % access(t.dtype) == 0
        or any(v in b.reserved for v in results)
    ):
        return None
    if not any(_multiplied(b.graph, v, len(shape) - 1, DEPTH) for v in results):
        return None
    return (*(s * up(shape[-1], access(t.dtype)) for s in row_major(shape[:-1])), 1)


def _multiplied(graph: Graph, value: Value, axis: int, depth: int) -> bool:
    """Whether a product or convolution reads the value, perhaps through views in which the features of ``axis`` stay together."""
    for user in graph.users(value) if depth else ():
        if user.kind in PRODUCTS and user.inputs[0] == value:
            return True
        after = _axis_after(graph, user, axis) if user.kind in VIEWS else None
        if after is not None and _multiplied(graph, user.value, after, depth - 1):
            return True
    return False


def _axis_after(graph: Graph, view: Op, axis: int) -> int | None:
    """The axis of a view's result that holds the features of ``axis``; None where it splits or merges them."""
    before, after = (graph.type(v).static_shape for v in (view.inputs[0] or view.value, view.value))
    if view.kind == "Transpose":
        perm = tuple(view.attrs.perm or reversed(range(len(before))))
        return perm.index(axis)
    behind = math.prod(before[axis + 1 :])
    found = [i for i, n in enumerate(after) if n == before[axis] and math.prod(after[i + 1 :]) == behind]
    return found[-1] if found else None
