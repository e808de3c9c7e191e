"""Operators on the rows that a mask selects compute all rows; the mask selects among their results.

Detectors assign each region of interest to a level of the feature pyramid by its size: for each level, ``i = NonZero(mask)`` and
``y[i] = f(x[i])``. The size of ``i`` depends on data, so no kernel can be planned for ``f``. If ``f`` is row-wise,
``Where(mask, f(Where(mask, x, 0)), y)`` is equal, and has the sizes of ``x``.

Further rules of this pass:

- ``passes/rules/mask_positions.py``: the sum of a mask is the number of its positions (PyTorch's ``y[mask] = f(x[mask])``).
- ``passes/rules/class_loops.py``: a loop over classes that selects the best boxes of each class (SSD) becomes one selection.
- ``passes/rules/best_rows.py``: the best of the scores above a threshold (RetinaNet) become the best of all scores.
- ``passes/rules/best_selected.py``: the best of the boxes that suppressions keep.
- ``passes/rules/nested_selections.py``: detectors select boxes by their size, then by their scores.
- ``passes/rules/masked_boxes.py``: detectors suppress boxes that a mask selects.
- ``passes/rules/taken_last.py``: arithmetic on the boxes that a suppression keeps is done for all boxes.
- ``passes/rules/first_places.py``: the first rows that a mask selects.
- ``passes/rules/first_rows.py``: rows that are filled up to a known number.
- ``passes/rules/masked_sums.py``: graph networks sum over the edges that are not self-loops.
- ``passes/rules/masked_writes.py``: graph networks write the weights of self-loops.
- ``passes/rules/rows_in_order.py``: features of pictures take the places of picture tokens.
- ``passes/rules/expert_rows.py``: mixtures of experts split rows by the number of rows of each expert.
- ``passes/rules/bounded_keys.py``: attention to the tokens that a mask selects (Mochi) has a mask for all tokens.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.dim import Dim, DimLike, bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.best_rows import best_rows
from optdnn.passes.rules.best_selected import best_selected
from optdnn.passes.rules.bounded_keys import bounded_keys
from optdnn.passes.rules.class_loops import best_of_classes
from optdnn.passes.rules.expert_rows import expert_rows
from optdnn.passes.rules.first_places import first_places
from optdnn.passes.rules.first_rows import first_rows_count, first_rows_filled
from optdnn.passes.rules.mask_positions import expand_to_positions, positions_count, uncut, unrepeated
from optdnn.passes.rules.masked_boxes import best_boxes, masked_boxes
from optdnn.passes.rules.masked_sums import masked_sums
from optdnn.passes.rules.masked_writes import masked_writes
from optdnn.passes.rules.nested_selections import nested_selections
from optdnn.passes.rules.rows_in_order import rows_in_order
from optdnn.passes.rules.taken_last import taken_last
from optdnn.passes.support.facts import in_shape, operand
from optdnn.passes.support.rows import SHAPED, RowOp, by_number, chosen_by, coordinates_of, copy_of, row_op, zero
from optdnn.types import BOOL, Shape, normalize_axis, product

MOST_ELEMENTS = 1 << 28
"""Most elements of a result of ``f`` for all rows."""


@rule("masked_rows", {"ScatterElements", "ScatterND"})
def masked_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """``y[NonZero(mask)] = f(x[NonZero(mask)])``, or a constant; the mask may have several axes."""
    base, updates = operand(op), operand(op, 2)
    chooser = _rows_written(graph, op)
    if chooser is None or op.attrs.reduction != "none":
        return None
    if op.kind == "ScatterND":
        updates, chooser = uncut(graph, updates), _chooser(graph, chooser)
    mask, count = operand(chooser), chooser.outputs[0].type.dims[1]
    axes, before = graph.type(mask).dims, graph.type(base).dims
    rows = product(axes)
    if before[: len(axes)] != axes or not isinstance(count, Dim) or (len(axes) > 1 and not isinstance(rows, int)):
        return None
    found = _computed(graph, updates, chooser, rows, count)
    if isinstance(found, Miss):
        return found
    copied, gathers = found
    most = bounds(rows)[1]
    if any(_elements(r.op.outputs[0].type.dims, most) > MOST_ELEMENTS for r in copied):
        return Miss("results for all rows would be too large")

    def build(patch: Patch) -> Value:
        chosen = mask if graph.type(mask).dtype == BOOL else patch.add("Cast", [mask], CastAttrs(BOOL))
        new: dict[Value, Value] = {}
        for gather in gathers:
            x = operand(gather)
            some = patch.add("Where", [_over(patch, chosen, x), x, zero(patch, graph.type(x).dtype)])
            flat = len(axes) > 1 and not all(r.op.pointwise for r in copied)
            new[gather.value] = in_shape(patch, some, (rows, *graph.type(x).dims[len(axes) :])) if flat else some
        for r in copied:
            made = copy_of(patch, r, new, rows if isinstance(rows, int) else None)
            new.update({Value(r.op.id, i): Value(made.id, i) for i in range(len(made.outputs))})
        if not copied and not gathers:
            return patch.add("Where", [_over(patch, chosen, base), updates, base])
        all_rows = new[updates] if patch.type(new[updates]).dims == before else in_shape(patch, new[updates], before)
        return patch.add("Where", [_over(patch, chosen, base), all_rows, _scalar(patch, base)])

    return Match((op, *(r.op for r in copied), *gathers, chooser), build)


def _rows_written(graph: Graph, op: Op) -> Op | None:
    """The NonZero of the mask whose rows a scatter writes, each row once and as a whole; None for other scatters."""
    indices, base, updates = operand(op, 1), graph.type(operand(op)), graph.type(operand(op, 2))
    if not base.shape or not updates.shape or graph.type(indices).shape is None:
        return None
    if op.kind == "ScatterND":
        return coordinates_of(graph, indices) if len(graph.type(indices).dims) == 2 else None
    if base.shape[1:] != updates.shape[1:]:
        return None
    if normalize_axis(op.attrs.axis, len(base.shape)) != 0 or graph.type(indices).shape != updates.shape:
        return None
    expand = graph.op(indices)
    if expand.kind == "Expand":
        indices = operand(expand)
    if len(graph.type(indices).dims) != len(updates.shape):
        return None  # the Expand adds leading axes
    dims = graph.type(indices).dims
    return chosen_by(graph, indices) if dims[0] == updates.shape[0] and all(d == 1 for d in dims[1:]) else None


def _chooser(graph: Graph, chooser: Op) -> Op:
    """The NonZero of the mask that ``chooser`` reads repeated along its last axes, if there is one; else ``chooser``."""
    mask = unrepeated(graph, operand(chooser))
    return next((u for u in graph.users(mask) if u.kind == "NonZero"), chooser)


def _computed(
    graph: Graph, result: Value, chooser: Op, rows: DimLike, count: Dim
) -> tuple[list[RowOp], list[Op]] | Miss:
    """The operators from the rows that ``chooser`` selects to ``result``, in order, and the Gathers of these rows.

    There are none if ``result`` is one row for all.
    """
    shape = graph.type(result).dims
    if all(isinstance(d, int) for d in shape) and (shape[:1] == (1,) or not shape):
        return [], []
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
        if found is None or by_number(found) or (op.kind in SHAPED and not isinstance(rows, int)):
            return Miss(f"{op.name} ({op.kind}) does not compute each row from a row that the mask selected")
        inside[op.id] = found
        left += [graph.op(operand(op, i)) for i, r in enumerate(found.operand_rows) if r is not None]
    return [inside[op.id] for op in graph.order() if op.id in inside], [gathers[i] for i in sorted(gathers)]


def _gathers(graph: Graph, op: Op, chooser: Op, rows: DimLike) -> bool:
    """Whether an operator gathers exactly the rows that ``chooser`` selects."""
    if op.kind == "GatherND" and not op.attrs.batch_dims and len(graph.type(operand(op, 1)).dims) == 2:
        found, dims = coordinates_of(graph, operand(op, 1)), graph.type(operand(chooser)).dims
        return found is not None and found.id == chooser.id and graph.type(operand(op)).dims[: len(dims)] == dims
    if op.kind != "Gather" or len(graph.type(operand(op, 1)).dims) != 1 or op.attrs.axis != 0:
        return False
    found = chosen_by(graph, operand(op, 1))
    return found is not None and found.id == chooser.id and graph.type(operand(op)).dims[0] == rows


def _over(patch: Patch, mask: Value, x: Value) -> Value:
    """The mask with the rank of ``x``: axes of size 1 follow its own."""
    dims = patch.type(mask).dims
    more = len(patch.type(x).dims) - len(dims)
    if more == 0:
        return mask
    return in_shape(patch, mask, (*dims, *[1] * more))


def _scalar(patch: Patch, value: Value) -> Value:
    """The scalar that fills a ConstantOfShape or a constant; any other value unchanged."""
    op, known = patch.graph.op(value), patch.graph.constant_value(value)
    if op.kind == "ConstantOfShape":
        return patch.constant(np.array(op.attrs.value, op.attrs.dtype), "filler")
    if known is None or not known.size or (known != known.flat[0]).any():
        return value
    return patch.constant(known.reshape(-1)[0], "filler")


def _elements(dims: Shape, rows: int) -> int:
    return rows * math.prod(d for d in dims if isinstance(d, int))


class MaskedRows(RulePass):
    name = "masked_rows"
    rules = (
        positions_count,
        expand_to_positions,
        best_of_classes,
        best_rows,
        best_selected,
        masked_rows,
        rows_in_order,
        nested_selections,
        best_boxes,
        masked_boxes,
        first_places,
        first_rows_count,
        first_rows_filled,
        taken_last,
        masked_sums,
        masked_writes,
        expert_rows,
        bounded_keys,
    )
