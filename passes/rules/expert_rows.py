"""Products of groups of rows whose sizes depend on data, each group with its own matrix, become one product.

JetMoE and GraniteMoE sort the rows of a mixture of experts by expert, split them by the number of rows of each expert, and join the
products: ``Concat(x_0 W_0, x_1 W_1, ...)``. The sizes of the parts depend on data, so no kernel can be planned for them. The number
of all rows is known. So each row selects the matrix of its group: ``x @ W[group]`` (see ``passes/selected_weights.py``).
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.index import CumulativeAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import integers, operand, reshaped
from optdnn.passes.support.selected_matrices import ROW
from optdnn.types import INT64, Array

MOST = 128
"""Largest number of groups without a kernel that reads matrices in place: it multiplies the arithmetic."""
MOST_ELEMENTS = 1 << 28
"""Most elements of all products then."""


@rule("expert_rows", {"Concat"})
def expert_rows(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Concat of the products of all parts of a Split of rows, in order."""
    products = [graph.op(v) for v in op.inputs if v is not None]
    split = graph.op(operand(products[0])) if products[0].kind in ("Gemm", "MatMul") else None
    if split is None or split.kind != "Split" or len(split.inputs) != 2 or graph.known(operand(split, 1)) is not None:
        return None
    rows = operand(split)
    dims = graph.type(rows).dims
    parts = split.values
    if len(dims) != 2 or split.attrs.axis % 2 or op.attrs.axis % 2 or [p.inputs[0] for p in products] != parts:
        return None
    taken = [_matrix(graph, p) for p in products]
    if not all(isinstance(d, int) for d in dims):
        return Miss("the number of rows is not known")
    stacks = [t for t in taken if t is not None]
    shapes = {(matrix.shape, bias is None) for matrix, bias in stacks}
    if len(stacks) < len(taken) or len(shapes) > 1:
        return Miss("its products differ in form, or their matrices are not constant")
    many, width = len(stacks), stacks[0][0].shape[1]
    (count, size) = graph.type(rows).static_shape
    in_place = context.on_gpu and size % ROW == 0
    if not in_place and (many > min(MOST, size) or count * many * width > MOST_ELEMENTS):
        return Miss(f"products of each row with all {many} matrices would take longer than products of the groups")

    def build(patch: Patch) -> Value:
        group = _groups(patch, operand(split, 1), count)
        matrices = patch.constant(np.stack([m for m, _ in stacks]), "experts")
        taken = patch.add("Gather", [matrices, group], GatherAttrs(0))
        made = patch.add("MatMul", [reshaped(patch, rows, (count, 1, size)), taken], MatMulAttrs())
        own = reshaped(patch, made, (count, width))
        if stacks[0][1] is None:
            return own
        biases = patch.constant(np.stack([b for _, b in stacks if b is not None]), "biases")
        return patch.add("Add", [own, patch.add("Gather", [biases, group], GatherAttrs(0))])

    return Match((op, *products, split), build)


def _matrix(graph: Graph, op: Op) -> tuple[Array, Array | None] | None:
    """The matrix (in, out) and bias (out) of a product without stages; None if they are not constant or there are other readers."""
    attrs = op.attrs
    if attrs.prologue or attrs.epilogue or graph.sole_user(op.value) is None or graph.sole_user(operand(op)) is None:
        return None
    weight = graph.constant_value(op.input(1))
    if weight is None or weight.ndim != 2:
        return None
    if op.kind == "MatMul":
        return weight, None
    bias = graph.constant_value(op.input(2))
    plain = GemmAttrs(transB=attrs.transB) == attrs and (op.input(2) is None or bias is not None)
    if not plain:
        return None
    matrix = weight.T if attrs.transB else weight
    return matrix, None if bias is None else np.broadcast_to(bias, (1, matrix.shape[1]))[0]


def _groups(patch: Patch, sizes: Value, count: int) -> Value:
    """Add ops that compute the group of each of ``count`` rows: the number of groups that end before it."""
    ends = patch.add("CumSum", [sizes, patch.constant(np.array(0, np.int64), "axis")], CumulativeAttrs())
    positions = patch.constant(np.arange(count).reshape(count, 1), "places")
    after = patch.add("Cast", [patch.add("GreaterOrEqual", [positions, ends])], CastAttrs(INT64))
    return patch.add("ReduceSum", [after, integers(patch, [1], "axes")], ReduceAttrs(keepdims=False))
