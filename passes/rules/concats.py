"""Concats: whole values in place of all their parts, and operators that move in front of a Concat of convolutions.

Mixed depthwise convolutions (Tan and Le, 2019) and cross-stage partial networks (Wang et al., 2020) put the results of several
convolutions side by side, and normalize and activate all of them together. Moved in front, weights and epilogues absorb these.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import normalize_axis

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


def _joined(graph: Graph, op: Op) -> Op | Miss | None:
    """The Concat of channels that only ``op`` reads, of convolutions that only it reads; None where there is no such Concat."""
    concat = producer(graph, op.inputs[0], {"Concat"}, alone=True)
    if concat is None or normalize_axis(concat.attrs.axis, len(concat.outputs[0].type.dims)) != 1:
        return None
    convolutions = [producer(graph, v, CONVOLUTIONS) for v in concat.inputs]
    if not any(convolutions):
        return None
    if any(c is None or graph.use_count(c.value) > 1 for c in convolutions):
        return Miss("the Concat before it has parts that are no convolutions' results, or are read elsewhere")
    return concat


@rule("concat_of_split", {"Concat"})
def concat_of_split(graph: Graph, op: Op) -> Match | None:
    """``concat(a, b, c)``, where a and b are all parts of a Split of x in their order, is ``concat(x, c)`` (C2f of YOLOv8).

    So the operator that computes x can write it in place.
    """
    axis, parts = normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)), list(op.inputs)
    for at, value in enumerate(parts):
        split = None if value is None or value.port else producer(graph, value, {"Split"})
        if split is None or normalize_axis(split.attrs.axis, len(op.outputs[0].type.dims)) != axis:
            continue
        end = at + len(split.outputs)
        if parts[at:end] == [Value(split.id, port) for port in range(len(split.outputs))]:
            parts[at:end] = [operand(split)]
            return Match((op,), lambda patch: patch.add("Concat", parts, op.attrs))
    return None


@rule("bn_of_parts", {"BatchNormalization"})
def bn_of_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """``bn(concat(conv, conv))`` is ``concat(bn(conv), bn(conv))``, each with the statistics of its own channels."""
    concat = _joined(graph, op)
    if concat is None or isinstance(concat, Miss):
        return concat
    dims = [graph.type(operand(concat, i)).dims[1] for i in range(len(concat.inputs))]
    widths = [d for d in dims if isinstance(d, int)]
    statistics = [s for v in op.inputs[1:5] if (s := graph.constant_value(v)) is not None]
    if len(widths) < len(dims) or len(statistics) < 4:
        return Miss("its statistics or the widths of the parts are not constant")
    bounds = list(pairwise(accumulate(widths, initial=0)))

    def build(patch: Patch) -> Value:
        parts = []
        for part, (start, end) in zip(concat.inputs, bounds, strict=True):
            own = [patch.constant(s[start:end].copy(), "statistic") for s in statistics]
            parts.append(patch.add("BatchNormalization", [part, *own], op.attrs))
        return patch.add("Concat", parts, concat.attrs, src=concat.src)

    return Match((op, concat), build)


@rule("activation_of_parts", ACTIVATIONS)
def activation_of_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(concat(conv, conv))`` is ``concat(f(conv), f(conv))``, where f reads nothing else but numbers."""
    concat = _joined(graph, op)
    if concat is None or isinstance(concat, Miss):
        return concat
    numbers = [graph.constant_value(v) for v in op.inputs[1:] if v is not None]
    if any(n is None or n.size > 1 for n in numbers):
        return Miss("it reads more than numbers beside the Concat")

    def build(patch: Patch) -> Value:
        parts = [patch.add(op.kind, [part, *op.inputs[1:]], op.attrs) for part in concat.inputs]
        return patch.add("Concat", parts, concat.attrs, src=concat.src)

    return Match((op, concat), build)
