"""What integers an input may hold: positions and lengths that a kernel cannot refuse, it only keeps from reading elsewhere."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.types import normalize_axis

_SAME = frozenset({"Cast", "Expand", "Flatten", "Identity", "Layout", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Kinds whose first operand has their elements."""


def input_bounds(graph: Graph) -> dict[str, list[Any]]:
    """Name of an input -> [lowest, highest, whose positions or lengths they are]. Sizes of ``graph`` are known."""
    found: dict[str, list[Any]] = {}
    for op in graph.order():
        limits = _limits(graph, op)
        if limits is None:
            continue
        slot, low, high = limits
        value = op.input(slot)
        while value is not None and graph.op(value).kind in _SAME:
            value = graph.op(value).inputs[0]
        if value is None or graph.op(value).kind != "Input" or graph.type(value).dtype.kind not in "iu":
            continue
        name = graph.output(value).name
        before = found.get(name)
        if before is None or low > before[0] or high < before[1]:
            both = (low, high) if before is None else (max(low, before[0]), min(high, before[1]))
            found[name] = [*both, f"{op.kind} {' + '.join(sorted(op.src)[:2]) or op.name}"]
    return found


def _limits(graph: Graph, op: Op) -> tuple[int, int, int] | None:
    """The operand that says where, or how many, and what it may hold."""

    def shape(value: Value | None) -> tuple[int, ...]:
        return () if value is None else graph.type(value).static_shape

    first = op.input(0)
    if first is None or any(v is not None and not graph.type(v).is_static for v in op.inputs):
        return None
    if op.kind in ("LSTM", "GRU", "RNN") and op.input(4) is not None:
        return 4, 0, shape(first)[0]
    if op.kind == "ReverseSequence":
        return 1, 0, shape(first)[op.attrs.time_axis]
    if op.kind in ("Gather", "GatherElements"):
        size = shape(first)[normalize_axis(op.attrs.axis, len(shape(first)))]
        return 1, -size, size - 1
    if op.kind == "TensorScatter" and op.attrs.mode == "linear":
        axis = normalize_axis(op.attrs.axis, len(shape(first)))
        return 2, 0, shape(first)[axis] - shape(op.input(1))[axis]
    if op.kind == "Attention" and op.input(6) is not None:
        return 6, 0, shape(op.input(1))[2]
    return None
