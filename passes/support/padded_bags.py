"""Recognizes the embedding bags of PyTorch's newer exporter that have a padding index (:mod:`optdnn.passes.rules.padded_bags`)."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.bag_bodies import REDUCTIONS, VIEWS, takes_rows, value_outside
from optdnn.passes.support.chosen_bags import Level, over_rows
from optdnn.passes.support.facts import ints, is_filled, operand, producer
from optdnn.passes.unroll import goes_on, number_of

Place = tuple[Value | None, int]
"""A bound of a bag: an element of a list, and its place there, or no list and a number."""


@dataclass(frozen=True)
class KeptPositions:
    """The positions from ``start`` to ``end`` whose ``indices`` are not ``padding``, as a Loop lists them.

    ``start``, ``end``: numbers, or values of one element. ``count`` is added to negative indices before the comparison, if it is
    not None. ``entered``: whether the first position is compared without a look at ``end``."""

    indices: Value
    padding: int
    count: int | None
    start: Value | int
    end: Value | int
    entered: bool


@dataclass(frozen=True)
class PaddedBag(KeptPositions):
    """The reduction (``kind``) of the ``rows`` at these positions, or zeros if there are none. ``ops``: the operators that compute
    the bag, the last one first."""

    rows: Value
    kind: str
    ops: tuple[Op, ...]

    @property
    def shared(self) -> tuple[Value, str, Value, int, int | None]:
        """The facts that all bags of one network share."""
        return self.rows, self.kind, self.indices, self.padding, self.count


def padded_bag(graph: Graph, value: Value | None) -> PaddedBag | None:
    """The bag that ``value`` is; None for other values."""
    choice = producer(graph, value, {"If"}, alone=True)
    same = None if choice is None or len(choice.outputs) > 1 else producer(graph, choice.inputs[0], {"Equal"})
    size = None if same is None else producer(graph, operand(same), {"Size"})
    loop = None if size is None else producer(graph, operand(size), {"Loop"})
    if choice is None or same is None or size is None or loop is None or ints(graph, operand(same, 1)) != (0,):
        return None
    listed = operand(size)
    empty, full = (Level(graph).branch(choice, which) for which in (True, False))
    made = full.maker(full.result, REDUCTIONS)
    if made is None or not over_rows(*made) or not is_filled(empty.graph.constant_value(empty.result), 0):
        return None
    at, reduce = made
    looked = at.maker(operand(reduce), {"Gather"})
    if looked is None or not takes_rows(looked[0].graph, looked[1]):
        return None
    (of, rows), (by, places) = (looked[0].origin(operand(looked[1], k)) for k in (0, 1))
    kept = _kept(graph, loop)
    if of.around is not None or by.around is not None or places != listed or listed.port != 1 or kept is None:
        return None
    if graph.type(kept.indices).shape != graph.type(rows).dims[:1] or _read_by_others(
        graph, loop, {choice.id, size.id}
    ):
        return None
    return PaddedBag(**vars(kept), rows=rows, kind=reduce.kind, ops=(choice, same, size, loop))


def _read_by_others(graph: Graph, loop: Op, readers: set[int]) -> bool:
    """Whether more than these operators read the results of a loop."""
    return any(user.id not in readers for v in loop.values for user in graph.users(v))


def _kept(graph: Graph, loop: Op) -> KeptPositions | None:
    """The list that a Loop with a counter and a list as its state makes; None for other loops."""
    body = loop.attrs.body.graph
    if loop.attrs.carried != 2 or len(body.outputs) != 3 or graph.type(operand(loop, 3)).shape != (0,):
        return None
    counter, held = Value(body.inputs[2]), Value(body.inputs[3])
    following, more = (operand(body.op(body.outputs[k])) for k in (1, 2))
    if not _is_next(body, following, counter):
        return None
    bounds = _bounds(graph, loop, following)
    appended = _appended(body, more, counter, held)
    if bounds is None or appended is None:
        return None
    index, padding, count = appended
    source = value_outside(loop, operand(index))
    if source is None or operand(index, 1) != counter or not takes_rows(body, index):
        return None
    return KeptPositions(source, padding, count, *bounds)


def place_in_a_list(graph: Graph, value: Value | int) -> Place | None:
    """A bound as a place; None if it is neither known nor an element of a list of known length."""
    if isinstance(value, int):
        return None, value
    if (known := ints(graph, value)) is not None and len(known) == 1:
        return None, known[0]
    gather = producer(graph, value, {"Gather"})
    place = None if gather is None else ints(graph, operand(gather, 1))
    if gather is None or place is None or len(place) != 1 or not is_list(graph, operand(gather)):
        return None
    return operand(gather), place[0]


def is_list(graph: Graph, value: Value) -> bool:
    """Whether a value is a vector of known length."""
    shape = graph.type(value).shape
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int)


def _is_next(body: Graph, value: Value, counter: Value) -> bool:
    """Whether a value is the counter plus 1."""
    add = producer(body, value, {"Add"})
    return add is not None and operand(add) == counter and ints(body, operand(add, 1)) == (1,)


def _bounds(graph: Graph, loop: Op, following: Value) -> tuple[Value | int, Value | int, bool] | None:
    """The first position of a loop over positions, the one after its last, and whether it is entered without a look at that."""
    body, start = loop.attrs.body.graph, operand(loop, 2)
    trips, going = number_of(graph, loop.input(0)), loop.input(1)
    always = going is None or bool(number_of(graph, going))
    if trips is not None and goes_on(body) and always:
        first = ints(graph, start)
        return None if first is None else (first[0], first[0] + max(trips, 0), False)
    less = producer(body, operand(body.op(body.outputs[0])), {"Less"})
    before = producer(graph, going, {"Less"})
    end = None if less is None or operand(less) != following else value_outside(loop, operand(less, 1))
    if loop.input(0) is not None or end is None or not (always or (before and before.inputs == (start, end))):
        return None
    return start, end, always


def _appended(body: Graph, value: Value, counter: Value, held: Value) -> tuple[Op, int, int | None] | None:
    """The Gather of the index that decides whether the counter joins the list ``held``, the padding that keeps it out, and the
    number that is added to negative indices."""
    choice = producer(body, value, {"If"})
    differs = None if choice is None else producer(body, operand(choice), {"Not"})
    same = None if differs is None else producer(body, operand(differs), {"Equal"})
    padding = None if same is None else ints(body, operand(same, 1))
    if choice is None or same is None or padding is None or len(padding) != 1:
        return None
    joined, kept = (Level(body).branch(choice, which) for which in (True, False))
    if _origin(kept, kept.result) != held:
        return None
    made = joined.maker(joined.result, {"Concat"})
    if made is None or len(made[1].inputs) != 2 or made[0].origin(operand(made[1]))[1] != held:
        return None
    view = made[0].maker(operand(made[1], 1), VIEWS)
    if view is None or view[0].origin(operand(view[1]))[1] != counter:
        return None
    found = _index(body, operand(same))
    return None if found is None else (found[0], padding[0], found[1])


def _origin(level: Level, value: Value) -> Value | None:
    """The value of the outermost graph that a value is, through an Identity; None if it is computed."""
    at, value = level.origin(value)
    if (same := producer(at.graph, value, {"Identity"})) is not None:
        at, value = at.origin(operand(same))
    return value if at.around is None else None


def _index(body: Graph, value: Value) -> tuple[Op, int | None] | None:
    """The Gather that computes an index, and the number that is added to it if it is negative (None if no number is)."""
    gather = producer(body, value, {"Gather"})
    if gather is not None:
        return gather, None
    choice = producer(body, value, {"If"})
    negative = None if choice is None else producer(body, operand(choice), {"Less"})
    gather = None if negative is None else producer(body, operand(negative), {"Gather"})
    if choice is None or negative is None or gather is None or ints(body, operand(negative, 1)) != (0,):
        return None
    moved, kept = (Level(body).branch(choice, which) for which in (True, False))
    made = moved.maker(moved.result, {"Add"})
    if (
        made is None
        or _origin(kept, kept.result) != gather.value
        or made[0].origin(operand(made[1]))[1] != gather.value
    ):
        return None
    number = made[0].ints(operand(made[1], 1))
    return None if number is None or len(number) != 1 else (gather, number[0])
