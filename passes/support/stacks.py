"""Stacks of values that are computed by equal operators from parts of tensors: one operator computes all along a new first axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, reshaped
from optdnn.passes.support.iterations import LIKE_FIRST, bounded, reduced
from optdnn.passes.support.parts import port_span, span
from optdnn.types import Array, normalize_axis

DEPTH = 9
"""Most operators between a part and its reader."""
SMALL = 64
"""Most elements of constants that are compared by value."""
_REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"})
_SEARCHES = frozenset({"ArgMax", "ArgMin"})
STACKED_KINDS = (
    frozenset(STAGE_KINDS) | RESHAPES | _REDUCTIONS | _SEARCHES | {"Transpose", "Slice", "Gather", "Trilu", "Concat"}
)
"""Kinds that can compute a stack of parts in one operator."""


@dataclass(frozen=True)
class Part:
    """``size`` positions of ``source`` along ``axis``, from ``start`` on. ``dropped``: the part lacks the axis (``size`` is 1)."""

    source: Value
    axis: int
    start: int
    size: int
    dropped: bool

    @property
    def family(self) -> Hashable:
        return ("part", self.source, self.axis, self.size, self.dropped)


@dataclass(frozen=True)
class Leaf:
    """A part, and the path of operators after it. Each comes with the slot of its operand that is on the path."""

    value: Value
    path: tuple[tuple[Op, int], ...]


@dataclass(frozen=True)
class Shared:
    """One value for all parts."""

    value: Value


@dataclass(frozen=True)
class Window:
    """Parts of one tensor at equal distances: consecutive parts, or single positions."""

    first: Part
    count: int
    step: int


@dataclass(frozen=True)
class Picked:
    """Parts that each take as many positions of one tensor along ``axis``: a row of ``positions`` each."""

    source: Value
    axis: int
    positions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Joined:
    """Values of any origin, which a Concat copies into one tensor."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class Same:
    """Equal operators with stacked operands."""

    ops: tuple[Op, ...]
    operands: tuple[Stack | None, ...]


Stack = Shared | Window | Picked | Joined | Same


def part_of(graph: Graph, value: Value) -> Part | None:
    """``value`` as the part of a tensor that a Slice, a Split or a Gather takes; else None."""
    op = graph.op(value)
    if op.kind not in ("Slice", "Split", "Gather") or not graph.type(operand(op)).is_static:
        return None
    sizes = graph.type(operand(op)).static_shape
    if op.kind == "Gather":
        axis, index = normalize_axis(op.attrs.axis, len(sizes)), graph.constant_value(op.input(1))
        if index is None or index.ndim:
            return None
        return Part(operand(op), axis, int(index) % sizes[axis], 1, dropped=True)
    after = graph.type(value).dims
    axes = [k for k, (a, b) in enumerate(zip(sizes, after, strict=True)) if a != b]
    if len(axes) != 1:
        return None
    axis = axes[0]
    size, back = sizes[axis], axis - len(sizes)
    taken = port_span(graph, op, value.port, back) if op.kind == "Split" else span(graph, op, size, back)
    if taken is None or taken[2] != 1:
        return None
    return Part(operand(op), axis, taken[0], taken[1] - taken[0], dropped=False)


def parts_of(graph: Graph, like: Part) -> Iterator[tuple[Value, Part]]:
    """All parts of the same tensor along the same axis and of the same size as ``like``, including itself."""
    for user in graph.users(like.source):
        for value in user.values:
            part = part_of(graph, value) if user.inputs[0] == like.source else None
            if part is not None and part.family == like.family:
                yield value, part


