"""Sums of products in each step of an unrolled recurrence become one sum for all steps."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, integers, operand, producer, reduction_axes, reshaped, sizes_of
from optdnn.passes.support.unrolled_steps import LEAST, Position, first_of_all
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis


@rule("sums_of_steps", {"Concat"})
def sums_of_steps(graph: Graph, op: Op) -> Match | Miss | None:
    """The Concat of ``sum(x[t] * y[t])`` for all t becomes ``sum(x * y)``: the outputs of unrolled selective scans (Mamba)."""
    values = [operand(op, k) for k in range(len(op.inputs))]
    shape, part = sizes_of(graph, op.value), sizes_of(graph, values[0])
    if (
        shape is None
        or part is None
        or len(values) < LEAST
        or part[axis := normalize_axis(op.attrs.axis, len(shape))] != 1
    ):
        return None
    found = [_sum_of_products(graph, v) for v in values]
    sums = [f for f in found if f is not None]
    if len(sums) < len(values):
        return None
    first, ops = sums[0][0], [o for _, _, between in sums for o in between]
    axes, attrs = reduction_axes(graph, first), first.attrs
    if axes is None or any((s.attrs, reduction_axes(graph, s)) != (attrs, axes) for s, _, _ in sums):
        return Miss("its parts are sums over different axes")
    sides = [first_of_all(graph, [operand(product, slot) for _, product, _ in sums]) for slot in (0, 1)]
    wholes = [(p, size) for p in sides if p is not None and (size := sizes_of(graph, p.whole)) is not None]
    if len(wholes) < len(sides) or any(size[p.axis] != len(values) for p, size in wholes):
        return Miss("its parts are not sums of products of all positions of two tensors")

    def build(patch: Patch) -> Value:
        factors = [_steps_first(patch, p, size) for p, size in wholes]
        given = integers(patch, [a + 1 for a in axes], f"{op.outputs[0].name}.axes")
        total = patch.add("ReduceSum", [patch.add("Mul", factors), given], ReduceAttrs(attrs.keepdims))
        rest = [n for k, n in enumerate(part) if k != axis]
        y = reshaped(patch, total, (len(values), *rest))
        order = (*range(1, axis + 1), 0, *range(axis + 1, len(shape)))
        return transposed(patch, y, order)

    return Match((op, *ops), build)


def _steps_first(patch: Patch, p: Position, size: tuple[int, ...]) -> Value:
    """Add a Transpose and a Reshape of a tensor of positions: steps become the first axis, before the axes of a position."""
    named = [k for k in p.view if k >= 0]
    order = (p.axis, *named, *(k for k in range(len(size)) if k != p.axis and k not in named))
    return reshaped(
        patch, transposed(patch, p.whole, order), (size[p.axis], *(1 if k < 0 else size[k] for k in p.view))
    )


def _sum_of_products(graph: Graph, value: Value) -> tuple[Op, Op, list[Op]] | None:
    """(sum, product, all operators) if ``value`` is a sum of products, possibly reshaped, and each operator has one reader."""
    between: list[Op] = []
    while graph.sole_user(value) is not None:
        op = graph.op(value)
        between.append(op)
        if op.kind == "ReduceSum":
            product = producer(graph, operand(op), {"Mul"}, alone=True)
            return None if product is None else (op, product, [*between, product])
        if op.kind not in RESHAPES:
            break
        value = operand(op)
    return None
