"""Products of products with constant matrices become products with one matrix: ``(x A + a) B`` is ``x (A B) + a B``.

This applies if the first product has another reader. Gates often multiply a projection by a projection of itself: the gated
attention of PatchTSMixer (Ekambaram et al., 2023), context gating (Miech et al., 2017), gated residual networks (Lim et al., 2021).
With one matrix, the gate does not wait for the projection. Both products then read the same rows, and become one product
(:mod:`optdnn.passes.fuse_siblings`), or one launch computes both and multiplies them.

A sum of two products or convolutions with the same weights is one of the sum: ``x A + y A`` is ``(x + y) A``. CBAM (Woo et al.,
2018) computes the means and the maxima of channels by one small network, and adds the results.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.checks import elements
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import operand, producer, sizes_of
from optdnn.passes.support.linear import LINEAR
from optdnn.passes.support.products import (
    PRODUCTS,
    ConstantMatrix,
    PlainProduct,
    constant_matrix,
    multiplied,
    plain_product,
)
from optdnn.types import Array

MORE_MULTIPLICATIONS = 10_000_000
"""Most additional multiplications: they take as long as a small launch."""
MORE_WEIGHTS = 1 << 19
"""Most additional weights: reading them takes less time than a launch."""
FEW = 1_000_000
"""So many elements are added in about the time of a launch."""


@rule("product_chains", PRODUCTS)
def product_chain(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """The second product of ``(x A + a) B + b``."""
    second, before = constant_matrix(graph, op), plain_product(graph, operand(op))
    if second is None or before is None:
        return None
    if graph.sole_user(operand(op)) == op:
        return None  # a factorized matrix: its factors stay apart, since each may have its own precision or be packed
    if (why := _why_slower(graph, op, before, second, context)) is not None:
        return Miss(why)
    chains = [(op, second)]
    others = [user for user in graph.users(operand(op)) if user != op]
    if (
        len(others) == 1
    ):  # the last two readers in one rewrite: the second one, left alone, would keep the first product
        (other,) = others
        last = constant_matrix(graph, other) if other.kind in PRODUCTS and operand(other) == operand(op) else None
        if last is not None and _why_slower(graph, other, before, last, context) is None:
            chains.append((other, last))

    def build(patch: Patch) -> None:
        for product, matrix in chains:
            patch.replace(product.value, _one_product(patch, before, matrix))

    return Match(tuple(product for product, _ in chains), build)


def _one_product(patch: Patch, first: PlainProduct, second: ConstantMatrix) -> Value:
    dtype, wide = second.array.dtype, second.array.astype(np.float64)  # NumPy multiplies no bf16
    matrix = (first.weight.astype(np.float64) @ wide).astype(dtype)
    shifts: list[Array] = [] if second.bias is None else [second.bias.astype(np.float64)]
    if first.bias is not None:
        shifts.append(first.bias.astype(np.float64) @ wide)
    bias = np.broadcast_to(sum(shifts), matrix.shape[1:]).astype(dtype) if shifts else None
    return multiplied(patch, first.x, matrix, bias)


def _why_slower(graph: Graph, op: Op, first: PlainProduct, second: ConstantMatrix, context: PassContext) -> str | None:
    """Why one product would be slower than the two, or None. ``op``: the second product."""
    (inner, middle), columns = first.matrix.shape, second.shape[1]
    sizes = sizes_of(graph, op.value)
    rows = None if sizes is None else sizes[:-1]
    more = inner * columns - middle * columns
    if more <= 0:
        return None
    if more > MORE_WEIGHTS:
        return f"one matrix of {inner} x {columns} would have many more elements than the two matrices have"
    if rows is None or context.counted(math.prod(rows) * more) > MORE_MULTIPLICATIONS:
        return f"one matrix of {inner} x {columns} would take many more multiplications than the two matrices take"
    return None


@rule("sum_of_equal_layers", {"Add", "Sub"})
def sum_of_equal_layers(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``layer(x) + layer(y)`` and ``layer(x) - layer(y)``, for convolutions and products with the same weights and biases."""
    first, second = (producer(graph, v, LINEAR) for v in op.inputs)
    if first is None or second is None or first == second or first.kind != second.kind or first.attrs != second.attrs:
        return None
    x, y = operand(first), operand(second)
    if first.inputs[1] != second.inputs[1] or x == y or graph.type(x) != graph.type(y):
        return None
    bias = first.input(2)
    shift = None if bias is None else graph.constant_value(bias)
    if bias != second.input(2) or (bias is not None and shift is None):
        return None
    stages = (getattr(first.attrs, "prologue", ()), getattr(first.attrs, "epilogue", ()))
    if any(stages):
        return Miss(f"{first.name} has stages")
    if any(producer(graph, v, {"Softmax"}) is not None for v in (x, y)):
        return Miss("attention whose weights are not added is one launch")
    if graph.sole_user(first.value) is None or graph.sole_user(second.value) is None:
        return Miss("one of the results is read elsewhere")
    size = elements(graph.type(x))
    if size > elements(op.outputs[0].type) and context.counted(size) > FEW:
        return Miss("the sum of the operands would be larger than the sum of the results")

    def build(patch: Patch) -> Value:
        both = patch.add(op.kind, [x, y])
        more = [] if shift is None or op.kind == "Sub" else [patch.constant(shift * shift.dtype.type(2), "bias")]
        return patch.add(first.kind, [both, first.inputs[1], *more], first.attrs)

    return Match((op, first, second), build)


class ProductChains(RulePass):
    name = "product_chains"
    rules = (product_chain, sum_of_equal_layers)