class Forms:
    """Computes a key for the form of each value of a graph. Values with equal keys may form a stack. Keys are cached."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._leaves: dict[tuple[Value, int], Leaf | None] = {}
        self._keys: dict[tuple[Value, int], Hashable] = {}
        self._families: dict[Value, Counter[Hashable]] = {}
        self._parts: dict[Hashable, list[tuple[Value, Part]]] = {}

    def parts(self, like: Part) -> list[tuple[Value, Part]]:
        """All parts of the family of a part, by their starts."""
        if like.family not in self._parts:
            self._parts[like.family] = sorted(parts_of(self.graph, like), key=lambda found: found[1].start)
        return self._parts[like.family]

    def leaf(self, value: Value, depth: int = DEPTH) -> Leaf | None:
        """A part from which the value is computed, or None."""
        if (value, depth) not in self._leaves:
            self._leaves[value, depth] = self._leaf(value, depth)
        return self._leaves[value, depth]

    def _leaf(self, value: Value, depth: int) -> Leaf | None:
        if self._one_of_many(value) is not None:
            return Leaf(value, ())
        op = self.graph.op(value)
        if depth == 0 or op.kind not in STACKED_KINDS or len(op.outputs) > 1:
            return None
        for slot, inner in enumerate(op.inputs):
            found = None if inner is None else self.leaf(inner, depth - 1)
            if found is not None:
                return Leaf(found.value, (*found.path, (op, slot)))
        return None

    def _one_of_many(self, value: Value) -> Part | None:
        """``value`` as a part, if the same tensor has other parts of this family; else None."""
        part = part_of(self.graph, value)
        if part is None:
            return None
        if part.source not in self._families:
            users = self.graph.users(part.source)
            values = [v for user in users for v in user.values]
            found = [part_of(self.graph, v) for v in values]
            self._families[part.source] = Counter(p.family for p in found if p is not None and p.source == part.source)
        return part if self._families[part.source][part.family] > 1 else None

    def of(self, value: Value, depth: int = DEPTH) -> Hashable:
        """The key of a value: values of one stack have equal keys."""
        if (value, depth) not in self._keys:
            self._keys[value, depth] = self._of(value, depth)
        return self._keys[value, depth]

    def _of(self, value: Value, depth: int) -> Hashable:
        part = self._one_of_many(value)
        if part is not None:
            return part.family
        op = self.graph.op(value)
        if op.kind == "Constant":
            return _number(op.attrs.value) or value
        if depth == 0 or op.kind not in STACKED_KINDS or len(op.outputs) > 1:
            return self.graph.type(value)
        return (op.kind, op.attrs, *(None if v is None else self.of(v, depth - 1) for v in op.inputs))


def _number(array: Array) -> tuple[str, tuple[int, ...], bytes] | None:
    """A key for the contents of a small constant; None for a large one."""
    return (array.dtype.str, array.shape, array.tobytes()) if array.size <= SMALL else None


def stack_of(graph: Graph, values: Sequence[Value], depth: int = DEPTH) -> Stack | None:
    """The stack that computes ``values``, one for each part; None if there are none, or they are computed differently."""
    if not values:
        return None
    if len(set(values)) == 1:
        return Shared(values[0])
    known = [v for value in values if (v := graph.constant_value(value)) is not None]
    if len(known) == len(values) and len({graph.type(v) for v in values}) == 1:
        alike = len({_number(v) for v in known}) == 1 and _number(known[0]) is not None
        return Shared(values[0]) if alike else Joined(tuple(values))
    if (window := _window_of([part_of(graph, v) for v in values])) is not None:
        return window
    if (picked := _picked_of(graph, values)) is not None:
        return picked
    ops = [graph.op(v) for v in values]
    if depth == 0 or ops[0].kind not in STACKED_KINDS or not graph.type(values[0]).is_static:
        return None
    found = same(graph, ops, [stack_of(graph, column, depth - 1) for column in columns(ops)])
    if found is not None and all(isinstance(each, Shared | None) for each in found.operands):
        return Shared(values[0])  # equal values: an earlier pass made equal operators
    return found


def _window_of(parts: Sequence[Part | None]) -> Window | None:
    """The window that consists of ``parts``, or None if there is none."""
    first, second = parts[:2]
    if first is None or second is None:
        return None
    step = second.start - first.start
    if step != first.size and (first.size > 1 or step < 1):
        return None
    alike = all(part == replace(first, start=first.start + k * step) for k, part in enumerate(parts))
    return Window(first, len(parts), step) if alike else None


def _picked_of(graph: Graph, values: Sequence[Value]) -> Picked | None:
    """The positions that Gathers with constant vectors of one length take from one tensor; None for other values."""
    first, rows = graph.op(values[0]), list[tuple[int, ...]]()
    for op in map(graph.op, values):
        index = graph.constant_value(op.input(1)) if op.kind == "Gather" else None
        if index is None or index.ndim != 1 or (op.inputs[0], op.attrs) != (first.inputs[0], first.attrs):
            return None
        rows.append(tuple(index.tolist()))
    if len({len(row) for row in rows}) > 1 or not graph.type(operand(first)).is_static:
        return None
    return Picked(operand(first), normalize_axis(first.attrs.axis, len(graph.type(operand(first)).dims)), tuple(rows))


def columns(ops: Sequence[Op]) -> Iterator[list[Value]]:
    """The operands of equal operators, slot by slot; an empty list stands for an absent operand."""
    for slot in range(min(len(op.inputs) for op in ops)):
        yield [v for op in ops if (v := op.inputs[slot]) is not None]


def same(graph: Graph, ops: Sequence[Op], operands: Sequence[Stack | None]) -> Same | None:
    """The stack of the results of ``ops``, from stacked operands; None if the operators differ."""
    first = ops[0]
    known = [slot for slot, v in enumerate(first.inputs) if v is not None]
    if any((op.kind, op.attrs, len(op.inputs)) != (first.kind, first.attrs, len(first.inputs)) for op in ops):
        return None
    if any(op.outputs[0].type != first.outputs[0].type or len(op.outputs) > 1 for op in ops):
        return None
    if any([s for s, v in enumerate(op.inputs) if v is not None] != known for op in ops):
        return None
    if any(operands[slot] is None for slot in known):
        return None
    looked_up = (
        first.kind == "Gather" and isinstance(operands[0], Shared) and first.attrs.axis == 0
    )  # rows of one table
    if not looked_up and first.kind not in {
        *STAGE_KINDS,
        "MatMul",
        "Concat",
    }:  # other operands are axes and sizes, equal constants
        others = [operands[slot] for slot in known[1:]]
        if any(not isinstance(o, Shared) or graph.constant_value(o.value) is None for o in others):
            return None
    return Same(tuple(ops), tuple(operands[slot] if slot in known else None for slot in range(len(first.inputs))))


def leaves(stack: Stack | None) -> Iterator[Value]:
    """The values from which a stack is computed."""
    match stack:
        case Shared(value):
            yield value
        case Window(first, _, _):
            yield first.source
        case Picked(source, _, _):
            yield source
        case Joined(values):
            yield from values
        case Same(_, operands):
            for each in operands:
                yield from leaves(each)


def covered(stack: Stack | None) -> Iterator[Op]:
    """The operators that a stack replaces, some of them several times."""
    if isinstance(stack, Same):
        yield from stack.ops
        for each in stack.operands:
            yield from covered(each)


def emit(patch: Patch, stack: Stack) -> Value:
    """Add the operators that compute a stack. A shared value stays as it is, without the axis of parts."""
    match stack:
        case Shared(value):
            return value
        case Window():
            return _window(patch, stack)
        case Picked(source, axis, positions):
            places = patch.constant(np.array(positions, np.int64), "parts")
            return _first(patch, patch.add("Gather", [source, places], GatherAttrs(axis)), axis)
        case Joined(values):
            rows = [reshaped(patch, v, (1, *patch.type(v).static_shape)) for v in values]
            return patch.add("Concat", rows, ConcatAttrs(0))
        case Same(ops, operands):
            return _computed(patch, ops, operands)


def _window(patch: Patch, window: Window) -> Value:
    first, count, step = window.first, window.count, window.step
    x, axis = first.source, first.axis
    sizes = list(patch.type(x).static_shape)
    end = first.start + (count - 1) * step + first.size
    if (first.start, end, step) != (0, sizes[axis], first.size):
        steps = [] if step == first.size else [step]
        limits = (integers(patch, [n], "part") for n in (first.start, end, axis, *steps))
        x = patch.add("Slice", [x, *limits])
    if not first.dropped:
        x = reshaped(patch, x, (*sizes[:axis], count, first.size, *sizes[axis + 1 :]))
    return _first(patch, x, axis)


def _first(patch: Patch, x: Value, axis: int) -> Value:
    """``x`` with this axis as the first one."""
    order = (axis, *(k for k in range(len(patch.type(x).dims)) if k != axis))
    return x if axis == 0 else patch.add("Transpose", [x], TransposeAttrs(order))


def _computed(patch: Patch, ops: Sequence[Op], operands: Sequence[Stack | None]) -> Value:
    """Add the operator that computes the results of ``ops`` along a new first axis."""
    op, count = ops[0], len(ops)
    shape = op.outputs[0].type.static_shape
    given = [None if each is None else emit(patch, each) for each in operands]
    stacked = [not isinstance(each, Shared | None) for each in operands]
    if op.kind in STAGE_KINDS or op.kind == "MatMul":
        rows = [
            _with_rank(patch, v, len(shape)) if v is not None and has_axis else v
            for v, has_axis in zip(given, stacked, strict=True)
        ]
        if op.kind == "Clip" and any(stacked[1:]):
            return bounded(patch, rows)
        if op.kind in LIKE_FIRST and not stacked[0]:
            rows[0] = _repeated(patch, operand(op), count)
        return patch.add(op.kind, rows, op.attrs)
    x = given[0]
    assert x is not None
    if op.kind in RESHAPES:
        return reshaped(patch, x, (count, *shape))
    if op.kind == "Transpose":
        perm = op.attrs.perm or tuple(reversed(range(len(shape))))
        return patch.add("Transpose", [x], TransposeAttrs((0, *(k + 1 for k in perm))))
    if op.kind == "Gather" and not stacked[0]:
        return patch.add("Gather", [x, given[1]], op.attrs)
    if op.kind == "Gather":
        rank = len(patch.type(x).dims) - 1
        return patch.add("Gather", [x, given[1]], GatherAttrs(normalize_axis(op.attrs.axis, rank) + 1))
    if op.kind in _SEARCHES or op.kind == "Concat":
        attrs = replace(op.attrs, axis=normalize_axis(op.attrs.axis, len(patch.type(operand(op)).dims)) + 1)
        parts = [_repeated(patch, v, count) if v and not own else v for v, own in zip(given, stacked, strict=True)]
        return patch.add(op.kind, parts, attrs)
    if op.kind == "Trilu":
        return patch.add("Trilu", [x, *given[1:]], op.attrs)
    if op.kind in _REDUCTIONS:
        return reduced(patch, patch.graph, op, x)
    at = 3 if op.kind == "Slice" else 1
    return patch.add(op.kind, [x, *given[1:at], _axes(patch, given[at], x), *given[at + 1 :]], op.attrs)


def _repeated(patch: Patch, x: Value, count: int) -> Value:
    """Add operators that repeat a shared value for each part."""
    shape = patch.type(x).static_shape
    return patch.add("Expand", [reshaped(patch, x, (1, *shape)), integers(patch, [count, *shape], "repeated")])


def _axes(patch: Patch, axes: Value | None, x: Value) -> Value:
    """Add a constant with the same axes, counted after the new first axis of ``x``."""
    rank = len(patch.type(x).dims) - 1
    known = ints(patch.graph, axes)
    assert known is not None
    return integers(patch, [normalize_axis(a, rank) + 1 for a in known], "axes")


def _with_rank(patch: Patch, x: Value, rank: int) -> Value:
    """Add a Reshape that gives the parts of a stack leading axes of size 1, up to ``rank`` axes."""
    count, *rest = patch.type(x).static_shape
    missing = rank - len(rest)
    return reshaped(patch, x, (count, *[1] * missing, *rest)) if missing else x


def part_values(patch: Patch, stacked: Value, count: int, axis: int = 0) -> list[Value]:
    """Add Gathers that take the ``count`` parts of a stack along ``axis``."""
    return [
        patch.add("Gather", [stacked, patch.constant(np.array(k, np.int64), "part")], GatherAttrs(axis))
        for k in range(count)
    ]
