"""Decays of linear recurrences (Mamba, S4) stay in fp32 in a bf16 network.

``s[t] = a[t] * s[t - 1] + b[t]``: bf16 rounds a decay of 0.9985 to 1, so that the state never decays. fp16 has eight times as many
numbers there: after 1,000 steps, its errors are some 0.3 %.
"""

from __future__ import annotations

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.support.facts import is_pointwise


def decays(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for pointwise operators that compute sequences which a scan multiplies with its state,
    and for the operators that move elements between them."""
    found: dict[int, str] = {}
    for scan in graph.of_kind("PointwiseScan"):
        for value in _factors(scan):
            moved = list[Op]()
            op = graph.op(value)
            while op.kind not in STRUCTURAL and op.definition.traits.movement and op.inputs[0] is not None:
                moved.append(op)
                op = graph.op(op.inputs[0])
            if is_pointwise(op):
                name = scan.outputs[0].name
                found.update((one.id, f"it computes decays of the recurrence {name}") for one in (*moved, op))
    return found


def _factors(scan: Op) -> list[Value]:
    """The sequences that a stage multiplies with a state."""
    states = scan.attrs.states
    slots = set[int]()
    for stage in scan.attrs.stages:
        if stage.kind == "Mul" and min(stage.args) >= 0 and min(stage.args) < states <= max(stage.args):
            slots.add(max(stage.args))
    return [v for k in sorted(slots) if k < states + len(scan.attrs.axes) and (v := scan.inputs[k]) is not None]
