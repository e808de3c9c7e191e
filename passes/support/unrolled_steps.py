"""Unrolled recurrences of pointwise steps: operators are assigned to steps, and runs of equal steps are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.fused import STAGE_KINDS
from optdnn.passes.base import Miss
from optdnn.passes.support.facts import RESHAPES, ints, operand, shape_of
from optdnn.passes.support.parts import span
from optdnn.types import Shape, normalize_axis

LEAST = 4
"""Least number of steps for which a scan pays."""


@dataclass(frozen=True)
class Position:
    """Position ``index`` of ``whole`` along ``axis``. ``view``: the axis of ``whole`` for each own axis, -1 for size 1."""

    whole: Value
    axis: int
    index: int
    view: tuple[int, ...]

    @property
    def sequence(self) -> tuple[Value, int, tuple[int, ...]]:
        return self.whole, self.axis, self.view


def position(graph: Graph, value: Value) -> Position | None:
    """``value`` as one position of another tensor, possibly after operators that add or remove axes of size 1; else None."""
    op = graph.op(value)
    shape, after = shape_of(graph, op.inputs[0]) if op.inputs else None, shape_of(graph, value)
    if shape is None or after is None:
        return None
    if op.kind in RESHAPES:
        inner = position(graph, operand(op))
        view = None if inner is None else _viewed(inner.view, shape, after)
        return None if inner is None or view is None else Position(inner.whole, inner.axis, inner.index, view)
    if op.kind == "Gather":
        index, axis = ints(graph, op.input(1)), normalize_axis(op.attrs.axis, len(shape))
        count = shape[axis]
        if index is None or len(index) != 1 or not isinstance(count, int) or len(after) > len(shape):
            return None
        return _position(operand(op), shape, axis, index[0] % count, kept=len(after) == len(shape))
    if op.kind not in ("Slice", "Split") or len(shape) != len(after):
        return None
    axis = next((k for k, (a, b) in enumerate(zip(shape, after, strict=True)) if a != b), -1)
    size = shape[axis] if axis >= 0 else None
    if not isinstance(size, int) or after[axis] != 1:
        return None
    if op.kind == "Split":
        each = all(o.type.dims[axis] == 1 for o in op.outputs)
        return _position(operand(op), shape, axis, value.port, kept=True) if each else None
    taken = span(graph, op, size, axis - len(shape))
    return None if taken is None else _position(operand(op), shape, axis, taken[0], kept=True)


class _Positions:
    """The positions that the values of a graph are. Each is found once."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._found: dict[Value, Position | None] = {}

    def of(self, value: Value) -> Position | None:
        if value not in self._found:
            self._found[value] = position(self._graph, value)
        return self._found[value]


def first_of_all(graph: Graph, values: Sequence[Value]) -> Position | None:
    """The position of the first of ``values``, if they are positions 0, 1, … of one tensor; else None."""
    found = [position(graph, v) for v in values]
    first = found[0]
    if first is None:
        return None
    order = [None if p is None else (p.sequence, p.index) for p in found]
    return first if order == [(first.sequence, k) for k in range(len(values))] else None


def _position(whole: Value, shape: Shape, axis: int, index: int, *, kept: bool) -> Position:
    rest = range(axis + 1, len(shape))
    return Position(whole, axis, index, (*range(axis), *([-1] if kept else []), *rest))


def _viewed(view: tuple[int, ...], before: Shape, after: Shape) -> tuple[int, ...] | None:
    """The view after a reshape that only adds and removes axes of size 1; None for other reshapes."""
    axes = [axis for axis, n in zip(view, before, strict=True) if n != 1]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    left = iter(axes)
    return tuple(-1 if n == 1 else next(left) for n in after)


@dataclass
class Step:
    """The correspondence between a step and the previous step.

    ``same``: value -> its counterpart in the previous step. ``states``: state that the step reads -> the state that the previous
    step reads."""

    same: dict[Value, Value] = field(default_factory=dict)
    states: dict[Value, Value] = field(default_factory=dict)


