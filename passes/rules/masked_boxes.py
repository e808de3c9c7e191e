"""Suppressions among boxes that a mask selects are suppressions among all boxes; the best boxes are suppressed with a limit.

Detectors with a suppression in the graph first select boxes: those whose scores exceed a threshold (YOLO), those that are large
enough (R-CNN), and the best ones of each level of a feature pyramid (RetinaNet). NonMaxSuppression has a threshold itself. With it,
the suppression reads all boxes, and returns indices into all boxes. The scores of other boxes are below the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, scalar, slice_limits, sliced
from optdnn.passes.support.lower_bounds import has_lower_bound, level_of
from optdnn.passes.support.paths import value_before
from optdnn.passes.support.rows import chosen_by
from optdnn.passes.support.selected_rows import SelectedRows, count_of


@rule("masked_boxes", {"NonMaxSuppression"})
def masked_boxes(graph: Graph, op: Op) -> Match | Miss | None:
    """A suppression of selected boxes, and Gathers of rows by its results."""
    boxes, scores = operand(op), operand(op, 1)
    count = count_of(graph, scores)
    if count is None or graph.type(scores).dims[2] != count or graph.type(boxes).dims[1] != count:
        return None
    found = SelectedRows(graph)
    reason = found.collect([boxes, scores])
    if reason is not None:
        return Miss(reason) if found.leaves else None
    ends = _picked(graph, op)
    if isinstance(ends, Miss):
        return ends
    read = [operand(end) for end, _ in ends]
    if any(graph.type(v).dims[0] != count or count_of(graph, v) is None for v in read):
        return Miss("its indices also take rows of other tensors")
    found = SelectedRows(graph)
    reason = found.collect([boxes, scores, *read])
    if reason is not None:
        return Miss(reason)
    threshold = _threshold(graph, op)
    if threshold is None and op.input(4) is not None and scalar(graph, op.input(4)) is None:
        return Miss("its threshold is no constant")
    if threshold is None and op.input(4) is None and not _finite_scores(graph, op):
        return Miss("a selected score may be minus infinity, which no threshold tells from the scores of other boxes")

    def build(patch: Patch) -> None:
        new, dtype = found.copied(patch), graph.type(scores).dtype
        given = new[scores]
        if threshold is None:
            own = scalar(graph, op.input(4))
            filler = patch.constant(np.array(-np.inf if own is None else own, dtype), "below")
            given = patch.add("Where", [found.mask(patch, scores), given, filler])
            least = patch.constant(np.array([-np.inf if own is None else own], dtype), "least")
        else:
            least = patch.constant(np.array([threshold], dtype), "least")
        suppressed = patch.add("NonMaxSuppression", [new[boxes], given, op.input(2), op.input(3), least], op.attrs)
        patch.replace(op.value, suppressed)
        box = patch.constant(np.array(2, np.int64), "box")
        numbers = patch.add("Gather", [suppressed, box], GatherAttrs(1))
        for end, whole in ends:
            index = numbers if whole and len(graph.type(operand(end, 1)).dims) == 1 else operand(end, 1)
            patch.replace(end.value, patch.add("Gather", [new[operand(end)], index], end.attrs, src=end.src))

    return Match((op, *found.ops, *(end for end, _ in ends)), build)


@rule("best_boxes", {"NonMaxSuppression"})
def best_boxes(graph: Graph, op: Op) -> Match | None:
    """A suppression of one class of one image, from whose results only the first ones are read: it finds no others."""
    limit = ints(graph, op.input(2))
    if limit is None or graph.type(operand(op, 1)).dims[:2] != (1, 1):
        return None
    cuts = _cuts(graph, op)
    most = max((end for _, end, _ in cuts), default=0)
    if not 0 < most < limit[0]:
        return None

    def build(patch: Patch) -> None:
        number = integers(patch, [most], "most")
        best = patch.add("NonMaxSuppression", [*op.inputs[:2], number, *op.inputs[3:]], op.attrs)
        patch.replace(op.value, best)
        for cut, end, views in cuts:
            x = best
            for view in views:
                x = patch.add(view.kind, [x, *view.inputs[1:]], view.attrs, src=view.src)
            patch.replace(cut.value, x if end == most else sliced(patch, x, 0, end, 0))

    return Match((op, *(cut for cut, _, _ in cuts)), build)


def _cuts(graph: Graph, op: Op) -> list[tuple[Op, int, list[Op]]]:
    """The Slices that take the first rows of a suppression's result: their number, and the views that choose a column before it.

    There are none if other operators read the result."""
    found: list[tuple[Op, int, list[Op]]] = []
    left: list[tuple[Op, list[Op]]] = [(user, []) for user in graph.users(op.value)]
    while left:
        user, views = left.pop()
        end = _first(graph, user)
        if end is not None:
            found.append((user, end, views))
        elif _column_of(graph, user) is not None or (user.kind in RESHAPES and _is_vector(graph, user)):
            left += [(u, [*views, user]) for u in graph.users(user.value)]
        else:
            return []
    return found


def _first(graph: Graph, op: Op) -> int | None:
    """The number of first rows that a Slice takes; None for another operator."""
    limits = slice_limits(graph, op) if op.kind == "Slice" else None
    end = limits[0][2] if limits is not None and len(limits) == 1 else 0
    return end if end > 0 and limits == [(0, 0, end, 1)] else None


def _is_vector(graph: Graph, op: Op) -> bool:
    """Whether an operator makes a vector of a matrix of one column."""
    return graph.type(operand(op)).dims[1:] == (1,) and len(op.outputs[0].type.dims) == 1


def _threshold(graph: Graph, op: Op) -> float | None:
    """The threshold of a suppression of all boxes, if boxes are selected by ``scores > t`` alone; else None."""
    found = _compared(graph, op)
    if found is None:
        return None
    mask, scores = found
    compared = graph.op(mask)
    levels = [level_of(graph, mask, scores) if compared.kind in ("Greater", "Less") else None]
    levels += [scalar(graph, op.input(4))] if op.input(4) is not None else []
    return None if None in levels else max(level for level in levels if level is not None)


def _compared(graph: Graph, op: Op) -> tuple[Value, Value] | None:
    """The mask of one NonZero that selects a suppression's scores, and the scores of all boxes; None for other selections."""
    gather = graph.op(value_before(graph, operand(op, 1), RESHAPES))
    chooser = chosen_by(graph, operand(gather, 1)) if gather.kind in ("Gather", "GatherND") else None
    return None if chooser is None else (operand(chooser), operand(gather))


