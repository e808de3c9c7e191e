"""Operators whose number of rows depends on data compute the largest possible number of rows.

GPU kernels are planned for known sizes. After a non-maximum suppression, or a list of the best scores, there are ``n <= 1000``
regions of interest. The operands are padded to 1000 rows, and the first ``n`` rows of the results are taken. All operators in
between are row-wise (``passes/support/rows.py``), so the first ``n`` rows are the same. The padding rows repeat the real ones, so
that calibration sees the ranges of real rows. If there are no rows to repeat, the padding rows are zeros.

A Pad that fills up the rows to a known number (YOLO's results after a suppression) becomes a Where between the rows and the pad
value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from optdnn.dim import INF, Dim, DimLike, bounds, floordiv
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs, ModAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import ShapeAttrs
from optdnn.passes.base import Fired, Match, Miss, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.support.facts import integers, operand
from optdnn.passes.support.filled_rows import filled_up, fills_up
from optdnn.passes.support.rows import RowOp, Rows, by_number, copy_of, elements_with, row_op, zero
from optdnn.passes.support.selected_rows import reads_elsewhere, with_first_box
from optdnn.types import INT64, Array, normalize_axis

WORK = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "PackedMatMul", "ResizedPeaks", "RoiAlign"})
"""Kinds for which padding always pays."""
MANY = 16
"""Padding also pays for this many operators on the same rows: each would be a step on the CPU."""
MOST_BYTES = 1 << 30
"""Most bytes of a padded result."""


class PadRows(Pass):
    """``ahead``: leave numbers of rows that are computed from other such rows, which selections may have between them."""

    name = "pad_rows"

    def __init__(self, *, ahead: bool = False) -> None:
        self.ahead = ahead

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        tried: set[Dim] = set()
        if self.ahead:
            tried |= _later(graph, {*_counts(graph)})
        while left := [d for d in _counts(graph) if d not in tried]:
            count = min(left, key=lambda d: bounds(d)[1])  # n before n + 7: the rows of a Concat are those of its parts
            tried.add(count)
            found = _match(graph, count)
            if isinstance(found, Match):
                nodes = node_names(found.ops)
                found.patch(graph).apply()
                report.fired.append(Fired(self.name, nodes))
            else:
                ops = [op for op in _workers(graph) if _count_of(graph, op) == count]
                report.refused.append(Refused(self.name, node_names(ops), found.reason))


def _later(graph: Graph, counts: set[Dim]) -> set[Dim]:
    """The numbers of rows that are computed from other ones of ``counts``."""
    found = set[Dim]()
    known = {
        op.id: d for op in graph.ops() if not op.outputs[0].type.is_static and (d := _count_of(graph, op)) in counts
    }
    for op, count in known.items():
        if count not in found and any(known.get(i, count) != count for i in nx.ancestors(graph.nx, op)):
            found.add(count)
    return found


def _workers(graph: Graph) -> Iterator[Op]:
    yield from (op for op in graph.of_kind(*WORK) if not op.outputs[0].type.is_static)
    yield from (graph.op(operand(op)) for op in graph.of_kind("Pad") if fills_up(graph, op))


def _counts(graph: Graph) -> Iterator[Dim]:
    """The data-dependent row counts of all operators for which padding pays."""
    for op in _workers(graph):
        count = _count_of(graph, op)
        if count is not None:
            yield count
    all_counts = Counter(_count_of(graph, op) for op in graph.ops() if not op.outputs[0].type.is_static)
    yield from (count for count, many in all_counts.items() if count is not None and many >= MANY)


def _count_of(graph: Graph, op: Op) -> Dim | None:
    """The data-dependent row count of an operator's result, without a factor: n for ``[91 * n, 784]``; None for other sizes."""
    inputs = {s for d in graph.symbols().values() for s in d.symbols()}
    dims = [d for d in op.outputs[0].type.shape or () if isinstance(d, Dim)]
    if len(dims) != 1 or dims[0].symbols() <= inputs:
        return None
    factor = math.gcd(*(c for _, c in dims[0].terms))
    count = floordiv(dims[0], factor)
    return count if isinstance(count, Dim) else None


