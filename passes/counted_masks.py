"""A mask over positions up to the longest length gets the size of the axis that it masks.

Speech networks (torchaudio's Conformer, ESPnet, icefall) compare ``arange(lengths.max())`` with the lengths. Its size depends
on data, so the comparison would run on the CPU. But the mask meets a tensor of known size, or a Reshape to one. So the range has
that size, or one element, which every position reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, scalar

_KEEPS = frozenset({"Unsqueeze", "Expand", *STAGE_KINDS})
"""Kinds through which a range keeps its size, or is repeated."""
_WRAPS = frozenset({*RESHAPES, "Cast", "Gather", "Identity"})
"""Kinds that only move a single number."""


class _Mask:
    """The operators that compute a mask from a range.

    ``ops``: those whose results have the size of the range. ``ends``: their readers with results of known size.
    """

    def __init__(self, graph: Graph, source: Op) -> None:
        self.graph, self.source = graph, source
        self.ops: dict[Value, Op] = {}
        self.ends: dict[Value, Op] = {}
        self.other: Op | None = None
        """A reader for which the size is unknown."""
        self.axes: dict[Value, int] = {source.value: -1}
        """The axis of the range in each result, from the back."""
        self._grow(source.value)

    def _grow(self, value: Value) -> None:
        for user in self.graph.users(value):
            axis = self._axis(user, value)
            if axis is None or self._axes_of(user) != {axis}:
                self.other = user
            elif self.graph.type(user.value).is_static:
                self.ends[user.value] = user
            elif user.value not in self.axes:
                self.ops[user.value] = user
                self.axes[user.value] = axis
                self._grow(user.value)

    def _axes_of(self, user: Op) -> set[int | None]:
        return {self._axis(user, value) for value in user.inputs if value in self.axes}

    def _axis(self, user: Op, value: Value) -> int | None:
        """The axis of the range in the result of ``user``, from the back; None if it may have another size there."""
        axis, rank = self.axes[value], self.graph.type(user.value).rank
        data = user.inputs if user.kind in STAGE_KINDS else user.inputs[:1]
        if rank is None or value not in data or value in user.inputs[len(data) :]:
            return None
        if user.kind == "Reshape":
            return axis if self._columns(user) else None
        if user.kind == "Unsqueeze":
            new = self.graph.constant_value(user.inputs[1])
            return None if new is None else _after_unsqueeze(axis, [int(k) % rank for k in new.ravel()], rank)
        if user.kind == "Expand" and not self.graph.type(user.value).is_static and self._target(user, 1) is None:
            return None
        return axis if user.kind in _KEEPS else None

    def _columns(self, reshape: Op) -> int | None:
        """The elements of a Reshape's result for each element of the other axes of its operand, or None."""
        size, dims = self.graph.type(reshape.value), list(self.graph.type(operand(reshape)).dims)
        del dims[self.axes[operand(reshape)]]
        if not size.is_static or not all(isinstance(n, int) and n > 0 for n in dims):
            return None
        total, rest = math.prod(size.static_shape), math.prod(n for n in dims if isinstance(n, int))
        return total // rest if total % rest == 0 else None

    def _target(self, expand: Op, columns: int) -> list[int] | None:
        """The target of an Expand if each size is known or, along the axis of the range, is that of the range: ``columns`` then."""
        found = []
        sizes = list(_elements(self.graph, operand(expand, 1)))
        for place, size in enumerate(sizes, -len(sizes)):
            if isinstance(size, int):
                found.append(size)
            elif (
                place == self.axes[operand(expand)]
                and size is not None
                and size == _number(self.graph, operand(self.source, 1))
            ):
                found.append(columns)
            else:
                return None
        return found

    def columns(self) -> set[int | None]:
        """The sizes that the readers ask for."""
        return {
            self._columns(end) if end.kind == "Reshape" else self.graph.type(end.value).static_shape[self._last(end)]
            for end in self.ends.values()
        }

    def _last(self, end: Op) -> int:
        """The axis of the range in the result of ``end``, from the back."""
        (axis,) = self._axes_of(end)
        assert axis is not None
        return axis

    def build(self, patch: Patch, columns: int) -> None:
        """Add the mask with ``columns`` positions."""
        limit = operand(self.source, 1)
        dtype = self.graph.type(self.source.value).dtype
        places = patch.constant(np.arange(columns).astype(dtype), "places")
        one, zero = (patch.constant(np.asarray(k).astype(dtype), "number") for k in (1, 0))
        made = {self.source.value: patch.add("Where", [patch.add("Equal", [limit, one]), zero, places])}

        def copy(op: Op) -> Value:
            inputs = [new(v) if v in self.axes else v for v in op.inputs]
            if op.kind == "Expand" and not self.graph.type(op.value).is_static:
                inputs[1] = patch.constant(np.asarray(self._target(op, columns), np.int64), "target")
            return patch.add(op.kind, inputs, op.attrs)

        def new(value: Value | None) -> Value:
            assert value is not None
            if value not in made:
                made[value] = copy(self.ops[value])
            return made[value]

        for value, end in self.ends.items():
            patch.replace(value, copy(end))


def _after_unsqueeze(axis: int, new: list[int], rank: int) -> int:
    """Where an axis, from the back, stands among ``new`` axes of a result with ``rank`` axes."""
    kept = [k for k in range(rank) if k not in new]
    return kept[axis] - rank


def _elements(graph: Graph, value: Value) -> Iterator[int | Value | None]:
    """The elements of a vector of sizes: numbers, or the values that hold them (None: unknown)."""
    known, joint = graph.known(value), producer(graph, value, {"Concat"})
    if known is not None:
        yield from (int(n) if isinstance(n, int | np.integer) else None for n in known.ravel())
    elif joint is not None:
        for part in joint.inputs:
            assert part is not None
            yield from _elements(graph, part)
    else:
        yield _number(graph, value)


def _number(graph: Graph, value: Value) -> Value | None:
    """The value that computes a single integer, before operators that only move it; None if there are several."""
    if not _is_single(graph, value):
        return None
    while (op := producer(graph, value, _WRAPS)) is not None and _is_single(graph, operand(op)):
        value = operand(op)
    return value


def _is_single(graph: Graph, value: Value) -> bool:
    found = graph.type(value)
    return found.dtype.kind in "iu" and found.is_static and math.prod(found.static_shape) == 1


@rule("counted_mask", {"Range"})
def counted_mask(graph: Graph, op: Op) -> Match | Miss | None:
    """A Range of integers from 0 in steps of 1 whose size depends on data, and whose readers meet tensors of one known size."""
    if scalar(graph, operand(op)) != 0 or scalar(graph, operand(op, 2)) != 1:
        return None
    found = graph.type(op.value)
    if found.dtype.kind not in "iu" or found.is_static or graph.known(operand(op, 1)) is not None:
        return None
    mask = _Mask(graph, op)
    if mask.other is not None:
        return Miss(f"{mask.other.name} reads it, whose result has no known size")
    sizes = mask.columns()
    if len(sizes) != 1 or None in sizes:
        return Miss("its readers do not ask for one known size")
    (columns,) = sizes
    assert columns is not None

    def build(patch: Patch) -> None:
        mask.build(patch, columns)

    return Match((op, *mask.ops.values(), *mask.ends.values()), build)


class CountedMasks(RulePass):
    """For GPUs only: the CPU libraries take sizes that depend on data."""

    name = "counted_masks"
    rules = (counted_mask,)
