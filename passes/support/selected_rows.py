"""Rows that masks select, computed for all rows: what depends on data is then a mask, and no size.

The rows are gathered by the positions of a mask (``x[NonZero(mask)]``), or are the first rows of a tensor (a Slice of a computed
number of rows). Row-wise operators compute further rows from them, and a Concat appends other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeAlias

import numpy as np

from optdnn.dim import INF, Dim, bounds, floordiv
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import ReshapeAttrs, ShapeAttrs
from optdnn.passes.support.facts import VIEWS, integers, ints, operand, reshaped, sliced
from optdnn.passes.support.rows import RowOp, by_number, chosen_by, copy_of, row_op
from optdnn.types import BOOL, INT64, normalize_axis

MOST_ELEMENTS = 1 << 28
"""Largest number of elements of a value with all rows."""


_FINDS = frozenset({"ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "Range", "Shape"})
"""Kinds that return positions, or numbers of elements."""
_TAKES = frozenset({"Cast", "Expand", "Gather", "GatherElements", "GatherND", "Identity", "Slice", *VIEWS})
"""Kinds that return elements of operand 0."""


@dataclass(frozen=True)
class Part:
    """Neighboring rows: those that ``mask`` selects of ``rows`` rows, the first ``first`` ones, or all (neither is given).

    ``number``: a vector that holds ``first`` times ``per``; or ``kept``: a suppression's result of ``first`` rows.
    """

    rows: int
    mask: Value | None = None
    first: Dim | None = None
    number: Value | None = field(default=None, compare=False)
    per: int = field(default=1, compare=False)
    kept: Value | None = field(default=None, compare=False)

    def count(self, patch: Patch) -> Value:
        """The number of selected rows times ``per``: int64 [1]."""
        if self.kept is not None:
            return patch.add("Shape", [self.kept], ShapeAttrs(0, 1), src=patch.graph.op(self.kept).src)
        if self.number is not None:
            return self.number
        if self.mask is None:
            return integers(patch, [self.rows], "count")
        ones = patch.add("Cast", [self.flags(patch, 1)], CastAttrs(INT64))
        return patch.add("ReduceSum", [ones, integers(patch, [0], "axis")], ReduceAttrs(keepdims=True))

    def flags(self, patch: Patch, entries: int) -> Value:
        """Whether each row is selected, for each of its ``entries``: bool [rows * entries]."""
        if self.mask is None and self.first is None:
            return patch.constant(np.ones(self.rows * entries, np.bool_), "there")
        if self.mask is None:
            places = np.repeat(self.per * np.arange(self.rows), entries)
            return patch.add("Less", [patch.constant(places, "places"), self.count(patch)])
        known = self.mask
        if patch.type(known).dtype != BOOL:
            known = patch.add("Cast", [known], CastAttrs(BOOL))
        if entries > 1:
            known = reshaped(patch, known, (self.rows, 1))
            known = patch.add("Expand", [known, integers(patch, [self.rows, entries], "shape")])
        flat = (self.rows * entries,)
        return known if patch.type(known).dims == flat else reshaped(patch, known, flat)


Parts: TypeAlias = "tuple[Part, ...]"


def count_of(graph: Graph, value: Value) -> Dim | None:
    """The number of a value's rows if it depends on data: the only symbolic size of the value. Else None."""
    sizes = [d for d in graph.type(value).shape or () if isinstance(d, Dim)]
    return sizes[0] if len(sizes) == 1 else None


def without_factor(count: Dim) -> Dim:
    """``n`` for ``4 * n``: the number of rows if each consists of four entries."""
    found = floordiv(count, math.gcd(*(c for _, c in count.terms)))
    return found if isinstance(found, Dim) else count


def _per(entries: Dim, count: Dim) -> int:
    """The number of entries of each of ``count`` rows."""
    per = floordiv(entries, count)
    assert isinstance(per, int)
    return per


