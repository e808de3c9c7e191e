"""A network on a GPU, launch by launch."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.trials.check import StepError, check_arena, check_steps
from optdnn.runtime.engine import Engine
from support.simulated import feeds_of, lowered

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3}


def checked_launches(graph: Graph, precision: str, bound: float = 0.0) -> list[StepError]:
    """Each launch of the network agrees with the meaning of its step and writes nothing else, and two runs give equal bits.
    ``bound``: the largest error (0: the default of the precision)."""
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert not [e for e in found if not e.error < (bound or TOLERANCE[precision])]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
    return found
