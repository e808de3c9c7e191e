"""Angles that grow with an input (time steps, positions, coordinates, phases) stay in fp32.

The sine of an angle depends on the angle modulo a full turn. At an angle of 500, the step between neighboring numbers is half a
radian in fp16 and four radians in bf16. So the operators that compute such an angle from inputs of the network stay in fp32, and so
does the sine. Angles that a layer with weights computes may be rounded, since the operands of that layer are rounded anyway.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op
from optdnn.passes.support.chains import chain
from optdnn.passes.support.coordinates import kinds_of
from optdnn.passes.support.facts import is_pointwise, shape_of
from optdnn.passes.support.guards import nodes

TRIGONOMETRIC = frozenset({"Cos", "Sin"})
CARRIES = frozenset({"CumSum", "ReduceSum", "Resize"})
"""Kinds that compute angles from angles, besides pointwise operators and operators that only move elements."""


def angles(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for operators that compute angles from inputs or take the sine of such an angle."""
    if not any(TRIGONOMETRIC & kinds for kinds in map(kinds_of, graph.ops())):
        return {}
    stages = dict(nodes(graph))
    found: dict[int, str] = {}
    for step, stage in stages.items():
        if stage.kind not in TRIGONOMETRIC:
            continue
        before, whole = chain(graph, stages, step, partial(_carries, graph))
        if whole:  # no other operator computes a part of the angle
            for i in sorted(before):
                found.setdefault(i, f"it computes an angle of {stage.kind} {stage.op.outputs[0].name} from inputs")
    return found


def _carries(graph: Graph, op: Op) -> bool:
    if op.kind == "MatMul":  # positions by frequencies
        return (shape_of(graph, op.inputs[0]) or (0,))[-1] == 1
    return is_pointwise(op) or op.definition.traits.movement or op.kind in CARRIES
