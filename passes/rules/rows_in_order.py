"""Rows that are written, in order, to the places that a mask selects: each place reads the row of its number among these places.

Models of pictures and text put the features of pictures in place of the embeddings of picture tokens: ``y[mask] = features``, or
``masked_scatter`` (LLaVA: Liu et al., 2023; Qwen2-VL: Wang et al., 2024). Their mask has as many places as there are features, but
exporters write its places as a list whose length depends on data. The rewrite does not notice more places than rows, an error of
ONNX: further places get the last row.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import CumulativeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.mask_positions import uncut, unrepeated
from optdnn.passes.support.facts import operand, reshaped
from optdnn.passes.support.rows import coordinates_of
from optdnn.types import BOOL, INT64, product


@rule("rows_in_order", {"ScatterND"})
def rows_in_order(graph: Graph, op: Op) -> Match | Miss | None:
    """``y[NonZero(mask)] = rows``; the rows may be cut to the number of places."""
    base, updates = operand(op), operand(op, 2)
    chooser = coordinates_of(graph, operand(op, 1)) if graph.type(operand(op, 1)).rank == 2 else None
    if chooser is None or op.attrs.reduction != "none":
        return None
    source, mask = uncut(graph, updates), unrepeated(graph, operand(chooser))
    if not graph.type(source).is_static:
        return None
    if not graph.type(base).is_static:
        return Miss("its sizes are not known")
    dims, lead = graph.type(base).static_shape, graph.type(mask).dims
    rest = dims[len(lead) :]
    size, count = product(rest), product(graph.type(source).static_shape)
    if dims[: len(lead)] != lead or not isinstance(size, int) or not size or not isinstance(count, int) or not count:
        return None
    if count % size:
        return Miss("the elements of its source are no whole rows")
    return Match((op, chooser), lambda patch: _selected(patch, base, mask, source, (count // size, *rest)))


def _selected(patch: Patch, base: Value, mask: Value, source: Value, rows: tuple[int, ...]) -> Value:
    """Add ``Where(mask, rows[number of the place], base)``."""
    dims = patch.type(base).static_shape
    lead = dims[: len(dims) - len(rows) + 1]
    chosen = mask if patch.type(mask).dtype == BOOL else patch.add("Cast", [mask], CastAttrs(BOOL))
    ones = patch.add("Cast", [reshaped(patch, chosen, (-1,))], CastAttrs(INT64))
    before = patch.add("CumSum", [ones, _number(patch, 0)], CumulativeAttrs(exclusive=True))
    place = patch.add("Min", [before, _number(patch, rows[0] - 1)])
    taken = patch.add("Gather", [reshaped(patch, source, rows), place], GatherAttrs(0))
    over = reshaped(patch, chosen, (*lead, *[1] * (len(rows) - 1)))
    return patch.add("Where", [over, reshaped(patch, taken, dims), base])


def _number(patch: Patch, number: int) -> Value:
    return patch.constant(np.array(number, np.int64), "number")
