"""Sums that are divided by the number of their terms are means, as patterns of normalizations expect them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import ints, operand, producer, shape_of
from optdnn.types import is_float


@rule("sum_is_mean", {"Div", "Mul"})
def sum_is_mean(graph: Graph, op: Op) -> Match | Miss | None:
    """``ReduceSum(x) / n`` and ``ReduceSum(x) * (1 / n)`` are ReduceMean(x), for sums of n terms (models of time series)."""
    dtype = op.outputs[0].type.dtype
    slots = ((0, 1), (1, 0)) if op.kind == "Mul" else ((0, 1),)
    for slot, other in slots:
        total = producer(graph, operand(op, slot), {"ReduceSum"})
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
    """How many terms each sum of a reduction has; None where that is not known."""
    shape = shape_of(graph, operand(op))
    axes = () if op.input(1) is None else ints(graph, op.input(1))
    if shape is None or axes is None:
        return None
    sizes = [shape[a] for a in reduced_axes(op.attrs, axes, len(shape))]
    counts = [d for d in sizes if isinstance(d, int)]
    return math.prod(counts) if sizes and len(counts) == len(sizes) else None


def _mean(total: Op, patch: Patch) -> Value:
    return patch.add("ReduceMean", total.inputs, total.attrs)
