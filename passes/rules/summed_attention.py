"""Attention of one query that is written as multiplications and sums.

Recommenders (DIN: Zhou et al., 2018), memory networks (Sukhbaatar et al., 2015) and pooled sequences write it so. Scores are sums
of ``keys * query`` over the features, and the result is a sum of ``weights * values`` over the keys. As an attention it is one
launch, unless the keys are many: sums read them with all multiprocessors, and an attention those of a query with one.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.dim import bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.reduce import reduced_axes
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, producer, scalar
from optdnn.types import Shape

MOST_FEATURES = 256
"""Most features of a query."""
MOST_ELEMENTS, MOST_WIDE_ELEMENTS = 1 << 16, 1 << 13
"""Most elements of the keys of a query at 16 bits, and in fp32."""
WIDE = frozenset({"fp32", "fp64", "tf32"})


@dataclass(frozen=True)
class _Sum:
    """A ReduceSum of a product of ``whole`` and a tensor that is repeated along the last axis or the one before it."""

    op: Op
    product: Op
    whole: Value
    repeated: Value


@rule("summed_attention", {"ReduceSum"})
def summed_attention(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``sum(softmax(sum(k * q, features) * scale) * v, keys)``, with keys [batch, (heads,) keys, features]."""
    return _match(graph, op, MOST_WIDE_ELEMENTS if context.only_precision in WIDE else MOST_ELEMENTS)


def _match(graph: Graph, op: Op, most: int) -> Match | Miss | None:
    weighted = _sum(graph, op, -2)
    softmax = None if weighted is None else _softmax(graph, weighted.repeated, graph.type(weighted.whole).dims)
    if weighted is None or softmax is None:
        return None
    scale, between, value = 1.0, list[Op](), operand(softmax)
    while (factor := producer(graph, value, {"Mul", "Div"}, alone=True)) is not None:
        number = scalar(graph, operand(factor, 1))
        if not number:
            break
        scale *= number if factor.kind == "Mul" else 1 / number
        between.append(factor)
        value = operand(factor)
    while (view := producer(graph, value, RESHAPES, alone=True)) is not None:
        between.append(view)
        value = operand(view)
    added = producer(graph, value, {"ReduceSum"}, alone=True)
    dots = None if added is None else _sum(graph, added, -1)
    if dots is None:
        return None
    dims, keys = graph.type(weighted.whole).dims, graph.type(dots.whole).dims
    if keys != dims:
        return Miss("keys and values have different shapes")
    if not isinstance(dims[-1], int) or dims[-1] > MOST_FEATURES:
        return Miss(f"it has {dims[-1]} features, more than {MOST_FEATURES}")
    if bounds(dims[-2])[1] * dims[-1] > most:
        return Miss(f"the keys of a query have more than {most} elements: sums read them faster")
    if scale <= 0:
        return Miss(f"the scores are multiplied by {scale:g}; a scale is positive")
    if graph.sole_user(softmax.value) is None:
        return Miss("its weights are used elsewhere")

    def build(patch: Patch) -> Value:
        heads = len(dims) == 4
        given = (dots.repeated, dots.whole, weighted.whole)
        q, k, v = (x if heads else patch.add("Unsqueeze", [x, integers(patch, [1], "axis")]) for x in given)
        y = patch.add("Attention", [q, k, v], AttentionAttrs(scale=scale))
        drop = [*([] if heads else [1]), *([] if op.attrs.keepdims else [2])]
        return patch.add("Squeeze", [y, integers(patch, drop, "axes")]) if drop else y

    return Match((op, weighted.product, softmax, *between, dots.op, dots.product), build)


def _sum(graph: Graph, op: Op, axis: int) -> _Sum | None:
    """The sum along ``axis`` (-1: features, -2: keys) of a product. One factor is repeated along the other axis."""
    product = producer(graph, operand(op), {"Mul"}, alone=True)
    dims = graph.type(operand(op)).dims if product is not None else ()
    if product is None or len(dims) not in (3, 4):
        return None
    if reduced_axes(op.attrs, ints(graph, op.input(1)), len(dims)) != (len(dims) + axis,):
        return None
    repeated = (*dims[:-1], 1) if axis == -2 else (*dims[:-2], 1, dims[-1])
    for i in (0, 1):
        whole, other = operand(product, i), operand(product, 1 - i)
        if graph.type(whole).dims == dims and graph.type(other).dims == repeated:
            return _Sum(op, product, whole, other)
    return None


def _softmax(graph: Graph, weights: Value, dims: Shape) -> Op | None:
    """The softmax over the keys that gives ``weights`` [batch, …, keys, 1], or a view of them."""
    value = weights
    while (view := producer(graph, value, RESHAPES, alone=True)) is not None:
        value = operand(view)
    softmax, shape = producer(graph, value, {"Softmax"}), graph.type(value).dims
    if softmax is None or shape not in (dims[:-1], (*dims[:-1], 1)):
        return None
    return softmax if softmax.attrs.axis % len(shape) == len(dims) - 2 else None
