"""A network on a GPU, launch by launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.trials.check import StepError, check_arena, check_steps
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program
from support.simulated import TOLERANCE, feeds_of, lowered


def checked_launches(graph: Graph, precision: str, bound: float = 0.0) -> list[StepError]:
    """:func:`checked_program` of the network in this precision. ``bound`` 0: the default of the precision."""
    program = lowered(graph, precision, target="cuda:sm_90a")
    return checked_program(program, feeds_of(graph), bound or TOLERANCE[precision])


def launch_errors(program: Program, graph: Graph, *kinds: str) -> list[float]:
    """The error of each launch of these kinds, against its step's meaning. There is at least one."""
    context: Any = Engine(program).context()
    found = [e.error for e in check_steps(context, feeds_of(graph)) if e.kind in kinds]
    assert found
    return found


def checked_program(program: Program, feeds: Mapping[str, Any], bound: float, runs: int = 2) -> list[StepError]:
    """Each launch agrees with its step's meaning, with errors below ``bound``, and writes nothing else. ``runs`` runs give equal
    bits."""
    context: Any = Engine(program).context()
    found = check_steps(context, feeds)
    assert found
    assert not [e for e in found if not e.error < bound]
    assert not check_arena(context.runner, feeds)
    first = context.run(feeds)
    for _ in range(runs - 1):
        again = context.run(feeds)
        assert all(first[k].tobytes() == again[k].tobytes() for k in first)
    return found
