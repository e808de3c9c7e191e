"""Recognizes products of rows with a constant matrix, and vectors that are added to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.support.facts import operand, producer
from optdnn.types import Array

PRODUCTS = frozenset({"MatMul", "Gemm"})


def output_axis(op: Op) -> int:
    """The axis of output channels (0 or 1) in the weights of a product or convolution. The other one has the input channels."""
    return 0 if op.kind in ("Conv", "PackedMatMul") or (op.kind == "Gemm" and op.attrs.transB) else 1


def added_vector(graph: Graph, op: Op) -> tuple[Value, Array] | None:
    """(operand, vector) of an addition whose other operand is a constant that varies only along the last axis; None for others."""
    for i in (0, 1):
        value, array = operand(op, i), graph.constant_value(op.inputs[1 - i])
        if array is None or graph.type(value).shape != op.outputs[0].type.shape:
            continue
        if array.size == (array.shape[-1] if array.ndim else 1):
            return value, array.reshape(-1)
    return None


@dataclass(frozen=True)
class ConstantMatrix:
    """The constant matrix of a product ``x @ matrix + bias``.

    The constant ``value`` holds ``stored``: the matrix, or its transpose. ``bias`` is a vector, or None.
    A rule that only asks about the product does not wait for a transposed copy.
    """

    value: Value
    stored: Array
    transposed: bool
    bias: Array | None

    @property
    def shape(self) -> tuple[int, ...]:
        """(depth, columns)."""
        return self.stored.shape[::-1] if self.transposed else self.stored.shape

    @cached_property
    def array(self) -> Array:
        """The matrix, contiguous if the constant is."""
        return np.ascontiguousarray(self.stored.T) if self.transposed else self.stored

    def add_to(self, patch: Patch) -> Value:
        """The matrix as a constant."""
        return patch.constant(self.array, "weight") if self.transposed else self.value


def constant_matrix(graph: Graph, op: Op) -> ConstantMatrix | None:
    """The constant matrix and the bias of a product without stages; None for other products."""
    weight, a = operand(op, 1), op.attrs
    array, bias = graph.constant_value(weight), graph.constant_value(op.input(2))
    if array is None or array.ndim != 2 or a.prologue or a.epilogue:
        return None
    if op.kind == "MatMul":
        return ConstantMatrix(weight, array, False, None)
    if a.transA or a.alpha != 1.0:
        return None
    if op.input(2) is not None:
        if bias is None or a.beta != 1.0 or bias.size != (bias.shape[-1] if bias.ndim else 1):
            return None
        bias = bias.reshape(-1)
    return ConstantMatrix(weight, array, bool(a.transB), bias)


def multiplied(
    patch: Patch, x: Value, matrix: Array | Value, *added: Array | Value | None, name: str = "weight"
) -> Value:
    """Add the product ``x @ matrix``, and the addition of each further operand. Arrays become constants; ``name``: the matrix's."""
    y = patch.add(
        "MatMul", [x, patch.constant(matrix, name) if isinstance(matrix, np.ndarray) else matrix], MatMulAttrs()
    )
    for each in (v for v in added if v is not None):
        y = patch.add("Add", [y, patch.constant(each, "bias") if isinstance(each, np.ndarray) else each])
    return y


@dataclass(frozen=True)
class PlainProduct:
    """``x @ weight + bias``, computed by ``ops``. ``bias`` is a vector, or None."""

    x: Value
    matrix: ConstantMatrix
    bias: Array | None
    ops: tuple[Op, ...]

    @property
    def weight(self) -> Array:
        """The matrix as an array."""
        return self.matrix.array


def plain_product(graph: Graph, value: Value) -> PlainProduct | None:
    """The product without stages that computes a value, or None. If an Add follows it, the product must have no other reader."""
    ops: list[Op] = []
    vectors: list[Array] = []
    if (addition := producer(graph, value, {"Add"})) is not None:
        found = added_vector(graph, addition)
        if found is None:
            return None
        value = found[0]
        vectors.append(found[1])
        ops.append(addition)
    op = producer(graph, value, PRODUCTS, alone=bool(ops))
    taken = None if op is None else constant_matrix(graph, op)
    if op is None or taken is None:
        return None
    vectors += [] if taken.bias is None else [taken.bias]
    bias = np.array(np.broadcast_to(sum(vectors), taken.shape[1:])) if vectors else None
    return PlainProduct(operand(op), taken, bias, (*ops, op))
