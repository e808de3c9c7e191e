"""Sums and products of all elements up to each one become one operator: exporters write them in steps that double their reach.

Each step combines every element with the one ``reach`` places before it (Hillis and Steele, 1986). `from_torch` exports ``cumprod``
in this way, since ONNX has no such operator before opset 26: the transmittance of NeRF (Mildenhall et al., 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import CumulativeAttrs
from optdnn.passes.base import Match, RulePass, rule
from optdnn.passes.support.facts import ints, operand, producer, scalar

_SCANS = {"Add": ("CumSum", 0), "Mul": ("CumProd", 1)}
"""The operator of each step: the operator of all steps, and the number that stands outside of the tensor."""

LEAST = 2
"""Fewest steps that become one operator."""


@dataclass(frozen=True)
class _Step:
    """``x`` combined with itself, moved by ``reach`` places along ``axis`` (below 0: toward the first element)."""

    x: Value
    axis: int
    reach: int
    ops: tuple[Op, Op]


def _step(graph: Graph, op: Op) -> _Step | None:
    if op.kind not in _SCANS:
        return None
    for slot in (0, 1):
        pad, x = producer(graph, op.inputs[slot], {"Pad"}, alone=True), operand(op, 1 - slot)
        if pad is None or operand(pad) != x or pad.attrs.mode != "constant" or pad.input(3) is not None:
            continue
        pads, filler = ints(graph, pad.input(1)), 0 if pad.input(2) is None else scalar(graph, pad.input(2))
        if pads is None or filler != _SCANS[op.kind][1]:
            continue
        rank = len(pads) // 2
        moved = [axis for axis in range(rank) if pads[axis] or pads[axis + rank]]
        if len(moved) == 1 and pads[moved[0]] == -pads[moved[0] + rank]:
            return _Step(x, moved[0], pads[moved[0]], (op, pad))
    return None


@rule("doubled_scan", {"Add", "Mul"})
def doubled_scan(graph: Graph, op: Op) -> Match | None:
    """The last of all steps: their reaches are 1, 2, 4, …, and reach the whole axis together."""
    last = _step(graph, op)
    if last is None:
        return None
    steps, size = [last], graph.type(op.value).dims[last.axis]
    if not isinstance(size, int) or not size <= 2 * abs(last.reach):
        return None
    while abs(steps[-1].reach) > 1:
        after, before = steps[-1], _step(graph, graph.op(steps[-1].x))
        if before is None or graph.op(after.x).kind != op.kind or len(graph.users(after.x)) != 2:
            return None
        if before.axis != after.axis or before.reach * 2 != after.reach:
            return None
        steps.append(before)
    if len(steps) < LEAST:
        return None

    def build(patch: Patch) -> Value:
        axis = patch.constant(np.asarray(last.axis, np.int64), "axis")
        return patch.add(_SCANS[op.kind][0], [steps[-1].x, axis], CumulativeAttrs(reverse=last.reach < 0))

    return Match(tuple(one for step in steps for one in step.ops), build)


class DoubledScans(RulePass):
    """For GPUs only, which have a kernel for it."""

    name = "doubled_scans"
    rules = (doubled_scan,)
