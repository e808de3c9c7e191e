"""The axes of a chain of Reshapes and Transposes, each as a list of parts: factors of the first tensor's axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.facts import VIEWS, operand

Axes = tuple[tuple[int, ...], ...]
"""The numbers of the parts of each axis. An axis of size 1 has none."""


@dataclass(frozen=True)
class Chain:
    """A chain of views of ``base``. ``moves``: the permutation of each Transpose, and None for each Reshape.

    ``sizes``: the size of each part. ``axes``: the axes of ``base``, and those after each move.
    """

    base: Value
    moves: tuple[tuple[int, ...] | None, ...]
    sizes: tuple[int, ...]
    axes: tuple[Axes, ...]

    def shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the base and after each move if the parts have these sizes."""
        return [tuple(math.prod(sizes[p] for p in axis) for axis in axes) for axes in self.axes]

    @property
    def parts(self) -> list[int]:
        """The numbers of the parts in the order of ``base``: ascending."""
        return list(range(len(self.sizes)))

    @property
    def taken(self) -> list[int]:
        """The numbers of the parts in the order after all moves."""
        return [p for axis in self.axes[-1] for p in axis]


def one_turn(
    sizes: Sequence[int], given: Sequence[int], taken: Sequence[int], starts: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The Reshape and the Transpose that bring the parts ``given``, with these ``sizes``, into the order of ``taken``.

    Parts that stay neighbors are one axis. Each of ``starts`` begins an axis: there may be gaps between axes in memory."""
    runs: list[list[int]] = []
    for i, p in enumerate(given):
        if i and p not in starts and taken.index(p) == taken.index(runs[-1][-1]) + 1:
            runs[-1].append(p)
        else:
            runs.append([p])
    order = sorted(runs, key=lambda run: taken.index(run[0]))
    return tuple(math.prod(sizes[p] for p in run) for run in runs), tuple(runs.index(run) for run in order)


def chain_of(graph: Graph, value: Value, *, alone: bool = False) -> Chain | None:
    """The longest chain of views that ends at ``value``; None if a size is unknown, or no parts express it. ``alone``: each value
    before ``value`` has one reader."""
    ops = list[Op]()
    while graph.op(value).kind in VIEWS and (not alone or not ops or graph.sole_user(value) is not None):
        ops.append(graph.op(value))
        value = operand(ops[-1])
    if alone and ops and graph.sole_user(value) is None:
        return None
    return chain_along(graph, value, ops[::-1])


def chain_along(graph: Graph, base: Value, views: Sequence[Op]) -> Chain | None:
    """The chain of these views of ``base``, in order; None if a size is unknown, or no parts express it."""
    types = [graph.type(base), *(op.outputs[0].type for op in views)]
    if any(not t.is_static or 0 in t.dims for t in types):
        return None
    if any(op.kind == "Transpose" and op.attrs.perm is None for op in views):
        return None
    moves = tuple(op.attrs.perm if op.kind == "Transpose" else None for op in views)
    found = _parts([t.static_shape for t in types], moves)
    return None if found is None else Chain(base, moves, *found)


class _Cut(NamedTuple):
    """A part that must be cut into an outer part of this size, and the rest."""

    part: int
    outer: int


def _parts(
    shapes: Sequence[tuple[int, ...]], moves: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[int, ...], tuple[Axes, ...]] | None:
    """The sizes of the parts, and the axes before and after each move; None if an axis would need a part of a fractional size."""
    cuts = [[n] if n > 1 else [] for n in shapes[0]]
    while True:
        number = count()
        first = tuple(tuple(next(number) for _ in own) for own in cuts)
        sizes, axes = [n for own in cuts for n in own], [first]
        cut: _Cut | None = None
        for perm, shape in zip(moves, shapes[1:], strict=True):
            if perm is not None:
                axes.append(tuple(axes[-1][p] for p in perm))
                continue
            grouped = _grouped([p for axis in axes[-1] for p in axis], sizes, shape)
            if grouped is None:
                return None
            if isinstance(grouped, _Cut):
                cut = grouped
                break
            axes.append(grouped)
        if cut is None:
            return tuple(sizes), tuple(axes)
        part, outer = cut
        owner = next(own for own, numbers in zip(cuts, first, strict=True) if part in numbers)
        at = part - next(numbers for numbers in first if part in numbers)[0]
        owner[at : at + 1] = [outer, owner[at] // outer]


def _grouped(parts: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> _Cut | Axes | None:
    """``parts`` in groups, one per axis of ``shape``; or a part that must be cut first; None if neither is possible."""
    groups, left = list[tuple[int, ...]](), list(parts)
    for size in shape:
        own, held = list[int](), 1
        while held < size:
            part = left.pop(0)
            if size % (held * sizes[part]) == 0:
                own.append(part)
                held *= sizes[part]
                continue
            outer = size // held
            return None if size % held or sizes[part] % outer or outer == 1 else _Cut(part, outer)
        groups.append(tuple(own))
    return tuple(groups)