@dataclass
class _Part:
    """Connected operators that compute ``count`` rows, at most ``most``; in the graph's order."""

    graph: Graph
    count: Dim
    most: int
    ops: list[RowOp]
    inside: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.inside = {r.op.id for r in self.ops}

    def given(self) -> dict[Value, Rows]:
        """The values from outside that have such rows."""
        found: dict[Value, Rows] = {}
        for r in self.ops:
            for value, rows in zip(r.op.inputs, r.operand_rows, strict=True):
                if value is not None and rows is not None and value.op not in self.inside:
                    found[value] = rows
        return found

    def wanted(self) -> dict[Value, Rows]:
        """The results that are read outside. Readers that only take the shape, and Pads that fill up, do not count."""
        found: dict[Value, Rows] = {}
        for r in self.ops:
            for port, rows in enumerate(r.result_rows):
                value = Value(r.op.id, port)
                readers = self.graph.users(value)
                pads = {pad.id for pad, _ in self.filled()}
                if rows is not None and any(u.id not in self.inside | pads and not self.asks_shape(u) for u in readers):
                    found[value] = rows
        return found

    def filled(self) -> list[tuple[Op, Rows]]:
        """The Pads that fill up a value inside, each with the rows of that value."""
        return [
            (u, r.result_rows[0])
            for r in self.ops
            for u in _pads_of(r)
            if r.result_rows[0] is not None and fills_up(self.graph, u)
        ]

    def shapes(self) -> list[Op]:
        """The operators outside that take the shape of a value inside."""
        values = (Value(r.op.id, port) for r in self.ops for port in range(len(r.result_rows)))
        return [u for value in values for u in self.graph.users(value) if self.asks_shape(u)]

    def asks_shape(self, op: Op) -> bool:
        """Whether ``op`` is a Shape whose result follows from the number of rows."""
        known = op.outputs[0].known if op.kind == "Shape" else None
        return known is not None and known.size > 0 and all(self.per(d) is not None for d in known.tolist())

    def per(self, d: DimLike) -> int | None:
        """The elements per row in a size that is a multiple of ``count``; 0 for a plain number, None for any other size."""
        if not isinstance(d, Dim):
            return 0
        per = floordiv(d, self.count)
        return per if isinstance(per, int) and per > 0 and per * self.count == d else None


def _match(graph: Graph, count: Dim) -> Match | Miss:
    most = bounds(count)[1]
    if most >= INF:
        return Miss(f"{count} has no bound")
    if most == 0:
        return Miss(f"{count} is always 0")
    part = _Part(graph, count, most, _connected(_members(graph, count)))
    if not part.ops:
        return Miss("no expensive operator computes each row from the same row of its operands")
    if all(rows.per != 1 for rows in part.given().values()):
        return Miss("no operand holds the number of rows")
    for r in part.ops:
        nbytes = elements_with(r.op, r.result_rows, most) * r.op.outputs[0].type.dtype.itemsize
        if nbytes > MOST_BYTES:
            return Miss(f"{r.op.name} would have {most} rows of {nbytes // most} bytes")
    covered = (*(r.op for r in part.ops), *part.shapes(), *(pad for pad, _ in part.filled()))
    return Match(covered, lambda patch: _build(patch, part))


def _members(graph: Graph, count: Dim) -> list[RowOp]:
    found = (row_op(graph, op, count) for op in graph.order() if not op.outputs[0].type.is_static)
    return [r for r in found if r is not None]


def _connected(members: Sequence[RowOp]) -> list[RowOp]:
    """The members that are connected to an operator for which padding pays, through inner values."""
    links: nx.Graph = nx.Graph()
    links.add_nodes_from(r.op.id for r in members)
    for r in members:
        links.add_edges_from(
            (v.op, r.op.id)
            for v, rows in zip(r.op.inputs, r.operand_rows, strict=True)
            if v is not None and rows is not None and v.op in links
        )
    workers = {r.op.id for r in members if r.op.kind in WORK or any(fills_up(r.graph, u) for u in _pads_of(r))}
    groups = nx.connected_components(links)
    kept = {i for group in groups if group & workers or len(group) >= MANY for i in group}
    return [r for r in members if r.op.id in kept]


