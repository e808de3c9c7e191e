"""Concatenated rows, as NeRF has them (Mildenhall et al., 2020): parts are reordered, and repeated arithmetic becomes one operator.

NeRF concatenates a position ``x`` with its encoding ``sin(x), cos(x), sin(2 x), cos(2 x), …``, and in the middle of the network
with features. A part can be written in place if it begins at a multiple of 16 bytes; otherwise it is copied. So parts whose width
is a multiple of 16 bytes come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, reshaped
from optdnn.passes.support.products import PRODUCTS, ConstantMatrix, constant_matrix, multiplied
from optdnn.types import Array, normalize_axis

ALIGNED = 8
"""16-bit elements in 16 bytes: products and copies begin at multiples of this."""
LEAST = 3
"""Fewest repetitions that become one operator."""
PERIOD = 4
"""Most parts in one repetition."""
DEPTH = 6
"""Most operators from a part back to its operands."""


@rule("aligned_rows_first", {"Concat"})
def aligned_rows_first(graph: Graph, op: Op) -> Match | Miss | None:
    """In concatenated rows that only products read, parts with a multiple of eight columns come first, as do their weights."""
    widths = _widths(graph, op)
    if widths is None:
        return None
    starts = [0, *accumulate(widths)]
    if not any(n % ALIGNED == 0 and at % ALIGNED for n, at in zip(widths, starts, strict=False)):
        return None
    users = graph.users(op.value)
    matrices = [_matrix(graph, op, user) for user in users]
    if any(m is None for m in matrices):
        return Miss("the joined rows are read by more than products with constant matrices")
    order = sorted(range(len(widths)), key=lambda k: widths[k] % ALIGNED != 0)
    rows = np.concatenate([np.arange(starts[k], starts[k] + widths[k]) for k in order])

    def build(patch: Patch) -> None:
        joined = patch.add("Concat", [op.inputs[k] for k in order], op.attrs)
        for user, matrix in zip(users, matrices, strict=True):
            assert matrix is not None
            name = graph.output(user.value).name
            weight = np.ascontiguousarray(matrix.array[rows])
            patch.replace(user.value, multiplied(patch, joined, weight, matrix.bias, name=f"{name}.weight"))

    return Match((op, *users), build)


def _widths(graph: Graph, op: Op) -> list[int] | None:
    """The widths of the parts, if they have two or more axes and are joined along the last one; else None."""
    dims = [graph.type(v).shape for v in op.inputs if v is not None]
    if len(dims) < 2 or any(d is None or len(d) < 2 or not isinstance(d[-1], int) for d in dims):
        return None
    rank = len(dims[0])  # type: ignore[arg-type]
    if normalize_axis(op.attrs.axis, rank) != rank - 1:
        return None
    return [d[-1] for d in dims]  # type: ignore[index, misc]


def _matrix(graph: Graph, op: Op, user: Op) -> ConstantMatrix | None:
    """The constant matrix and the bias with which ``user`` multiplies the joined rows; None for other operators."""
    if user.kind not in PRODUCTS or [v for v in user.inputs if v == op.value] != [user.inputs[0]]:
        return None
    return constant_matrix(graph, user)


@dataclass(frozen=True)
class _Run:
    """Parts ``start`` to ``start + period * times`` of a Concat: the same arithmetic ``times`` times, with other constants."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


@rule("repeated_parts", {"Concat"})
def repeated_parts(graph: Graph, op: Op) -> Match | None:
    """``[sin(a x), cos(a x), sin(b x), cos(b x), …]`` is the sine and cosine of ``x`` times ``[a, b, …]``, side by side."""
    widths = _widths(graph, op)
    parts = [v for v in op.inputs if v is not None]
    if widths is None or len(parts) < LEAST or len({graph.type(v).dims for v in parts}) > 2:
        return None
    counts = Counter(v for part in parts for v in _arithmetic(graph, part))
    best: tuple[_Run, set[Value]] | None = None
    for period in range(1, PERIOD + 1):
        # Values that this many parts depend on are the same in all repetitions.
        shared = {v for v, count in counts.items() if count >= LEAST * period}
        run = _longest_run([(graph.type(v).dims, _form(graph, v, shared)) for v in parts], period)
        if run is not None and (best is None or run.end - run.start > best[0].end - best[0].start):
            best = run, shared
    if best is None:
        return None
    run, shared = best
    first = parts[run.start : run.start + run.period]
    if any(v in shared or not _has_one_rank(graph, v, shared) for v in first):
        return None

    def build(patch: Patch) -> Value:
        built: dict[tuple[Value, ...], Value] = {}
        columns = [
            _stacked(patch, parts[run.start + j : run.end : run.period], shared, built) for j in range(run.period)
        ]
        rank = len(graph.type(parts[run.start]).dims)
        rows = columns[0] if run.period == 1 else patch.add("Concat", columns, ConcatAttrs(rank))
        rows = reshaped(patch, rows, (*[0] * (rank - 1), widths[run.start] * run.period * run.times))
        others = [*parts[: run.start], rows, *parts[run.end :]]
        return rows if len(others) == 1 else patch.add("Concat", others, ConcatAttrs(rank - 1))

    return Match((op,), build)


