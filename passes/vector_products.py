"""Products of one tensor with constant vectors become one product with a matrix, for which there are faster kernels.

Graph attention (Velickovic et al., 2018) multiplies the features of each node by two vectors, one for each end of an edge. A cross
network (Wang et al., 2017) multiplies its rows by one vector in each layer. If the features are themselves a product with a
constant matrix, the vectors are multiplied by this matrix in the build. Then both products read one operand, and become one
(:mod:`optdnn.passes.fuse_siblings`).
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, producer, shape_of
from optdnn.passes.support.products import PRODUCTS, multiplied
from optdnn.types import Array, is_float

COLUMNS = 8
"""A matrix that is joined with others gets zeros up to a multiple of 8 columns: TMA needs aligned rows of 16-bit floats."""


def _vector(graph: Graph, op: Op) -> Array | None:
    """The constant vector that a MatMul without stages multiplies with the last axis of its first operand; None for other ops."""
    if op.kind != "MatMul" or op.attrs.prologue or op.attrs.epilogue:
        return None
    array, shape = graph.constant_value(op.inputs[1]), shape_of(graph, op.inputs[0])
    fits = array is not None and array.ndim == 1 and shape is not None and len(shape) > 1 and is_float(array.dtype)
    return array if fits else None


@rule("vector_products", {"MatMul"})
def vector_products(graph: Graph, op: Op) -> Match | Miss | None:
    """Rewrites all products of one tensor with constant vectors at once."""
    if _vector(graph, op) is None:
        return None
    x = operand(op)
    members = [u for u in graph.users(x) if u.inputs[0] == x and _vector(graph, u) is not None]
    turn = producer(graph, x, {"Transpose"}, alone=True)
    if turn is not None and turn.attrs.perm is not None and turn.attrs.perm[-1] != len(turn.attrs.perm) - 1:
        return Miss("kernels for vectors read transposed rows in place, and those for matrices would need a copy")
    vectors = np.stack([v for u in members if (v := _vector(graph, u)) is not None], 1)
    matrix = np.zeros((len(vectors), -(-len(members) // COLUMNS) * COLUMNS), vectors.dtype)
    matrix[:, : len(members)] = vectors
    source, weights, bias = _composed(graph, x, matrix)
    if len(members) == 1 and not any(u.kind in PRODUCTS and u is not op for u in graph.users(source)):
        weights, bias = weights[:, :1], None if bias is None else bias[:1]  # a column that joins no other matrix
    axis = len(graph.type(x).dims) - 1

    def build(patch: Patch) -> None:
        y = multiplied(patch, source, weights, bias)
        for k, member in enumerate(members):
            column = patch.constant(np.array(k, np.int64), "column")
            patch.replace(member.value, patch.add("Gather", [y, column], GatherAttrs(axis)))

    return Match(tuple(members), build)


def _composed(graph: Graph, x: Value, matrix: Array) -> tuple[Value, Array, Array | None]:
    """A tensor, matrix and bias that give the product of ``x`` with ``matrix``.

    If ``x`` is a product with a constant matrix, perhaps with a bias, the two matrices are composed. This product must not have
    more than twice as many features as ``x``."""
    add = producer(graph, x, {"Add"})
    bias: Array | None = None
    before_bias: Value | None = x
    for slot in (0, 1) if add is not None else ():
        array = graph.constant_value(add.inputs[slot]) if add is not None else None
        if add is not None and array is not None and array.ndim <= 1:
            before_bias, bias = add.inputs[1 - slot], array
    product = producer(graph, before_bias, {"MatMul"})
    weights = None if product is None else graph.constant_value(product.inputs[1])
    if product is None or weights is None or weights.ndim != 2 or product.attrs.prologue or product.attrs.epilogue:
        return x, matrix, None
    if len(weights) > 2 * weights.shape[1]:
        return x, matrix, None
    wide, dtype = matrix.astype(np.float64), matrix.dtype  # NumPy multiplies no bf16
    shift = None if bias is None else (np.broadcast_to(bias, len(matrix)).astype(np.float64) @ wide).astype(dtype)
    return operand(product), (weights.astype(np.float64) @ wide).astype(dtype), shift


class VectorProducts(RulePass):
    name = "vector_products"
    rules = (vector_products,)
