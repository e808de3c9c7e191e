"""Scattered sums, maxima and minima at constant positions become segment reductions: each result reads its own rows, in one launch.

Graph networks with edges that are known at build time pass messages in this way (meshes, road networks, molecules of one kind). The
rows are sorted by their target node. The operators that compute the rows move into the loop that adds them: gathers of nodes, and
pointwise operators. A factor that all rows of a node share, such as the sum of an attention's weights (Velickovic et al., 2018),
moves after the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.segment_sum import NEUTRAL, SegmentSumAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.fuse_pointwise import REPEATED
from optdnn.passes.support.facts import RESHAPES, in_shape, is_filled, operand, producer
from optdnn.passes.support.open_stages import MAX_OPERANDS, MAX_STAGES
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS
from optdnn.types import Array, broadcast_dims, is_float, normalize_axis

LEAST_ROWS = 64
"""Fewest rows for which a segment reduction pays: with fewer rows a scatter is fast."""


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor that rows read. Row ``e`` reads position ``index[e]`` along ``axis``; without an index it reads the whole tensor.

    ``view``: the axes of a row as axes of the tensor, -1 for an axis of size 1. ``gathered``: several rows may read one position.
    """

    value: Value
    index: Array | None
    axis: int
    view: tuple[int, ...]
    gathered: bool = False

    def same(self, other: Table) -> bool:
        """Whether a row reads the same elements of both tables."""
        alike = (self.value, self.axis, self.view) == (other.value, other.axis, other.view)
        return alike and same_index(self.index, other.index)


