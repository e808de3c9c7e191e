"""A selection among selected rows is one selection among all rows: ``x[NonZero(m)][NonZero(p(x[NonZero(m)]))]``.

Detectors remove small boxes, then boxes with low scores. If the second mask computes each of its elements from the same row, the
rows that remain are those of the mask ``m and p(x)``. PyTorch's exporters select by Gather, GatherND, or lists of positions.
"""

from __future__ import annotations

from optdnn.dim import Dim
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, operand, reshaped
from optdnn.passes.support.rows import chosen_by
from optdnn.passes.support.selected_rows import SelectedRows, count_of
from optdnn.types import BOOL, normalize_axis


@rule("nested_selections", {"NonZero"})
def nested_selections(graph: Graph, op: Op) -> Match | Miss | None:
    """The positions of a mask of selected rows, which only select among rows of the same selection."""
    mask = operand(op)
    if count_of(graph, mask) is None or len(graph.type(mask).dims) != 1:
        return None
    ends = _selections(graph, op)
    if isinstance(ends, Miss):
        return ends
    values = [mask, *(operand(end) for end in ends)]
    found = SelectedRows(graph, axes=1)
    reason = found.collect(values)
    if reason is not None:
        return Miss(reason) if found.leaves else None
    if any(graph.type(operand(end)).dims[_axis(graph, end)] != graph.type(mask).dims[0] for end in ends):
        return Miss("it selects among parts of the rows")

    def build(patch: Patch) -> None:
        new = found.copied(patch)
        inner = new[mask]
        if patch.type(inner).dtype != BOOL:
            inner = patch.add("Cast", [inner], CastAttrs(BOOL))
        both = patch.add("And", [found.mask(patch, mask), inner])
        chosen = patch.add("NonZero", [both], src=op.src)
        patch.replace(op.value, chosen)
        index = reshaped(patch, chosen, (-1,), src=op.src)
        for end in ends:
            if chosen_by(graph, operand(end)) is not None:  # positions among all rows
                dims = tuple(-1 if isinstance(d, Dim) else d for d in graph.type(end.value).dims)
                patch.replace(end.value, index if len(dims) == 1 else reshaped(patch, chosen, dims, src=op.src))
                continue
            attrs = GatherAttrs(_axis(graph, end))
            patch.replace(end.value, patch.add("Gather", [new[operand(end)], index], attrs, src=end.src))

    return Match((op, *ends, *found.ops), build)


def _selections(graph: Graph, op: Op) -> list[Op] | Miss:
    """The Gathers by the positions that a NonZero of one axis lists; a Miss if other operators read them."""
    ends: dict[int, Op] = {}
    left: list[tuple[Op, Value]] = [(user, op.value) for user in graph.users(op.value)]
    while left:
        user, value = left.pop()
        plain = len(graph.type(value).dims) == 1
        if user.kind in RESHAPES or (user.kind == "Transpose" and 1 in graph.type(value).dims):
            left += [(u, user.value) for u in graph.users(user.value)]
        elif _takes(graph, user, value, plain):
            ends[user.id] = user
        elif user.kind != "Shape":
            return Miss(f"{user.name} ({user.kind}) reads the positions of the rows")
    return [ends[i] for i in sorted(ends)]


def _takes(graph: Graph, user: Op, index: Value, plain: bool) -> bool:
    """Whether an operator gathers rows by these positions, in a vector (``plain``) or in a column."""
    if user.kind not in ("Gather", "GatherND") or operand(user, 1) != index or operand(user) == index:
        return False
    if user.kind == "Gather":
        return plain
    return not user.attrs.batch_dims and graph.type(index).dims[1:] == (1,)


def _axis(graph: Graph, end: Op) -> int:
    return 0 if end.kind == "GatherND" else normalize_axis(end.attrs.axis, len(graph.type(operand(end)).dims))
