"""Values in a loop's body that follow from counters: numbers with known first values that change only by iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array, DType

TRIPS = 4096
"""The most iterations that are counted."""
OPS = 32
"""The most operators of a body that are evaluated in each iteration."""
ELEMENTS = 16
"""The most elements of a computed value."""
NESTED = frozenset({"If", "Loop", "Scan", "Custom"})

First = Callable[[int], Array | None]
"""The first value of the body's input at a position, or its value in all iterations; None if it is unknown."""


@dataclass(frozen=True)
class Counters:
    """``wanted`` values of a body, the operators that compute them (in order), and the positions of the carried values that they
    need."""

    body: Graph
    wanted: tuple[Value, ...]
    ops: tuple[Op, ...]
    carried: tuple[int, ...]

    @cached_property
    def _calls(self) -> list[tuple[Op, dict[str, Any], list[DType]]]:
        """Each operator with its attributes and the types of its results, in the form that its kernel expects."""
        return [(op, plain_attrs(op.definition, op.attrs), [o.type.dtype for o in op.outputs]) for op in self.ops]

    def iterations(self, first: First) -> Iterator[list[Array]] | None:
        """The wanted values of one iteration after the other, without end; None if a first value is unknown.

        The iterator raises RunError if an operator has no result, or a result of more than ELEMENTS elements.
        """
        values = self._first_values(first)
        return None if values is None else self._run(values)

    def _first_values(self, first: First) -> dict[Value, Array] | None:
        read = {v for o in self.ops for v in o.inputs} | set(self.wanted)
        read |= {v for k in self.carried for v in (result(self.body, 1 + k), Value(self.body.inputs[2 + k]))}
        values: dict[Value, Array] = {}
        for place, i in enumerate(self.body.inputs):
            if place < 2 or Value(i) not in read:
                continue
            known = first(place)
            if known is None or known.dtype == object or (place - 2 in self.carried and known.size > ELEMENTS):
                return None
            values[Value(i)] = known
        return values

    def _run(self, values: dict[Value, Array]) -> Iterator[list[Array]]:
        for trip in count():
            state = {**values, Value(self.body.inputs[0]): np.array(trip, np.int64)}
            found, after = self._iteration({**state, Value(self.body.inputs[1]): np.array(True)})
            yield found
            values = {**values, **dict(zip((Value(self.body.inputs[2 + k]) for k in self.carried), after, strict=True))}

    def _iteration(self, state: dict[Value, Array]) -> tuple[list[Array], list[Array]]:
        """The wanted values of an iteration, and the carried values after it."""

        def at(value: Value) -> Array:
            known = self.body.constant_value(value)
            return state[value] if known is None else known

        for op, attrs, dtypes in self._calls:
            operands = [None if v is None else at(v) for v in op.inputs]
            for port, array in enumerate(run_kernel(op.kind, operands, attrs, dtypes)):
                if array.size > ELEMENTS:
                    raise RunError(f"a counter has {array.size} elements, at most {ELEMENTS} are evaluated")
                state[Value(op.id, port)] = array
        return [at(v) for v in self.wanted], [at(result(self.body, 1 + k)) for k in self.carried]


def counters(body: Graph, carried: int, wanted: Sequence[Value]) -> Counters | None:
    """The computation of ``wanted`` in a body with ``carried`` carried values; None if it has many operators, or large values."""
    places = {Value(i): k for k, i in enumerate(body.inputs)}
    open_, ops, changed = list(wanted), dict[int, Op](), set[int]()
    while open_:
        value = open_.pop()
        op = body.op(value)
        place = places.get(value)
        if place is not None and 2 <= place < 2 + carried and place - 2 not in changed:
            changed.add(place - 2)
            open_.append(result(body, place - 1))
        if place is not None or op.kind == "Constant" or op.id in ops:
            continue
        ops[op.id] = op
        if len(ops) > OPS or op.kind in NESTED or any(_large(o.type.shape) for o in op.outputs):
            return None
        open_ += [v for v in op.inputs if v is not None]
    return Counters(body, tuple(wanted), tuple(op for op in body.order() if op.id in ops), tuple(sorted(changed)))


def _large(shape: Sequence[object] | None) -> bool:
    """Whether a value is known to have more than ELEMENTS elements."""
    return math.prod(d for d in shape or () if isinstance(d, int)) > ELEMENTS


def result(body: Graph, output: int) -> Value:
    """The value that a body yields as output ``output``."""
    value = body.op(body.outputs[output]).inputs[0]
    assert value is not None
    return value


def number_of_iterations(found: Iterator[list[Array]], limit: int | None) -> int | None:
    """The number of iterations, at most ``limit``, if ``found`` yields the condition after each iteration; None above TRIPS, or if
    the condition has no value."""
    if limit is not None and limit <= 0:
        return 0
    most = TRIPS if limit is None else min(limit, TRIPS)
    try:
        for trip, (going,) in enumerate(islice(found, most)):
            if not going.reshape(-1)[0]:
                return trip + 1
    except RunError:
        return None
    return limit if limit is not None and limit <= TRIPS else None


def without_condition(body: GraphBody) -> GraphBody:
    """The body with its condition passed through unchanged: a trip count ends the loop."""
    inner = body.graph.copy()
    inner.share_symbols(body.graph)
    condition = inner.op(inner.outputs[0])
    inner.set_op(replace(condition, inputs=(Value(inner.inputs[1]),)))
    inner.remove_dead([op.id for op in inner.ops()])
    return GraphBody(inner)
