"""Embeddings of the columns of one tensor become one Gather from their concatenated tables (DeepFM: Guo et al., 2017).

The same holds for bags of rows of several tables (``passes/rules/joined_bags.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.concats import concat_of_split
from optdnn.passes.rules.joined_bags import joined_bags, longest_run, with_joined
from optdnn.passes.rules.tables_of_columns import tables_of_columns, takes_all_tables
from optdnn.passes.rules.tables_of_one_index import tables_of_one_index
from optdnn.passes.support.facts import producer, reshaped, shape_of
from optdnn.passes.support.tables import LEAST, MOST_BYTES, column_of, columns_of, rows_of_tables
from optdnn.types import Array, normalize_axis


@dataclass(frozen=True)
class _Embedding:
    """The rows of ``table`` at the indices in column ``column`` of ``source``, cast to integers."""

    source: Value
    column: int
    table: Array

    @property
    def form(self) -> tuple[object, ...]:
        """Embeddings of the same form can be joined."""
        return self.source, self.table.shape[1], self.table.dtype


@rule("joined_tables", {"Concat"})
def joined_tables(graph: Graph, op: Op) -> Match | Miss | None:
    """A Concat of embeddings: each part is rows of its own table, selected by one column of the same tensor."""
    found = [_embedding(graph, op, v) for v in op.inputs]
    start, end = longest_run([None if e is None else e.form for e in found])
    run = [e for e in found[start:end] if e is not None]
    shape = op.outputs[0].type.shape
    if len(run) < LEAST or shape is None:
        return None
    if sum(e.table.nbytes for e in run) > MOST_BYTES:
        return Miss("its tables are too large to be joined")
    axis = normalize_axis(op.attrs.axis, len(shape))
    size = len(run) * (1 if axis < len(shape) - 1 else run[0].table.shape[1])
    part = tuple(0 if i == 0 else size if i == axis else int(d) for i, d in enumerate(shape))  # type: ignore[arg-type]

    def build(patch: Patch) -> Value:
        return with_joined(patch, op, (start, end), reshaped(patch, _gathered(patch, run), part), axis)

    return Match((op,), build)


def _gathered(patch: Patch, run: Sequence[_Embedding]) -> Value:
    """The rows of all K embeddings, (B, K, width). Negative indices count from the end of their own table."""
    return rows_of_tables(patch, columns_of(patch, run[0].source, [e.column for e in run]), [e.table for e in run])


def _embedding(graph: Graph, op: Op, value: Value | None) -> _Embedding | None:
    """The embedding in a part of a Concat, of shape (B, width) or (B, 1, width); None for other parts."""
    part, gather = shape_of(graph, value), producer(graph, value, {"Gather"})
    while gather is None and (view := producer(graph, value, {"Reshape", "Unsqueeze"})) is not None:
        value = view.inputs[0]
        gather = producer(graph, value, {"Gather"})
    table = None if gather is None else graph.constant_value(gather.input(0))
    if gather is None or table is None or table.ndim != 2 or normalize_axis(gather.attrs.axis, 2):
        return None
    column = column_of(graph, gather.input(1))
    if column is None or takes_all_tables(graph, gather):
        return None
    source, number = column
    batch, shape = shape_of(graph, source), op.outputs[0].type.shape
    if batch is None or part is None or shape is None or shape[0] != batch[0] or len(shape) < 2:
        return None
    ones = all(d == 1 for i, d in enumerate(part[1:-1], start=1))
    axis = normalize_axis(op.attrs.axis, len(shape))
    joins = axis == len(shape) - 1 or (axis == 1 and len(shape) == 3)
    return _Embedding(source, number, table) if ones and joins and part[-1] == table.shape[1] else None


class JoinedTables(RulePass):
    name = "joined_tables"
    rules = (joined_tables, joined_bags, concat_of_split, tables_of_columns, tables_of_one_index)
    sinks_first = True  # Concats of rows before their Gathers
