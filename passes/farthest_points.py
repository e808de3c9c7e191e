"""Steps that choose points far from each other become one op (farthest point sampling: Qi et al., PointNet++, 2017).

Networks on point clouds choose hundreds of points, one after another: the distance of each point to the nearest chosen one is
updated, and the farthest point is the next one. Exporters unroll the loop: a step takes three to five launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.farthest import FarthestPointsAttrs, fits
from optdnn.ops.fused import plain_attrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, ints, operand, sizes_of, sliced
from optdnn.passes.support.items import equal
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array, normalize_axis, product

LEAST = 4
"""Fewest steps that become one op."""
_MOVES = frozenset({
    "Add", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
"""Operators between an index and the coordinates of its point. They move elements, and add the number of a cloud's first row."""
_MOST = 12
"""Most operators of one index."""


@dataclass(frozen=True)
class _Step:
    """``chosen = argmax(min(before, |points - points[found]|^2))``. ``found``: an index of each cloud, or constants."""

    points: Value
    before: Value
    found: Value | Array
    ops: tuple[Op, ...]


@rule("farthest_points", {"ArgMax"})
def farthest_points(graph: Graph, op: Op) -> Match | Miss | None:
    """The last of several choices, each of the point that is farthest from the points chosen before."""
    if len(graph.users(operand(op))) > 1:
        return None  # a step in the middle: the next one reads its distances
    steps: list[tuple[Op, _Step]] = []
    while (step := _step(graph, op)) is not None and (not steps or step.points == steps[0][1].points):
        steps.append((op, step))
        previous = graph.op(step.found) if isinstance(step.found, Value) else None
        if previous is None or previous.kind != "ArgMax" or operand(previous) != step.before:
            break
        inner = {o.id for o in (*step.ops, previous)}
        if {user.id for user in graph.users(step.before)} - inner:
            break
        op = previous
    if len(steps) < LEAST:
        return None
    points = steps[0][1].points
    clouds, count, size = sizes_of(graph, points) or (0, 0, 0)
    if not fits(count, size, graph.type(points).dtype):
        return Miss(f"a block of the kernel holds fewer points of {size} coordinates than {count}")
    steps.reverse()
    first = steps[0][1]

    def build(patch: Patch) -> None:
        start = first.found if isinstance(first.found, Value) else patch.constant(first.found, "first")
        start = in_shape(patch, start, (clouds,))
        whole = patch.add("FarthestPoints", [points, first.before, start], FarthestPointsAttrs(len(steps)))
        for k, (last, _) in enumerate(steps):
            shape = graph.type(last.value).static_shape
            patch.replace(last.value, in_shape(patch, sliced(patch, whole, k, k + 1, 1), shape))

    return Match(tuple(o for last, step in reversed(steps) for o in (last, *step.ops)), build)


def _step(graph: Graph, op: Op) -> _Step | None:
    """``op`` as the end of a step, or None."""
    shape = sizes_of(graph, operand(op))
    a = op.attrs
    if shape is None or len(shape) != 2 or a.select_last_index or normalize_axis(a.axis, 2) != 1:
        return None
    for distance, before, ops in _nearest(graph, graph.op(operand(op))):
        found = _distance(graph, graph.op(distance), shape)
        if found is not None and graph.type(before).shape == shape:
            points, center, inner = found
            index = _index(graph, center, points)
            if index is not None:
                return _Step(points, before, index, (*ops, *inner))
    return None


def _nearest(graph: Graph, op: Op) -> list[tuple[Value, Value, tuple[Op, ...]]]:
    """The two operands of a minimum, in either order, and its operators: a Min, or a selection by a comparison."""
    if op.kind == "Min" and len(op.inputs) == 2:
        a, b = operand(op), operand(op, 1)
        return [(a, b, (op,)), (b, a, (op,))]
    if op.kind != "Where":
        return []
    less, taken, before = graph.op(operand(op)), operand(op, 1), operand(op, 2)
    ops = [op, less]
    inner = graph.op(taken)
    if inner.kind == "Where" and operand(inner) == less.value:  # where masked rows are computed for all rows
        taken = operand(inner, 1)
        ops.append(inner)
    if less.kind not in ("Less", "Greater"):
        return []
    small, large = (operand(less, k) for k in ((0, 1) if less.kind == "Less" else (1, 0)))
    return [(taken, large, tuple(ops))] if small == taken and equal(graph, before, large) else []


