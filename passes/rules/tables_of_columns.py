"""Gathers by the columns of one tensor become one Gather from their concatenated tables, whatever reads the rows.

Recommendation networks (deepctr) look up each categorical feature, which is a column of their input. They concatenate the rows, add
them and multiply them. There may be several tables for each column, for the weight and for the factors of a feature.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.tables_of_one_index import ALIGNED, SHARED_BYTES
from optdnn.passes.support.facts import operand, shape_of, split_along
from optdnn.passes.support.tables import LEAST, MOST_BYTES, column_of, columns_of, gathered_table, rows_of_tables
from optdnn.types import Array


def table_of(graph: Graph, op: Op) -> Array | None:
    """The constant matrix whose rows a Gather takes by a column (B, 1) of a matrix; None for other operators."""
    table, shape = gathered_table(graph, op), shape_of(graph, op.input(1))
    return table if shape is not None and len(shape) == 2 and shape[1] == 1 else None


@rule("tables_of_columns", {"Gather"})
def tables_of_columns(graph: Graph, op: Op) -> Match | Miss | None:
    """All Gathers by columns of the tensor by whose column ``op`` gathers, if each column has tables of the same widths."""
    return _match(graph, op)


def _match(graph: Graph, op: Op) -> Match | Miss | None:
    column = None if table_of(graph, op) is None else column_of(graph, op.input(1))
    found = None if column is None else _gathers(graph, column[0])
    if column is None or found is None:
        return None
    members = [member for tables in found.values() for member in tables]
    if sum(t.nbytes for _, t in members) > MOST_BYTES:
        return Miss("its tables are too large to be joined")
    for gather, table in members:
        if graph.use_count(operand(gather)) > 1 and table.nbytes > SHARED_BYTES:
            return Miss(f"other operators also read the table of {gather.name}, so it would be stored twice")
    columns = sorted(found)
    sizes = [t.shape[1] for _, t in found[columns[0]]]
    spare = -sum(sizes) % ALIGNED if len(sizes) > 1 else 0

    def build(patch: Patch) -> None:
        index = columns_of(patch, column[0], columns)
        tables = [np.concatenate([t for _, t in found[k]], 1) for k in columns]
        rows = rows_of_tables(patch, index, [np.pad(t, ((0, 0), (0, spare))) for t in tables])
        widths = [*sizes, *([spare] if spare else [])]
        parts = split_along(patch, rows, 2, widths)[: len(sizes)] if len(sizes) > 1 else [rows]
        for i, part in enumerate(parts):
            split = patch.add_op("Split", [part], SplitAttrs(1, len(columns)), outputs=len(columns))
            patch.replace_each((found[k][i][0].value for k in columns), split.values)

    return Match(tuple(g for k in columns for g, _ in found[k]), build)


def takes_all_tables(graph: Graph, gather: Op) -> bool:
    """Whether :func:`tables_of_columns` matches a Gather whose rows, or whose column, have other readers."""
    shared = graph.use_count(gather.value) > 1 or graph.use_count(operand(gather, 1)) > 1
    return shared and isinstance(_match(graph, gather), Match)


def _gathers(graph: Graph, source: Value) -> dict[int, list[tuple[Op, Array]]] | None:
    """The Gathers by columns of ``source``: column -> Gathers and their tables, the widest and first one first.

    None if there are few columns, if they have tables of different widths, or if a column has tables of different lengths."""
    found: dict[int, list[tuple[Op, Array]]] = {}
    for op in graph.of_kind("Gather"):
        table = table_of(graph, op)
        own = None if table is None else column_of(graph, op.input(1))
        if table is not None and own is not None and own[0] == source:
            found.setdefault(own[1], []).append((op, table))
    for tables in found.values():
        tables.sort(key=lambda x: (-x[1].shape[1], x[0].id))
    widths = {tuple(t.shape[1] for _, t in tables) for tables in found.values()}
    lengths = [{len(t) for _, t in tables} for tables in found.values()]
    alike = len(widths) == 1 and all(len(n) == 1 for n in lengths)
    return found if alike and len(found) >= LEAST else None