class SelectedRows:
    """The operators that compute rows that masks select.

    ``axes``: the fewest axes of a mask whose positions these operators may read. ``kept``: the rows of a suppression's result are
    selected rows, too. ``edges``: the rows that a mask may select are edges of a graph, and all of them name nodes.
    """

    def __init__(self, graph: Graph, axes: int = 2, *, kept: bool = False, edges: bool = False) -> None:
        self.graph, self.axes, self.kept, self.edges = graph, axes, kept, edges
        self.members: list[tuple[Op, RowOp | None]] = []
        """The operators, in topological order. None stands for a Concat of rows, or an operator that selects rows."""
        self.leaves: dict[int, Part] = {}
        """Id of an operator that selects rows, or whose positions are read -> these rows."""
        self.parts: dict[Dim, Parts] = {}
        """Number of selected rows -> the parts that they consist of."""
        self.choosers: dict[int, Op] = {}
        """The NonZero operators that list the positions of masks."""

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*(op for op, _ in self.members), *self.choosers.values())

    def collect(self, values: list[Value]) -> str | None:
        """Find the operators that compute ``values``. Returns the reason why one of them cannot compute all rows, or None."""
        inside: set[int] = set()
        left = [v.op for v in values]
        while left:
            op = self.graph.op(left.pop())
            if op.id in inside:
                continue
            inside.add(op.id)
            chooser = _selection(self.graph, op) or self._positions(op)
            first = first_rows(self.graph, op) or (_kept_rows(op) if self.kept else None)
            if chooser is not None:
                mask = operand(chooser)
                self.leaves[op.id] = Part(math.prod(self.graph.type(mask).static_shape), mask)
                self.choosers[chooser.id] = chooser
            elif first is not None:
                self.leaves[op.id] = first
            elif op.kind != "Shape":
                left += [v.op for v in op.inputs if v is not None and count_of(self.graph, v) is not None]
        waiting = [op for op in self.graph.order() if op.id in inside and op.kind != "Shape"]
        self._know_leaves(waiting)
        for op in waiting:
            reason = self._add(op)
            if reason is not None:
                return reason
        return None

    def _positions(self, op: Op) -> Op | None:
        """The operator if it is a NonZero of a mask of known sizes whose positions may be read; else None."""
        mask = self.graph.type(operand(op)) if op.kind == "NonZero" else None
        return op if mask is not None and mask.is_static and len(mask.static_shape) >= self.axes else None

    def _know_leaves(self, ops: list[Op]) -> None:
        """Note the rows of the operators that select them: an Expand to their number may precede them."""
        for op in ops:
            count = count_of(self.graph, op.value)
            if op.id in self.leaves and count is not None:
                self.parts.setdefault(without_factor(count), (self.leaves[op.id],))

    def _add(self, op: Op) -> str | None:
        """Add an operator to the members, or return the reason why it cannot compute all rows."""
        entries = count_of(self.graph, op.value)
        refusal = f"{op.name} ({op.kind}) does not compute each row from a row that the mask selected"
        if entries is None:
            return refusal
        count, made = without_factor(entries), None
        if op.id in self.leaves:
            found: Parts | None = (self.leaves[op.id],)
        elif op.kind == "Concat" and isinstance(
            op.outputs[0].type.dims[normalize_axis(op.attrs.axis, self._rank(op))], Dim
        ):
            found = self._joined(op)
        else:
            made = row_op(self.graph, op, count)
            if made is None or by_number(made):
                return refusal
            found = self.parts.get(count)
            chosen = any(part.first is not None or (part.mask and not self.edges) for part in found or ())
            if chosen and reads_elsewhere(made):
                return f"{op.name} ({op.kind}) may read positions that do not exist for other rows"
        if found is None:
            return refusal
        if self.parts.setdefault(count, found) != found:
            return f"{op.name} holds other rows than a value of the same size"
        if op.outputs[0].type.dims and self._elements(op) > MOST_ELEMENTS:
            return "results for all rows would be too large"
        self.members.append((op, made))
        return None

    def _rank(self, op: Op) -> int:
        return len(op.outputs[0].type.dims)

    def _joined(self, op: Op) -> Parts | None:
        """The parts of the rows of a Concat; None if an operand's rows are not known."""
        axis = normalize_axis(op.attrs.axis, self._rank(op))
        parts: list[Part] = []
        for slot in range(len(op.inputs)):
            size = self.graph.type(operand(op, slot)).dims[axis]
            if isinstance(size, int):
                parts.append(Part(size))
            elif size in self.parts:
                parts += self.parts[size]
            else:
                return None
        return tuple(parts)

    def rows(self, count: Dim) -> int:
        """The number of all rows."""
        return sum(part.rows for part in self.parts[count])

    def _elements(self, op: Op) -> int:
        """The number of elements of the operator's result with all rows."""
        total = 1
        for d in op.outputs[0].type.dims:
            total *= d if isinstance(d, int) else self._entries(d)
        return total

    def _entries(self, d: Dim) -> int:
        """The size along the axis of rows."""
        count = without_factor(d)
        return _per(d, count) * self.rows(count)

    def copied(self, patch: Patch) -> dict[Value, Value]:
        """Add copies of the operators that compute all rows. Returns old value -> value with all rows."""
        new: dict[Value, Value] = {}
        for op, r in self.members:
            if r is not None:
                count = count_of(self.graph, op.value)
                assert count is not None
                copy = copy_of(patch, r, new, self.rows(without_factor(count)))
                new.update({Value(op.id, i): Value(copy.id, i) for i in range(len(copy.outputs))})
            elif op.kind == "NonZero":
                dims = self.graph.type(operand(op)).static_shape
                new[op.value] = patch.constant(np.indices(dims).reshape(len(dims), -1), "positions")
            elif op.kind == "NonMaxSuppression":
                new[op.value] = with_first_box(patch, op.value)
            elif op.id in self.leaves:
                new[op.value] = operand(op)
            else:
                given = [new.get(v, v) for v in op.inputs if v is not None]
                new[op.value] = patch.add("Concat", given, op.attrs, src=op.src)
        return new

    def number(self, patch: Patch, count: Dim) -> Value:
        """The number of selected rows: int64 [1]."""
        numbers = [(part.count(patch), part.per) for part in self.parts[count]]
        rows = [x if per == 1 else patch.add("Div", [x, integers(patch, [per], "per")]) for x, per in numbers]
        return reduce(lambda a, b: patch.add("Add", [a, b]), rows)

    def mask(self, patch: Patch, value: Value) -> Value:
        """Whether each row is selected, as booleans with an axis for each axis of ``value``."""
        entries, dims = count_of(self.graph, value), self.graph.type(value).dims
        assert entries is not None
        count = without_factor(entries)
        per = _per(entries, count)
        flags = [part.flags(patch, per) for part in self.parts[count]]
        flag = flags[0] if len(flags) == 1 else patch.add("Concat", flags, ConcatAttrs(0))
        if len(dims) == 1:
            return flag
        shape = integers(patch, [-1 if d == entries else 1 for d in dims], "shape")
        return patch.add("Reshape", [flag, shape], ReshapeAttrs())


