"""Differences of a running sum stay in fp32: sums over segments (the cumsum trick of Lift-Splat-Shoot) and box filters.

A running sum over 40,000 rows is hundreds of times as large as the sum over a segment, which a subtraction takes out of it. fp16
keeps eleven bits of the large number, and few of them are left in the difference.
"""

from __future__ import annotations

from collections.abc import Iterable

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.support.coordinates import INDEXED, kinds_of
from optdnn.passes.support.facts import is_pointwise
from optdnn.types import is_float


def differences(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for running sums whose elements are subtracted from one another, for these subtractions,
    and for the operators that move elements between them."""
    found: dict[int, str] = {}
    for op in graph.of_kind("CumSum"):
        if not is_float(op.outputs[0].type.dtype):
            continue
        values, readers = _moved(graph, op)
        ends = [
            r for r in readers if is_pointwise(r) and "Sub" in kinds_of(r) and sum(v in values for v in r.inputs) > 1
        ]
        for i in _between(graph, values, ends):
            found.setdefault(i, f"it computes differences of the running sum {op.outputs[0].name}")
    return found


def _moved(graph: Graph, op: Op) -> tuple[set[Value], Iterable[Op]]:
    """The result of ``op``, the results of operators that only move its elements, and the other operators that read these."""
    values, readers, waiting = {op.value}, dict[int, Op](), [op.value]
    while waiting:
        value = waiting.pop()
        for user in (u for u in graph.users(value) if u.kind not in STRUCTURAL):
            if not user.definition.traits.movement and (user.kind not in INDEXED or user.inputs[0] != value):
                readers[user.id] = user
                continue
            results = set(user.values) - values
            values |= results
            waiting += results
    return values, readers.values()


def _between(graph: Graph, values: set[Value], ends: Iterable[Op]) -> set[int]:
    """The operators of ``ends``, and those that compute ``values`` which they read, directly or by way of other values."""
    kept, waiting = set[int](), list(ends)
    while waiting:
        op = waiting.pop()
        if op.id not in kept:
            kept.add(op.id)
            waiting += [graph.op(v) for v in op.inputs if v is not None and v in values]
    return kept
