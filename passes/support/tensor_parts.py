"""Parts of tensors for tensor parallelism: the part of a rank, and the operand parts that an operator needs for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ops.base import Attrs
from optdnn.passes.support.facts import operand
from optdnn.types import Array, Shape

VIEW_LIMIT = 1 << 24
"""Most elements of the axes that a Reshape merges or splits together with the axis of a part."""


class Whole(Exception):
    """An operator needs whole operands. The text is the reason."""


@dataclass(frozen=True)
class Part:
    """The indices ``take`` along ``axis``, in the order in which a rank holds them."""

    axis: int
    take: Array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self.axis == other.axis and np.array_equal(self.take, other.take)

    __hash__ = None  # type: ignore[assignment]

    @property
    def size(self) -> int:
        return len(self.take)

    def of(self, shape: Shape) -> Shape:
        """The shape of this part of a tensor of ``shape``."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    @property
    def run(self) -> tuple[int, int] | None:
        """The first index and the number of indices, if they are consecutive; else None."""
        first = int(self.take[0])
        return (first, self.size) if np.array_equal(self.take, np.arange(first, first + self.size)) else None


@dataclass
class Needed:
    """The changes to an operator that computes only a part of its result."""

    operands: dict[int, Part] = field(default_factory=dict)
    """Slot -> part; absent operands are whole."""
    outputs: dict[int, Part] = field(default_factory=dict)
    """Output number -> part, for its other results."""
    constants: dict[int, Array] = field(default_factory=dict)
    """Slot -> the constant that replaces an operand."""
    attrs: Attrs | None = None
    """New attributes, or None."""
    divided: dict[int, Array] = field(default_factory=dict)
    """Slot -> divisor of an integer operand that is known only at run time."""


@dataclass(frozen=True)
class Asked:
    """An operator, and the required parts of its results (output number -> part; at least one)."""

    graph: Graph
    op: Op
    parts: Mapping[int, Part]

    @property
    def part(self) -> Part:
        """The required part; with several results, the part of the first."""
        return self.parts[min(self.parts)]

    @property
    def axis(self) -> int:
        return self.part.axis

    def dims(self, slot: int) -> Shape:
        return self.graph.type(operand(self.op, slot)).dims

    @property
    def out(self) -> Shape:
        return self.op.outputs[min(self.parts)].type.dims

    def aligned(self, slot: int) -> dict[int, Part]:
        """The part of an operand that is broadcast to the result; empty if the operand has one element along the axis."""
        if self.op.input(slot) is None:
            return {}
        dims = self.dims(slot)
        at = len(dims) - (len(self.out) - self.axis)
        if at < 0 or dims[at] == 1:
            return {}
        return {slot: Part(at, self.part.take)}


def coarse(take: Array, size: int, what: str) -> Array:
    """The numbers of the groups of ``size`` consecutive indices that ``take`` consists of. Raises Whole if it cuts a group.

    ``what`` names a group in the error's text."""
    if len(take) % size == 0:
        groups = take.reshape(-1, size)
        if np.array_equal(groups, groups[:, :1] // size * size + np.arange(size)):
            found: Array = groups[:, 0] // size
            return found
    raise Whole(f"its part would cut {what} of {size}")


def viewed(before: Shape, after: Shape, part: Part) -> Part:
    """The part of a tensor of shape ``before`` that is ``part`` after a Reshape to ``after``. Raises Whole if there is none."""
    first, last, start, end = _merged(before, after, part.axis)
    inner, outer = before[first:last], after[start:end]
    if not all(isinstance(d, int) for d in (*inner, *outer)):
        raise Whole("a view of unknown sizes cuts it")
    sizes, new_sizes = [int(d) for d in inner], [int(d) for d in outer]  # type: ignore[arg-type]
    count = math.prod(new_sizes)
    if count > VIEW_LIMIT:
        raise Whole(f"a view merges or splits axes of {count} elements around it, more than {VIEW_LIMIT}")
    wanted = np.arange(count).reshape(new_sizes).take(part.take, axis=part.axis - start).reshape(-1)
    positions = np.arange(count).reshape(sizes)
    for axis, size in enumerate(sizes):
        along = wanted // math.prod(sizes[axis + 1 :]) % size
        _, order = np.unique(along, return_index=True)
        take = along[np.sort(order)]
        if np.array_equal(positions.take(take, axis=axis).reshape(-1), wanted):
            return Part(first + axis, take)
    shown = " x ".join(map(str, sizes))
    raise Whole(f"{part.size} of {after[part.axis]} indices are not a part of {shown} along one axis")


def _merged(before: Shape, after: Shape, axis: int) -> tuple[int, int, int, int]:
    """The smallest runs of axes of ``before`` and ``after`` that hold the same elements, with ``axis`` in the run of ``after``.

    Returns the first axis and one past the last axis of each run: ``before``'s, then ``after``'s."""
    i = j = 0
    while True:
        first, start = i, j
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if not isinstance(a, int) or not isinstance(b, int):
                raise Whole("a view of unknown sizes cuts it")
            if a < b:
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        if i == len(before) or j == len(after):
            i, j = len(before), len(after)
        if start <= axis < j:
            return first, i, start, j
