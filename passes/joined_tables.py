"""Embeddings and bags of rows of several tables become one Gather from their concatenated tables (DeepFM: Guo et al., 2017)."""

from __future__ import annotations

from optdnn.passes.base import RulePass
from optdnn.passes.rules.concats import concat_of_split
from optdnn.passes.rules.joined_bags import joined_bags
from optdnn.passes.rules.tables_of_columns import tables_of_columns
from optdnn.passes.rules.tables_of_one_index import tables_of_one_index


class JoinedTables(RulePass):
    name = "joined_tables"
    rules = (joined_bags, concat_of_split, tables_of_columns, tables_of_one_index)
    sinks_first = True  # Concats of rows before their Gathers
