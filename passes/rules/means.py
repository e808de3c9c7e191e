"""One form for means and other reductions, which the patterns of normalizations expect."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, integers, operand, producer, reduction_axes, reshaped, shape_of
from optdnn.passes.support.views import groups
from optdnn.types import is_float


@rule("sum_is_mean", {"Div", "Mul"})
def sum_is_mean(graph: Graph, op: Op) -> Match | Miss | None:
    """``ReduceSum(x) / n`` and ``ReduceSum(x) * (1 / n)`` become ReduceMean(x) if the sums have n terms (models of time series).

    A ReduceSumSquare becomes the mean of ``x x`` (variances of JAX)."""
    dtype = op.outputs[0].type.dtype
    slots = ((0, 1), (1, 0)) if op.kind == "Mul" else ((0, 1),)
    for slot, other in slots:
        total = producer(graph, operand(op, slot), {"ReduceSum", "ReduceSumSquare"})
        factor = graph.constant_value(operand(op, other))
        if total is None or factor is None or not is_float(dtype):
            continue
        terms = _terms(graph, total)
        if not terms or shape_of(graph, total.value) != shape_of(graph, op.value):
            return None
        if (factor != np.asarray(terms if op.kind == "Div" else 1 / terms, dtype)).any():
            return None
        if graph.use_count(total.value) > 1:
            return Miss(f"the result of {total.name} is used {graph.use_count(total.value)} times")
        return Match((op, total), partial(_mean, total))
    return None


def _terms(graph: Graph, op: Op) -> int | None:
    """The number of terms of each sum of a reduction; None if it is not known."""
    shape, axes = shape_of(graph, operand(op)), reduction_axes(graph, op)
    if shape is None or axes is None:
        return None
    sizes = [shape[a] for a in axes]
    counts = [d for d in sizes if isinstance(d, int)]
    return math.prod(counts) if sizes and len(counts) == len(sizes) else None


def _mean(total: Op, patch: Patch) -> Value:
    x = operand(total)
    terms = x if total.kind == "ReduceSum" else patch.add("Mul", [x, x])
    return patch.add("ReduceMean", [terms, *total.inputs[1:]], total.attrs)


@rule("reduction_of_reduction", {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"})
def reduction_of_reduction(graph: Graph, op: Op) -> Match | Miss | None:
    """Two reductions of the same kind in a row become one over the axes of both (Conv-TasNet's global layer norms).

    This holds for means as well, because all inner means have the same number of terms."""
    inner = producer(graph, operand(op), {op.kind})
    if inner is None or (op.kind == "ReduceMean" and not is_float(op.outputs[0].type.dtype)):
        return None
    shape, first, second = shape_of(graph, operand(inner)), reduction_axes(graph, inner), reduction_axes(graph, op)
    if shape is None or not first or not second:
        return None
    if not inner.attrs.keepdims:
        kept = [a for a in range(len(shape)) if a not in first]
        second = tuple(kept[a] for a in second)
    axes = tuple(sorted({*first, *second}))
    if op.attrs.keepdims != inner.attrs.keepdims and not (inner.attrs.keepdims and {*first} <= {*second}):
        return None
    if any(shape[a] != 1 for a in range(axes[0], axes[-1]) if a not in axes):
        return Miss("the reduced axes are not adjacent")
    if graph.use_count(inner.value) > 1:
        return Miss(f"the result of {inner.name} is used {graph.use_count(inner.value)} times")

    def build(patch: Patch) -> Value:
        given = integers(patch, axes, f"{op.outputs[0].name}.axes")
        return patch.add(op.kind, [inner.inputs[0], given], ReduceAttrs(op.attrs.keepdims))

    return Match((op, inner), build)


_OVER_AXES = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"})


def _joined(found: Sequence[tuple[Sequence[int], Sequence[int]]], axes: Collection[int]) -> tuple[int, ...] | None:
    """The axes before a Reshape that it joined to these ones. None if it joined one of them with another axis, or split it."""
    reduced = [(of, to) for of, to in found if {*to} & {*axes}]
    return None if any(not {*to} <= {*axes} for _, to in reduced) else tuple(a for of, _ in reduced for a in of)


@rule("variance_of_joined_axes", {"ReduceMean"})
def variance_of_joined_axes(graph: Graph, op: Op) -> Match | Miss | None:
    """The variance over an axis that a Reshape has joined is taken over these axes: AdaIN's ``x.view(n, c, -1).var(2)``."""
    square = producer(graph, op.inputs[0], {"Mul"}, alone=True)
    deviation = (
        None if square is None or square.inputs[0] != square.inputs[1] else producer(graph, square.inputs[0], {"Sub"})
    )
    center = None if deviation is None else producer(graph, deviation.inputs[1], {"ReduceMean"})
    if square is None or deviation is None or center is None or center.inputs[0] != deviation.inputs[0]:
        return None
    view, axes = producer(graph, center.inputs[0], RESHAPES), reduction_axes(graph, op)
    if view is None or not axes or axes != reduction_axes(graph, center) or not center.attrs.keepdims:
        return None
    fine, coarse, out = (shape_of(graph, v) for v in (operand(view), view.value, op.value))
    found = None if fine is None or coarse is None else groups(fine, coarse)
    if fine is None or found is None or out is None or fine == coarse or not all(isinstance(d, int) for d in out):
        return None
    if graph.use_count(deviation.value) > 2:
        return Miss(f"the result of {deviation.name} is read elsewhere")
    among = _joined(found, axes)
    if not among:
        return Miss(f"{view.name} splits a reduced axis, or joins it with another one") if among is None else None

    def build(patch: Patch) -> Value:
        x, given = operand(view), integers(patch, among, f"{op.outputs[0].name}.axes")
        own = patch.add(
            "Sub", [x, patch.add("ReduceMean", [x, given], ReduceAttrs(True))], src=deviation.src | center.src
        )
        y = patch.add("ReduceMean", [patch.add("Mul", [own, own], src=square.src), given], ReduceAttrs(False))
        return reshaped(patch, y, tuple(int(d) for d in out))  # type: ignore[arg-type]

    return Match((op, square, deviation), build)


@rule("reduction_of_joined_axes", _OVER_AXES)
def reduction_of_joined_axes(graph: Graph, op: Op) -> Match | Miss | None:
    """A reduction over an axis that a Reshape has joined reduces the axes themselves: ``x.flatten(2).amax(-1)``.

    The reduction then reads the tensor in any order of its axes, and its launch can compute a pointwise op before the view."""
    view = producer(graph, operand(op), RESHAPES)
    axes = None if view is None else reduction_axes(graph, op)
    if view is None or not axes:
        return None
    fine, coarse, out = (shape_of(graph, v) for v in (operand(view), view.value, op.value))
    found = None if fine is None or coarse is None else groups(fine, coarse)
    if fine is None or coarse is None or found is None or out is None or fine == coarse:
        return None
    if any(user.kind not in _OVER_AXES for user in graph.users(view.value)):
        return Miss(f"the result of {view.name} is read elsewhere")
    among = _joined(found, axes)
    if among is None:
        return Miss(f"{view.name} splits a reduced axis, or joins it with another one")
    if not among:
        return None
    kept = tuple(d for a, d in enumerate(fine) if a not in among)
    target = None if kept == out else tuple(d for d in out if isinstance(d, int))
    if target is not None and len(target) < len(out):
        return Miss("the sizes of its result are not known")

    def build(patch: Patch) -> Value:
        given = integers(patch, among, f"{op.outputs[0].name}.axes")
        y = patch.add(op.kind, [operand(view), given], ReduceAttrs(False))
        return y if target is None else reshaped(patch, y, target)

    return Match((op, view), build)
