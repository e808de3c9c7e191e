"""A GatherElements whose index is the same for all channels becomes a Gather of rows, which are contiguous."""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs, ModAttrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import exchange_last, in_shape, operand, producer, shape_of, sizes_of
from optdnn.types import INT64, normalize_axis


@rule("gather_by_one_index", {"GatherElements"})
def gather_by_one_index(graph: Graph, op: Op) -> Match | None:
    """A GatherElements with an index that is repeated for all channels becomes a Gather of rows, which are contiguous."""
    expanded = producer(graph, op.input(1), {"Expand"})
    shape, after = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if expanded is None or shape is None or after is None:
        return None
    index, at = shape_of(graph, expanded.inputs[0]), normalize_axis(op.attrs.axis, len(shape))
    if len(shape) < 2 or at != len(shape) - 1 or shape[:at] != after[:at]:
        return None
    stacks = after[: at - 1]
    if index not in (
        (*stacks, 1, after[at]),
        *(((1,) * k + (after[at],)) for k in range(at + 1) if set(stacks) <= {1}),
    ):
        return None
    return Match((op, expanded), lambda patch: _rows_by_index(patch, op, expanded, math.prod(stacks)))


@rule("rows_by_one_index", {"GatherElements"})
def rows_by_one_index(graph: Graph, op: Op) -> Match | None:
    """A GatherElements with an index that is repeated along all later axes becomes a Gather of whole rows.

    Detectors with two stages select the best queries in this form (Deformable DETR: Zhu et al., 2021)."""
    expanded = producer(graph, op.input(1), {"Expand"})
    shape, after = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if expanded is None or shape is None or after is None:
        return None
    index, at = sizes_of(graph, operand(expanded)), normalize_axis(op.attrs.axis, len(shape))
    if index is None or at == len(shape) - 1 or (shape[:at], shape[at + 1 :]) != (after[:at], after[at + 1 :]):
        return None
    index = (*[1] * (len(shape) - len(index)), *index)
    one = set(index[:at]) <= {1}
    if index[at] != after[at] or set(index[at + 1 :]) > {1} or not (one or index[:at] == shape[:at]):
        return None

    def build(patch: Patch) -> Value:
        if one:
            rows = in_shape(patch, operand(expanded), (after[at],), expanded.src)
            return patch.add("Gather", [operand(op), rows], GatherAttrs(at))
        rows = in_shape(patch, operand(expanded), (*after[: at + 1], 1), expanded.src)
        if patch.type(rows).dtype != INT64:
            rows = patch.add("Cast", [rows], CastAttrs(INT64), src=expanded.src)
        return patch.add("GatherND", [operand(op), rows], GatherNDAttrs(at))

    return Match((op, expanded), build)


def _rows_by_index(patch: Patch, op: Op, expanded: Op, stacks: int) -> Value:
    """``stacks`` matrices [channels, rows], each with an index of its own, as rows of one matrix."""
    (*_, channels, rows), after = patch.type(operand(op)).static_shape, op.outputs[0].type.static_shape
    turned, many = TransposeAttrs(exchange_last(len(after))), stacks * after[-1]
    index = operand(expanded)
    if stacks > 1:
        size, firsts = (
            patch.constant(np.array(rows), "rows"),
            patch.constant(np.arange(stacks)[:, None] * rows, "firsts"),
        )
        kind = patch.type(index).dtype
        if kind != INT64:
            index = patch.add("Cast", [index], CastAttrs(INT64), src=expanded.src)
        index = in_shape(patch, index, (stacks, after[-1]), expanded.src)
        inside = patch.add("Mod", [index, size], ModAttrs(), src=expanded.src)  # indices may count from the end
        index = patch.add("Add", [inside, firsts], src=expanded.src)
    index = in_shape(patch, index, (many,), expanded.src)
    x = patch.add("Transpose", [operand(op)], turned, src=op.src)
    y = patch.add("Gather", [in_shape(patch, x, (stacks * rows, channels), op.src), index], GatherAttrs(0), src=op.src)
    y = in_shape(patch, y, (*after[:-2], after[-1], channels), op.src)
    return patch.add("Transpose", [y], turned, src=op.src)
