"""The best boxes of each class, which PyTorch's SSD selects in a loop over its classes (``_postprocess_detections``).

For each class ``c`` the loop computes ``i = NonZero(scores[:, c] > t)`` and the ``min(K, len(i))`` largest of these scores. It
gathers their boxes, and adds a label ``c`` for each box. Then it concatenates all classes. Ninety classes are over a thousand
operators with sizes that depend on data. The scores above ``t`` among the K largest scores of a whole column are the same numbers.
So one TopK of all columns and one selection at the end replace the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.dim import bounds, dim_min
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.sort import TopKAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, operand, producer, reshaped, scalar
from optdnn.passes.support.rows import chosen_by
from optdnn.types import normalize_axis

GATHERS = frozenset({"Gather", "GatherND"})


@dataclass(frozen=True)
class Best:
    """The ``count`` largest scores above ``least`` in a column of ``scores`` (boxes, classes)."""

    top: Op
    chooser: Op
    scores: Value
    least: Value
    column: int
    count: int


@rule("best_of_classes", {"Concat"})
def best_of_classes(graph: Graph, op: Op) -> Match | Miss | None:
    """The Concat of the best scores of all classes, and the Concats of their boxes and labels in the same order."""
    tops = [producer(graph, v, {"TopK"}) for v in op.inputs]
    if len(tops) < 2 or not all(
        t is not None and v is not None and v.port == 0 for t, v in zip(tops, op.inputs, strict=True)
    ):
        return None
    classes = [_best(graph, top) for top in tops if top is not None]
    found = [c for c in classes if c is not None]
    if len(found) < len(classes):
        return None
    first = found[0]
    if any((c.scores, c.count) != (first.scores, first.count) for c in found):
        return Miss("the classes do not select equally many scores from columns of one matrix")
    levels = {scalar(graph, c.least) for c in found}
    if len(levels) != 1 or None in levels:
        return Miss("the classes have no common constant threshold")
    rows = {c.id: (c, _boxes(graph, c, found)) for top in found for c in _concats_after(graph, Value(top.top.id, 1))}
    boxes = [(c, source) for c, source in rows.values() if source is not None]
    numbered = {c.id: (c, _labels(graph, c, found)) for c in _concats_after(graph, first.top.value)}
    labels = [(c, own) for c, own in numbered.values() if own is not None]

    def build(patch: Patch) -> None:
        indices, values = _best_of_all(patch, found)
        above = patch.add("NonZero", [patch.add("Greater", [values, first.least])])
        chosen = reshaped(patch, above, (-1,))
        patch.replace(op.value, _rows(patch, values, chosen))
        for end, source in boxes:
            patch.replace(end.value, _rows(patch, _rows(patch, source, indices), chosen))
        for end, own in labels:
            repeated = np.repeat(np.asarray(own), first.count).astype(end.outputs[0].type.dtype)
            patch.replace(end.value, _rows(patch, patch.constant(repeated, "classes"), chosen))

    return Match((op, *(c for c, _ in (*boxes, *labels)), *(c.top for c in found)), build)


def _best(graph: Graph, top: Op) -> Best | None:
    """A TopK on the scores of one column above a threshold; None unless it takes all of them, up to a fixed number."""
    gather, dims = producer(graph, operand(top), GATHERS), top.outputs[0].type.dims
    if gather is None or len(dims) != 1 or not top.attrs.largest:
        return None
    chooser, x = chosen_by(graph, operand(gather, 1)), operand(gather)
    compared = None if chooser is None else producer(graph, operand(chooser), {"Greater"})
    column = producer(graph, x, {"Gather"})
    if chooser is None or compared is None or operand(compared) != x or column is None:
        return None
    number, scores = graph.constant_value(operand(column, 1)), graph.type(operand(column))
    count, rows = bounds(dims[0])[1], chooser.outputs[0].type.dims[1]
    if number is None or number.ndim or scores.rank != 2 or normalize_axis(column.attrs.axis, 2) != 1:
        return None
    if not isinstance(scores.dims[0], int) or dims[0] != dim_min(count, rows) or count > scores.dims[0]:
        return None
    return Best(top, chooser, operand(column), operand(compared, 1), int(number), count)


def _concats_after(graph: Graph, value: Value) -> list[Op]:
    """The Concats that read the results of one or two operators after ``value``."""
    users = [u for user in graph.users(value) for u in (user, *graph.users(user.value))]
    return [end for u in users if len(u.outputs) == 1 for end in graph.users(u.value) if end.kind == "Concat"]


def _parts(op: Op, classes: Sequence[Best]) -> list[Value]:
    """The operands of a Concat along axis 0 with one operand per class; empty for other Concats."""
    parts = [v for v in op.inputs if v is not None]
    rank = op.outputs[0].type.rank
    rows = rank is not None and normalize_axis(op.attrs.axis, rank) == 0
    return parts if rows and len(parts) == len(classes) else []


def _boxes(graph: Graph, op: Op, classes: Sequence[Best]) -> Value | None:
    """The tensor whose rows a Concat joins: each operand has the rows of the best scores of one class. None for other Concats."""
    sources = set[Value]()
    for part, best in zip(_parts(op, classes), classes, strict=False):
        taken = producer(graph, part, {"Gather"})
        rows = None if taken is None else producer(graph, operand(taken), GATHERS)
        if taken is None or rows is None or taken.attrs.axis != 0 or operand(taken, 1) != Value(best.top.id, 1):
            return None
        if chosen_by(graph, operand(rows, 1)) != best.chooser or (rows.kind == "Gather" and rows.attrs.axis != 0):
            return None
        sources.add(operand(rows))
    return sources.pop() if len(sources) == 1 else None


def _labels(graph: Graph, op: Op, classes: Sequence[Best]) -> list[float] | None:
    """The label of each class, if each operand of the Concat repeats it once per best score; else None."""
    found = list[float]()
    for part, best in zip(_parts(op, classes), classes, strict=False):
        filled = producer(graph, part, {"ConstantOfShape"})
        shape = None if filled is None else producer(graph, operand(filled), {"Shape"})
        if filled is None or shape is None or operand(shape) != best.top.value:
            return None
        found.append(filled.attrs.value)
    return found or None


def _best_of_all(patch: Patch, classes: Sequence[Best]) -> tuple[Value, Value]:
    """Add one TopK: row indices and values of the best scores of each class, in the order of the classes."""
    first = classes[0]
    columns = integers(patch, [c.column for c in classes], "columns")
    scores = patch.add("Gather", [first.scores, columns], GatherAttrs(axis=1))
    top = patch.add_op("TopK", [scores, integers(patch, [first.count], "count")], TopKAttrs(axis=0), outputs=2)
    values, indices = (
        reshaped(patch, patch.add("Transpose", [Value(top.id, port)], TransposeAttrs((1, 0))), (-1,)) for port in (0, 1)
    )
    return indices, values


def _rows(patch: Patch, x: Value, chosen: Value) -> Value:
    return patch.add("Gather", [x, chosen], GatherAttrs(axis=0))
