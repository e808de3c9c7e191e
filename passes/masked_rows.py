"""Rows that are gathered by a mask, computed, and scattered back become a choice between all rows, computed, and the old ones.

Detectors send each region of interest to the level of its size: for each level, ``i = NonZero(mask)`` and
``y[i] = f(x[i])``. The size of ``i`` depends on data, so no kernel can be planned for ``f``. Wherever ``f`` keeps rows apart,
``Where(mask, f(Where(mask, x, 0)), y)`` is the same, and its sizes are those of ``x``.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.dim import Dim, DimLike, bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, operand
from optdnn.passes.support.rows import SHAPED, RowOp, by_number, copy_of, row_op, zero
from optdnn.types import BOOL, Shape, normalize_axis

MOST_ELEMENTS = 1 << 28
"""Most elements of a result of ``f`` for all rows."""


@rule("masked_rows", {"ScatterElements", "ScatterND"})
def masked_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """``y[NonZero(mask)] = f(x[NonZero(mask)])``."""
    base, updates = operand(op), operand(op, 2)
    chooser = _rows_written(graph, op)
    if chooser is None or op.attrs.reduction != "none":
        return None
    mask, count = operand(chooser), chooser.outputs[0].type.dims[1]
    rows = graph.type(mask).dims[0]
    if graph.type(base).dims[0] != rows or not isinstance(count, Dim):
        return None
    found = _computed(graph, updates, chooser, rows, count)
    if isinstance(found, Miss):
        return found
    copied, gathers = found
    most = bounds(rows)[1]
    if any(_elements(r.op.outputs[0].type.dims, most) > MOST_ELEMENTS for r in copied):
        return Miss("all rows together are too large")

    def build(patch: Patch) -> Value:
        chosen = mask if graph.type(mask).dtype == BOOL else patch.add("Cast", [mask], CastAttrs(BOOL))
        new: dict[Value, Value] = {}
        for gather in gathers:
            x = operand(gather)
            new[gather.value] = patch.add("Where", [_over(patch, chosen, x), x, zero(patch, graph.type(x).dtype)])
        for r in copied:
            made = copy_of(patch, r, new, None)
            new.update({Value(r.op.id, i): Value(made.id, i) for i in range(len(made.outputs))})
        return patch.add("Where", [_over(patch, chosen, base), new[updates], _scalar(patch, base)])

    return Match((op, *(r.op for r in copied), *gathers, chooser), build)


def _rows_written(graph: Graph, op: Op) -> Op | None:
    """The NonZero of a mask whose rows the scatter writes, each whole row once; None if it writes others."""
    indices, base, updates = operand(op, 1), graph.type(operand(op)), graph.type(operand(op, 2))
    if not base.shape or not updates.shape or graph.type(indices).shape is None or base.shape[1:] != updates.shape[1:]:
        return None
    if op.kind == "ScatterElements":
        if normalize_axis(op.attrs.axis, len(base.shape)) != 0 or graph.type(indices).shape != updates.shape:
            return None
        expand = graph.op(indices)
        if expand.kind == "Expand":
            indices = operand(expand)
        if len(graph.type(indices).dims) != len(updates.shape):
            return None  # expanded along leading axes
    elif graph.type(indices).dims[1:] != (1,):
        return None
    dims = graph.type(indices).dims
    return _positions(graph, indices) if dims[0] == updates.shape[0] and all(d == 1 for d in dims[1:]) else None


def _positions(graph: Graph, value: Value) -> Op | None:
    """The NonZero of a mask of one axis whose positions, in their order, are the elements of ``value``."""
    op = graph.op(value)
    while op.kind in RESHAPES or (op.kind == "Transpose" and 1 in graph.type(operand(op)).dims):
        op = graph.op(operand(op))
    if op.kind != "NonZero" or len(graph.type(operand(op)).dims) != 1:
        return None
    return op


def _computed(
    graph: Graph, result: Value, chooser: Op, rows: DimLike, count: Dim
) -> tuple[list[RowOp], list[Op]] | Miss:
    """The operators between the rows that ``chooser`` chose and ``result``, in order, and the Gathers of these rows."""
    inside: dict[int, RowOp] = {}
    gathers: dict[int, Op] = {}
    left = [graph.op(result)]
    while left:
        op = left.pop()
        if op.id in inside or op.id in gathers:
            continue
        if _gathers(graph, op, chooser, rows):
            gathers[op.id] = op
            continue
        found = row_op(graph, op, count)
        if found is None or by_number(found) or op.kind in SHAPED:
            return Miss(f"{op.name} ({op.kind}) does not compute each row from a row that the mask chose")
        inside[op.id] = found
        left += [graph.op(operand(op, i)) for i, r in enumerate(found.given) if r is not None]
    if not gathers:
        return Miss("it is computed from no rows that the mask chose")
    return [inside[op.id] for op in graph.order() if op.id in inside], [gathers[i] for i in sorted(gathers)]


def _gathers(graph: Graph, op: Op, chooser: Op, rows: DimLike) -> bool:
    """Whether an operator takes the chosen rows of a tensor."""
    if op.kind != "Gather" or len(graph.type(operand(op, 1)).dims) != 1 or op.attrs.axis != 0:
        return False
    found = _positions(graph, operand(op, 1))
    return found is not None and found.id == chooser.id and graph.type(operand(op)).dims[0] == rows


def _over(patch: Patch, mask: Value, x: Value) -> Value:
    """The mask with an axis for each axis of ``x``."""
    rank = len(patch.type(x).dims)
    if rank == 1:
        return mask
    shape = patch.constant(np.array([-1, *[1] * (rank - 1)], np.int64), "shape")
    return patch.add("Reshape", [mask, shape], ReshapeAttrs())


def _scalar(patch: Patch, value: Value) -> Value:
    """The number that fills a tensor, if one does; else the tensor."""
    op = patch.graph.op(value)
    if op.kind != "ConstantOfShape":
        return value
    return patch.constant(np.array(op.attrs.value, op.attrs.dtype), "filler")


def _elements(dims: Shape, rows: int) -> int:
    return rows * math.prod(d for d in dims if isinstance(d, int))


class MaskedRows(RulePass):
    name = "masked_rows"
    rules = (masked_rows,)