def _finite_scores(graph: Graph, op: Op) -> bool:
    """Whether no selected score is minus infinity (NaN aside)."""
    found = _compared(graph, op)
    return (found is not None and level_of(graph, *found) is not None) or has_lower_bound(graph, operand(op, 1))


@dataclass(frozen=True)
class _Indices:
    """A suppression's result (…, 3), or a part of it. ``boxes``: only the column of box indices. ``whole``: all rows, in order."""

    value: Value
    boxes: bool = False
    whole: bool = True


def _picked(graph: Graph, op: Op) -> list[tuple[Op, bool]] | Miss:
    """The Gathers that take rows by the box indices in a suppression's result, and whether by all of them, in order.

    A Miss if other operators read these indices."""
    ends: dict[int, tuple[Op, bool]] = {}
    left = [(user, _Indices(op.value)) for user in graph.users(op.value)]
    while left:
        user, x = left.pop()
        data = user.kind != "Output" and operand(user) == x.value
        column = _column_of(graph, user) if data and not x.boxes else None
        if user.kind == "Gather" and user.attrs.axis == 0 and x.boxes and not data:
            ends[user.id] = (user, x.whole)
        elif data and user.kind == "Slice" and ints(graph, user.input(3)) == (0,):
            left += [(u, replace(x, value=user.value, whole=False)) for u in graph.users(user.value)]
        elif column == 2 or (data and x.boxes and (user.kind in RESHAPES or _is_column(graph, user, x.value))):
            left += [(u, replace(x, value=user.value, boxes=True)) for u in graph.users(user.value)]
        elif user.kind != "Shape" and column is None:
            return Miss(f"{user.name} ({user.kind}) reads the indices of the remaining boxes")
    return [ends[i] for i in sorted(ends)]


def _is_column(graph: Graph, op: Op, value: Value) -> bool:
    """Whether an operator takes the only column of a matrix."""
    return graph.type(value).dims[1:] == (1,) and _column_of(graph, op) == 0


def _column_of(graph: Graph, op: Op) -> int | None:
    """The column of a suppression's result (…, 3) that a Gather or Slice takes; None for other operators."""
    if op.kind == "Gather" and op.attrs.axis == 1:
        index = ints(graph, op.input(1))
        return index[0] % 3 if index is not None and len(index) == 1 else None
    if op.kind != "Slice" or ints(graph, op.input(3)) not in ((1,), (-1,)):
        return None
    start = ints(graph, op.input(1))
    return start[0] % 3 if start is not None and op.outputs[0].type.dims[1:] == (1,) else None
