"""Reductions over rows that a mask selects become reductions over all rows. The other rows hold the neutral element.

Graph networks (GCN: Kipf and Welling, 2017; GAT: Velickovic et al., 2018) select the edges that are no self-loops by
``i = NonZero(mask)``, and append a self-loop for each node. They compute each edge by itself, and scatter the results onto the
nodes. The number of edges depends on data, so no kernel can be planned for these operators. If all edges are computed, edges
outside of the mask scatter a number that changes nothing: 0 for a sum, infinity for a minimum.

Operators may also read the positions that a mask of several axes selects (mixtures of experts). All positions are known when the
network is built.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from optdnn.dim import Dim
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, reshaped
from optdnn.passes.support.rows import RowOp, by_number, chosen_by, copy_of, row_op, zero
from optdnn.types import BOOL, Array, DType, is_float, normalize_axis

Parts: TypeAlias = "tuple[tuple[Value | None, int], ...]"
"""Pairs (mask, number of rows), in the order of the rows: the mask selects some of the rows. None: all rows are selected."""

REDUCES = {"ReduceSum": "add", "ReduceMin": "min", "ReduceMax": "max"}
"""Kind that reduces over rows -> the reduction."""
MOST_ELEMENTS = 1 << 28
"""Largest number of elements of a value with all rows."""


@rule("masked_sums", {"ScatterElements", "ScatterND", *REDUCES})
def masked_sums(graph: Graph, op: Op) -> Match | Miss | None:
    """A reduction over rows that a mask selects, or a scatter of such rows with a reduction."""
    reduction = REDUCES.get(op.kind) or op.attrs.reduction
    slots = (0,) if op.kind in REDUCES else (1, 2)
    values = [operand(op, slot) for slot in slots]
    if reduction == "none" or not op.outputs[0].type.is_static or any(count_of(graph, v) is None for v in values):
        return None
    found = SelectedRows(graph)
    reason = found.collect(values)
    if reason is not None:
        return None if not found.masks else Miss(reason)

    def build(patch: Patch) -> Value:
        new = found.copied(patch)
        given = list(op.inputs)
        for slot in slots:
            value = operand(op, slot)
            filler = zero(patch, graph.type(value).dtype)
            if slot == slots[-1]:
                dtype = graph.type(value).dtype
                filler = patch.constant(_neutral(reduction, dtype), "neutral")
            given[slot] = patch.add("Where", [found.mask(patch, value), new[value], filler])
        return patch.add(op.kind, given, op.attrs)

    return Match((op, *found.ops), build)


def _neutral(reduction: str, dtype: DType) -> Array:
    """The neutral element of a reduction."""
    if reduction in ("add", "mul"):
        return np.array(reduction == "mul", dtype)
    if is_float(dtype):
        return np.array(np.inf if reduction == "min" else -np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.array(limits.max if reduction == "min" else limits.min, dtype)


def count_of(graph: Graph, value: Value) -> Dim | None:
    """The number of a value's rows if it depends on data: the only symbolic size of the value. Else None."""
    sizes = [d for d in graph.type(value).shape or () if isinstance(d, Dim)]
    return sizes[0] if len(sizes) == 1 else None


