"""Recognizes the embedding bags of PyTorch's newer exporter: an If gives zeros for an empty bag, and else reduces a run of rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.bag_bodies import REDUCTIONS
from optdnn.passes.support.facts import ints, is_filled, operand, producer


@dataclass(frozen=True)
class Level:
    """A graph, or a branch of an If inside of it. ``outside``: the branch's inputs, as values of the graph ``around``."""

    graph: Graph
    outside: Mapping[Value, Value] = field(default_factory=dict)
    around: Level | None = None

    def branch(self, choice: Op, which: bool) -> Level:
        """A branch of an If of this graph."""
        captured = choice.attrs.then_captured
        body = (choice.attrs.then_branch if which else choice.attrs.else_branch).graph
        given = choice.inputs[1 : 1 + captured] if which else choice.inputs[1 + captured :]
        pairs = zip(map(Value, body.inputs), given, strict=True)
        return Level(body, {inside: value for inside, value in pairs if value is not None}, self)

    @property
    def result(self) -> Value:
        """The first value that a branch yields."""
        return operand(self.graph.op(self.graph.outputs[0]))

    def origin(self, value: Value) -> tuple[Level, Value]:
        """The level that computes a value, and the value there."""
        level = self
        while level.around is not None and value in level.outside:
            value, level = level.outside[value], level.around
        return level, value

    def maker(self, value: Value, kinds: Collection[str]) -> tuple[Level, Op] | None:
        """The operator that computes a value, with its level, if its kind is in ``kinds``; else None."""
        level, value = self.origin(value)
        op = producer(level.graph, value, kinds)
        return None if op is None else (level, op)

    def ints(self, value: Value | None) -> tuple[int, ...] | None:
        """The elements of a known integer tensor; None if it is absent, unknown or symbolic."""
        if value is None:
            return None
        level, value = self.origin(value)
        return ints(level.graph, value)


@dataclass(frozen=True)
class OpenBag:
    """A bag that is written in another way (:class:`optdnn.passes.support.bag_segments.OpenBags`): in the iteration in which
    ``counter`` equals ``at``, or always if there is no counter."""

    count: int
    counter: Value | None = None
    at: int = 0


@dataclass(frozen=True)
class ChosenBag:
    """The reduction (``kind``) of ``rows[start : end]``, or zeros if the bag is empty."""

    rows: Value
    start: Value
    end: Value
    kind: str
    open: OpenBag | None = None


def chosen_bag(graph: Graph, choice: Op) -> ChosenBag | None:
    """The bag that an If computes; None for another If."""
    if len(choice.outputs) > 1:
        return None
    same = producer(graph, choice.inputs[0], {"Equal"})
    empty, full = (Level(graph).branch(choice, which) for which in (True, False))
    if same is None or not is_filled(empty.graph.constant_value(empty.result), 0):
        return None
    found = _reduced(full, full.result) or _mean_of_the_last(full, full.result) or _last_or_other(full)
    found = found or _maximum_of_the_last(full, same.inputs)
    return found if found is not None and {*same.inputs} == {found.start, found.end} else None


def _last_or_other(level: Level) -> ChosenBag | None:
    """An If that writes the mean of the last iteration's bag as a sum and a division."""
    made = level.maker(level.result, {"If"})
    if made is None:
        return None
    here, choice = made
    last, other = here.branch(choice, True), here.branch(choice, False)
    first, mean = _mean_of_the_last(last, last.result), _reduced(other, other.result)
    if first is None or first.open is None or mean is None or replace(first, open=None) != mean:
        return None
    return _in_one_iteration(here, choice, mean, first.open.count)


def _maximum_of_the_last(level: Level, bounds: Sequence[Value | None]) -> ChosenBag | None:
    """The maximum of all rows from the start of a bag to a constant end. ``bounds``: the start and the end of the bag."""
    made = level.maker(level.result, {"ReduceMax"})
    run = None if made is None or not over_rows(*made) else _run(made[0], operand(made[1]), made[1].kind)
    if not isinstance(run, tuple) or run[1] not in bounds:
        return None
    rows, start, count = run
    end = next((v for v in bounds if v is not None and v != start), start)
    return ChosenBag(rows, start, end, "ReduceMax", OpenBag(count))


