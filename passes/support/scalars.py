"""Integers that the iterations of a Loop compute from their own rows of integer matrices, for all iterations at once.

An integer of an iteration, or an element of a short vector, is a :data:`Scalar`: a constant, or an expression. It becomes a value
[iterations, 1] of the graph around the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.support.facts import is_filled
from optdnn.types import INT64, DType, normalize_axis

MOST_ELEMENTS = 16
"""Most elements of a vector of an iteration."""
POINTWISE = {"Add": 2, "Sub": 2, "Mul": 2, "Max": 0, "Min": 0, "Neg": 1, "Abs": 1}
"""Kind -> the number of operands (0: any)."""
SAME = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Identity", "Flatten", "Expand"})
"""Kinds that give a vector of one element another rank."""


@dataclass(frozen=True)
class Expression:
    """``kind`` of scalars; or "row": element ``column`` of the iteration's row of a matrix of the graph, ``source``."""

    kind: str
    operands: tuple[Scalar, ...] = ()
    source: Value | None = None
    column: int = 0


Scalar = int | Expression


class Scalars:
    """The scalars of the iterations of ``loop``."""

    def __init__(self, graph: Graph, loop: Op):
        self._graph, self._loop, self._body = graph, loop, loop.attrs.body.graph
        carried = loop.attrs.carried
        self._captured = {
            Value(i): v for i, v in zip(self._body.inputs[2 + carried :], loop.inputs[2 + carried :], strict=True)
        }
        self._rows: set[Value] = set()
        self._made: dict[tuple[Scalar, DType], Value] = {}

    def of(self, value: Value) -> list[Scalar] | None:
        """The elements of a value of the body: an integer, or a short vector; None for other values."""
        body = self._body
        known = body.constant_value(value)
        if known is not None:
            small = known.dtype.kind in "iu" and known.ndim <= 1 and known.size <= MOST_ELEMENTS
            return [int(x) for x in known.reshape(-1)] if small else None
        op, t = body.op(value), body.type(value)
        if t.dtype.kind not in "iu" or t.shape is None or len(t.shape) > 1:
            return None
        if op.kind == "Gather":
            return self._gathered(op)
        given = [None if v is None else self.of(v) for v in op.inputs]
        if op.kind == "Concat":
            return None if any(g is None for g in given) else [x for g in given if g is not None for x in g]
        if op.kind in SAME:
            return given[0] if given[0] is not None and len(given[0]) == 1 and t.shape in ((), (1,)) else None
        if op.kind in ("ReduceMax", "ReduceMin") and op.input(1) is None and given[0]:
            return [_made(op.kind[len("Reduce") :], *given[0])]
        if op.kind == "Clip":
            return self._clipped(op)
        arity = POINTWISE.get(op.kind)
        if arity is None or any(g is None for g in given) or (arity and len(given) != arity):
            return None
        parts = [g for g in given if g is not None]
        length = max(map(len, parts))
        if any(len(p) not in (1, length) for p in parts):
            return None
        return [_made(op.kind, *(p[k % len(p)] for p in parts)) for k in range(length)]

    def _clipped(self, op: Op) -> list[Scalar] | None:
        found = self.of(op.inputs[0])  # type: ignore[arg-type]
        for kind, slot in (("Max", 1), ("Min", 2)):
            if found is not None and (bound := op.input(slot)) is not None:
                limit = self.of(bound)
                found = [_made(kind, x, limit[0]) for x in found] if limit is not None and len(limit) == 1 else None
        return found

    def _gathered(self, op: Op) -> list[Scalar] | None:
        """An iteration's row of a matrix, or an element of a vector."""
        source, index = op.inputs
        assert source is not None
        rank = len(self._body.type(source).dims)
        if normalize_axis(op.attrs.axis, rank):
            return None
        if source in self._captured and index == Value(self._body.inputs[0]) and rank == 2:
            outside = self._captured[source]
            columns = self._body.type(source).dims[1]
            if outside is None or not isinstance(columns, int) or columns > MOST_ELEMENTS:
                return None
            self._rows.add(outside)
            return [Expression("row", source=outside, column=k) for k in range(columns)]
        parts, number = self.of(source), self._body.known(index)
        if (
            parts is None
            or number is None
            or number.size != 1
            or not isinstance(k := number.reshape(-1).tolist()[0], int)
        ):
            return None
        return [parts[k]] if -len(parts) <= k < len(parts) else None

    def rows_of(self, value: Value) -> Value | None:
        """The value around the loop whose rows the iterations take as ``value``: directly, or without or with axes of size 1."""
        body = self._body
        op = body.op(value)
        while op.kind in ("Expand", "Reshape", "Squeeze", "Unsqueeze", "Identity") or (
            op.kind == "Gather" and op.inputs[0] not in self._captured and is_filled(body.known(op.inputs[1]), 0)
        ):
            if op.inputs[0] is None or not _same_size(body, op):
                return None
            op = body.op(op.inputs[0])
        taken = op.kind == "Gather" and op.inputs[1] == Value(body.inputs[0]) and not op.attrs.axis
        outside = self._captured.get(op.inputs[0]) if taken and op.inputs[0] is not None else None
        if outside is not None:
            self._rows.add(outside)
        return outside

    def all_rows(self) -> bool:
        """Whether there are as many iterations as each of the values has rows."""
        return as_many_as_rows(self._graph, self._loop, self._rows)

    # ------------------------------------------------------------ values of the graph around the loop

    def value(self, patch: Patch, scalar: Scalar, dtype: DType = INT64) -> Value:
        """A scalar as a value [iterations, 1]; a constant as a value [1, 1]."""
        if (scalar, dtype) not in self._made:
            self._made[scalar, dtype] = self._value(patch, scalar, dtype)
        return self._made[scalar, dtype]

    def _value(self, patch: Patch, scalar: Scalar, dtype: DType) -> Value:
        if isinstance(scalar, int):
            return patch.constant(np.full((1, 1), scalar, dtype), "")
        if dtype != INT64:
            return patch.add("Cast", [self.value(patch, scalar)], CastAttrs(dtype))
        if scalar.kind != "row":
            return patch.add(scalar.kind, [self.value(patch, s) for s in scalar.operands])
        assert scalar.source is not None
        column = patch.add(
            "Gather", [scalar.source, patch.constant(np.array([scalar.column]), "column")], GatherAttrs(1)
        )
        return column if patch.type(column).dtype == INT64 else patch.add("Cast", [column], CastAttrs(INT64))


