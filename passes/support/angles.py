"""Angles that grow with an input: time steps, positions, coordinates, phases.

The sine of an angle depends on the angle's fraction of a turn. An angle of 500 has steps of half a radian in fp16, and of four in
bf16. So the operators that compute such an angle from inputs of the network stay in fp32, and so does the sine. Angles that a layer
with weights computes are left alone: its operands are rounded all the same.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op
from optdnn.passes.fuse_pointwise import is_pointwise
from optdnn.passes.support.chains import chain
from optdnn.passes.support.facts import shape_of
from optdnn.passes.support.guards import nodes

TURNS = frozenset({"Cos", "Sin"})
CARRIES = frozenset({"CumSum", "ReduceSum", "Resize"})
"""Kinds, besides pointwise ones and movement, that compute angles of angles."""


def angles(graph: Graph) -> dict[int, str]:
    """Op id -> the reason, for operators that compute angles from inputs, and those that take their sines."""
    if not any(TURNS & kinds for kinds in map(_kinds, graph.ops())):
        return {}
    stages = dict(nodes(graph))
    found: dict[int, str] = {}
    for step, stage in stages.items():
        if stage.kind not in TURNS:
            continue
        before, whole = chain(graph, stages, step, partial(_carries, graph))
        if whole:  # no other operator computes a part of the angle
            for i in sorted(before):
                found.setdefault(i, f"it computes an angle of {stage.kind} {stage.op.outputs[0].name} from inputs")
    return found


def _kinds(op: Op) -> set[str]:
    return {op.kind} if op.kind != "Pointwise" else {s.kind for s in op.attrs.epilogue}


def _carries(graph: Graph, op: Op) -> bool:
    if op.kind == "MatMul":  # positions by frequencies
        return (shape_of(graph, op.inputs[0]) or (0,))[-1] == 1
    return is_pointwise(op) or op.definition.traits.movement or op.kind in CARRIES
