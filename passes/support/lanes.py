"""Equal operators on the parts of a tensor, computed at once: in one tensor whose axis before the last one counts the parts.

The values of such parts, one for each part, are *lanes*. ``plan`` finds how all lanes are computed, ``emit`` adds the operators
that compute them together. Lanes of sizes (…, n) become one tensor of sizes (…, lanes, n)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.passes.support.facts import NORMS, RESHAPES, integers, ints, operand, reshaped, sliced
from optdnn.passes.support.parts import port_span, span
from optdnn.passes.support.stacks import Part, Stack, part_of, part_values, stack_of
from optdnn.passes.support.stacks import Same as StackedOps
from optdnn.passes.support.stacks import Window as StackedParts
from optdnn.passes.support.stacks import covered as stack_covered
from optdnn.passes.support.stacks import emit as stacked
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis

DEPTH = 9
"""Most operators between a part and its reader."""
SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"})
LAST_AXIS = SUMS | NORMS | {"Softmax", "LpNormalization"}
"""Kinds that work along the last axis, if their attributes or axes say so."""
CUTS = frozenset({"Slice", "Split"})
"""Kinds that take a part of the last axis of each lane."""


@dataclass(frozen=True)
class Shared:
    """One value for all lanes."""

    value: Value


@dataclass(frozen=True)
class Constants:
    """A constant for each lane, all of one type."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class Window:
    """Consecutive parts of one tensor, beginning with ``first``: parts of its last axis, or single positions of any axis."""

    first: Part
    count: int


@dataclass(frozen=True)
class Same:
    """Equal operators. ``cut``: for a Slice or Split, the begin and the end of the part of the last axis."""

    ops: tuple[Op, ...]
    operands: tuple[Lanes | None, ...]
    cut: tuple[int, int] | None = None


@dataclass(frozen=True)
class Moved:
    """Lanes that Transposes and Reshapes take from parts along any axis, as a stack along a new first axis."""

    stack: Stack


Lanes = Shared | Constants | Window | Same | Moved


def leaf(graph: Graph, value: Value) -> Part | None:
    """``value`` as a part that may be a lane: a part of the last axis, or one position of an axis, without this axis."""
    part = part_of(graph, value)
    if part is not None:
        rank = graph.type(part.source).rank or 0
        return part if rank > 1 and (part.dropped or part.axis == rank - 1) else None
    view = graph.op(value)
    inner = part_of(graph, operand(view)) if view.kind in RESHAPES else None
    if inner is None or inner.dropped or inner.size != 1 or (graph.type(inner.source).rank or 0) < 2:
        return None
    dims = graph.type(operand(view)).dims
    kept = (*dims[: inner.axis], *dims[inner.axis + 1 :])
    return Part(inner.source, inner.axis, inner.start, 1, dropped=True) if graph.type(value).dims == kept else None


def plan(graph: Graph, values: Sequence[Value], depth: int = DEPTH) -> Lanes | None:
    """How the lanes ``values`` are computed, or None if their operators differ, or cannot compute all lanes together."""
    if len(set(values)) == 1:
        return Shared(values[0])
    types = {graph.type(v) for v in values}
    if len(types) > 1 or not graph.type(values[0]).is_static:
        return None
    arrays = [a for v in values if (a := graph.constant_value(v)) is not None]
    if len(arrays) == len(values):
        return Shared(values[0]) if all(np.array_equal(a, arrays[0]) for a in arrays) else Constants(tuple(values))
    first, *others = (leaf(graph, v) for v in values)
    if first is not None:
        follow = [replace(first, start=first.start + k * first.size) for k in range(1, len(values))]
        if others == follow:
            return Window(first, len(values))
    ops = [graph.op(v) for v in values]
    if depth == 0 or any(alike(op) != alike(ops[0]) for op in ops) or len({v.port for v in values}) > 1:
        return None
    if ops[0].kind in RESHAPES | {"Transpose", "Slice", "Split", "Gather"} and graph.type(values[0]).rank:
        moved = stack_of(graph, values, depth)
        if isinstance(moved, StackedOps | StackedParts):
            return Moved(moved)
    return _same(graph, ops, values[0], depth)


def alike(op: Op) -> tuple[object, ...]:
    """What operators of all lanes have in common, besides their operands."""
    return op.kind, op.attrs, len(op.outputs), tuple(v is None for v in op.inputs)


def _same(graph: Graph, ops: Sequence[Op], value: Value, depth: int) -> Shared | Same | None:
    first = ops[0]
    pointwise = first.kind in STAGE_KINDS and len(first.outputs) == 1
    if not pointwise and not along_last(graph, first):
        return None
    slots = range(len(first.inputs)) if pointwise or first.kind in NORMS else range(1)
    operands = [
        None if first.inputs[slot] is None else plan(graph, [operand(op, slot) for op in ops], depth - 1)
        for slot in slots
    ]
    if any(found is None and first.inputs[slot] is not None for slot, found in zip(slots, operands, strict=True)):
        return None
    if not pointwise and any(not along_last(graph, op) for op in ops):
        return None
    if all(isinstance(each, Shared | None) for each in operands):
        return Shared(value)
    cuts = {cut_of(graph, Value(op.id, value.port)) for op in ops}
    return Same(tuple(ops), tuple(operands), cuts.pop()) if len(cuts) == 1 else None


