"""Loops that end by a condition on counters get the number of their iterations: TensorFlow's ``while i < n``.

The condition is computed from numbers that only the iterations change: counters, with known first values. So the number of
iterations is known when the network is built, by counting them. Results that the iterations stack then have known sizes.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.counters import TRIPS, counters, number_of_iterations, result, without_condition
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.bodies import LoopAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
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

    def build(patch: Patch) -> None:
        number = patch.constant(np.array(trips, np.int64), "trips")
        names = [o.name for o in op.outputs]
        made = patch.add_op("Loop", [number, None, *op.inputs[2:]], attrs, names=names, outputs=len(names))
        for port in range(len(names)):
            if graph.uses(Value(op.id, port)):
                patch.replace(Value(op.id, port), Value(made.id, port))

    return Match((op,), build)


class CountedLoops(RulePass):
    name = "counted_loops"
    rules = (counted_loop,)
