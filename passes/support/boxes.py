"""Tables of positions that list a box: what GatherND and ScatterND read for a slice of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from optdnn.dim import Dim, DimLike
from optdnn.ir.graph import Graph, Value
from optdnn.passes.support.facts import operand, producer, shape_of
from optdnn.types import Array, normalize_axis

Line = Array | Dim
"""Positions along an axis. A symbolic count stands for all of them: 0, 1, …, count - 1."""


def box_of(table: Array) -> list[Array] | None:
    """The positions along each axis, if a constant table (..., axes) lists the positions of a box in row-major order; else None.

    The positions are as in the table: negative ones count from the end."""
    depth = table.shape[-1]
    if depth == 0:
        return None
    rows = table.reshape(-1, depth)
    lines = [_in_order(rows[:, k]) for k in range(depth)]
    if math.prod(len(line) for line in lines) != len(rows):
        return None
    grid = np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, depth)
    return lines if np.array_equal(grid, rows) else None


def box_of_columns(graph: Graph, table: Value) -> list[Line] | None:
    """The positions along each axis, if a computed table is a Concat of columns that list a box in row-major order; else None.

    Each column is constant along all axes of the table but one, by an Expand. Exporters write the tables of slices in this way, and
    tables of millions of positions do not become constants. An axis whose size depends on data has a Range as its column."""
    concat, sizes = producer(graph, table, {"Concat"}), shape_of(graph, table)
    if concat is None or not sizes or 0 in sizes or normalize_axis(concat.attrs.axis, len(sizes)) != len(sizes) - 1:
        return None
    columns = [_column(graph, value) for value in concat.inputs if value is not None]
    found = [column for column in columns if column is not None]
    if len(found) < len(columns) or len(found) != sizes[-1]:
        return None
    axes = [axis for axis, line in found if _count(line) != 1]
    wanted = [axis for axis, size in enumerate(sizes[:-1]) if size != 1]
    ascending = all(a < b for a, b in itertools.pairwise(axes))
    return [line for _, line in found] if ascending and axes == wanted else None


def _in_order(column: Array) -> Array:
    """The different positions of a column, in the order in which they first appear."""
    _, first = np.unique(column, return_index=True)
    return column[np.sort(first)]


def _count(line: Line) -> DimLike:
    return line if isinstance(line, Dim) else len(line)


def _column(graph: Graph, value: Value) -> tuple[int, Line] | None:
    """The only axis along which a value varies, and its elements there; axis 0 and one element if it is constant.

    None if the value varies along several axes, or is not known."""
    sizes, known = shape_of(graph, value), graph.constant_value(value)
    if sizes is None:
        return None
    if known is not None:
        varies = [axis for axis, size in enumerate(known.shape) if size > 1]
        if len(varies) < 2:
            return (varies[0] if varies else 0), known.reshape(-1)
        return None
    if (counted := _counted(graph, value)) is not None:
        return 0, counted
    op = producer(graph, value, {"Expand", "Reshape", "Unsqueeze", "Squeeze"})
    inner = None if op is None else _column(graph, operand(op))
    before = None if op is None else shape_of(graph, operand(op))
    if op is None or inner is None or before is None:
        return None
    axis, line = inner
    if _count(line) == 1:
        return 0, line
    moved = axis + len(sizes) - len(before) if op.kind == "Expand" else _moved(axis, before, sizes)
    return None if moved is None or sizes[moved] != _count(line) else (moved, line)


def _counted(graph: Graph, value: Value) -> Dim | None:
    """The size of a Range ``0, 1, …`` if it depends on data; None for other values."""
    op = producer(graph, value, {"Range"})
    if op is None:
        return None
    start, step, count = graph.constant_value(op.input(0)), graph.constant_value(op.input(2)), graph.type(value).dims[0]
    return count if start == 0 and step == 1 and isinstance(count, Dim) else None


def _moved(axis: int, before: Sequence[DimLike], after: Sequence[DimLike]) -> int | None:
    """The place of an axis after a Reshape that only adds or removes axes of one element; None for other ones."""
    if [d for d in before if d != 1] != [d for d in after if d != 1]:
        return None
    place = sum(d != 1 for d in before[:axis])
    return [k for k, d in enumerate(after) if d != 1][place]
