"""One form for means and other reductions, which the patterns of normalizations expect."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, operand, producer, reduction_axes, shape_of
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
