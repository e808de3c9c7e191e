"""The operators of a loop's body for all of its independent iterations at once, along one more leading axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import reduced_axes
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, reshaped, slice_limits
from optdnn.passes.support.views import transposed
from optdnn.types import normalize_axis

MOST_BYTES = 1 << 30
"""Most bytes of a result for all iterations."""
LIKE_FIRST = frozenset({"PRelu", "Snake"})
"""Pointwise kinds whose result has the shape of the first operand."""
ALONG_AXIS = frozenset({"ArgMax", "ArgMin", "LogSoftmax", "Softmax"})
"""Kinds along the axis of an attribute."""


def bounded(patch: Patch, operands: Sequence[Value | None]) -> Value:
    """A Clip whose bounds (operands 1 and 2) differ along an axis: ONNX's Clip has bounds of one element."""
    found = operands[0]
    assert found is not None
    for kind, bound in zip(("Max", "Min"), operands[1:], strict=False):
        found = found if bound is None else patch.add(kind, [found, bound])
    return found


def reduced(patch: Patch, body: Graph, op: Op, x: Value) -> Value:
    """A reduction of ``body``, of ``x``, which is its operand with one more leading axis."""
    axes = reduced_axes(op.attrs, ints(body, op.input(1)), len(patch.type(x).dims) - 1, op.kind)
    where = integers(patch, [k + 1 for k in axes], "axes")
    return patch.add(op.kind, [x, where], replace(op.attrs, noop_with_empty_axes=True))


def moved_axis(patch: Patch, x: Value, source: int, target: int) -> Value:
    """``x`` with the axis ``source`` at the place ``target``."""
    rest = [k for k in range(len(patch.type(x).dims)) if k != source]
    return transposed(patch, x, (*rest[:target], source, *rest[target:]))


def dims_of(body: Graph, value: Value) -> tuple[int, ...]:
    return body.type(value).static_shape


def refusal(body: Graph, ops: Iterable[Op], trips: int) -> str | None:
    """Why these operators of the body cannot be computed for ``trips`` iterations at once, or None."""
    inner = [op for op in ops if op.kind not in STRUCTURAL and op.kind != "Constant"]
    if (why := next((w for op in inner if (w := refused_operator(body, op)) is not None), None)) is not None:
        return why
    sizes = (math.prod(dims_of(body, op.value)) * op.outputs[0].type.dtype.itemsize for op in inner)
    large = trips * max(sizes, default=0) > MOST_BYTES
    return "the results of all its iterations would take too much memory" if large else None


def refused_operator(body: Graph, op: Op) -> str | None:
    """Why an operator of the body cannot have one more leading axis, or None."""
    if len(op.outputs) != 1 or not all(body.type(v).is_static for v in (*op.inputs, op.value) if v is not None):
        return f"its {op.kind} has sizes that are not known"
    if op.definition.traits.pointwise or op.kind in ("Transpose", "Concat"):
        return None
    if op.kind == "MatMul" and all(len(dims_of(body, operand(op, i))) >= 2 for i in (0, 1)):
        return None
    if op.kind == "Unsqueeze" and ints(body, op.input(1)) is not None:
        return None
    if op.kind in RESHAPES and 0 not in dims_of(body, op.value):
        return None
    if op.kind in ALONG_AXIS or (op.kind == "Slice" and all(ints(body, v) is not None for v in op.inputs[1:] if v)):
        return None
    if op.kind.startswith("Reduce") and (op.input(1) is None or ints(body, op.input(1)) is not None):
        return None
    return f"its {op.kind} cannot have one more axis"


