"""Stages move in front of the Reshape between them and a product or convolution, whose epilogue then takes them in."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, scalar
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS, refuses

STAGES = ACTIVATIONS | ADDITIONS | SCALINGS


@rule("stage_before_reshape", STAGES)
def stage_before_reshape(graph: Graph, op: Op) -> Match | None:
    """``f(reshape(x W))`` is ``reshape(f(x W))``, where f reads nothing else but numbers: the root of a sum (StyleGAN2)."""
    reshape = _before(graph, op, RESHAPES)
    if reshape is None or refuses(graph, op, reshape.value) is not None:
        return None
    views = [reshape]
    while (view := producer(graph, operand(views[-1]), RESHAPES, alone=True)) is not None:
        views.append(view)
    source = operand(views[-1])
    made = graph.op(source)
    while made.kind in STAGES and (before := _before(graph, made, ANCHORS | STAGES)) is not None:
        made = before
    if made.kind not in ANCHORS or graph.sole_user(source) != views[-1]:
        return None

    def build(patch: Patch) -> Value:
        y = patch.add(op.kind, [source if v == reshape.value else v for v in op.inputs], op.attrs, src=op.src)
        for each in reversed(views):
            y = patch.add(each.kind, [y, *each.inputs[1:]], each.attrs, src=each.src)
        return y

    return Match((op, *views), build)


def _before(graph: Graph, op: Op, kinds: frozenset[str]) -> Op | None:
    """The operator of these kinds whose result only ``op`` reads; all else that it reads are numbers."""
    found: Op | None = None
    for value in op.inputs:
        if value is None or scalar(graph, value) is not None:
            continue
        if found is not None or (found := producer(graph, value, kinds, alone=True)) is None:
            return None
    return found
