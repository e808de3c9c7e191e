"""Views of boxes of a tensor: what Slices, Splits, Transposes and Reshapes of axes of size 1 read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.ir.graph import Graph, Value
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import RESHAPES, VIEWS, in_shape, operand, slice_limits, sliced
from optdnn.passes.support.parts import port_span
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis

DEPTH = 16
"""Most views between a tensor and a part of it."""


@dataclass(frozen=True)
class Region:
    """A box of ``root``: ``ranges`` holds the begin and the end of each of its axes. ``axes``: for each axis of the view, the axis
    of ``root``, or None for a new axis of size 1. Axes of ``root`` that are missing have one position."""

    root: Value
    ranges: tuple[tuple[int, int], ...]
    axes: tuple[int | None, ...]

    def joined(self, other: Region, axis: int) -> Region | None:
        """The region that continues along ``axis`` of the view by ``other``; None if it does not follow directly."""
        along = self.axes[axis] if self.axes[axis] is not None else other.axes[axis]
        if along is None or (self.root, self._named(axis, along)) != (other.root, other._named(axis, along)):
            return None
        same = all(a == b for k, (a, b) in enumerate(zip(self.ranges, other.ranges, strict=True)) if k != along)
        (begin, end), (start, stop) = self.ranges[along], other.ranges[along]
        if not same or end != start:
            return None
        ranges = tuple((begin, stop) if k == along else r for k, r in enumerate(self.ranges))
        return Region(self.root, ranges, self._named(axis, along))

    def _named(self, axis: int, along: int) -> tuple[int | None, ...]:
        """The axes, with the axis ``along`` of the root at ``axis`` of the view if it was dropped, having one position."""
        if self.axes[axis] is not None or along in self.axes:
            return self.axes
        return (*self.axes[:axis], along, *self.axes[axis + 1 :])


def region(graph: Graph, value: Value, depth: int = DEPTH) -> Region | None:
    """``value`` as a view of a tensor that is no view itself; None if a size or a position is not known."""
    dims = graph.type(value).shape
    if dims is None or not graph.type(value).is_static:
        return None
    op = graph.op(value)
    whole = Region(value, tuple((0, int(n)) for n in dims), tuple(range(len(dims))))  # type: ignore[arg-type]
    if depth == 0 or op.kind not in {*VIEWS, "Slice", "Split"}:
        return whole
    inner = region(graph, operand(op), depth - 1)
    return whole if inner is None else viewed(graph, value, inner) or whole


def viewed(graph: Graph, value: Value, inner: Region) -> Region | None:
    """The region of the view ``value`` of a tensor with the region ``inner``; None if it is no box in order."""
    op = graph.op(value)
    before, after = graph.type(operand(op)).static_shape, graph.type(value).static_shape
    if op.kind == "Transpose":
        perm = op.attrs.perm or tuple(reversed(range(len(before))))
        return replace(inner, axes=tuple(inner.axes[p] for p in perm))
    if op.kind in RESHAPES:
        kept = [axis for axis, n in zip(inner.axes, before, strict=True) if n != 1]
        if [n for n in before if n != 1] != [n for n in after if n != 1]:
            return None
        names = iter(kept)
        return replace(inner, axes=tuple(None if n == 1 else next(names) for n in after))
    cuts = _cuts(graph, value, before)
    if cuts is None or any(inner.axes[axis] is None for axis in cuts):
        return None
    ranges = list(inner.ranges)
    for axis, (begin, end) in cuts.items():
        along = inner.axes[axis]
        assert along is not None
        ranges[along] = (ranges[along][0] + begin, ranges[along][0] + end)
    return replace(inner, ranges=tuple(ranges))


def _cuts(graph: Graph, value: Value, sizes: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """Axis -> begin and end of what a Slice or a Split takes; None if a Slice has steps or unknown limits."""
    op = graph.op(value)
    if op.kind == "Split":
        axis = normalize_axis(op.attrs.axis, len(sizes))
        found = port_span(graph, op, value.port, axis - len(sizes))
        return None if found is None else {axis: found[:2]}
    limits = slice_limits(graph, op)
    if limits is None or any(step != 1 for *_, step in limits):
        return None
    return {axis: slice(start, end).indices(sizes[axis])[:2] for axis, start, end, _ in limits}


def boxed(patch: Patch, found: Region) -> Value:
    """Add the Slices that read the box of a region, in the order of the root's axes."""
    x, sizes = found.root, patch.type(found.root).static_shape
    for axis, (begin, end) in enumerate(found.ranges):
        if (begin, end) != (0, sizes[axis]):
            x = sliced(patch, x, begin, end, axis)
    return x


def forward(patch: Patch, box: Value, found: Region, dims: Sequence[int]) -> Value:
    """Add the views that turn a box, in the order of the root's axes, into the view with the sizes ``dims``."""
    x = transposed(patch, box, _order(found))
    return x if patch.type(x).static_shape == tuple(dims) else in_shape(patch, x, tuple(dims))


def backward(patch: Patch, view: Value, found: Region) -> Value:
    """Add the views that turn a tensor with the sizes of the view into one with those of the box: the inverse of ``forward``."""
    order = _order(found)
    sizes = tuple(found.ranges[axis][1] - found.ranges[axis][0] for axis in order)
    x = view if patch.type(view).static_shape == sizes else in_shape(patch, view, sizes)
    return transposed(patch, x, tuple(order.index(axis) for axis in range(len(order))))


def _order(found: Region) -> tuple[int, ...]:
    """The root's axes in the order of the view; those that it lacks are last."""
    named = [axis for axis in found.axes if axis is not None]
    return (*named, *(axis for axis in range(len(found.ranges)) if axis not in named))