def _distance(graph: Graph, op: Op, shape: tuple[int, ...]) -> tuple[Value, Value, tuple[Op, ...]] | None:
    """Points [B, N, D] and centers [B, 1, D] whose squared distances an op sums, and the operators."""
    if op.kind != "ReduceSum" or op.attrs.keepdims or ints(graph, op.input(1)) not in ((-1,), (2,)):
        return None
    square = graph.op(operand(op))
    way = graph.op(operand(square)) if square.kind == "Mul" and len(set(square.inputs)) == 1 else None
    if way is None or way.kind != "Sub":
        return None
    for x, center in ((operand(way), operand(way, 1)), (operand(way, 1), operand(way))):
        wide, one = sizes_of(graph, x), sizes_of(graph, center)
        if wide is not None and one == (wide[0], 1, wide[-1]) and wide[:2] == shape and len(wide) == 3 and shape[1] > 1:
            return x, center, (op, square, way)
    return None


def _index(graph: Graph, center: Value, points: Value) -> Value | Array | None:
    """The index of each cloud whose point ``center`` is, or None.

    The operators between them move elements and add constants to indices, so each coordinate's place is an index plus a constant:
    a few choices of indices show whether it is the place of the point."""
    clouds, count, size = sizes_of(graph, points) or (0, 0, 0)
    order: list[Op] = []
    sources = _sources(graph, center, points, order)
    if sources is None or len(sources) > 1:
        return None
    table = np.arange(clouds * count * size).reshape(clouds, count, size)
    if not sources:
        places = _run(graph, order, {points: table})
        if places is None:
            return None
        first: Array = places[:, 0, 0] // size % count
        return first if np.array_equal(places, table[np.arange(clouds), first][:, None]) else None
    (index,) = sources
    shape = sizes_of(graph, index)
    if shape is None or product(shape) != clouds:
        return None
    clouds_apart = (np.arange(clouds) % count, np.arange(clouds) // count % count)
    for rows in (np.zeros(clouds, np.int64), np.full(clouds, count - 1), *clouds_apart):
        places = _run(graph, order, {points: table, index: rows.reshape(shape).astype(graph.type(index).dtype)})
        if places is None or not np.array_equal(places, table[np.arange(clouds), rows][:, None]):
            return None
    return index


def _sources(graph: Graph, center: Value, points: Value, order: list[Op]) -> set[Value] | None:
    """The values besides ``points`` and constants from which ``center`` is made; None if by many operators. ``order``: these."""
    found: set[Value] = set()
    seen: set[int] = set()

    def visit(value: Value) -> bool:
        op = graph.op(value)
        if value == points or op.id in seen or graph.constant_value(value) is not None:
            return True
        if op.kind not in _MOVES:
            found.add(value)
            return True
        seen.add(op.id)
        fits = len(seen) <= _MOST and all(visit(v) for v in op.inputs if v is not None)
        order.append(op)
        return fits

    return found if visit(center) else None


def _run(graph: Graph, order: list[Op], known: dict[Value, Array]) -> Array | None:
    """The result of the last operator of ``order``; None if an index is out of range."""
    results = dict(known)
    for op in order:
        operands = [None if v is None else results.get(v, graph.constant_value(v)) for v in op.inputs]
        try:
            (results[op.value],) = run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs))
        except RunError:
            return None
    return results[order[-1].value] if order else None


class FarthestPoints(RulePass):
    """For GPUs only, which have a kernel for it."""

    name = "farthest_points"
    rules = (farthest_points,)
