"""Scatters to constant positions (assignments to slices) become Concat or Pad.

Exporters write ``y[:, 1:, ::2] = x`` as a ScatterND or ScatterElements with a constant table of all positions. A scatter kernel
reads the table; a Concat of the kept and the written parts only copies. The table of a large part is not a constant: it is a
Concat of columns that are constant up to an Expand (``passes/support/boxes.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.dim import Dim, DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.boxes import Line, box_of, box_of_columns
from optdnn.passes.support.facts import integers, operand, producer, reshape_target, reshaped, shape_of
from optdnn.types import Array, normalize_axis

SCATTERS = frozenset({"ScatterElements", "ScatterND"})
MOST_WRITES = 4
"""If more writes into a tensor follow one another, ``known_writes`` does not make a Concat of each."""


@dataclass(frozen=True)
class Span:
    """The ``count`` positions ``start, start + step, …`` along an axis of ``size`` elements."""

    axis: int
    start: int
    step: int
    count: int
    size: int

    @property
    def whole(self) -> bool:
        return self.count == self.size

    @property
    def end(self) -> int:
        """One past the last position of a dense span."""
        return self.start + self.count

    @property
    def dense(self) -> bool:
        return self.step == 1 or self.count == 1

    @property
    def interleaved(self) -> bool:
        """Whether the axis consists of groups of ``step``, and the same member of each group is written."""
        return self.start < self.step and self.count * self.step == self.size


@rule("known_writes", SCATTERS)
def known_writes(graph: Graph, op: Op) -> Match | Miss | None:
    """A scatter to a box of the tensor (constant positions, in order) becomes a Concat of the kept and the written parts."""
    x, updates = operand(op), operand(op, 2)
    shape, given = shape_of(graph, x), shape_of(graph, updates)
    if not _known(graph, op) or shape is None or given is None or op.attrs.reduction not in ("none", "add"):
        return None
    if _writes(graph, op) > MOST_WRITES:
        return Miss("too many writes follow one another: each Concat would copy the tensor")
    found = _box(graph, op, shape)
    if found is None:
        return Miss("the positions that it writes are not a box of the tensor, in order")
    spans, adds = [s for s in found if not s.whole], op.attrs.reduction == "add"
    if not all(s.dense or (s.interleaved and not adds) for s in spans):
        return Miss("the positions that it writes have gaps")
    counts = {s.axis: s.count for s in found}
    box = tuple(counts.get(k, d) for k, d in enumerate(shape))
    target = reshape_target(given, box)
    if target is None or any(_split(shape, s) is None for s in spans if not s.dense):
        return Miss("no constant target can express how symbolic dimensions move")
    filler = _filler(graph, x) if all(s.dense for s in spans) else None
    adds = adds and (filler is None or filler != 0)
    around = _transposes(graph, op)
    perm = around[0].attrs.perm if around else tuple(range(len(shape)))
    source, dims = (
        (operand(around[0]), [shape[perm.index(k)] for k in range(len(perm))]) if around else (x, list(shape))
    )
    placed = [replace(s, axis=perm[s.axis]) for s in spans]

    def build(patch: Patch) -> Value:
        part = updates if given == box else reshaped(patch, updates, target)
        if around:
            part = patch.add("Transpose", [part], TransposeAttrs(around[1].attrs.perm))
        if adds:
            zero = np.zeros((), graph.type(x).dtype)
            return patch.add("Add", [source, _padded(patch, part, placed, zero, len(shape))])
        if filler is not None:
            return _padded(patch, part, placed, filler, len(shape))
        return _written(patch, source, dims, part, placed)

    return Match((op, around[1]), build, around[1].value) if around else Match((op,), build)


@rule("hidden_write", SCATTERS)
def hidden_write(graph: Graph, op: Op) -> Match | None:
    """A write is not needed for a next one to the same positions: PyTorch exports ``x[:, 1:] += r`` as two writes."""
    following = [u for u in graph.users(op.value) if u.kind == op.kind and u.inputs[0] == op.value]
    if len(following) != 1 or {op.attrs.reduction, following[0].attrs.reduction} != {"none"}:
        return None
    after = following[0]
    table, other = (graph.constant_value(write.inputs[1]) for write in (op, after))
    equal = table is not None and other is not None and np.array_equal(table, other)
    if after.attrs != op.attrs or not (equal or (op.inputs[1] == after.inputs[1] and op.kind == "ScatterND")):
        return None
    inputs = [op.inputs[0], *after.inputs[1:]]
    return Match((after, op), lambda patch: patch.add(op.kind, inputs, op.attrs), after.value)


@rule("assembled_writes", SCATTERS)
def assembled_writes(graph: Graph, op: Op) -> Match | Miss | None:
    """Consecutive scatters that write disjoint parts of a tensor become one Concat: ``y[:, t] = step(t)`` of a loop."""
    after = graph.sole_user(op.value)
    if (after is not None and after.kind in SCATTERS and after.inputs[0] == op.value) or _writes(
        graph, op
    ) <= MOST_WRITES:
        return None
    parts: list[_Part] = []
    write: Op | None = op
    while write is not None and (part := _part(graph, write)) is not None:
        parts.append(part)
        write = producer(graph, write.inputs[0], SCATTERS, alone=True)
    lines = list(itertools.takewhile(lambda p: p.lines_of(parts[0]), parts))
    if len(lines) > MOST_WRITES:
        return _joined_lines(op, lines)
    return _joined_boxes(graph, op, parts)


def _joined_lines(op: Op, parts: list[_Part]) -> Match | Miss:
    """The Concat of parts along one axis, and of the unwritten ranges between them."""
    base, size = operand(parts[-1].op), parts[0].spans[0].size
    parts = sorted(parts, key=lambda p: p.spans[0].start)
    ends = [p.spans[0].end for p in parts]
    if any(p.spans[0].start < end for p, end in zip(parts[1:], ends, strict=False)):
        return Miss("positions are written more than once")

    def build(patch: Patch) -> Value:
        axis, pieces, at = parts[0].spans[0].axis, list[Value](), 0
        for p, end in zip(parts, ends, strict=True):
            if p.spans[0].start > at:
                pieces.append(_slice(patch, base, axis, at, p.spans[0].start))
            pieces.append(p.add_to(patch))
            at = end
        if at < size:
            pieces.append(_slice(patch, base, axis, at, size))
        return patch.add("Concat", pieces, ConcatAttrs(axis))

    return Match((op, *(p.op for p in parts if p.op is not op)), build)


def _joined_boxes(graph: Graph, op: Op, parts: list[_Part]) -> Match | Miss:
    """The Concat of disjoint boxes in a tensor that is filled with one number.

    Stereo networks fill their cost volume in this way, shift by shift."""
    shape = shape_of(graph, op.value)
    filler = _filler(graph, operand(parts[-1].op)) if parts else None
    if len(parts) <= MOST_WRITES or filler is None or shape is None or not all(isinstance(d, int) for d in shape):
        return Miss("its writes are not parts of one axis")
    if not _apart(parts, len(shape)):
        return Miss("positions are written more than once")
    sizes = tuple(int(d) for d in shape)  # type: ignore[arg-type]

    def build(patch: Patch) -> Value:
        return _assembled(patch, parts, [(0, n) for n in sizes], filler)

    return Match((op, *(p.op for p in parts if p.op is not op)), build)


def _groups(parts: Sequence[_Part], rank: int) -> tuple[int, list[list[_Part]]] | None:
    """The first axis that separates the parts into groups, and these groups in order; None if there is no such axis.

    The parts of a group have the same range along the axis, and the ranges of the groups do not overlap."""
    for axis in range(rank):
        ranges = sorted({p.range(axis) for p in parts})
        if len(ranges) > 1 and all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)):
            return axis, [[p for p in parts if p.range(axis) == each] for each in ranges]
    return None


def _apart(parts: Sequence[_Part], rank: int) -> bool:
    """Whether no two parts share a position: each group of parts is separated along some axis."""
    if len(parts) == 1:
        return True
    found = _groups(parts, rank)
    return found is not None and all(_apart(group, rank) for group in found[1])


def _assembled(patch: Patch, parts: Sequence[_Part], region: Sequence[tuple[int, int]], filler: Array) -> Value:
    """The region (begin and end of each axis) of a tensor of ``filler`` with these parts in it."""
    if len(parts) == 1:
        ranges = [parts[0].range(k) for k in range(len(region))]
        spans = [
            Span(k, own[0] - begin, 1, own[1] - own[0], end - begin)
            for k, (own, (begin, end)) in enumerate(zip(ranges, region, strict=True))
        ]
        return _padded(patch, parts[0].add_to(patch), spans, filler, len(region))
    found = _groups(parts, len(region))
    assert found is not None
    axis, groups = found
    pieces, at = list[Value](), region[axis][0]
    for group, end in [*((g, g[0].range(axis)) for g in groups), (None, (region[axis][1], 0))]:
        if end[0] > at:
            sizes = [end[0] - at if k == axis else b - a for k, (a, b) in enumerate(region)]
            pieces.append(patch.constant(np.full(sizes, filler), "filler"))
        if group is not None:
            pieces.append(_assembled(patch, group, [end if k == axis else r for k, r in enumerate(region)], filler))
            at = end[1]
    return patch.add("Concat", pieces, ConcatAttrs(axis))


@dataclass(frozen=True)
class _Part:
    """The box that ``op`` writes: ``spans``, and all other axes of ``shape`` as a whole. The updates are reshaped to ``target``."""

    op: Op
    spans: tuple[Span, ...]
    shape: tuple[DimLike, ...]
    target: tuple[int, ...] | None

    def lines_of(self, other: _Part) -> bool:
        """Whether both parts have a span of the same axis, and of no other axis."""
        return len(self.spans) == len(other.spans) == 1 and self.spans[0].axis == other.spans[0].axis

    def range(self, axis: int) -> tuple[int, int]:
        """Begin and end of the part along an axis."""
        own = [(s.start, s.end) for s in self.spans if s.axis == axis]
        return own[0] if own else (0, int(self.shape[axis]))  # type: ignore[arg-type]

    def add_to(self, patch: Patch) -> Value:
        """The updates, with the shape of the box."""
        return operand(self.op, 2) if self.target is None else reshaped(patch, operand(self.op, 2), self.target)


def _part(graph: Graph, op: Op) -> _Part | None:
    """The box without gaps that a scatter writes; None if it writes other positions, or the whole tensor."""
    shape, given = shape_of(graph, operand(op)), shape_of(graph, operand(op, 2))
    if not _known(graph, op) or shape is None or given is None or op.attrs.reduction != "none":
        return None
    spans = tuple(s for s in _box(graph, op, shape) or () if not s.whole)
    if not spans or not all(s.dense for s in spans):
        return None
    counts = {s.axis: s.count for s in spans}
    box = tuple(counts.get(k, d) for k, d in enumerate(shape))
    target = reshape_target(given, box)
    if target is None:
        return None
    return _Part(op, spans, tuple(shape), None if given == box else target)


def _writes(graph: Graph, op: Op) -> int:
    """The number of consecutive scatters into the tensor, including this one. It is not counted far beyond ``MOST_WRITES``."""
    count, before, after = 1, producer(graph, op.inputs[0], SCATTERS), graph.sole_user(op.value)
    while before is not None and count <= MOST_WRITES:
        count, before = count + 1, producer(graph, before.inputs[0], SCATTERS)
    while after is not None and after.kind in SCATTERS and count <= MOST_WRITES:
        count, after = count + 1, graph.sole_user(after.value)
    return count


def _filler(graph: Graph, x: Value) -> Array | None:
    """The element of a constant whose elements are all equal; None for other values."""
    base = graph.constant_value(x)
    return None if base is None or not base.size or (base != base.flat[0]).any() else base.reshape(-1)[0]


def _transposes(graph: Graph, op: Op) -> tuple[Op, Op] | None:
    """The Transpose before the scatter and the inverse Transpose after it, or None."""
    before, after = producer(graph, op.inputs[0], {"Transpose"}), graph.sole_user(op.value)
    if before is None or after is None or after.kind != "Transpose" or before.attrs.perm is None:
        return None
    back = tuple(int(k) for k in np.argsort(before.attrs.perm))
    return (before, after) if after.attrs.perm == back else None


def _known(graph: Graph, op: Op) -> bool:
    """Whether the positions that a scatter writes are known, and there are some."""
    table = graph.constant_value(op.inputs[1])
    return bool(table.size) if table is not None else _lines(graph, op) is not None


def _lines(graph: Graph, op: Op) -> Sequence[Line] | None:
    """The positions along each indexed axis, if a ScatterND writes a box in order; else None."""
    table = graph.constant_value(op.inputs[1])
    if op.kind != "ScatterND":
        return None
    return box_of_columns(graph, operand(op, 1)) if table is None else box_of(table)


def _box(graph: Graph, op: Op, shape: Sequence[DimLike]) -> list[Span] | None:
    """The spans of the axes that a scatter indexes, if its known positions are a box in order; else None.

    An axis of symbolic size has no span: all of it is written."""
    if op.kind == "ScatterElements":
        table = graph.constant_value(op.inputs[1])
        return None if table is None else _box_of_elements(op, table, shape)
    lines = _lines(graph, op)
    if lines is None:
        return None
    spans: list[Span | None] = []
    for k, (line, size) in enumerate(zip(lines, shape, strict=False)):
        if isinstance(line, Dim):
            if line != size:
                return None
        elif isinstance(size, int):
            spans.append(_span(k, np.where(line < 0, line + size, line), size))
        else:
            return None
    return None if None in spans else [s for s in spans if s is not None]


def _box_of_elements(op: Op, table: Array, shape: Sequence[DimLike]) -> list[Span] | None:
    """The spans of all axes, if a ScatterElements writes a box in order; else None."""
    axis = normalize_axis(op.attrs.axis, len(shape))
    line = np.moveaxis(table, axis, -1)
    if (line != line.reshape(-1, line.shape[-1])[0]).any():
        return None
    spans = []
    for k, (size, count) in enumerate(zip(shape, table.shape, strict=True)):
        if not isinstance(size, int):
            return None
        positions = np.arange(count) if k != axis else line.reshape(-1, count)[0]
        spans.append(_span(k, np.where(positions < 0, positions + size, positions), size))
    return None if None in spans else [s for s in spans if s is not None]


def _span(axis: int, positions: Array, size: int) -> Span | None:
    """Positions along an axis as a span; None if they are not evenly spaced, or do not ascend."""
    step = int(positions[1] - positions[0]) if len(positions) > 1 else 1
    even = step > 0 and np.array_equal(positions, positions[0] + step * np.arange(len(positions)))
    return Span(axis, int(positions[0]), step, len(positions), size) if even else None


def _split(dims: Sequence[DimLike], span: Span) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Two Reshape targets: the first splits an interleaved axis into (count, step), the second joins it again."""
    cut = (*dims[: span.axis], span.count, span.step, *dims[span.axis + 1 :])
    split, back = reshape_target(tuple(dims), cut), reshape_target(cut, tuple(dims))
    return None if split is None or back is None else (split, back)