def along_last(graph: Graph, op: Op) -> bool:
    """Whether an operator works along the last axis only, and keeps it."""
    if op.kind not in LAST_AXIS | CUTS:
        return False
    rank = graph.type(operand(op)).rank
    if rank is None or op.outputs[0].type.rank != rank or (len(op.outputs) > 1 and op.kind != "Split"):
        return False
    if op.kind in SUMS:
        axes = ints(graph, op.input(1))
        return bool(op.attrs.keepdims and axes is not None and [normalize_axis(a, rank) for a in axes] == [rank - 1])
    if op.kind in CUTS:
        return cut_of(graph, Value(op.id, 0)) is not None
    return normalize_axis(op.attrs.axis, rank) == rank - 1


def cut_of(graph: Graph, value: Value) -> tuple[int, int] | None:
    """Begin and end of the part of the last axis that a Slice or a Split takes; None for other operators."""
    op = graph.op(value)
    if op.kind not in CUTS:
        return None
    size = graph.type(operand(op)).dims[-1:]
    if not size or not isinstance(size[0], int):
        return None
    found = port_span(graph, op, value.port) if op.kind == "Split" else span(graph, op, size[0])
    return found[:2] if found is not None and found[2] == 1 else None


def covered(lanes: Lanes | None) -> Iterator[Op]:
    """The operators that lanes replace, some of them several times."""
    if isinstance(lanes, Moved):
        yield from stack_covered(lanes.stack)
    if isinstance(lanes, Same):
        yield from lanes.ops
        for each in lanes.operands:
            yield from covered(each)


def emit(patch: Patch, lanes: Lanes, made: dict[Hashable, Value] | None = None) -> Value:
    """Add the operators that compute all lanes, each once (``made``: those so far). A shared value has one lane."""
    made = {} if made is None else made
    key = (tuple(op.id for op in lanes.ops), lanes.cut) if isinstance(lanes, Same) else lanes
    if key not in made:
        made[key] = _emitted(patch, lanes, made)
    return made[key]


def _emitted(patch: Patch, lanes: Lanes, made: dict[Hashable, Value]) -> Value:
    match lanes:
        case Shared(value):
            dims = patch.type(value).static_shape
            return value if len(dims) < 2 else reshaped(patch, value, (*dims[:-1], 1, dims[-1]))
        case Constants(values):
            arrays = [patch.graph.constant_value(v) for v in values]
            rows = [a.reshape(1) if a.ndim == 0 else a for a in arrays if a is not None]
            return patch.constant(np.stack(rows, axis=-2), "lanes")
        case Window(first, count):
            return _window(patch, first, count)
        case Moved(stack):
            x = stacked(patch, stack)
            rank = len(patch.type(x).dims)
            return transposed(patch, x, (*range(1, rank - 1), 0, rank - 1))
        case Same(ops, operands, cut):
            return _computed(
                patch, ops[0], [None if each is None else emit(patch, each, made) for each in operands], cut
            )


def _window(patch: Patch, first: Part, count: int) -> Value:
    x, axis = first.source, first.axis
    sizes = list(patch.type(x).static_shape)
    width = count * first.size
    if width != sizes[axis]:
        x = sliced(patch, x, first.start, first.start + width, axis)
    if not first.dropped:
        return reshaped(patch, x, (*sizes[:-1], count, first.size))
    rank = len(sizes)
    others = [k for k in range(rank) if k != axis]
    return transposed(patch, x, (*others[:-1], axis, others[-1]))


def _computed(patch: Patch, op: Op, given: Sequence[Value | None], cut: tuple[int, int] | None) -> Value:
    """Add the operator that computes all lanes of ``op``."""
    x = given[0]
    assert x is not None
    if cut is not None:
        return sliced(patch, x, *cut, -1)
    if op.kind in STAGE_KINDS:
        return patch.add(op.kind, given, op.attrs)
    if op.kind in SUMS:
        return patch.add(op.kind, [x, integers(patch, [-1], "axes")], op.attrs)
    attrs = replace(op.attrs, axis=-1)
    if op.kind not in NORMS or all(v is None or patch.type(v).rank == 1 for v in given[1:]):
        return patch.add(op.kind, given, attrs)
    ones = patch.constant(np.ones(patch.type(x).static_shape[-1:], patch.type(x).dtype), "ones")
    y = patch.add(op.kind, [x, ones], attrs)
    for kind, factor in zip(("Mul", "Add"), given[1:], strict=False):
        y = y if factor is None else patch.add(kind, [y, factor])
    return y


def taken(patch: Patch, lanes: Value, count: int) -> list[Value]:
    """Add Gathers that take each lane of a tensor."""
    return part_values(patch, lanes, count, len(patch.type(lanes).dims) - 2)


def rows_in(graph: Graph, value: Value) -> int:
    """The number of rows of a static value: all but its last axis."""
    return math.prod(graph.type(value).static_shape[:-1])