def _pads_of(r: RowOp) -> list[Op]:
    """The Pads of an operator's first result."""
    return [u for u in r.graph.users(r.op.value) if u.kind == "Pad" and operand(u) == r.op.value]


def _build(patch: Patch, part: _Part) -> None:
    given, most = part.given(), part.most
    first = next(v for v, rows in given.items() if rows.per == 1)
    axis = given[first].axis
    shapes = part.shapes()
    asked = frozenset().union(*(op.src for op in shapes))
    found = {v: x for v, rows in given.items() if (x := _whole(part.graph, v, rows, most)) is not None}
    whole = {v: x.add_to(patch) for v, x in found.items()}
    for value, rows in given.items():
        if (numbers := _numbered(part.graph, value, most * rows.per)) is not None:
            whole[value] = patch.constant(numbers, "numbers")
    shape = ShapeAttrs(axis, axis + 1)
    number = found[first].number(patch) if first in found else patch.add("Shape", [first], shape, src=asked)
    cut = {rows.per for v, rows in given.items() if v not in whole and part.graph.op(v).kind != "NonMaxSuppression"}
    sources = {per: _sources(patch, number, per, most) for per in sorted(cut)}
    new: dict[Value, Value] = {}
    for value, rows in given.items():
        new[value] = whole[value] if value in whole else _padded(patch, value, rows, sources.get(rows.per))
    for r in part.ops:
        operands = dict(new)
        indices = r.op.input(1)
        if by_number(r) and indices is not None:
            operands[indices] = _from_front(patch, new.get(indices, indices), _times(patch, number, r.operand_rows[0]))
        elif indices is not None and reads_elsewhere(r):
            operands[indices] = _if_any(patch, new.get(indices, indices), number)
        made = copy_of(patch, r, operands, most)
        new.update({Value(r.op.id, i): Value(made.id, i) for i in range(len(made.outputs))})
    for pad, rows in part.filled():
        patch.replace(pad.value, filled_up(patch, pad, new[operand(pad)], _times(patch, number, rows), rows))
    start = patch.constant(np.array([0], np.int64), "start")
    for value, rows in part.wanted().items():
        axes = patch.constant(np.array([rows.axis], np.int64), "axes")
        end = _times(patch, number, rows)
        taken = patch.add("Slice", [new[value], start, end, axes], src=part.graph.op(value).src)
        patch.replace(value, taken)
    for op in shapes:
        patch.replace(op.value, _shape(patch, part, number, op))


def _sources(patch: Patch, number: Value, per: int, most: int) -> Value:
    """For each element of ``most`` rows along their axis, the index of the element of ``number`` rows that it repeats.

    The index is 0 if there are no rows."""
    there = patch.add(
        "Max", [_times(patch, number, Rows(0, per)), patch.constant(np.array([1], np.int64), "one")], src=()
    )
    return patch.add("Mod", [patch.constant(np.arange(most * per), "places"), there], ModAttrs(), src=())


@dataclass(frozen=True)
class _Whole:
    """The tensor of all rows, for a value that holds the first ones: the Slice ``cut``, or the Concat ``join`` of ``front`` rows
    and this Slice."""

    cut: Op
    join: Op | None = None
    front: int = 0

    def add_to(self, patch: Patch) -> Value:
        if self.join is None:
            return operand(self.cut)
        return patch.add("Concat", [*self.join.inputs[:-1], operand(self.cut)], self.join.attrs, src=self.join.src)

    def number(self, patch: Patch) -> Value:
        """The number of rows of the value (int64 [1])."""
        end = operand(self.cut, 2)
        return (
            end
            if self.join is None
            else patch.add("Add", [end, integers(patch, (self.front,), "front")], src=self.join.src)
        )


def _whole(graph: Graph, value: Value, rows: Rows, most: int) -> _Whole | None:
    """The tensor of ``most`` rows, if a value is a Slice of its first rows, or a Concat of known rows and such a Slice."""
    op = graph.op(value)
    if (
        op.kind == "Concat"
        and normalize_axis(op.attrs.axis, len(graph.type(value).dims)) == rows.axis
        and rows.per == 1
    ):
        before = [graph.type(v).dims[rows.axis] for v in op.inputs[:-1] if v is not None]
        front = sum(d for d in before if isinstance(d, int))
        cut = graph.op(operand(op, len(op.inputs) - 1))
        known = not any(isinstance(d, Dim) for d in before)
        return _Whole(cut, op, front) if known and _cuts(graph, cut, rows, most - front) else None
    return _Whole(op) if _cuts(graph, op, rows, most) else None