def _padded(patch: Patch, part: Value, spans: Sequence[Span], filler: Array, rank: int) -> Value:
    """Add a Pad that puts ``part`` at the positions of ``spans``, with ``filler`` around it."""
    begins, ends = [0] * rank, [0] * rank
    for s in spans:
        begins[s.axis], ends[s.axis] = s.start, s.size - s.start - s.count
    if not any(begins + ends):
        return part
    pads = integers(patch, (*begins, *ends), "pads")
    return patch.add("Pad", [part, pads, patch.constant(filler, "filler")], PadAttrs())


def _written(patch: Patch, x: Value, dims: Sequence[DimLike], part: Value, spans: Sequence[Span]) -> Value:
    """Write ``part`` into the box of ``spans`` of ``x`` (shape ``dims``): add one Concat per axis that is only partly written."""
    if not spans:
        return part
    first, rest = spans[0], spans[1:]
    if rest:
        last = first.start + (first.count - 1) * first.step
        inner = _slice(patch, x, first.axis, first.start, last + 1, first.step)
        sizes = [first.count if k == first.axis else d for k, d in enumerate(dims)]
        part = _written(patch, inner, sizes, part, rest)
    if first.dense:
        return _joined(patch, x, part, first.axis, range(first.start, first.start + first.count), first.size)
    targets = _split(dims, first)
    assert targets is not None
    split, back = targets
    part = patch.add("Unsqueeze", [part, integers(patch, (first.axis + 1,), "axes")])
    columns = range(first.start, first.start + 1)
    return reshaped(patch, _joined(patch, reshaped(patch, x, split), part, first.axis + 1, columns, first.step), back)


def _joined(patch: Patch, x: Value, part: Value, axis: int, positions: range, size: int) -> Value:
    """Add a Concat that replaces these positions of ``x`` along an axis by ``part``."""
    parts = [_slice(patch, x, axis, 0, positions.start)] if positions.start else []
    parts.append(part)
    parts += [_slice(patch, x, axis, positions.stop, size)] if positions.stop < size else []
    return patch.add("Concat", parts, ConcatAttrs(axis))


def _slice(patch: Patch, x: Value, axis: int, begin: int, end: int, step: int = 1) -> Value:
    numbers = [
        integers(patch, (n,), name) for n, name in ((begin, "starts"), (end, "ends"), (axis, "axes"), (step, "steps"))
    ]
    return patch.add("Slice", [x, *numbers])
