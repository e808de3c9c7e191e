"""Keys and values whose heads an exporter repeats for groups of queries: the heads before the repetition."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.support.facts import HEADS_FIRST
from optdnn.passes.support.views import Move, View, trace
from optdnn.types import Shape, normalize_axis


def unrepeated(graph: Graph, view: View) -> View | None:
    """The view (B, G, S, D) that a view (B, H, S, D) repeats, each head H / G times in a row; None without such a repetition.

    Heads are repeated in (B, G, S, D), or, as Keras and JAX do it, in (B, S, G, D)."""
    op = graph.op(view.base)
    source = op.inputs[0] if op.inputs else None
    before, wide = (None if source is None else graph.type(source).shape), view.before
    if source is None or before is None or len(wide) != 5 or len(before) != 5:
        return None
    batch, heads, steps, features = view.shape
    first = [Move((batch, heads, steps, features))]
    last = [Move((batch, steps, heads, features)), Move(view.shape, HEADS_FIRST)]
    at = next((at for at, moves in ((2, first), (3, last)) if _order(view.moves) == _order(moves)), None)
    if at is None or before != (*wide[:at], 1, *wide[at + 1 :]) or wide[at - 1] * wide[at] != heads:
        return None
    if (wide[0], wide[3 if at == 2 else 1], wide[4]) != (batch, steps, features):
        return None
    copies = op.kind == "Concat" and isinstance(op.attrs, ConcatAttrs) and len(set(op.inputs)) == 1
    if op.kind != "Expand" and not (copies and normalize_axis(op.attrs.axis, 5) == at):
        return None
    inner = trace(graph, source)
    if inner is None:
        return None
    alone = inner.reshape((*before[:at], *before[at + 1 :]))
    return alone if at == 2 else alone.transpose(HEADS_FIRST)


def _order(moves: Sequence[Move]) -> list[tuple[Shape, tuple[int, ...]]]:
    """The moves without axes of size 1, which may stand anywhere: each one's shape, and its order of the axes before it."""
    found = []
    for move in moves:
        order = move.perm or tuple(range(len(move.shape)))
        kept = [p for p, n in zip(order, move.shape, strict=True) if n != 1]
        found.append((tuple(n for n in move.shape if n != 1), tuple(sorted(kept).index(p) for p in kept)))
    return found