def reads_elsewhere(r: RowOp) -> bool:
    """Whether an operator gathers by numbers that may be valid in the selected rows alone.

    These are numbers from the network's inputs, and positions of largest elements among more elements than it reads: labels of 91
    classes, where a mask selects those of 80. Other positions that a TopK, a NonZero or a suppression finds are valid in all rows.
    """
    if r.op.kind not in ("Gather", "GatherND", "GatherElements") or r.operand_rows[1] is None:
        return False
    least = INF if r.op.kind == "GatherND" else bounds(r.dims(0)[normalize_axis(r.op.attrs.axis, len(r.dims(0)))])[0]
    left, seen = [(operand(r.op, 1), least)], set[tuple[Value, int]]()
    while left:
        value, size = left.pop()
        op = r.graph.op(value)
        if op.kind == "Input" or _elements_searched(r.graph, value) > size:
            return True
        found = op.kind in _FINDS or (op.kind == "TopK" and value.port == 1)
        if (value, size) not in seen and not found:
            same = op.kind in _TAKES  # these return elements of operand 0
            left += [(v, size if same and not i else INF) for i, v in enumerate(op.inputs) if v is not None]
        seen.add((value, size))
    return False


def _elements_searched(graph: Graph, value: Value) -> int:
    """The most elements among which an ArgMax, ArgMin or TopK finds the positions ``value``; 0 for values of other operators."""
    op = graph.op(value)
    if op.kind not in ("ArgMax", "ArgMin") and (op.kind != "TopK" or value.port != 1):
        return 0
    dims = graph.type(operand(op)).dims
    return bounds(dims[normalize_axis(op.attrs.axis, len(dims))])[1]


def with_first_box(patch: Patch, kept: Value) -> Value:
    """A suppression's result with as many rows as it can have: others name the first box of the first class and image."""
    most = bounds(patch.type(kept).dims[0])[1]
    none = patch.constant(np.zeros((most, 3), np.int64), "first")
    whole = patch.add("Concat", [kept, none], ConcatAttrs(0), src=patch.graph.op(kept).src)
    return sliced(patch, whole, 0, most, 0)


def _kept_rows(op: Op) -> Part | None:
    """The rows of a suppression's result, if their number has a bound; else None."""
    count = op.outputs[0].type.dims[0] if op.kind == "NonMaxSuppression" else None
    most = bounds(count)[1] if isinstance(count, Dim) else INF
    return Part(most, None, count, kept=op.value) if isinstance(count, Dim) and most < INF else None


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


def first_rows(graph: Graph, op: Op) -> Part | None:
    """The rows of a Slice of the first rows of a tensor of known sizes, if their number is not negative; else None."""
    if op.kind != "Slice" or not graph.type(operand(op)).is_static or op.input(3) is None:
        return None
    starts, axes, end = ints(graph, op.input(1)), ints(graph, op.input(3)), graph.known(op.input(2))
    steps = (1,) if op.input(4) is None else ints(graph, op.input(4))
    entries = count_of(graph, op.value)
    if starts != (0,) or axes is None or len(axes) != 1 or steps != (1,) or entries is None or end is None:
        return None
    if graph.type(operand(op, 2)).dtype != INT64:  # others compute with the number
        return None
    whole = graph.type(operand(op)).static_shape[axes[0]]
    count = without_factor(entries)
    per = floordiv(entries, count)
    if end.tolist() != [entries] or bounds(entries)[0] < 0 or not isinstance(per, int) or whole % per:
        return None
    return Part(whole // per, None, count, operand(op, 2), per)