class Iterations:
    """Values of ``body`` in the graph around the loop. ``place``: their values there; those in ``every`` have a leading axis of
    iterations, and all others have none. ``trips``: the number of iterations, or an int64 value [1] with it."""

    def __init__(
        self, patch: Patch, body: Graph, trips: int | Value, place: Mapping[Value, Value], every: Iterable[Value]
    ):
        self._patch, self._body, self._trips = patch, body, trips
        self.place, self.every = dict(place), set(every)

    def run(self, ops: Iterable[Op]) -> None:
        """Adds these operators, in their order."""
        for op in ops:
            if op.kind == "Constant":
                self.place[op.value] = self._patch.constant(op.attrs.value, op.outputs[0].name)
            elif op.kind in STRUCTURAL or op.value in self.place:
                continue
            elif self.every.intersection(v for v in op.inputs if v is not None):
                self.place[op.value] = self._for_all(op)
                self.every.add(op.value)
            else:
                operands = [None if v is None else self.place[v] for v in op.inputs]
                self.place[op.value] = self._patch.add(op.kind, operands, op.attrs)

    def stacked(self, value: Value) -> Value:
        """The value of all iterations, with the leading axis."""
        if value in self.every:
            return self.place[value]
        dims = dims_of(self._body, value)
        if isinstance(self._trips, int):
            shape = self._patch.constant(np.array((self._trips, *dims), np.int64), "shape")
        else:
            sizes = integers(self._patch, dims, "sizes")
            shape = self._patch.add("Concat", [self._trips, sizes], ConcatAttrs(0)) if dims else self._trips
        return self._patch.add("Expand", [self.place[value], shape])

    def _for_all(self, op: Op) -> Value:
        """An operator of the body for all iterations."""
        patch, body, rank = self._patch, self._body, len(dims_of(self._body, operand(op)))
        if op.kind == "Transpose":
            perm = op.attrs.perm or tuple(reversed(range(rank)))
            return patch.add("Transpose", [self.place[operand(op)]], TransposeAttrs((0, *(k + 1 for k in perm))))
        if op.kind == "Unsqueeze":
            own = [normalize_axis(k, len(dims_of(body, op.value))) for k in ints(body, op.input(1)) or ()]
            return patch.add("Unsqueeze", [self.place[operand(op)], integers(patch, [k + 1 for k in own], "axes")])
        if op.kind == "Concat":
            parts = [self.stacked(v) for v in op.inputs if v is not None]
            return patch.add("Concat", parts, ConcatAttrs(normalize_axis(op.attrs.axis, rank) + 1))
        if op.kind in RESHAPES:
            count = self._trips if isinstance(self._trips, int) else -1
            return reshaped(patch, self.place[operand(op)], (count, *dims_of(body, op.value)))
        if op.kind in ALONG_AXIS:
            axis = normalize_axis(op.attrs.axis, rank) + 1
            return patch.add(op.kind, [self.place[operand(op)]], replace(op.attrs, axis=axis))
        if op.kind == "Slice":
            return self._sliced(op)
        if op.kind == "Gather":
            return self._gathered(op, rank)
        if op.kind.startswith("Reduce"):
            return reduced(patch, body, op, self.place[operand(op)])
        ranks = [len(dims_of(body, v)) for v in op.inputs if v is not None]
        operands = [None if v is None else self._aligned(v, max(ranks)) for v in op.inputs]
        if op.kind == "Clip" and self.every.intersection(v for v in op.inputs[1:] if v is not None):
            return bounded(patch, operands)
        if op.kind in LIKE_FIRST:
            operands[0] = self.stacked(operand(op))
        return patch.add(op.kind, operands, op.attrs)

    def _sliced(self, op: Op) -> Value:
        found = slice_limits(self._body, op) or []
        axes, starts, ends, steps = ([each[k] for each in found] for k in range(4))
        limits = [integers(self._patch, v, "limits") for v in (starts, ends, [axis + 1 for axis in axes], steps)]
        return self._patch.add("Slice", [self.place[operand(op)], *limits])

    def _gathered(self, op: Op, rank: int) -> Value:
        """Rows of a tensor that all iterations share, by indices of their own."""
        axis = normalize_axis(op.attrs.axis, rank)
        rows = self._patch.add("Gather", [self.place[operand(op)], self.place[operand(op, 1)]], GatherAttrs(axis))
        return moved_axis(self._patch, rows, axis, 0)

    def _aligned(self, value: Value, rank: int) -> Value:
        """A value with axes of size 1 after the axis of iterations, up to ``rank`` more axes: ready for broadcasting."""
        own = len(dims_of(self._body, value))
        if value not in self.every or own == rank:
            return self.place[value]
        axes = integers(self._patch, range(1, 1 + rank - own), "axes")
        return self._patch.add("Unsqueeze", [self.place[value], axes])
