"""Gathers of rows from several tables by the same indices become one Gather: the tables are concatenated along their columns.

Factorization machines (Rendle, 2010) look up each feature twice, for its weight and for its factors. Other networks have tables of
features, biases and scales.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.transpose import is_after_anchor
from optdnn.passes.support.facts import RESHAPES, is_pointwise, operand, split_along
from optdnn.passes.support.tables import MOST_BYTES, gathered_table

ALIGNED = 8
"""Kernels read a part as vectors if its first column is a multiple of this. The number of all columns is padded to a multiple."""
SHARED_BYTES = 1 << 20
"""Largest table that other ops may also read: the engine then holds it twice."""


@rule("tables_of_one_index", {"Gather"})
def tables_of_one_index(graph: Graph, op: Op) -> Match | Miss | None:
    """All Gathers of rows of constant tables with the same number of rows, the same dtype and the same computed indices."""
    index, table = operand(op, 1), gathered_table(graph, op)
    if table is None or graph.constant_value(index) is not None:
        return None
    alike = [
        user
        for user in graph.users(index)
        if (t := gathered_table(graph, user)) is not None and (len(t), t.dtype) == (len(table), table.dtype)
    ]
    joined = [user for user in alike if not _is_taken_in(graph, user)]
    members = list({user.inputs[0]: user for user in joined}.values())
    if len(members) < 2:
        return (
            Miss("pointwise operators take the rows from the tables")
            if len(joined) < len(alike) and len(alike) > 1
            else None
        )
    if op not in joined:
        return None
    if any(_feeds_rotary(graph, one) for one in members):
        return Miss("the rows are angles of rotary embeddings")
    tables = {one.id: t for one in members if (t := gathered_table(graph, one)) is not None}
    if sum(t.nbytes for t in tables.values()) > MOST_BYTES:
        return Miss(f"the tables are too large to be joined: over {MOST_BYTES >> 30} GiB")
    for one in members:
        if graph.use_count(operand(one)) > 1 and tables[one.id].nbytes > SHARED_BYTES:
            return Miss(f"other operators also read the table of {one.name}, so it would be stored twice")
    members.sort(key=lambda one: tables[one.id].shape[1] % ALIGNED != 0)
    widths = [tables[one.id].shape[1] for one in members]
    spare = -sum(widths) % ALIGNED

    def build(patch: Patch) -> None:
        columns = [tables[one.id] for one in members]
        rest = [np.zeros((len(table), spare), table.dtype)] if spare else []
        joined = patch.constant(np.concatenate([*columns, *rest], 1), "tables")
        rows = patch.add("Gather", [joined, index], GatherAttrs(0))
        sizes = [*widths, *([spare] if spare else [])]
        patch.replace_each(
            (one.value for one in members), split_along(patch, rows, len(patch.type(rows).dims) - 1, sizes)
        )

    return Match(tuple(members), build)


def _is_taken_in(graph: Graph, op: Op) -> bool:
    """Whether a pointwise operator alone reads the rows, perhaps after views, and no product takes that operator in."""
    user = graph.sole_user(op.value)
    while user is not None and user.kind in RESHAPES:
        user = graph.sole_user(user.value)
    if user is None or not is_pointwise(user):
        return False
    return not any(v is not None and is_after_anchor(graph, replace(user, inputs=(v,))) for v in user.inputs)


def _feeds_rotary(graph: Graph, op: Op) -> bool:
    """Whether a RotaryEmbedding reads the rows, directly or after views: its kernels expect cosines and sines as they are."""
    values = [op.value]
    for value in values:
        for user in graph.users(value):
            if user.kind == "RotaryEmbedding":
                return True
            if user.kind in RESHAPES | {"Transpose"}:
                values.append(user.value)
    return False
