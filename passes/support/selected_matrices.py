"""Products of rows that each select a matrix from a constant stack, as a mixture of experts has them."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import PassContext
from optdnn.passes.support.facts import operand, producer, shape_of
from optdnn.types import INT64

ROW = 8
"""The kernels that read selected matrices in place load rows of a multiple of this many elements."""


@dataclass(frozen=True)
class Selection:
    """``W[index] @ x`` with columns x (rows, size, 1) if ``slot`` is 0, or ``x @ W[index]`` with rows x (rows, 1, size)."""

    slot: int
    pick: Op
    """The Gather or GatherND that takes a matrix for each row."""
    many: int
    """The number of matrices."""
    rows: DimLike
    width: int
    """The number of elements of a row's result."""
    size: int


def selection(graph: Graph, op: Op) -> Selection | None:
    """What a MatMul selects, if its matrices are a constant stack and only the product reads those of the rows; else None."""
    found = next(((slot, pick) for slot in (0, 1) if (pick := _picked(graph, op.inputs[slot])) is not None), None)
    if found is None:
        return None
    slot, pick = found
    many, *matrix = graph.type(operand(pick)).static_shape
    width, size = matrix if slot == 0 else matrix[::-1]
    shape = shape_of(graph, operand(op, 1 - slot))
    if shape is None or shape[1:] != ((size, 1) if slot == 0 else (1, size)):
        return None
    return Selection(slot, pick, many, shape[0], width, size)


def read_in_place(graph: Graph, found: Selection, context: PassContext) -> bool:
    """Whether a kernel of the target reads the matrix of each row where it is; else each row gets a copy of its matrix."""
    index = operand(found.pick, 1)
    known = graph.constant_value(index) is not None
    return context.on_gpu and found.size % ROW == 0 and graph.type(index).dtype == INT64 and not known


def stays_in_place(graph: Graph, op: Op, context: PassContext) -> bool:
    """Whether a MatMul is left to a kernel that reads selected matrices in place, for rows of one or of several matrices."""
    found = selection(graph, op)
    if found is not None:
        return read_in_place(graph, found, context)
    return context.on_gpu and any(_picked(graph, v, rank=2) is not None for v in op.inputs[:2])


def _picked(graph: Graph, value: Value | None, rank: int = 1) -> Op | None:
    """The Gather or GatherND that takes a matrix per row from a constant stack, if only the product reads its result; else None.
    ``rank``: of a Gather's indices."""
    op = producer(graph, value, {"Gather", "GatherND"}, alone=True)
    if op is None or graph.constant_value(op.inputs[0]) is None or graph.type(operand(op)).rank != 3:
        return None
    index = shape_of(graph, operand(op, 1))
    if index is None:
        return None
    if op.kind == "Gather":
        return op if len(index) == rank and op.attrs.axis in (0, -3) else None
    return op if len(index) == 2 and index[1] == 1 and op.attrs.batch_dims == 0 else None
