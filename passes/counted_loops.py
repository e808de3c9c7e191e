"""Loops that end by a condition on counters get the number of their iterations: TensorFlow's ``while i < n``.

The condition is computed from numbers that only the iterations change: counters, with known first values. So the number of
iterations is known when the network is built, by counting them. Results that the iterations stack then have known sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.control import LoopAttrs
from optdnn.ops.fused import plain_attrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.unroll import goes_on, number_of
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

TRIPS = 4096
"""Most iterations that are counted."""
OPS = 32
"""Most operators of a body that its condition may need."""
ELEMENTS = 16
"""Most elements of a value that they compute."""
NESTED = frozenset({"If", "Loop", "Scan", "Custom"})


@dataclass(frozen=True)
class _Counters:
    """What a condition is computed from: operators of the body in order, and the carried values that they change, by position."""

    ops: tuple[Op, ...]
    carried: tuple[int, ...]


@rule("counted_loop", {"Loop"})
def counted_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose condition depends only on counters becomes one with a trip count."""
    body: Graph = op.attrs.body.graph
    limit, going = number_of(graph, op.input(0)), op.input(1)
    begins = True if going is None else number_of(graph, going)
    if goes_on(body):
        return None
    if begins is None or (limit is None and op.input(0) is not None):
        return Miss("its first condition, or the most iterations that it runs, depend on data")
    counters = _counters(body, op.attrs.carried)
    if isinstance(counters, Miss):
        return counters
    first = _first_values(graph, op, counters)
    if first is None:
        return Miss("its condition depends on data")
    trips = _count(body, counters, first, limit) if begins else 0
    if trips is None:
        return Miss(f"it runs more than {TRIPS} times, or its condition cannot be evaluated")
    attrs = LoopAttrs(_without_condition(op.attrs.body), op.attrs.carried)

    def build(patch: Patch) -> None:
        number = patch.constant(np.array(trips, np.int64), "trips")
        names = [o.name for o in op.outputs]
        made = patch.add_op("Loop", [number, None, *op.inputs[2:]], attrs, names=names, outputs=len(names))
        for port in range(len(names)):
            if graph.uses(Value(op.id, port)):
                patch.replace(Value(op.id, port), Value(made.id, port))

    return Match((op,), build)


def _counters(body: Graph, carried: int) -> _Counters | Miss:
    """The operators that compute the condition, and what they carry from one iteration to the next."""
    places = {Value(i): k for k, i in enumerate(body.inputs)}
    wanted, ops, changed = [_result(body, 0)], dict[int, Op](), set[int]()
    while wanted:
        value = wanted.pop()
        op = body.op(value)
        place = places.get(value)
        if place is not None and 2 <= place < 2 + carried and place - 2 not in changed:
            changed.add(place - 2)
            wanted.append(_result(body, place - 1))
        if place is not None or op.kind == "Constant" or op.id in ops:
            continue
        sizes = [o.type.shape for o in op.outputs]
        if op.kind in NESTED or any(s is None or any(not isinstance(d, int) for d in s) for s in sizes):
            return Miss("its condition depends on data")
        ops[op.id] = op
        if len(ops) > OPS or any(math.prod(d for d in s or () if isinstance(d, int)) > ELEMENTS for s in sizes):
            return Miss("its condition depends on data")
        wanted += [v for v in op.inputs if v is not None]
    return _Counters(tuple(op for op in body.order() if op.id in ops), tuple(sorted(changed)))


def _result(body: Graph, output: int) -> Value:
    value = body.op(body.outputs[output]).inputs[0]
    assert value is not None
    return value


def _first_values(graph: Graph, op: Op, counters: _Counters) -> dict[Value, Array] | None:
    """What the body's inputs hold at first that the condition reads; None where one of them is not known."""
    body: Graph = op.attrs.body.graph
    read = {v for o in counters.ops for v in o.inputs} | {_result(body, 0)}
    read |= {v for k in counters.carried for v in (_result(body, 1 + k), Value(body.inputs[2 + k]))}
    values: dict[Value, Array] = {}
    for place, i in enumerate(body.inputs):
        if place < 2 or Value(i) not in read:
            continue
        known = graph.known(op.inputs[place])
        if known is None or known.dtype == object or known.size > ELEMENTS:
            return None
        values[Value(i)] = known
    return values


def _count(body: Graph, counters: _Counters, values: dict[Value, Array], limit: int | None) -> int | None:
    """How many iterations run, at most ``limit``; None where there are more than TRIPS, or the condition has no value."""
    for trips in range(TRIPS + 1):
        if limit is not None and trips >= limit:
            return max(limit, 0)
        state = {**values, Value(body.inputs[0]): np.array(trips, np.int64), Value(body.inputs[1]): np.array(True)}
        try:
            going, *after = _iteration(body, counters, state)
        except RunError:
            return None
        values = {**values, **dict(zip((Value(body.inputs[2 + k]) for k in counters.carried), after, strict=True))}
        if not going.reshape(-1)[0]:
            return trips + 1
    return None


def _iteration(body: Graph, counters: _Counters, state: dict[Value, Array]) -> list[Array]:
    """The condition after an iteration, and the counters."""

    def at(value: Value) -> Array:
        known = body.constant_value(value)
        return state[value] if known is None else known

    for op in counters.ops:
        operands = [None if v is None else at(v) for v in op.inputs]
        dtypes = [o.type.dtype for o in op.outputs]
        for port, array in enumerate(run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs), dtypes)):
            state[Value(op.id, port)] = array
    return [at(_result(body, 0)), *(at(_result(body, 1 + k)) for k in counters.carried)]


def _without_condition(body: GraphBody) -> GraphBody:
    """The body, whose condition stays as it is: the count ends the loop."""
    inner = body.graph.copy()
    inner.share_symbols(body.graph)
    condition = inner.op(inner.outputs[0])
    inner.set_op(replace(condition, inputs=(Value(inner.inputs[1]),)))
    inner.remove_dead([op.id for op in inner.ops()])
    return GraphBody(inner)


class CountedLoops(RulePass):
    name = "counted_loops"
    rules = (counted_loop,)