def as_many_as_rows(graph: Graph, loop: Op, values: Iterable[Value]) -> bool:
    """Whether a Loop begins, and has as many iterations as each of these values has rows; False without values."""
    trips, shapes = graph.known(loop.input(0)), [graph.type(v).shape for v in values]
    begins = loop.input(1) is None or is_filled(graph.known(loop.input(1)), 1)
    if trips is None or trips.size != 1 or not begins:
        return False
    count = trips.reshape(-1).tolist()[0]
    return bool(shapes) and all(s is not None and s[0] == count for s in shapes)


def _made(kind: str, *operands: Scalar) -> Scalar:
    """An expression; of constants, their value."""
    numbers = [x for x in operands if isinstance(x, int)]
    if len(numbers) < len(operands):
        return Expression(kind, operands) if len(operands) > 1 or kind in ("Neg", "Abs") else operands[0]
    first, *others = numbers
    for x in others:
        first = {"Add": first + x, "Sub": first - x, "Mul": first * x, "Max": max(first, x), "Min": min(first, x)}[kind]
    return -first if kind == "Neg" else abs(first) if kind == "Abs" else first


def _same_size(body: Graph, op: Op) -> bool:
    """Whether an operator keeps the number of elements, which is known."""
    before, after = (body.type(v) for v in (op.inputs[0], op.value) if v is not None)
    return before.is_static and after.is_static and math.prod(before.static_shape) == math.prod(after.static_shape)
