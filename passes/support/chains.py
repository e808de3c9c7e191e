"""Chains of operators before an operator, as far back as a rounding error would pass through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from optdnn.ir.graph import Graph, Op
from optdnn.passes.support.guards import Stage, StageId
from optdnn.types import is_float


def chain(
    graph: Graph, stages: Mapping[StageId, Stage], last: StageId, carries: Callable[[Op], bool]
) -> tuple[set[int], bool]:
    """The ids of the operators before ``last`` for which ``carries`` is True, including its own; and whether the chain is whole.

    A whole chain begins only at inputs, constants and integers. Otherwise a part of it begins at an operator for which ``carries``
    is False.
    """
    found, seen, wanted, whole = set[int](), {last}, [last], True
    while wanted:
        stage = stages[wanted.pop()]
        found.add(stage.op.id)
        for a in stage.args:
            if not isinstance(a, tuple) or a in seen:
                continue
            seen.add(a)
            op = graph.op(a[0])
            if op.kind in ("Constant", "Input") or not is_float(op.outputs[0].type.dtype):
                continue
            before = a if a in stages else (op.id, 0)  # another result of the same operator
            if before in stages and carries(op):
                wanted.append(before)
            else:
                whole = False
    return found, whole