def same_index(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


@dataclass(frozen=True, eq=False)
class Node:
    """A pointwise operator that is computed for each row."""

    kind: str
    attrs: Attrs
    args: tuple[Table | Node | None, ...]


Expression = Table | Node


@dataclass(frozen=True)
class _Scatter:
    """A reduction of each row ``e`` of ``rows`` into ``data[target[e]]``: a sum, maximum or minimum."""

    data: Value
    rows: Value
    target: Array


def _scatter(graph: Graph, op: Op) -> _Scatter | Miss | None:
    """The scatter reduction of ``op``, if it reduces whole rows at constant positions; a Miss or None if not."""
    data, positions, rows = (operand(op, k) for k in range(3))
    types = [graph.type(v) for v in (data, positions, rows)]
    if op.attrs.reduction not in NEUTRAL or not is_float(types[0].dtype):
        return None
    known = graph.constant_value(positions)
    if known is None:
        return Miss("its positions are not known when the network is built")
    if not all(t.is_static for t in types):
        return Miss("its sizes are not known when the network is built")
    shape = types[0].static_shape
    if op.kind == "ScatterND":
        if known.shape[-1] != 1 or known.ndim != 2:
            return Miss("its positions are not a list of row numbers")
        target = known[:, 0]
    else:
        whole = (
            normalize_axis(op.attrs.axis, len(shape)) == 0 and known.shape[1:] == shape[1:] == types[2].static_shape[1:]
        )
        column = known.reshape(len(known), -1)[:, :1]
        if not whole or not known.size or (known.reshape(len(known), -1) != column).any():
            return Miss("it does not scatter whole rows")
        target = column[:, 0]
    if len(target) < LEAST_ROWS:
        return Miss(f"it has only {len(target)} rows, for which a scatter is fast")
    if types[2].static_shape != (len(target), *shape[1:]):
        return Miss("the shape of its rows does not match its positions")
    return _Scatter(data, rows, np.where(target < 0, target + shape[0], target).astype(np.int64))


_JOINED = {"add": "Add", "max": "Max", "min": "Min"}
"""Reduction -> the operator that combines its result with ``data``."""


@rule("segment_sum", {"ScatterElements", "ScatterND"})
def segment_sum(graph: Graph, op: Op) -> Match | Miss | None:
    """A scatter reduction at constant positions becomes a SegmentSum, with the operators that compute its rows."""
    found = _scatter(graph, op)
    if not isinstance(found, _Scatter):
        return found
    count, rank = graph.type(found.data).static_shape[0], len(graph.type(found.data).static_shape)
    order = np.argsort(found.target, kind="stable")
    target = found.target[order]
    inside: dict[int, Op] = {op.id: op}
    rows = _Expansion(graph, inside).of(Table(found.rows, order, 0, tuple(range(1, rank))))
    adds = op.attrs.reduction == "add"
    rest, factors = _without_factors(graph, rows, target, count) if adds else (rows, [])
    if rest is None or not _is_whole(graph, rest, graph.type(found.data).static_shape[1:]):
        rest, factors = rows, []
    tables, indices, stages = _flattened(rest)
    begins = np.searchsorted(target, np.arange(count + 1)).astype(np.int32)

    def build(patch: Patch) -> Value:
        arrays = [patch.constant(i.astype(np.int32), "rows") for i in indices]
        first = patch.constant(begins, "first")
        scales = [_factor(patch, table, rank) for _, table in factors]
        which = [
            -1 if t.index is None else next(k for k, i in enumerate(indices) if same_index(i, t.index)) for t in tables
        ]
        attrs = SegmentSumAttrs(
            stages,
            indices=tuple(which),
            axes=tuple(t.axis for t in tables),
            views=tuple(t.view for t in tables),
            factors=tuple(kind for kind, _ in factors),
            reduction=op.attrs.reduction,
        )
        total = patch.add("SegmentSum", [*(t.value for t in tables), *arrays, first, *scales], attrs)
        neutral = is_filled(graph.constant_value(found.data), NEUTRAL[op.attrs.reduction])
        return total if neutral else patch.add(_JOINED[op.attrs.reduction], [total, found.data])

    return Match(tuple(inside.values()), build)


class _Expansion:
    """Expands a table into the operators that compute it and the tables that they read. Absorbed operators go to ``inside``."""

    def __init__(self, graph: Graph, inside: dict[int, Op]):
        self.graph, self.inside, self.stages, self.tables = graph, inside, 0, 1
        self.expanded: list[tuple[Table, Expression]] = []

    def of(self, table: Table) -> Expression:
        """The expression of a table, expanded as far as it can be computed again for each row."""
        for known, expression in self.expanded:
            if known.same(table):
                return expression
        op = self.graph.op(table.value)
        found: Expression = table
        moved = self._moved(table, op)
        if moved is not None:
            self._cover(op)
            found = self.of(moved)
        elif table.index is not None and not table.gathered and self._repeats(op):
            self._cover(op)
            self.stages += 1
            self.tables += len(op.inputs) - 1
            args = tuple(None if v is None else self.of(self._operand(table, op, v)) for v in op.inputs)
            found = Node(op.kind, op.attrs, args)
        self.expanded.append((table, found))
        return found

    def _cover(self, op: Op) -> None:
        """Mark an operator as absorbed, if nothing else reads its result."""
        if all(user.id in self.inside for user in self.graph.users(op.value)):
            self.inside[op.id] = op

    def _repeats(self, op: Op) -> bool:
        """Whether to compute a pointwise operator for each row: nothing else reads its result, or it is small and no epilogue's."""
        if op.kind not in STAGE_KINDS or op.kind == "Cast" or len(op.outputs) != 1 or not op.outputs[0].type.is_static:
            return False
        if self.stages == MAX_STAGES or self.tables + len(op.inputs) - 1 > MAX_OPERANDS:
            return False
        types = [self.graph.type(v) for v in op.inputs if v is not None]
        if not all(t.is_static and is_float(t.dtype) for t in (*types, op.outputs[0].type)):
            return False
        if all(user.id in self.inside for user in self.graph.users(op.value)):
            return True
        return math.prod(op.outputs[0].type.static_shape) <= REPEATED // MAX_STAGES and not _in_epilogue(self.graph, op)

    def _operand(self, table: Table, op: Op, value: Value) -> Table:
        """The table of an operand that is broadcast to the operator's result."""
        shape = self.graph.type(value).static_shape
        lead = len(op.outputs[0].type.dims) - len(shape)
        view = tuple(-1 if i < lead or shape[i - lead] == 1 else i - lead for i in table.view)
        axis = table.axis - lead
        if axis < 0 or shape[axis] == 1:
            return Table(value, None, -1, view)
        return Table(value, table.index, axis, view, table.gathered)

    def _moved(self, table: Table, op: Op) -> Table | None:
        """The table before a movement of elements; None if ``op`` is not such a movement."""
        if not op.inputs or op.inputs[0] is None or not self.graph.type(op.inputs[0]).is_static:
            return None
        source = operand(op)
        before, after = self.graph.type(source).static_shape, self.graph.type(table.value).dims
        if op.kind == "Transpose":
            perm = op.attrs.perm
            axis = perm[table.axis] if table.axis >= 0 else -1
            return replace(table, value=source, axis=axis, view=tuple(-1 if i < 0 else perm[i] for i in table.view))
        if op.kind in RESHAPES and [n for n in before if n != 1] == [n for n in after if n != 1]:
            axes = iter([i for i, n in enumerate(before) if n != 1])
            to = {i: next(axes) for i, n in enumerate(after) if n != 1}
            if table.axis >= 0 and table.axis not in to:
                return None
            view = tuple(to.get(i, -1) for i in table.view)
            return replace(table, value=source, axis=to.get(table.axis, -1), view=view)
        index = self._index(op, before) if table.index is not None else None
        if index is None or (op.kind == "Gather" and normalize_axis(op.attrs.axis, len(before)) != table.axis):
            return None
        if op.kind == "GatherND" and table.axis != 0:
            return None
        return replace(table, value=source, index=index[table.index], gathered=True)

    def _index(self, op: Op, shape: tuple[int, ...]) -> Array | None:
        """The constant indices that an operator gathers along one axis, or None."""
        known = self.graph.constant_value(op.input(1)) if op.kind in ("Gather", "GatherND") else None
        if known is None:
            return None
        if op.kind == "Gather":
            size = shape[normalize_axis(op.attrs.axis, len(shape))]
            return np.where(known < 0, known + size, known) if known.ndim == 1 else None
        if op.attrs.batch_dims or known.ndim != 2 or known.shape[1] != 1:
            return None
        return np.where(known < 0, known + shape[0], known)[:, 0]


def _in_epilogue(graph: Graph, op: Op) -> bool:
    """Whether the kernel of a product or convolution can compute a pointwise operator in its epilogue. Repeating the operator would
    give the product a second reader, and so keep the operator out of the epilogue (the residual blocks of DimeNet++)."""
    for value in op.inputs:
        before = (
            None if value is None else producer(graph, value, ANCHORS | ACTIVATIONS | ADDITIONS | SCALINGS, alone=True)
        )
        if before is not None and (before.kind in ANCHORS or _in_epilogue(graph, before)):
            return True
    return False


Factors = list[tuple[str, Table]]


def _without_factors(graph: Graph, rows: Expression, target: Array, count: int) -> tuple[Expression | None, Factors]:
    """Rows without the factors that all rows of a segment share (None if only factors are left), and these factors."""

    def shared(one: Expression | None) -> bool:
        if not isinstance(one, Table) or not same_index(one.index, target):
            return False
        axes = [i for i in (one.axis, *one.view) if i >= 0]
        return graph.type(one.value).static_shape[one.axis] == count and axes == sorted(axes)

    def strip(one: Expression) -> tuple[Expression | None, Factors]:
        if isinstance(one, Table) and shared(one):
            return None, [("Mul", one)]
        if isinstance(one, Table) or one.kind not in ("Mul", "Div") or any(x is None for x in one.args):
            return one, []
        (a, first), b = strip(_given(one.args[0])), _given(one.args[1])
        if one.kind == "Div":
            if isinstance(b, Table) and shared(b) and a is not None:
                return a, [*first, ("Div", b)]
            return one, []
        other, second = strip(b)
        if a is None or other is None:
            return (other if a is None else a), [*first, *second]
        return (Node("Mul", one.attrs, (a, other)), [*first, *second]) if first or second else (one, [])

    return strip(rows)


def _is_whole(graph: Graph, rest: Expression, row: tuple[int, ...]) -> bool:
    """Whether an expression has rows of this shape, and reads a table with an index."""
    tables, indices, _ = _flattened(rest)
    shapes = [graph.type(t.value).static_shape for t in tables]
    parts = [tuple(1 if i < 0 else shape[i] for i in t.view) for t, shape in zip(tables, shapes, strict=True)]
    return bool(indices) and broadcast_dims(*parts) == row


def _given(one: Expression | None) -> Expression:
    assert one is not None
    return one


def _factor(patch: Patch, table: Table, rank: int) -> Value:
    """A factor with the segments as its first axis."""
    shape = patch.type(table.value).static_shape
    parts = [1 if i < 0 else shape[i] for i in table.view]
    return in_shape(patch, table.value, (shape[table.axis], *[1] * (rank - 1 - len(parts)), *parts))


def _flattened(rows: Expression) -> tuple[list[Table], list[Array], tuple[Stage, ...]]:
    """The tables, their different index arrays, and the stages of an expression. Table 0 has an index array."""
    tables: list[Table] = []
    order: list[Node] = []

    def visit(one: Expression | None) -> None:
        if isinstance(one, Table):
            if not any(t.same(one) for t in tables):
                tables.append(one)
        elif one is not None and one not in order:
            for arg in one.args:
                visit(arg)
            order.append(one)

    visit(rows)
    tables.sort(key=lambda t: t.index is None)
    indices: list[Array] = []
    for t in tables:
        if t.index is not None and not any(same_index(i, t.index) for i in indices):
            indices.append(t.index)

    def slot(one: Expression | None) -> int | None:
        if one is None:
            return None
        return (
            ~(order.index(one) + 1) if isinstance(one, Node) else next(k for k, t in enumerate(tables) if t.same(one))
        )

    return tables, indices, tuple(Stage(n.kind, tuple(map(slot, n.args)), n.attrs) for n in order)


@rule("segment_epilogue", STAGE_KINDS)
def segment_epilogue(graph: Graph, op: Op) -> Match | Miss | None:
    """A pointwise operator on segment sums and constants becomes a stage of their epilogue: a bias, an activation."""
    slots = [k for k, v in enumerate(op.inputs) if v is not None and graph.op(v).kind == "SegmentSum"]
    if len(slots) != 1 or len(op.outputs) != 1 or op.kind == "Cast":
        return None
    total = graph.op(operand(op, slots[0]))
    others = [v for k, v in enumerate(op.inputs) if v is not None and k != slots[0]]
    if graph.sole_user(total.value) is None:
        return Miss("the sums have other readers")
    if any(graph.constant_value(v) is None for v in others):
        return Miss("it reads another tensor that is computed")
    if op.outputs[0].type != total.outputs[0].type:
        return Miss("its result has another type than the sums")
    if len(total.attrs.epilogue) == MAX_STAGES:
        return Miss(f"the sums have {MAX_STAGES} stages already")
    begin = len(total.inputs)

    def slot(k: int, value: Value | None) -> int | None:
        return ~len(total.attrs.epilogue) if k == slots[0] else None if value is None else begin + others.index(value)

    stage = Stage(op.kind, tuple(slot(k, v) for k, v in enumerate(op.inputs)), op.attrs)
    attrs = replace(total.attrs, epilogue=(*total.attrs.epilogue, stage))
    return Match((op, total), lambda patch: patch.add("SegmentSum", [*total.inputs, *others], attrs))


class SegmentSums(RulePass):
    name = "segment_sums"
    rules = (segment_sum, segment_epilogue)
