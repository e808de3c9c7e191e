"""Convolutions and pools over an axis of size 1 lose this axis, if views added it before them and remove it after them.

TensorFlow and PaddlePaddle compute a convolution over a sequence as one over an image of one row: Unsqueeze, Conv, Squeeze. The
views would stop bias, activation and layout.

JAX's pools have windows over all axes of an image, also over batch and channels. No kernel and no library has pools over so many
axes. The axes along which windows hold one element join the channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import CONVOLUTIONS, RESHAPES, in_shape, operand, producer

_AXES = frozenset({"kernel_shape", "strides", "dilations", "output_padding"})
"""Attributes with one number for each spatial axis; ``pads`` has two."""


@rule("unit_axis", CONVOLUTIONS | {"MaxPool", "AveragePool"})
def unit_axis(graph: Graph, op: Op) -> Match | Miss | None:
    """``squeeze(conv(unsqueeze(x)))`` becomes a convolution over one axis less, with or without a Transpose on either side."""
    x, after = operand(op), op.outputs[0].type
    if len(op.outputs) > 1 or after.rank is None or after.rank < 4 or graph.type(x).rank != after.rank:
        return None
    axis = next((k for k in range(2, after.rank) if _added(graph, x, k)), None)
    if axis is None or after.dims[axis] != 1:
        return None
    views = _removing(graph, op.value, axis)
    if not views:
        return Miss("not all readers remove the axis of size 1")
    a, weight = op.attrs, None
    if (
        a.auto_pad != "NOTSET"
        or getattr(a, "output_shape", ())
        or getattr(a, "prologue", ())
        or getattr(a, "epilogue", ())
    ):
        return Miss("its padding depends on its input, or it has stages")
    if op.kind in CONVOLUTIONS and (weight := graph.constant_value(op.inputs[1])) is None:
        return Miss("its weights are not constant")
    taps = a.kernel_shape[axis - 2] if weight is None else weight.shape[axis]
    if taps != 1 or any(_pads(a.pads, axis - 2)) or any(getattr(a, "output_padding", ())[axis - 2 : axis - 1]):
        return Miss("its windows along the axis of size 1 hold padding")

    def build(patch: Patch) -> None:
        inputs = [_before(graph, patch, x, axis), *op.inputs[1:]]
        if weight is not None:
            inputs[1] = patch.constant(np.ascontiguousarray(weight.squeeze(axis)), "weight")
        y = patch.add(op.kind, inputs, _without(a, axis - 2))
        for view, transpose in views:
            taken = y if transpose is None else _transposed(patch, y, transpose, transpose.attrs.perm.index(axis))
            patch.replace(view.value, taken)

    return Match((op, *(view for view, _ in views)), build)


MOST_AXES = 3
"""Most spatial axes of a pool that kernels and libraries have."""


@rule("unit_windows", {"MaxPool", "AveragePool"})
def unit_windows(graph: Graph, op: Op) -> Match | Miss | None:
    """A pool over more than three axes becomes one over the axes along which its windows hold more than one element."""
    x, a, after = operand(op), op.attrs, op.outputs[0].type
    spatial = range(len(a.kernel_shape))
    if len(spatial) <= MOST_AXES or len(op.outputs) > 1:
        return None
    single = [k for k in spatial if (a.kernel_shape[k], a.strides[k], *_pads(a.pads, k)) == (1, 1, 0, 0)]
    pooled = [k for k in spatial if k not in single]
    if a.auto_pad != "NOTSET" or not 0 < len(pooled) <= MOST_AXES:
        return Miss(f"its windows hold several elements along {len(pooled)} axes, or its padding depends on its input")
    if not graph.type(x).is_static:
        return Miss("the sizes of its axes are not known")
    order = (0, 1, *(2 + k for k in single), *(2 + k for k in pooled))
    batch, *rest = (graph.type(x).static_shape[k] for k in order)
    results = [after.static_shape[k] for k in order]
    attrs = a
    for k in reversed(single):
        attrs = _without(attrs, k)

    def build(patch: Patch) -> Value:
        turned = patch.add("Transpose", [x], TransposeAttrs(order))
        flat = in_shape(patch, turned, (batch, math.prod(rest[: 1 + len(single)]), *rest[1 + len(single) :]))
        y = in_shape(patch, patch.add(op.kind, [flat], attrs), tuple(results))
        return patch.add("Transpose", [y], TransposeAttrs(tuple(order.index(k) for k in range(len(order)))))

    return Match((op,), build)


def _added(graph: Graph, value: Value, axis: int) -> bool:
    """Whether a view adds ``axis``, of size 1, perhaps with a Transpose after it."""
    op = producer(graph, value, {*RESHAPES, "Transpose"})
    if op is None:
        return False
    if op.kind == "Transpose":
        inner = producer(graph, operand(op), RESHAPES)
        return inner is not None and op.attrs.perm is not None and _added(graph, operand(op), op.attrs.perm[axis])
    before, after = graph.type(operand(op)), graph.type(value)
    return before.rank is not None and before.dims == _dropped(after.dims, axis) and after.dims[axis] == 1


def _removing(graph: Graph, value: Value, axis: int) -> list[tuple[Op, Op | None]]:
    """The views that remove ``axis`` of ``value``, each with the Transpose before it; empty if there are other readers."""
    found = list[tuple[Op, Op | None]]()
    for user in graph.users(value):
        transposed = user.kind == "Transpose" and user.attrs.perm is not None
        at = user.attrs.perm.index(axis) if transposed else axis
        source = user.value if transposed else value
        views = graph.users(source) if transposed else [user]
        kept = _dropped(graph.type(source).dims, at)
        if any(
            v.kind not in RESHAPES or v.outputs[0].type.rank is None or v.outputs[0].type.dims != kept for v in views
        ):
            return []
        found += [(view, user if transposed else None) for view in views]
    return found


def _dropped(items: Sequence[Any], axis: int) -> tuple[Any, ...]:
    return (*items[:axis], *items[axis + 1 :])


def _pads(pads: Sequence[int], spatial: int) -> tuple[int, int]:
    return pads[spatial], pads[len(pads) // 2 + spatial]


def _without(attrs: Any, spatial: int) -> Any:
    """The attributes of a window without one spatial axis."""
    half = len(attrs.pads) // 2
    kept = {f.name: _dropped(getattr(attrs, f.name), spatial) for f in fields(attrs) if f.name in _AXES}
    pads = (*_dropped(attrs.pads[:half], spatial), *_dropped(attrs.pads[half:], spatial))
    return replace(attrs, **kept, pads=pads)


def _before(graph: Graph, patch: Patch, value: Value, axis: int) -> Value:
    """The value before the view that adds ``axis`` of ``value``, transposed as ``value`` is."""
    op = graph.op(value)
    if op.kind != "Transpose":
        return operand(op)
    return _transposed(patch, operand(graph.op(operand(op))), op, axis)


def _transposed(patch: Patch, x: Value, transpose: Op, at: int) -> Value:
    """Add a Transpose of ``x`` as ``transpose``, without the axis at ``at`` of its result."""
    perm = transpose.attrs.perm
    kept = tuple(p - (p > perm[at]) for p in _dropped(perm, at))
    return patch.add("Transpose", [x], TransposeAttrs(kept), src=transpose.src)