class SelectedRows:
    """The operators that compute rows that masks select."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.members: list[tuple[Op, RowOp | None]] = []
        """The operators, in topological order. None stands for a Concat of rows, or a Gather that selects rows."""
        self.leaves: dict[int, Op] = {}
        """Id of a Gather that selects rows -> the NonZero of its mask. A NonZero whose positions are read leads to itself."""
        self.parts: dict[Dim, Parts] = {}
        """Number of selected rows -> the parts that they consist of."""
        self.masks: set[Value] = set()

    @property
    def ops(self) -> tuple[Op, ...]:
        choosers = {c.id: c for c in self.leaves.values()}
        return (*(op for op, _ in self.members), *choosers.values())

    def collect(self, values: list[Value]) -> str | None:
        """Find the operators that compute ``values``. Returns the reason why one of them cannot compute all rows, or None."""
        inside: set[int] = set()
        left = [v.op for v in values]
        while left:
            op = self.graph.op(left.pop())
            if op.id in inside:
                continue
            inside.add(op.id)
            chooser = _selection(self.graph, op) or _positions(self.graph, op)
            if chooser is not None:
                self.leaves[op.id] = chooser
                self.masks.add(operand(chooser))
            elif op.kind != "Shape":
                left += [v.op for v in op.inputs if v is not None and count_of(self.graph, v) is not None]
        for op in self.graph.order():
            if op.id in inside and op.kind != "Shape":
                reason = self._add(op)
                if reason is not None:
                    return reason
        return None

    def _add(self, op: Op) -> str | None:
        """Add an operator to the members, or return the reason why it cannot compute all rows."""
        count = count_of(self.graph, op.value)
        refusal = f"{op.name} ({op.kind}) does not compute each row from a row that the mask selected"
        if count is None:
            return refusal
        if op.id in self.leaves:
            mask = operand(self.leaves[op.id])
            found: Parts | None = ((mask, math.prod(self.graph.type(mask).static_shape)),)
        elif op.kind == "Concat" and isinstance(
            op.outputs[0].type.dims[normalize_axis(op.attrs.axis, self._rank(op))], Dim
        ):
            found = self._joined(op)
        else:
            r = row_op(self.graph, op, count)
            if r is None or by_number(r) or any(rows is not None and rows.per > 1 for rows in r.operand_rows):
                return refusal
            self.members.append((op, r))
            found = self.parts.get(count)
        if found is None:
            return refusal
        if self.parts.setdefault(count, found) != found:
            return f"{op.name} holds other rows than a value of the same size"
        if op.outputs[0].type.dims and self._elements(op, count) > MOST_ELEMENTS:
            return "results for all rows would be too large"
        if not self.members or self.members[-1][0].id != op.id:
            self.members.append((op, None))
        return None

    def _rank(self, op: Op) -> int:
        return len(op.outputs[0].type.dims)

    def _joined(self, op: Op) -> Parts | None:
        """The parts of the rows of a Concat; None if an operand's rows are not known."""
        axis = normalize_axis(op.attrs.axis, self._rank(op))
        parts: list[tuple[Value | None, int]] = []
        for slot in range(len(op.inputs)):
            size = self.graph.type(operand(op, slot)).dims[axis]
            if isinstance(size, int):
                parts.append((None, size))
            elif size in self.parts:
                parts += self.parts[size]
            else:
                return None
        return tuple(parts)

    def _elements(self, op: Op, count: Dim) -> int:
        """The number of elements of the operator's result with all rows."""
        total = sum(rows for _, rows in self.parts[count])
        for d in op.outputs[0].type.dims:
            total *= d if isinstance(d, int) else 1
        return total

    def copied(self, patch: Patch) -> dict[Value, Value]:
        """Add copies of the operators that compute all rows. Returns old value -> value with all rows."""
        new: dict[Value, Value] = {}
        for op, r in self.members:
            if r is not None:
                count = count_of(self.graph, op.value)
                assert count is not None
                copy = copy_of(patch, r, new, sum(rows for _, rows in self.parts[count]))
                new.update({Value(op.id, i): Value(copy.id, i) for i in range(len(copy.outputs))})
            elif op.kind == "NonZero":
                dims = self.graph.type(operand(op)).static_shape
                new[op.value] = patch.constant(np.indices(dims).reshape(len(dims), -1), "positions")
            elif op.id in self.leaves:
                new[op.value] = operand(op)
            else:
                given = [new.get(v, v) for v in op.inputs if v is not None]
                new[op.value] = patch.add("Concat", given, op.attrs, src=op.src)
        return new

    def mask(self, patch: Patch, value: Value) -> Value:
        """Whether each row is selected, as booleans with an axis for each axis of ``value``."""
        count, dims = count_of(self.graph, value), self.graph.type(value).dims
        assert count is not None
        flags = []
        for mask, rows in self.parts[count]:
            if mask is None:
                flags.append(patch.constant(np.ones(rows, np.bool_), "there"))
            else:
                known = mask if self.graph.type(mask).dtype == BOOL else patch.add("Cast", [mask], CastAttrs(BOOL))
                flags.append(reshaped(patch, known, (rows,)))
        flag = flags[0] if len(flags) == 1 else patch.add("Concat", flags, ConcatAttrs(0))
        shape = patch.constant(np.array([-1 if d == count else 1 for d in dims], np.int64), "shape")
        return flag if len(dims) == 1 else patch.add("Reshape", [flag, shape], ReshapeAttrs())


def _positions(graph: Graph, op: Op) -> Op | None:
    """The operator if it is a NonZero of a mask of several axes of known sizes; else None."""
    if op.kind != "NonZero":
        return None
    mask = graph.type(operand(op))
    return op if mask.is_static and len(mask.static_shape) > 1 else None


def _selection(graph: Graph, op: Op) -> Op | None:
    """The NonZero of a mask whose rows ``op`` gathers from a value that holds all rows; else None."""
    if op.kind not in ("Gather", "GatherND"):
        return None
    axis, index = 0, graph.type(operand(op, 1)).shape
    if op.kind == "Gather":
        axis = normalize_axis(op.attrs.axis, len(graph.type(operand(op)).dims))
        if index is None or len(index) != 1:
            return None
    elif op.attrs.batch_dims or index is None or index[1:] != (1,):
        return None
    chooser = chosen_by(graph, operand(op, 1))
    if chooser is None:
        return None
    rows = graph.type(operand(chooser)).dims[0]
    return chooser if isinstance(rows, int) and graph.type(operand(op)).dims[axis] == rows else None
