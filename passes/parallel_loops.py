"""A Loop with independent iterations computes all of them at once, along one more axis.

Each iteration takes its own row of values around the loop, and appends a row to the results. PyTorch's Keypoint R-CNN resizes the
maps of each detection to the size of its box, and looks for the largest element of each. An iteration takes the CPU over a
millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.cropped_boxes import cropped_boxes
from optdnn.passes.support.bag_bodies import takes_rows, value_outside
from optdnn.passes.support.facts import integers, ints, operand, producer, reshaped
from optdnn.passes.support.iterations import Iterations, dims_of, refusal
from optdnn.passes.support.resized_peaks import Peaks, peaks_of
from optdnn.passes.support.scalars import as_many_as_rows
from optdnn.passes.unroll import goes_on
from optdnn.types import INT64, normalize_axis


@dataclass(frozen=True)
class _Body:
    """An independent iteration: rows it takes (value of the body -> value around the loop), and the value of each result's row."""

    graph: Graph
    rows: dict[Value, Value]
    results: tuple[Value, ...]
    peaks: tuple[Peaks, ...]

    def known(self) -> set[Value]:
        """Values that need no operator of their own."""
        found = {v for p in self.peaks for v in (p.place, *p.extents, *p.elements)}
        return found | set(self.rows)

    def needed(self, values: Iterable[Value]) -> list[Op]:
        """The operators that compute values, in order."""
        left, seen, known = list(values), set[int](), self.known()
        while left:
            value = left.pop()
            if value not in known and value.op not in seen:
                seen.add(value.op)
                left += [v for v in self.graph.op(value).inputs if v is not None]
        return [op for op in self.graph.order() if op.id in seen]

    def every_op(self) -> list[Op]:
        """All operators that have to be computed for all iterations."""
        return self.needed([*self.results, *(v for p in self.peaks for v in (p.image, *p.sizes))])


@rule("parallel_loop", {"Loop"})
def parallel_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations only read rows of their own, and append to the results."""
    body = op.attrs.body.graph
    results = _appended(graph, op)
    if results is None:
        return None
    if not goes_on(body):
        return Miss("a condition that it computes may end it")
    found = _Body(body, _rows_of(op), results, tuple(peaks_of(body)))
    ops = found.every_op()
    if not as_many_as_rows(graph, op, found.rows.values()):
        return Miss("its iterations are not as many as the rows that they take in turn")
    if any(o.kind == "Input" and o.value in _changing(op) for o in ops):
        return Miss("an iteration reads its number, or what the one before it computed")
    trips = graph.type(next(iter(found.rows.values()))).dims[0]
    if (why := refusal(body, ops, trips if isinstance(trips, int) else 1)) is not None:
        return Miss(why)

    return Match((op,), lambda patch: patch.replace_each(op.values, _results(patch, op, found)))


def _appended(graph: Graph, op: Op) -> tuple[Value, ...] | None:
    """For each result of a loop, the value of the body that an iteration appends as a row; None if it does something else."""
    body, carried = op.attrs.body.graph, op.attrs.carried
    found: list[Value] = []
    for k in range(carried):
        joined = producer(body, body.op(body.outputs[1 + k]).inputs[0], {"Concat"})
        initial = graph.type(operand(op, 2 + k)).shape
        own = Value(body.inputs[2 + k])
        if joined is None or len(joined.inputs) != 2 or joined.inputs[0] != own or len(body.uses(own)) != 1:
            return None
        one = producer(body, joined.inputs[1], {"Unsqueeze"})
        if one is None or ints(body, one.input(1)) != (0,) or initial is None or initial[:1] != (0,):
            return None
        if normalize_axis(joined.attrs.axis, len(initial)):
            return None
        found.append(operand(one))
    return (*found, *(operand(body.op(i)) for i in body.outputs[1 + carried :]))


def _rows_of(op: Op) -> dict[Value, Value]:
    """The rows that an iteration takes by its number: value of the body -> the value around the loop."""
    body, number = op.attrs.body.graph, Value(op.attrs.body.graph.inputs[0])
    taken = [g for g in body.users(number) if g.kind == "Gather" and g.inputs[1] == number and takes_rows(body, g)]
    found = {g.value: value_outside(op, g.inputs[0]) for g in taken if g.inputs[0] not in _changing(op)}
    return {row: source for row, source in found.items() if source is not None}


def _changing(op: Op) -> set[Value]:
    """The inputs of the body that differ between iterations."""
    body = op.attrs.body.graph
    return {Value(i) for i in body.inputs[: 2 + op.attrs.carried]}


def _results(patch: Patch, op: Op, found: _Body) -> list[Value]:
    """The values that replace the Loop's results."""
    body, carried = found.graph, op.attrs.carried
    place = dict(found.rows)
    captured = zip(body.inputs[2 + carried :], op.inputs[2 + carried :], strict=True)
    place.update((Value(i), v) for i, v in captured if v is not None)
    trips = reshaped(patch, operand(op, 0), (1,))
    all_at_once = Iterations(patch, body, trips, place, found.rows)
    for peaks in found.peaks:
        all_at_once.run(found.needed([peaks.image, *peaks.sizes]))
        _add_peaks(patch, body, all_at_once, peaks)
    all_at_once.run(found.needed(found.results))
    return [all_at_once.stacked(v) for v in found.results]


def _add_peaks(patch: Patch, body: Graph, all_at_once: Iterations, peaks: Peaks) -> None:
    unit = 1 + dims_of(body, peaks.image)[:2].index(1)
    image = patch.add("Squeeze", [all_at_once.stacked(peaks.image), integers(patch, [unit], "axes")])
    parts = [all_at_once.stacked(v) for v in peaks.sizes]
    size = parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(1))
    assert patch.type(size).dtype == INT64
    op = patch.add_op("ResizedPeaks", [image, size], peaks.attrs, outputs=2)
    places, elements = Value(op.id), Value(op.id, 1)
    new = {peaks.place: places, **dict.fromkeys(peaks.elements, elements)}
    for extent, k in peaks.extents.items():
        new[extent] = patch.add("Gather", [size, patch.constant(INT64.type(k), "axis")], GatherAttrs(1))
    all_at_once.place.update(new)
    all_at_once.every.update(new)


class ParallelLoops(RulePass):
    name = "parallel_loops"
    rules = (cropped_boxes, parallel_loop)
    gpu_only = True  # the libraries of the CPU run loops