def _numbered(graph: Graph, value: Value, most: int) -> Array | None:
    """The first ``most`` elements of a Range of integers, if its first element and its step are known; else None."""
    op = graph.op(value)
    if op.kind != "Range" or graph.type(value).dtype.kind != "i":
        return None
    start, step = (graph.constant_value(op.input(slot)) for slot in (0, 2))
    numbers = None if start is None or step is None else start.item() + step.item() * np.arange(most)
    return None if numbers is None else numbers.astype(graph.type(value).dtype)


def _cuts(graph: Graph, cut: Op, rows: Rows, most: int) -> bool:
    """Whether an operator is a Slice of the first rows of a tensor of ``most`` rows, whose end is their number."""
    if cut.kind != "Slice" or len(cut.inputs) != 4:
        return False
    starts, axes = (graph.constant_value(cut.inputs[slot]) for slot in (1, 3))
    if starts is None or axes is None or (starts.tolist(), axes.tolist()) != ([0], [rows.axis]):
        return False
    end, entries = graph.known(cut.inputs[2]), cut.outputs[0].type.dims[rows.axis]
    if end is None or end.tolist() != [entries] or graph.type(operand(cut, 2)).dtype != INT64:
        return False
    return bounds(entries)[0] >= 0 and graph.type(operand(cut)).dims[rows.axis] == most * rows.per


def _padded(patch: Patch, value: Value, rows: Rows, source: Value | None) -> Value:
    """``value`` padded by its own rows, repeated; zeros if it has no rows. Kept boxes are padded by the first box."""
    if patch.graph.op(value).kind == "NonMaxSuppression":
        return with_first_box(patch, value)
    t, src = patch.type(value), patch.graph.op(value).src
    shape = [1 if i == rows.axis else d for i, d in enumerate(t.dims)]
    spare = patch.constant(np.zeros([d for d in shape if isinstance(d, int)], t.dtype), "spare")
    some = patch.add("Concat", [value, spare], ConcatAttrs(rows.axis), src=src)
    return patch.add("Gather", [some, source], GatherAttrs(rows.axis), src=src)


def _times(patch: Patch, number: Value, rows: Rows | None) -> Value:
    """The number of elements of all rows along their axis."""
    if rows is None or rows.per == 1:
        return number
    return patch.add("Mul", [number, patch.constant(np.array([rows.per], np.int64), "per")], src=())


def _from_front(patch: Patch, indices: Value, size: Value) -> Value:
    """Indices that count from the front; negative ones would count from the end of the padded rows."""
    if patch.type(indices).dtype != INT64:
        indices = patch.add("Cast", [indices], CastAttrs(INT64))
    negative = patch.add("Less", [indices, zero(patch, INT64)])
    return patch.add("Where", [negative, patch.add("Add", [indices, size]), indices])


def _if_any(patch: Patch, indices: Value, number: Value) -> Value:
    """The indices, or zeros if there are no rows: the padding may hold no valid index then."""
    there = patch.add("Less", [zero(patch, patch.type(number).dtype), number])
    return patch.add("Where", [there, indices, zero(patch, patch.type(indices).dtype)])


def _shape(patch: Patch, part: _Part, number: Value, op: Op) -> Value:
    """The result of a Shape, from constants and the number of rows."""
    known = op.outputs[0].known
    assert known is not None
    parts: list[Value] = []
    plain: list[int] = []
    for d in known.tolist():
        per = part.per(d)
        if not per:
            plain.append(int(d))
            continue
        if plain:
            parts.append(patch.constant(np.array(plain, np.int64), "sizes"))
            plain = []
        parts.append(_times(patch, number, Rows(0, per)))
    if plain:
        parts.append(patch.constant(np.array(plain, np.int64), "sizes"))
    return parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(0), src=op.src)