def _inner(graph: Graph, value: Value) -> Op | None:
    """The pointwise operator that computes a value, or None."""
    op = graph.op(value)
    if not op.pointwise or len(op.outputs) != 1 or None in op.inputs:
        return None
    return op


def _number(graph: Graph, value: Value) -> Array | None:
    array = graph.constant_value(value)
    return array if array is not None and array.size == 1 else None


def _arithmetic(graph: Graph, value: Value, depth: int = DEPTH) -> set[Value]:
    """The value and the values that it is computed from by at most ``depth`` pointwise operators, without constants."""
    op = _inner(graph, value) if depth else None
    found = {value}
    for v in () if op is None else op.inputs:
        assert v is not None
        if graph.constant_value(v) is None:
            found |= _arithmetic(graph, v, depth - 1)
    return found


def _form(graph: Graph, value: Value, shared: set[Value], depth: int = DEPTH) -> Any:
    """A key for the arithmetic that computes a value from ``shared`` values and scalar constants, whatever these constants are."""
    if (number := _number(graph, value)) is not None:
        return number.dtype.str
    op = _inner(graph, value) if depth and value not in shared else None
    if op is None:
        return value
    return op.kind, op.attrs, tuple(_form(graph, operand(op, i), shared, depth - 1) for i in range(len(op.inputs)))


def _longest_run(forms: Sequence[Any], period: int) -> _Run | None:
    """The longest run of repeated forms, the first if several are equally long; None if all are shorter than ``LEAST``."""
    best: _Run | None = None
    for start in range(len(forms) - period):
        times = 1
        while forms[start + times * period :][:period] == forms[start:][:period]:
            times += 1
        if times >= LEAST and (best is None or times > best.times):
            best = _Run(start, period, times)
    return best


def _has_one_rank(graph: Graph, value: Value, shared: set[Value]) -> bool:
    """Whether all operands in a part's arithmetic, except for scalars, have the part's rank: then an axis can be inserted."""
    op = None if value in shared or _number(graph, value) is not None else _inner(graph, value)
    rank = len(graph.type(value).dims)
    before = [] if op is None else [v for v in op.inputs if v is not None and _number(graph, v) is None]
    return all(len(graph.type(v).dims) == rank and _has_one_rank(graph, v, shared) for v in before)


def _stacked(patch: Patch, values: Sequence[Value], shared: set[Value], built: dict[tuple[Value, ...], Value]) -> Value:
    """Values of equal arithmetic, stacked along a new axis before the last one. ``built``: the stacks so far."""
    key, graph = tuple(values), patch.graph
    if key not in built:
        numbers = [_number(graph, v) for v in values]
        op = _inner(graph, values[0]) if values[0] not in shared else None
        if all(a is not None for a in numbers):
            stack = np.stack([a.reshape(1) for a in numbers if a is not None])
            built[key] = patch.constant(stack[0, 0] if len(set(values)) == 1 else stack, "numbers")
        elif op is None:
            dims = graph.type(values[0]).dims
            built[key] = reshaped(patch, values[0], (*[0] * (len(dims) - 1), 1, int(dims[-1])))  # type: ignore[arg-type]
        else:
            sides = [[operand(graph.op(v), i) for v in values] for i in range(len(op.inputs))]
            built[key] = patch.add(op.kind, [_stacked(patch, side, shared, built) for side in sides], op.attrs)
    return built[key]


class JoinedRows(RulePass):
    name = "joined_rows"
    rules = (repeated_parts, aligned_rows_first)
