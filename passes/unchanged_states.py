"""States that no iteration of a Loop or Scan changes are read from outside instead.

JAX's exporters pass the weights and the sequences of ``lax.scan`` through each iteration. As states, they look as if they differed
between iterations: constants would not be known, and positions of a sequence would depend on the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.body import GraphBody
from optdnn.ir.counters import result
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, RulePass, rule
from optdnn.passes.support.facts import operand
from optdnn.passes.support.long_steps import value_behind


@rule("unchanged_states", {"Loop", "Scan"})
def unchanged_states(graph: Graph, op: Op) -> Match | None:
    """States whose next value is the state itself."""
    body: Graph = op.attrs.body.graph
    loop = op.kind == "Loop"  # its first two operands, and its first output, are its own
    first, count = (2, op.attrs.carried) if loop else (0, op.attrs.states)
    before = int(loop)
    slots = [
        first + k
        for k in range(count)
        if value_behind(body, result(body, before + k)) == Value(body.inputs[first + k])
        and op.inputs[first + k] is not None
        and graph.type(operand(op, first + k)) == body.type(Value(body.inputs[first + k]))
    ]
    if not slots:
        return None
    ports = [k - first for k in slots]

    def build(patch: Patch) -> None:
        inner = _captured(op.attrs.body, slots, [before + k for k in ports])
        changed = {"carried" if loop else "states": count - len(slots)}
        given = [*(v for k, v in enumerate(op.inputs) if k not in slots), *(op.inputs[k] for k in slots)]
        left = [k for k in range(len(op.outputs)) if k not in ports]
        names = [op.outputs[k].name for k in left]
        attrs = replace(op.attrs, body=inner, **changed)
        made = patch.add_op(op.kind, given, attrs, names=names, outputs=len(left)) if left else None
        kept = iter(() if made is None else made.values)
        results = [operand(op, first + k) if k in ports else next(kept) for k in range(len(op.outputs))]
        patch.replace_each(op.values, results)

    return Match((op,), build)


def _captured(body: GraphBody, slots: Sequence[int], ports: Sequence[int]) -> GraphBody:
    """The body with its inputs at ``slots`` at the end, and without its outputs at ``ports``."""
    inner = body.graph.copy()
    inner.share_symbols(body.graph)
    gone = [inner.outputs[k] for k in ports]
    inner.inputs = [i for k, i in enumerate(inner.inputs) if k not in slots] + [inner.inputs[k] for k in slots]
    inner.outputs = [i for i in inner.outputs if i not in gone]
    for i in gone:
        inner.remove(i)
    inner.remove_dead([op.id for op in inner.ops()])
    return GraphBody(inner)


class UnchangedStates(RulePass):
    name = "unchanged_states"
    rules = (unchanged_states,)
    gpu_only = True  # the libraries of the CPU run loops
