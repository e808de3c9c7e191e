"""Columns that equal operators compute one by one, and that a Concat joins, are computed at once.

Scikit-learn's exporter writes polynomial features and bins of features column by column: each has a Gather and a reduction of its
own, several hundred for some twenty features. Each operator would be a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, operand, reshaped
from optdnn.passes.support.stacks import Same, Stack, covered, emit, stack_of
from optdnn.types import TensorType, normalize_axis

LEAST = 4
"""Fewest columns that become a stack."""
KEY = 4
"""Operators before the Concat that columns must have in common in order to be tried as a stack."""
MOST_ELEMENTS = 1 << 18
"""Most elements of a stack: larger columns are worth launches of their own."""
Run = tuple[int, list[Value], Stack]
"""Consecutive operands of a Concat: the number of the first one, the operands, and their stack."""


@rule("stacked_columns", {"Concat"})
def stacked_columns(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``Concat(f(x[:, a]), f(x[:, b]), …)`` is f of all columns, where f reduces or searches."""
    y = op.outputs[0].type
    if not y.is_static or len(op.inputs) < LEAST:
        return None
    runs = list(_runs(graph, op))
    if not runs:
        return None
    if context.counted(math.prod(y.static_shape)) > MOST_ELEMENTS:
        return Miss("each column is large enough for a launch of its own")
    axis = normalize_axis(op.attrs.axis, len(y.dims))

    def build(patch: Patch) -> Value:
        parts = [operand(op, k) for k in range(len(op.inputs))]
        for start, values, stack in reversed(runs):
            parts[start : start + len(values)] = [_side_by_side(patch, emit(patch, stack), axis)]
        return parts[0] if len(parts) == 1 else patch.add("Concat", parts, op.attrs)

    inside = {one.id: one for _, _, stack in runs for one in covered(stack)}
    return Match((op, *inside.values()), build)


def _runs(graph: Graph, op: Op) -> Iterator[Run]:
    """The operands that are stacks of equal operators, one of them at least more than a pointwise one or a view."""
    numbered = enumerate(v for v in op.inputs if v is not None)
    for _, group in groupby(numbered, key=lambda pair: _chain(graph, pair[1])):
        columns = list(group)
        values = [v for _, v in columns]
        if len(values) < LEAST or len(set(values)) < len(values):
            continue
        stack = stack_of(graph, values)
        if isinstance(stack, Same) and any(_costs_a_launch(one) for one in covered(stack)):
            yield columns[0][0], values, stack


def _costs_a_launch(op: Op) -> bool:
    return op.kind not in STAGE_KINDS and op.kind not in RESHAPES


def _chain(graph: Graph, value: Value) -> tuple[tuple[str, TensorType], ...]:
    """The kinds and result types of the last operators that compute a value, along their first operands."""
    found = list[tuple[str, TensorType]]()
    at: Value | None = value
    while at is not None and len(found) < KEY:
        op = graph.op(at)
        found.append((op.kind, graph.type(at)))
        at = op.input(0)
    return tuple(found)


def _side_by_side(patch: Patch, stack: Value, axis: int) -> Value:
    """The parts of a stack (part, …) along ``axis`` of each."""
    count, *shape = patch.type(stack).static_shape
    order = (*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1))
    turned = patch.add("Transpose", [stack], TransposeAttrs(order)) if axis else stack
    return reshaped(patch, turned, (*shape[:axis], count * shape[axis], *shape[axis + 1 :]))


class StackedColumns(RulePass):
    name = "stacked_columns"
    rules = (stacked_columns,)
