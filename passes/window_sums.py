"""Cost volumes of optical flow and stereo: the sums of products with each shifted image become one op over all shifts.

PWC-Net (Sun et al., 2018) compares each pixel of an image with all pixels near its position in another image. Exporters unroll the
loop over the shifts: for each shift a Slice, a product and a mean over the channels, then a Concat of the means. The shifted images
are windows of the second image, which one kernel reads in place.

Stereo networks cut both images to their overlap, and put the mean into a volume of zeros (DispNetC). GwcNet (Guo et al., 2019)
takes a mean for each group of channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.crops import starts, zeros_before
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, producer, reshaped, shape_of
from optdnn.passes.support.parts import longest_run
from optdnn.types import Array, normalize_axis

SUMS = frozenset({"ReduceMean", "ReduceSum"})
FEWEST = 4
"""Fewest shifts for which windows pay for their transposition."""


@dataclass(frozen=True)
class Shift:
    """A part of a Concat: the sum (``kind``) of ``other`` times ``source`` from ``begin`` on, with zeros around it.

    ``cut``: both images were cut to their overlap, and the sum has zeros around it. ``split``: (groups, channels per group) if the
    channels are split first.
    """

    other: Value
    source: Value
    kind: str
    begin: tuple[int, ...]
    ops: tuple[Op, ...]
    cut: bool = False
    split: tuple[int, int] | None = None

    @property
    def moved(self) -> bool:
        return any(self.begin)


@dataclass(frozen=True)
class Steps:
    """``count`` positions along an axis from ``start`` on, ``step`` apart."""

    start: int
    step: int
    count: int


@rule("window_sum", {"Concat"})
def window_sum(graph: Graph, op: Op) -> Match | Miss | None:
    """``concat(sum(x * slice(y, 0, 0)), sum(x * slice(y, 0, 1)), …)`` is ``sum(x * windows(y))``."""
    rank = op.outputs[0].type.rank
    if rank is None or not op.outputs[0].type.is_static:
        return None
    axis = normalize_axis(op.attrs.axis, rank)
    start, run = max(
        (longest_run([_shift(graph, v, axis, slot) for v in op.inputs], _kind) for slot in (0, 1)),
        key=lambda found: len(found[1]),
    )
    end = start + len(run)
    if not any(s.moved for s in run):
        return None
    if len(run) < FEWEST:
        return Miss(f"it joins sums of {len(run)} shifts, fewer than {FEWEST}")
    steps = _grid([s.begin for s in run])
    if steps is None:
        return Miss("the shifts of its sums do not form a grid with equal distances")
    if steps[axis].count > 1:
        return Miss("its sums are shifted along the axis that they sum over")
    ops = (op, *(o for s in run for o in s.ops))

    def build(patch: Patch) -> Value:
        y = _summed(patch, replace(run[0], cut=any(s.cut for s in run)), steps, axis)
        if len(run) == len(op.inputs):
            return y
        return patch.add("Concat", [*op.inputs[:start], y, *op.inputs[end:]], op.attrs)

    return Match(ops, build)


def _shift(graph: Graph, part: Value | None, axis: int, slot: int) -> Shift | None:
    """The shifted sum in a part of a Concat along ``axis``, or None. Operand ``slot`` of the product is the shifted image."""
    pad = producer(graph, part, {"Pad"}, alone=True)
    found = _sum(graph, part if pad is None else operand(pad), axis)
    if found is None:
        return None
    total, product, split, ops = found
    moved, other = operand(product, slot), operand(product, 1 - slot)
    sizes = shape_of(graph, product.value)
    if shape_of(graph, moved) != sizes or shape_of(graph, other) != sizes:
        return None
    source, begin, moves = _sliced(graph, moved)
    if not graph.type(source).is_static:
        return None
    if pad is not None:
        shared = _uncut(graph, pad, axis, split, (source, begin), other)
        if shared is None:
            return None
        other, begin, kept = shared
        moves = [pad, *moves, *kept]
    if split is not None:
        if begin[axis - 1] or graph.type(source).static_shape[axis - 1] != split[0] * split[1]:
            return None
        begin = (*begin[: axis - 1], 0, 0, *begin[axis:])
    return Shift(other, source, total.kind, begin, (*ops, *moves), pad is not None, split)


def _sum(graph: Graph, part: Value | None, axis: int) -> tuple[Op, Op, tuple[int, int] | None, list[Op]] | None:
    """The sum along ``axis``, the product that it adds up, the split of the channels in between, and all operators on the way.

    The axis has size 1 in the result. The split is (groups, channels per group), or None."""
    ops = [op for op in (producer(graph, part, RESHAPES, alone=True),) if op is not None]
    total = producer(graph, operand(ops[0]) if ops else part, SUMS, alone=True)
    if total is None:
        return None
    shape, axes = shape_of(graph, operand(total)), ints(graph, total.input(1))
    joined = (ops[0] if ops else total).outputs[0].type.shape
    if shape is None or axes is None or [normalize_axis(a, len(shape)) for a in axes] != [axis]:
        return None
    if joined != (*shape[:axis], 1, *shape[axis + 1 :]):
        return None
    groups = producer(graph, operand(total), {"Reshape"}, alone=True)
    product = producer(graph, operand(total if groups is None else groups), {"Mul"}, alone=True)
    if product is None:
        return None
    if groups is None:
        return total, product, None, [*ops, total, product]
    outer, own = shape[axis - 1] if axis else None, shape[axis]
    if not isinstance(outer, int) or not isinstance(own, int):
        return None
    if shape_of(graph, product.value) != (*shape[: axis - 1], outer * own, *shape[axis + 1 :]):
        return None
    return total, product, (outer, own), [*ops, total, groups, product]


def _uncut(
    graph: Graph, pad: Op, axis: int, split: tuple[int, int] | None, moved: tuple[Value, tuple[int, ...]], other: Value
) -> tuple[Value, tuple[int, ...], list[Op]] | None:
    """The whole image behind ``other``, the shift, and the Slices without other readers; or None.

    ``other`` must be the overlap of the whole image with the shifted one, and ``pad`` must add zeros everywhere else. ``axis``:
    the axis along which the sums are joined."""
    before, frame = zeros_before(graph, pad), list(pad.outputs[0].type.shape or ())
    whole, start, moves = _sliced(graph, other)
    source, begin = moved
    if before is None or before[axis] or not all(graph.type(v).is_static for v in (whole, other)):
        return None
    if frame[axis] != 1 or (split is not None and frame[axis - 1] != split[0]):
        return None  # the Pad adds channels
    channels = axis if split is None else axis - 1
    if split is not None:
        del before[axis], frame[axis]
    sizes, box, limits = (graph.type(v).static_shape for v in (whole, other, source))
    frame[channels] = sizes[channels]
    if tuple(frame) != sizes or list(start) != [-n for n in before] or sizes[channels] != box[channels]:
        return None
    shifts = tuple(b - a for a, b in zip(start, begin, strict=True))
    for a, n, size, shift, limit in zip(start, box, sizes, shifts, limits, strict=True):
        if (a, a + n) != (max(0, -shift), min(size, limit - shift)):
            return None  # the Pad has zeros where both images have values
    return whole, shifts, moves


def _sliced(graph: Graph, value: Value) -> tuple[Value, tuple[int, ...], list[Op]]:
    """The tensor from which Slices with steps of 1 take a box, the box's first element, and the Slices without other readers.

    If Pads add zeros to the tensor, the box may begin before it or end after it."""
    begin, alone, moves = [0] * len(graph.type(value).dims), True, list[Op]()
    while (op := producer(graph, value, {"Slice", "Pad"})) is not None:
        moved = starts(graph, op) if op.kind == "Slice" else zeros_before(graph, op)
        if moved is None:
            break
        begin = [b + m for b, m in zip(begin, moved, strict=True)]
        alone = alone and graph.sole_user(op.value) is not None
        moves += [op] if alone else []
        value = operand(op)
    return value, tuple(begin), moves


def _kind(shift: Shift) -> tuple[object, ...]:
    """What parts that differ only in their shifts have in common."""
    return shift.other, shift.source, shift.kind, shift.split


def _grid(begins: Sequence[Sequence[int]]) -> list[Steps] | None:
    """The positions along each axis, if the shifts are all combinations of them with the last axis fastest; else None."""
    steps: list[Steps] = []
    for positions in zip(*begins, strict=True):
        own = list(dict.fromkeys(positions))
        step = own[1] - own[0] if len(own) > 1 else 1
        if own != list(range(own[0], own[0] + step * len(own), step)):
            return None
        steps.append(Steps(own[0], step, len(own)))
    wanted = itertools.product(*(range(s.start, s.start + s.step * s.count, s.step) for s in steps))
    return steps if [tuple(b) for b in begins] == list(wanted) else None


def _summed(patch: Patch, shift: Shift, steps: Sequence[Steps], axis: int) -> Value:
    """The sums of all shifts, joined along ``axis``.

    The summed axis, the channels, is moved last: the convolutions around use channels-last order, and a thread reads neighbors."""
    if shift.split is not None:
        other, source = (_in_groups(patch, v, axis, shift.split) for v in (shift.other, shift.source))
        shift = replace(shift, other=other, source=source)
    shape = patch.type(shift.other).static_shape
    rank = len(shape)
    outer = [k for k in range(rank) if k != axis]
    last = TransposeAttrs((*outer, axis))
    shared = _shared(shape, patch.type(shift.source).static_shape, steps, outer) if shift.cut else None
    source, steps = _padded(patch, shift, steps)
    channels = patch.constant(steps[axis].start + np.arange(shape[axis]), "channels")
    if patch.type(source).dims[axis] != shape[axis]:
        source = patch.add("Gather", [source, channels], GatherAttrs(axis))
    windows, other = (patch.add("Transpose", [v], last) for v in (source, shift.other))
    counts: list[int] = []
    sizes: list[int] = []
    for size, s in zip([shape[k] for k in outer], [steps[k] for k in outer], strict=True):
        at = len(counts) + len(sizes)
        index = s.start + s.step * np.arange(s.count)[:, None] + np.arange(size)
        if s.count > 1:
            counts.append(at)
        windows = patch.add(
            "Gather", [windows, patch.constant(index if s.count > 1 else index[0], "shifts")], GatherAttrs(at)
        )
        sizes.append(at + (s.count > 1))
    turned = TransposeAttrs((*sizes, *counts, len(sizes) + len(counts)))
    windows = patch.add("Transpose", [windows], turned)
    other = reshaped(patch, other, (*(shape[k] for k in outer), *[1] * len(counts), shape[axis]))
    product = patch.add("Mul", [other, windows])
    total = patch.add(shift.kind, [product, integers(patch, [-1], "axes")], ReduceAttrs(keepdims=False))
    if shared is not None:
        zero = patch.constant(np.zeros((), patch.type(total).dtype), "zero")
        total = patch.add("Where", [patch.constant(shared, "shared"), total, zero])
    total = reshaped(patch, total, (*(shape[k] for k in outer), int(np.prod([s.count for s in steps]))))
    back = sorted(range(rank), key=lambda k: (*outer, axis)[k])
    return patch.add("Transpose", [total], TransposeAttrs(tuple(back)))


def _in_groups(patch: Patch, image: Value, axis: int, split: tuple[int, int]) -> Value:
    """An image whose channels are split into the axes ``axis - 1`` and ``axis``."""
    shape = patch.type(image).static_shape
    return reshaped(patch, image, (*shape[: axis - 1], *split, *shape[axis:]))


def _shared(shape: Sequence[int], limits: Sequence[int], steps: Sequence[Steps], outer: Sequence[int]) -> Array:
    """For each shift, a mask of the positions in an image of ``shape`` where the shifted image, of shape ``limits``, has a value.

    A product with padding zeros would not be enough: zero times infinity is NaN. The axes are those of the sums before they are
    joined."""
    counts = [k for k in outer if steps[k].count > 1]
    shared = np.ones((1,) * (len(outer) + len(counts)), bool)
    for at, k in enumerate(outer):
        s = steps[k]
        positions = np.arange(shape[k])[:, None] + s.start + s.step * np.arange(s.count)
        inside = (positions >= 0) & (positions < limits[k])
        dims = [1] * shared.ndim
        dims[at] = shape[k]
        if s.count > 1:
            dims[len(outer) + counts.index(k)] = s.count
        shared = shared & inside.reshape(dims)
    return shared


def _padded(patch: Patch, shift: Shift, steps: Sequence[Steps]) -> tuple[Value, list[Steps]]:
    """The tensor, padded with zeros for boxes that reach outside of it, and the positions in the padded tensor."""
    shape, sizes = patch.type(shift.source).static_shape, patch.type(shift.other).static_shape
    ends = [(s.start, s.start + s.step * (s.count - 1)) for s in steps]
    before = [max(0, -min(e)) for e in ends]
    after = [max(0, max(e) + n - whole) for e, n, whole in zip(ends, sizes, shape, strict=True)]
    moved = [replace(s, start=s.start + n) for s, n in zip(steps, before, strict=True)]
    if not any((*before, *after)):
        return shift.source, moved
    pads = integers(patch, [*before, *after], "pads")
    return patch.add("Pad", [shift.source, pads], PadAttrs()), moved


class WindowSums(RulePass):
    name = "window_sums"
    rules = (window_sum,)
