"""Values that are parts of a tensor along an axis: results of Split and Slice, and runs of alike ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.facts import operand, shape_of, slice_limits
from optdnn.types import Array

T = TypeVar("T")

PARTS = frozenset({"Slice", "Split"})
"""The operators that take parts of a tensor."""


def is_axis(graph: Graph, x: Value, axis: int, wanted: int) -> bool:
    """Whether ``axis`` is the same axis of ``x`` as ``wanted``, which counts from the end (-1 is the last)."""
    rank = graph.type(x).rank
    return rank is not None and axis in (wanted, rank + wanted)


def whole(graph: Graph, first: Value, second: Value, even: bool = False, axis: int = -1) -> Value | None:
    """The tensor whose two parts along ``axis`` are ``first`` and ``second``, or None; ``even``: both must have the same size."""
    a, b = graph.op(first), graph.op(second)
    if a.kind not in PARTS or b.kind not in PARTS:
        return None
    x = a.input(0)
    if x is None or b.input(0) != x or shape_of(graph, x) is None or shape_of(graph, first) is None:
        return None
    if not -len(graph.type(x).dims) <= axis < len(graph.type(x).dims):
        return None
    size, cut = graph.type(x).dims[axis], graph.type(first).dims[axis]
    if not isinstance(size, int) or not isinstance(cut, int) or (even and 2 * cut != size):
        return None
    if a.kind == "Split":
        both = a.id == b.id and (first.port, second.port) == (0, 1) and len(a.outputs) == 2
        return x if both and is_axis(graph, x, a.attrs.axis, axis) else None
    spans = [span(graph, op, size, axis) for op in (a, b)]
    return x if spans == [(0, cut, 1), (cut, size, 1)] else None


def longest_run(found: Sequence[T | None], key: Callable[[T], object]) -> tuple[int, list[T]]:
    """The longest run of neighbors with equal keys, where nothing is None: the index of its first element, and the elements."""
    best: tuple[int, list[T]] = (0, [])
    at = 0
    for _, group in groupby(found, lambda one: None if one is None else key(one)):
        own = list(group)
        run = [one for one in own if one is not None]
        best = (at, run) if len(run) > len(best[1]) else best
        at += len(own)
    return best


def pair(graph: Graph, first: Value, second: Value, axis: int = -1) -> Value | None:
    """As :func:`whole`, for equal parts. If the axis has two elements, Gathers may take them (``x[..., 0]`` and ``x[..., 1]``)."""
    a, b = graph.op(first), graph.op(second)
    if a.kind != "Gather" or b.kind != "Gather":
        return whole(graph, first, second, even=True, axis=axis)
    x = operand(a)
    shape = shape_of(graph, x)
    if operand(b) != x or shape is None or len(shape) < -axis or shape[axis] != 2:
        return None
    taken = [graph.constant_value(op.inputs[1]) for op in (a, b)]
    if any(t is None or t.size != 1 for t in taken) or not all(is_axis(graph, x, op.attrs.axis, axis) for op in (a, b)):
        return None
    return x if [t.item() % 2 for t in taken if t is not None] == [0, 1] else None


def span(graph: Graph, op: Op, size: int, axis: int = -1) -> tuple[int, int, int] | None:
    """Begin, end and step of a Slice of only this axis, whose size is ``size``; None for other ops."""
    if op.kind != "Slice":
        return None
    limits = slice_limits(graph, op)
    if limits is None or len(limits) != 1 or not is_axis(graph, operand(op), limits[0][0], axis):
        return None
    return slice(*limits[0][1:]).indices(size)


def neighbors(indices: Array, size: int) -> tuple[int, int] | None:
    """First and one past the last of ``indices`` into an axis of ``size``, if each is one more than the one before; else None."""
    rows = np.where(indices < 0, indices + size, indices)
    if not rows.size or not np.array_equal(rows, rows[0] + np.arange(rows.size)):
        return None
    return int(rows[0]), int(rows[-1]) + 1


def consecutive(graph: Graph, parts: Sequence[Value]) -> Value | None:
    """The tensor that consists of ``parts`` along the last axis, in this order and without gaps; None if there is none."""
    return graph.op(parts[0]).input(0) if parts_of_whole(graph, parts) == len(parts) else None


def parts_of_whole(graph: Graph, parts: Sequence[Value], axis: int = -1) -> int:
    """How many of the first ``parts`` are all parts of one tensor along ``axis``, in order and without gaps; 0 if they are not.
    ``axis`` counts from the end."""
    x, at = graph.op(parts[0]).input(0), 0
    shape = None if x is None else shape_of(graph, x)
    size = shape[axis] if shape is not None and len(shape) >= -axis else None
    for k, value in enumerate(parts):
        op = graph.op(value)
        if op.kind not in PARTS or op.input(0) != x or not isinstance(size, int):
            return 0
        found = port_span(graph, op, value.port, axis) if op.kind == "Split" else span(graph, op, size, axis)
        if found is None or found[0] != at or found[2] != 1:
            return 0
        at = found[1]
        if at == size:
            return k + 1
    return 0


def port_span(graph: Graph, op: Op, port: int, axis: int = -1) -> tuple[int, int, int] | None:
    """Begin, end and step of a part of a Split along ``axis``, which counts from the end; None for a Split of another axis."""
    sizes = [graph.type(Value(op.id, k)).dims[axis] for k in range(port + 1)]
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes) or not is_axis(graph, operand(op), op.attrs.axis, axis):
        return None
    return sum(known[:-1]), sum(known), 1
