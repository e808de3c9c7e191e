"""What does not change which element is the largest is not computed before an ArgMax or ArgMin.

Vector quantizers (VQ-VAE: van den Oord et al., 2017; the audio codecs SoundStream, EnCodec and DAC) look for the nearest code by
``argmin |x|^2 - 2 x c + |c|^2``. ``|x|^2`` is the same for all codes. Rounding is monotone, so that the rewritten operator finds a
largest element also of the rounded values. Which one of nearly equal elements it finds may depend on the sum's rounding, which
becomes smaller.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import operand, producer, scalar
from optdnn.types import is_float, normalize_axis

OPPOSITE = {"ArgMax": "ArgMin", "ArgMin": "ArgMax"}
_SUMS = frozenset({"Add", "Sub"})
_SCALED = frozenset({"Div", "Mul"})
_GROWING = frozenset({"LogSoftmax", "Softmax", "Sqrt"})
"""Operators that keep the order of the elements, softmaxes along the axis of the search."""


@rule("largest_of_growing", {"ArgMax", "ArgMin"})
def largest_of_growing(graph: Graph, op: Op) -> Match | None:
    """Reads in front of a softmax, a root, a negation, or a multiplication by a constant number."""
    before = producer(graph, operand(op), {"Neg", *_SCALED, *_GROWING})
    if before is None or not is_float(before.outputs[0].type.dtype) or not before.outputs[0].type.rank:
        return None
    factor, x = 1.0, operand(before)
    if before.kind in ("LogSoftmax", "Softmax"):
        rank = len(before.outputs[0].type.dims)
        if normalize_axis(before.attrs.axis, rank) != normalize_axis(op.attrs.axis, rank):
            return None
    elif before.kind == "Neg":
        factor = -1.0
    elif before.kind in _SCALED:
        number = scalar(graph, before.inputs[1])
        if number is None or not number or graph.type(x).shape != before.outputs[0].type.shape:
            return None
        factor = number
    kind = op.kind if factor > 0 else OPPOSITE[op.kind]
    return Match((op,), lambda patch: patch.add(kind, [x], op.attrs))


@rule("largest_of_sum", {"ArgMax", "ArgMin"})
def largest_of_sum(graph: Graph, op: Op) -> Match | None:
    """Leaves out the terms of a sum that are constant along the axis of the search."""
    whole = graph.type(operand(op))
    if not whole.shape or not is_float(whole.dtype):
        return None
    terms = _terms(graph, operand(op), True, alone=False)
    axis = normalize_axis(op.attrs.axis, len(whole.dims)) - len(whole.dims)
    kept = [(v, plus) for v, plus in terms if len(s := graph.type(v).dims) >= -axis and s[axis] != 1]
    if len(kept) == len(terms) or not any(graph.type(v).shape == whole.shape for v, _ in kept):
        return None

    def build(patch: Patch) -> Value:
        kind = op.kind if any(plus for _, plus in kept) else OPPOSITE[op.kind]
        (first, _), *rest = sorted(kept, key=lambda term: not term[1])
        for value, plus in rest:
            first = patch.add("Add" if plus or kind != op.kind else "Sub", [first, value])
        return patch.add(kind, [first], op.attrs)

    return Match((op,), build)


def _terms(graph: Graph, value: Value, plus: bool, *, alone: bool = True) -> list[tuple[Value, bool]]:
    """The terms of a sum, and whether each is added."""
    op = producer(graph, value, _SUMS, alone=alone)
    if op is None:
        return [(value, plus)]
    second = plus if op.kind == "Add" else not plus
    return [*_terms(graph, operand(op), plus), *_terms(graph, operand(op, 1), second)]
