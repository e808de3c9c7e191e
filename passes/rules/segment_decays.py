"""The decays between all steps of a chunk are differences of one running sum (Mamba-2: Dao and Gu, 2024).

``segment[i, j] = a[j + 1] + … + a[i]`` is exported as a running sum over a matrix with ``a`` in each column, below the diagonal.
A mask for the upper triangle follows. With ``c = cumsum(a)`` it is ``c[i] - c[j]``, an operator in registers. The network often
computes ``c`` anyway.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.index import CumulativeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, ints, is_filled, operand, producer, reshaped, shape_of, sizes_of
from optdnn.types import normalize_axis

_DEPTH = 16
"""Most operators that are examined for infinite exponents."""


@rule("segment_decays", {"Where"})
def segment_decays(graph: Graph, op: Op) -> Match | Miss | None:
    """A mask of the upper triangle, after running sums of columns below the diagonal."""
    masked = _masked(graph, op, 0)
    total = None if masked is None else producer(graph, masked[0], {"CumSum"}, alone=True)
    shape = None if total is None else sizes_of(graph, total.value)
    if masked is None or total is None or shape is None or len(shape) < 2 or shape[-1] != shape[-2]:
        return None
    axis = ints(graph, total.input(1))
    if axis is None or normalize_axis(axis[0], len(shape)) != len(shape) - 2 or total.attrs != CumulativeAttrs():
        return None
    columns = producer(graph, operand(total), {"Where"}, alone=True)
    below = None if columns is None else _masked(graph, columns, -1)
    if columns is None or below is None or not is_filled(graph.constant_value(below[1]), 0.0):
        return None
    column = producer(graph, below[0], RESHAPES)
    source = below[0] if column is None else operand(column)
    if shape_of(graph, below[0]) != (*shape[:-1], 1) or shape_of(graph, source) != shape[:-1]:
        return None
    if _may_be_infinite(graph, source, _DEPTH):
        return Miss("a step may have an infinite exponent, and infinite running sums have no difference")

    def build(patch: Patch) -> Value:
        last = patch.constant(np.array(len(shape) - 2, np.int64), "axis")
        sums = _running_sum(graph, source) or patch.add("CumSum", [source, last], CumulativeAttrs())
        rows, others = (reshaped(patch, sums, target) for target in ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1])))
        y = patch.add("Sub", [rows, others])
        return patch.add("Where", [y if v == total.value else v for v in op.inputs])

    return Match((op, total, columns), build)


def _masked(graph: Graph, op: Op, diagonal: int) -> tuple[Value, Value] | None:
    """The operands that a Where takes up to this diagonal and above it, if its condition is such a constant triangle."""
    condition = graph.constant_value(op.inputs[0])
    if condition is None or condition.ndim < 2 or condition.size != condition.shape[-1] * condition.shape[-2]:
        return None
    lower = np.tril(np.ones(condition.shape[-2:], bool), diagonal)
    found = condition.reshape(lower.shape)
    if (found == lower).all():
        return operand(op, 1), operand(op, 2)
    return (operand(op, 2), operand(op, 1)) if (found == ~lower).all() else None


def _running_sum(graph: Graph, source: Value) -> Value | None:
    """The running sum of a tensor along its last axis, if the network computes it."""
    for user in graph.users(source):
        axis = ints(graph, user.input(1)) if user.kind == "CumSum" and user.attrs == CumulativeAttrs() else None
        if (
            axis is not None
            and normalize_axis(axis[0], len(graph.type(source).dims)) == len(graph.type(source).dims) - 1
        ):
            return user.value
    return None


def _may_be_infinite(graph: Graph, value: Value, depth: int) -> bool:
    """Whether a logarithm or an infinite constant is among the pointwise operators that compute a value."""
    op = graph.op(value)
    if op.kind == "Constant":
        return not np.isfinite(op.attrs.value).all()
    if op.kind == "Log" or depth == 0:
        return True
    through = op.kind in STAGE_KINDS or (op.kind not in STRUCTURAL and op.definition.traits.movement)
    return through and any(_may_be_infinite(graph, v, depth - 1) for v in op.inputs if v is not None)
