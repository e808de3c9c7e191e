"""Shifted copies of one image, stacked along a new axis, are written by one operator instead of a Pad for each copy.

Stereo networks (GC-Net: Kendall et al., 2017; PSMNet: Chang and Chen, 2018) write the features of both images into a volume of
zeros, a plane for each disparity d: ``volume[:, :c, d, :, d:] = left[..., d:]`` and ``volume[:, c:, d, :, d:] = right[..., :-d]``.
Each plane is a Slice, a Pad and a part of a Concat. All planes of an image are a selection between the image, shifted by a Gather,
and zeros. Volumes of products are different: :mod:`optdnn.passes.window_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.crops import starts, zeros_before
from optdnn.passes.support.facts import RESHAPES, integers, operand, producer
from optdnn.passes.support.parts import longest_run
from optdnn.types import Array, normalize_axis

FEWEST = 4
"""Fewest Pads for which a Gather and a selection pay."""


@dataclass(frozen=True)
class Plane:
    """A part of a Concat: element p is ``source[p + shift]`` where low <= p < high, and zero elsewhere. ``ops`` compute it."""

    source: Value
    shift: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    ops: tuple[Op, ...]

    @property
    def padded(self) -> bool:
        return any(op.kind == "Pad" for op in self.ops)


@rule("shifted_stack", {"Concat"})
def shifted_stack(graph: Graph, op: Op) -> Match | Miss | None:
    """``stack(pad(x[..., 0:]), pad(x[..., 1:]), …)`` is a selection between shifted x and zeros."""
    t = op.outputs[0].type
    if not t.is_static or len(op.inputs) < FEWEST:
        return None
    axis = normalize_axis(op.attrs.axis, len(t.dims))
    start, planes = longest_run([_plane(graph, v, axis) for v in op.inputs], lambda plane: plane.source)
    if sum(plane.padded for plane in planes) < FEWEST or 0 in graph.type(planes[0].source).dims:
        return None
    moved = [k for k in range(len(t.dims) - 1) if any(plane.shift[k] for plane in planes)]
    if len(moved) > 1:
        return Miss("the images of its stack are shifted along several axes")
    sizes = (*t.static_shape[:axis], *t.static_shape[axis + 1 :])
    source = planes[0].source
    if any(a != b for k, (a, b) in enumerate(zip(graph.type(source).dims, sizes, strict=True)) if k not in moved):
        return Miss("the images of its stack have another size than their source")

    def build(patch: Patch) -> Value:
        if moved:
            y = _shifted(patch, planes, moved[0], sizes[moved[0]], axis)
        else:
            y = patch.add("Unsqueeze", [source, integers(patch, [axis], "axis")])
        zero = patch.constant(np.zeros((), patch.type(source).dtype), "zero")
        y = patch.add("Where", [patch.constant(_inside(planes, sizes, axis), "inside"), y, zero])
        if len(planes) == len(op.inputs):
            return y
        return patch.add("Concat", [*op.inputs[:start], y, *op.inputs[start + len(planes) :]], op.attrs)

    return Match((op, *(o for plane in planes for o in plane.ops)), build)


def _plane(graph: Graph, part: Value | None, axis: int) -> Plane | None:
    """The shifted image in a part of a Concat along ``axis``, where it has size 1; None for other parts."""
    if part is None or graph.type(part).static_shape[axis] != 1:
        return None
    value, ops, stacked = part, list[Op](), True
    low, high = [0] * len(graph.type(part).dims), [*graph.type(part).static_shape]
    shift = list(low)
    while (op := producer(graph, value, {"Pad", "Slice", *RESHAPES})) is not None and graph.type(operand(op)).is_static:
        before, now = graph.type(operand(op)).static_shape, graph.type(value).static_shape
        if op.kind in RESHAPES:
            if not stacked or before != (*now[:axis], *now[axis + 1 :]):
                break
            stacked = False
            del shift[axis], low[axis], high[axis]
        else:
            moved = starts(graph, op) if op.kind == "Slice" else zeros_before(graph, op)
            if moved is None or (stacked and before[axis] != 1):
                break
            shift = [a + b for a, b in zip(shift, moved, strict=True)]
            low = [max(a, -s) for a, s in zip(low, shift, strict=True)]
            high = [min(a, n - s) for a, n, s in zip(high, before, shift, strict=True)]
        if len(ops) == 0 or graph.sole_user(ops[-1].value) is not None:
            ops.append(op)
        value = operand(op)
    return None if stacked else Plane(value, tuple(shift), tuple(low), tuple(high), tuple(ops))


def _shifted(patch: Patch, planes: Sequence[Plane], moved: int, size: int, axis: int) -> Value:
    """The source of the planes, shifted along the axis ``moved`` and stacked along ``axis``; any element where a plane is zero."""
    source = planes[0].source
    most = patch.type(source).static_shape[moved] - 1
    index = np.array([plane.shift[moved] for plane in planes])[:, None] + np.arange(size)
    y = patch.add("Gather", [source, patch.constant(np.clip(index, 0, most), "shifts")], GatherAttrs(moved))
    order = [k for k in range(len(patch.type(y).dims)) if k != moved]
    order.insert(axis, moved)
    return patch.add("Transpose", [y], TransposeAttrs(tuple(order)))


def _inside(planes: Sequence[Plane], sizes: Sequence[int], axis: int) -> Array:
    """For each plane, where it holds elements of its source. Axes along which all planes are whole have size 1."""
    whole = np.ones((len(planes), *[1] * len(sizes)), np.bool_)
    for k, size in enumerate(sizes):
        ends = np.array([(plane.low[k], plane.high[k]) for plane in planes])
        if (ends != (0, size)).any():
            inside = (np.arange(size) >= ends[:, :1]) & (np.arange(size) < ends[:, 1:])
            whole = whole & inside.reshape(len(planes), *[size if k == i else 1 for i in range(len(sizes))])
    return np.moveaxis(whole, 0, axis)


class ShiftedStacks(RulePass):
    name = "shifted_stacks"
    rules = (shifted_stack,)