def _in_one_iteration(level: Level, choice: Op, bag: ChosenBag, count: int) -> ChosenBag | None:
    """The bag that an If writes in another way where a counter has one value."""
    equal = level.maker(operand(choice), {"Equal"})
    if equal is None:
        return None
    at, condition = equal
    origin, counter = at.origin(operand(condition))
    number = at.ints(operand(condition, 1))
    if number is None or len(number) != 1 or origin.around is not None:
        return None
    return replace(bag, open=OpenBag(count, counter, number[0]))


def _reduced(level: Level, value: Value) -> ChosenBag | None:
    """The reduction of a run of rows. Rows and bounds must be values of the outermost graph."""
    made = level.maker(value, REDUCTIONS)
    if made is None or not over_rows(*made):
        return None
    at, reduce = made
    if (found := _run(at, operand(reduce), reduce.kind)) is not None:
        return found if isinstance(found, ChosenBag) else None
    return _to_the_end(at, reduce)


def over_rows(level: Level, reduce: Op) -> bool:
    """Whether a reduction is that of the first axis, and keeps it."""
    return reduce.attrs.keepdims and level.ints(reduce.input(1)) == (0,)


def _to_the_end(level: Level, reduce: Op) -> ChosenBag | None:
    """The maximum of a run of rows that an If extends, in one iteration, to a constant end."""
    made = level.maker(operand(reduce), {"If"}) if reduce.kind == "ReduceMax" else None
    if made is None:
        return None
    here, choice = made
    branches = [here.branch(choice, which) for which in (True, False)]
    last, other = (_run(b, b.result, reduce.kind) for b in branches)
    if not isinstance(last, tuple) or not isinstance(other, ChosenBag) or last[:2] != (other.rows, other.start):
        return None
    return _in_one_iteration(here, choice, other, last[2])


def _run(level: Level, value: Value, kind: str) -> ChosenBag | tuple[Value, Value, int] | None:
    """The run of rows that a Slice takes; if its end is a constant: the rows, the start, and the end."""
    made = level.maker(value, {"Slice"})
    if made is None:
        return None
    at, cut = made
    if any(v is not None and at.ints(v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return None
    (of, rows), (begun, start), (ended, end) = (at.origin(operand(cut, k)) for k in range(3))
    if of.around is not None or begun.around is not None:
        return None
    if (known := at.ints(operand(cut, 2))) is not None and len(known) == 1:
        return rows, start, known[0]
    return ChosenBag(rows, start, end, kind) if ended.around is None else None


def _mean_of_the_last(level: Level, value: Value) -> ChosenBag | None:
    """The sum of a run of rows, divided by a number minus the start of the run if this is positive."""
    made = level.maker(value, {"If"})
    if made is None:
        return None
    here, choice = made
    greater = here.maker(operand(choice), {"Greater"})
    divided, whole = here.branch(choice, True), here.branch(choice, False)
    division = divided.maker(divided.result, {"Div"})
    kept = whole.maker(whole.result, {"Identity"})
    total = whole.origin(whole.result) if kept is None else kept[0].origin(operand(kept[1]))
    found = _reduced(*total)
    if greater is None or division is None or found is None or found.kind != "ReduceSum":
        return None
    at, div = division
    cast = at.maker(operand(div, 1), {"Cast"})
    size = greater[0].origin(operand(greater[1]))
    if at.origin(operand(div)) != total or cast is None or cast[0].origin(operand(cast[1])) != size:
        return None
    difference = size[0].maker(size[1], {"Sub"})
    if difference is None or greater[0].ints(operand(greater[1], 1)) != (0,):
        return None
    count, start = difference[0].ints(operand(difference[1])), difference[0].origin(operand(difference[1], 1))
    if count is None or len(count) != 1 or start[0].around is not None or start[1] != found.start:
        return None
    return ChosenBag(found.rows, found.start, found.end, "ReduceMean", OpenBag(count[0]))
