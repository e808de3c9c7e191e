"""Where Slices begin and Pads end: the box of a tensor that they take."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op
from optdnn.passes.support.facts import ints, operand, shape_of, zeros_around
from optdnn.types import normalize_axis


def starts(graph: Graph, op: Op) -> list[int] | None:
    """The begin of a Slice with steps of one along each axis; None for other Slices."""
    shape, (starts, axes, steps) = shape_of(graph, operand(op)), (ints(graph, op.input(k)) for k in (1, 3, 4))
    if shape is None or starts is None or (op.input(3) is not None and axes is None):
        return None
    if op.input(4) is not None and (steps is None or set(steps) != {1}):
        return None
    begin = [0] * len(shape)
    for start, a in zip(starts, range(len(starts)) if axes is None else axes, strict=True):
        size = shape[normalize_axis(a, len(shape))]
        if not isinstance(size, int):
            return None
        begin[normalize_axis(a, len(shape))] = min(max(start + size, 0) if start < 0 else start, size)
    return begin


def zeros_before(graph: Graph, op: Op) -> list[int] | None:
    """As :func:`starts`, for a Pad that adds zeros and crops nothing: positions before the tensor are negative."""
    zeros = zeros_around(graph, op) if op.input(3) is None else None
    return None if zeros is None else [-n for n in zeros[: len(zeros) // 2]]
