"""Loops that end by a condition on counters get the number of their iterations: TensorFlow's ``while i < n``.

The condition is computed from numbers that only the iterations change: counters, with known first values. So the number of
iterations is known when the network is built, by counting them. Results that the iterations stack then have known sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from optdnn.ir.counters import TRIPS, counters, number_of_iterations, result, without_condition
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.bodies import LoopAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES
from optdnn.passes.unroll import goes_on, number_of


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
    needed = counters(body, op.attrs.carried, [result(body, 0)])
    found = None if needed is None else needed.iterations(lambda place: graph.known(op.inputs[place]))
    if found is None:
        return Miss("its condition depends on data")
    trips = number_of_iterations(found, limit) if begins else 0
    if trips is None:
        return Miss(f"it runs more than {TRIPS} times, or its condition cannot be evaluated")
    attrs = LoopAttrs(without_condition(op.attrs.body), op.attrs.carried)
    return Match((op,), partial(_counted, op, trips, (None, *op.inputs[2:]), attrs))


def _counted(op: Op, trips: int, others: Sequence[Value | None], attrs: LoopAttrs, patch: Patch) -> None:
    """The Loop with this number of iterations, and with its ``others`` operands."""
    number, names = patch.constant(np.array(trips, np.int64), "trips"), [o.name for o in op.outputs]
    made = patch.add_op("Loop", [number, *others], attrs, names=names, outputs=len(names))
    patch.replace_each(op.values, made.values)


@rule("bounded_loop", {"Loop"})
def bounded_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop that ends by a counter at the latest, ``while i < n and not done``, gets a trip count. Its condition stays."""
    body: Graph = op.attrs.body.graph
    limit = number_of(graph, op.input(0))
    if goes_on(body) or (limit is None and op.input(0) is not None):
        return None
    bounds: list[int] = []
    for part in _conjuncts(body, result(body, 0)):
        needed = counters(body, op.attrs.carried, [part])
        found = None if needed is None else needed.iterations(lambda place: graph.known(op.inputs[place]))
        trips = None if found is None else number_of_iterations(found, limit)
        bounds += [] if trips is None else [trips]
    if not bounds or (limit is not None and min(bounds) >= limit):
        return None
    return Match((op,), partial(_counted, op, min(bounds), op.inputs[1:], op.attrs))


def _conjuncts(body: Graph, condition: Value) -> list[Value]:
    """The conditions that all have to be true, if there are several."""
    left, found = [condition], list[Value]()
    while left:
        op = body.op(value := left.pop())
        if op.kind == "And" or op.kind in ("Identity", *RESHAPES):
            left += [v for v in op.inputs[: 2 if op.kind == "And" else 1] if v is not None]
        else:
            found.append(value)
    return found if len(found) > 1 else []


class CountedLoops(RulePass):
    name = "counted_loops"
    rules = (counted_loop, bounded_loop)