class Steps:
    """The pointwise operators that compute ``results``. Each is assigned to the earliest step that can compute it."""

    def __init__(self, graph: Graph, results: Sequence[Value]):
        self.graph, self.backward = graph, False
        self._known = graph.kept(_Positions)  # one for all steps: each walks through the steps before it
        self.time: dict[Value, int] = {}
        """Value -> its step; -1 if it depends on no sequence."""
        self.positions: dict[Value, Position] = {}
        self._order = list(self._inner(results))
        indices: dict[tuple[Value, int, tuple[int, ...]], set[int]] = {}
        for found in self.positions.values():
            indices.setdefault(found.sequence, set()).add(found.index)
        self.count = max((len(each) for each in indices.values()), default=0)
        self.positions = {v: p for v, p in self.positions.items() if 2 * len(indices[p.sequence]) > self.count}
        """Values that are positions of sequences. A position that all steps read is an ordinary operand."""
        self._set_times()

    def turned(self) -> Steps:
        """The same operators, if the steps begin at the last positions."""
        other = copy(self)
        other.backward, other.time = not self.backward, {}
        other._set_times()
        return other

    def _set_times(self) -> None:
        last = max((p.index for p in self.positions.values()), default=0)
        for value in self._order:
            if value in self.positions:
                index = self.positions[value].index
                self.time[value] = last - index if self.backward else index
            elif self._computes(value):
                self.time[value] = max((self.time.get(v, -1) for v in self._reads(value)), default=-1)

    def _computes(self, value: Value) -> bool:
        op = self.graph.op(value)
        return op.kind in STAGE_KINDS and len(op.outputs) == 1

    def _reads(self, value: Value) -> list[Value]:
        return [v for v in self.graph.op(value).inputs if v is not None]

    def _inner(self, results: Sequence[Value]) -> Iterator[Value]:
        """The values of pointwise operators and the positions that they read, operands first."""
        seen: set[Value] = set()
        stack = [(v, False) for v in results]
        while stack:
            value, done = stack.pop()
            if done:
                yield value
                continue
            if value in seen:
                continue
            seen.add(value)
            if (found := self._known.of(value)) is not None:
                self.positions[value] = found
                yield value
            elif self._computes(value):
                stack.append((value, True))
                stack += [(v, False) for v in self._reads(value)]

    def member(self, value: Value) -> bool:
        """Whether a step computes ``value``."""
        return self.time.get(value, -1) >= 0 and value not in self.positions

    def compare(self, t: int, roots: Sequence[tuple[Value, Value]]) -> Step | None:
        """The correspondence between step ``t`` and the previous step; None if they differ.

        ``roots``: pairs of values, one of each step, that both steps must compute in the same way."""
        step = Step()
        return step if all(self._same(t, a, b, step) for a, b in roots) else None

    def _same(self, t: int, a: Value, b: Value, step: Step) -> bool:
        """Whether ``a`` in step ``t`` corresponds to ``b`` in the previous step."""
        if a in step.same or a in step.states:
            return step.same.get(a, step.states.get(a)) == b
        if a in self.positions or b in self.positions:
            p, q = self.positions.get(a), self.positions.get(b)
            ahead = -1 if self.backward else 1
            return p is not None and q is not None and p.sequence == q.sequence and p.index - q.index == ahead
        at = self.time.get(a, -1)
        if at == t and self.time.get(b, -1) == t - 1:
            return self._same_op(t, a, b, step)
        if at == t - 1 and t and self.time.get(b, -1) < at and self.graph.type(a).agrees(self.graph.type(b)):
            step.states[a] = b
            return True
        return at < 0 and (a == b or self._equal_constants(a, b))

    def _same_op(self, t: int, a: Value, b: Value, step: Step) -> bool:
        one, other = self.graph.op(a), self.graph.op(b)
        alike = (one.kind, one.attrs, len(one.inputs)) == (other.kind, other.attrs, len(other.inputs))
        if not alike or self.graph.type(a) != self.graph.type(b):
            return False
        orders = [other.inputs]
        if one.definition.traits.commutative and len(one.inputs) == 2:
            orders.append(other.inputs[::-1])
        for order in orders:
            tried = Step({**step.same, a: b}, dict(step.states))
            pairs = list(zip(one.inputs, order, strict=True))
            if all(x is y if x is None or y is None else self._same(t, x, y, tried) for x, y in pairs):
                step.same, step.states = tried.same, tried.states
                return True
        return False

    def _equal_constants(self, a: Value, b: Value) -> bool:
        x, y = self.graph.constant_value(a), self.graph.constant_value(b)
        return x is not None and y is not None and x.dtype == y.dtype and np.array_equal(x, y)


@dataclass(frozen=True)
class Scan:
    """The equal steps ``first`` to ``last`` of ``steps``. ``alike[t]``: the correspondence between steps ``t`` and ``t - 1``."""

    steps: Steps
    first: int
    last: int
    alike: Mapping[int, Step]

    @property
    def template(self) -> list[Value]:
        """The values that the second step computes, in order: they represent all steps."""
        inside = self.alike[self.first + 1].same
        return [v for v in self.steps.time if v in inside]

    def named(self) -> dict[Value, Value]:
        """Value that a step of the scan computes -> its counterpart in the template."""
        found = {v: v for v in self.template}
        found |= {before: v for v, before in self.alike[self.first + 1].same.items()}
        for t in range(self.first + 2, self.last + 1):
            found |= {v: found[before] for v, before in self.alike[t].same.items()}
        return found


def find_scan(steps: Steps, results: Mapping[int, Value], first: int) -> Scan | Miss:
    """The longest run of equal steps that ends at the last step with a result and begins at ``first`` or later.

    ``results``: step -> its result."""
    last = max(results)
    alike: dict[int, Step] = {}
    for t in range(last, first, -1):
        before = alike[t + 1].states.items() if t < last else ()
        roots = [(results[t], results[t - 1])] if t in results and t - 1 in results else []
        found = steps.compare(t, [*roots, *before])
        if found is None:
            break
        alike[t] = found
    first = last - len(alike)
    missed = Miss(f"only {last + 1 - first} steps at its end do the same")
    while last + 1 - first >= LEAST:
        why = _why_not(alike, first, last)
        if why is None:
            return Scan(steps, first, last, alike)
        missed, first = Miss(why), first + 1
    return missed


def _why_not(alike: Mapping[int, Step], first: int, last: int) -> str | None:
    """The reason why the steps from ``first`` on are not a scan, or None.

    The values of different steps must correspond one to one: states that differ in a step must differ in the previous step. The
    first step is an exception: its states may be equal.
    """
    states, later = alike[first + 1].states, alike[first + 2].states
    if not states:
        return "no step reads a result of the previous step"
    if any(not set(alike[t].same.values()) <= set(alike[t - 1].same) for t in range(first + 2, last + 1)):
        return "its last steps compute more than the steps before them"
    apart = all(len(set(alike[t].states.values())) == len(alike[t].states) for t in range(first + 2, last + 1))
    return (
        None
        if apart and set(states) == set(later.values())
        else "its first steps read other states than the later steps"
    )
