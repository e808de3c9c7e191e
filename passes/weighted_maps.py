"""Values under a weighted sum of attention maps become the sum of an attention and a product.

Gated positional attention (d'Ascoli et al., "ConViT", 2021) multiplies the values by ``(1 - g) softmax(q k^T) + g P``, divided by
the sums of its rows. ``P`` are constant maps of positions, ``g`` is a number of each head. The difference of two softmaxes (Ye et
al., "Differential Transformer", 2024) has the same form. A product distributes over such a sum, and each row of a softmax adds up
to one. So no map has to be stored: an attention takes the values for each softmax, and one product for the constant maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.attention_scores import find_scores, has_stages
from optdnn.passes.support.facts import depends_on_inputs, integers, operand, producer, reduction_axes
from optdnn.types import normalize_axis

MOST = 4
"""Most products of a sum: each of them takes a launch."""
WIDEST = 256
"""Most features of a value: with more, a further product takes longer than storing the maps."""


@dataclass(frozen=True)
class Term:
    """``sign * weight * softmax``, or ``sign * maps`` if there is no softmax. A weight of None is 1."""

    maps: Value
    softmax: Op | None = None
    weight: Value | None = None
    sign: int = 1


@rule("weighted_maps", {"MatMul"})
def weighted_maps(graph: Graph, op: Op) -> Match | Miss | None:
    """A product of a weighted sum of maps with values."""
    divided = _divided(graph, operand(op))
    maps = operand(divided[0]) if divided else operand(op)
    if has_stages(op) or graph.op(maps).kind not in ("Add", "Sub"):
        return None
    ops = [op, *divided]
    terms = list(_terms(graph, maps, ops, 2 if divided else 1))
    if all(t.softmax is None for t in terms):
        return None
    if why := _refused(graph, op, terms):
        return Miss(why)
    return Match(tuple(ops), lambda patch: _apart(patch, op, terms, divided=bool(divided)))


def _divided(graph: Graph, value: Value) -> tuple[Op, ...]:
    """The operators that divide maps by the sums of their rows, the Div first; none if ``value`` is no such quotient."""
    div = producer(graph, value, {"Div"}, alone=True)
    if div is None:
        return ()
    view = producer(graph, div.inputs[1], {"Reshape", "Unsqueeze"}, alone=True)
    sums = producer(graph, div.inputs[1] if view is None else view.inputs[0], {"ReduceSum"}, alone=True)
    shape = graph.type(operand(div)).dims
    if sums is None or sums.inputs[0] != div.inputs[0] or graph.type(operand(div, 1)).dims != (*shape[:-1], 1):
        return ()
    if reduction_axes(graph, sums) != (len(shape) - 1,):
        return ()
    return (div, sums) if view is None else (div, view, sums)


def _terms(graph: Graph, value: Value, ops: list[Op], uses: int = 1) -> Iterator[Term]:
    """The terms of the sum ``value``, which has so many readers. ``ops`` gets the operators of the sum."""
    op = graph.op(value)
    alone = graph.use_count(value) == uses and len(ops) <= 3 * MOST
    if alone and op.kind in ("Add", "Sub"):
        ops.append(op)
        yield from _terms(graph, operand(op), ops)
        for term in _terms(graph, operand(op, 1), ops):
            yield term if op.kind == "Add" else replace(term, sign=-term.sign)
    elif alone and op.kind == "Softmax" and depends_on_inputs(graph, value):
        yield Term(value, op)
    elif alone and op.kind == "Mul":
        for v, weight in zip(op.inputs, reversed(op.inputs), strict=True):
            softmax = producer(graph, v, {"Softmax"}, alone=True)
            constant = weight is not None and not depends_on_inputs(graph, weight)
            if softmax is not None and constant and depends_on_inputs(graph, softmax.value):
                ops.append(op)
                yield Term(softmax.value, softmax, weight)
                return
        yield Term(value)
    else:
        yield Term(value)


def _refused(graph: Graph, op: Op, terms: list[Term]) -> str | None:
    """Why the product cannot be taken apart, or should not be, or None."""
    shape, values = graph.type(operand(op)).dims, graph.type(operand(op, 1))
    products = sum(t.softmax is not None for t in terms) + any(t.softmax is None for t in terms)
    if products > MOST:
        return f"its maps are a sum that takes {products} products"
    if len(shape) < 3 or values.rank != len(shape) or not isinstance(values.dims[-1], int) or values.dims[-1] > WIDEST:
        return f"its values are not rows of at most {WIDEST} features, one for each key"
    for term in terms:
        dims = graph.type(term.maps).dims
        if term.softmax is None and (depends_on_inputs(graph, term.maps) or dims[-2:] != shape[-2:]):
            return "its maps are a sum of a softmax and others that are not constant maps"
        if term.softmax is None:
            continue
        if normalize_axis(term.softmax.attrs.axis, len(shape)) != len(shape) - 1 or dims != shape:
            return "a softmax is not over the keys, or its maps are repeated"
        if term.weight is not None and (graph.type(term.weight).dims or (1,))[-1] != 1:
            return "a factor of a softmax differs from key to key"
        scores = find_scores(graph, term.softmax.inputs[0], values.dtype)
        if isinstance(scores, Miss):
            return scores.reason
    return None


def _apart(patch: Patch, op: Op, terms: list[Term], *, divided: bool) -> Value:
    """The sum of the products. Factors and constant maps are divided by the sums of the rows, which are constants.

    Constant maps are added before the product: large ones that cancel would lose all digits of fp16 after it."""
    values = operand(op, 1)
    constants = [(t.sign, t.maps) for t in terms if t.softmax is None]
    terms = [t for t in terms if t.softmax is not None]
    if constants:
        terms.append(Term(_sum(patch, constants)))
    if divided:
        terms = _normalized(patch, terms)
    parts = list[tuple[int, Value]]()
    for term in terms:
        y = patch.add("MatMul", [term.maps, values], MatMulAttrs())
        parts.append((term.sign, y if term.weight is None else patch.add("Mul", [y, term.weight])))
    return _sum(patch, parts)


def _normalized(patch: Patch, terms: list[Term]) -> list[Term]:
    """The terms divided by the sums of the rows of all terms together. A row of a softmax adds up to one."""
    one = patch.constant(np.ones(1, patch.type(terms[0].maps).dtype), "one")
    sums = list[tuple[int, Value]]()
    for term in terms:
        maps = [term.maps, integers(patch, [-1], "axes")]
        sums.append(
            (term.sign, (term.weight or one) if term.softmax else patch.add("ReduceSum", maps, ReduceAttrs(True)))
        )
    total = _sum(patch, sums)
    return [
        replace(term, weight=patch.add("Div", [term.weight or one, total]))
        if term.softmax
        else replace(term, maps=patch.add("Div", [term.maps, total]))
        for term in terms
    ]


def _sum(patch: Patch, terms: list[tuple[int, Value]]) -> Value:
    """The sum of terms with signs; those that are added come first."""
    (sign, result), *others = sorted(terms, key=lambda t: -t[0])
    if sign < 0:
        result = patch.add("Neg", [result])
    for sign, value in others:
        result = patch.add("Add" if sign > 0 else "Sub", [result, value])
    return result


class WeightedMaps(RulePass):
    name = "weighted_maps"
    rules = (weighted_maps,)
