"""Bounds of integer inputs: positions and lengths.

A kernel cannot refuse a value that is out of bounds (it only avoids reading elsewhere), and CPU libraries do not check it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from optdnn.dim import Dim, DimLike, dim_max, dim_min
from optdnn.dim_text import parse_dim
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Stage
from optdnn.types import Shape, normalize_axis

LOWEST = -(1 << 31)
"""The lower bound of a value without any."""
_SAME = frozenset({"Cast", "Expand", "Flatten", "Identity", "Layout", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Kinds whose result has the elements of their first operand."""


def input_bounds(graph: Graph) -> dict[str, list[Any]]:
    """Name of an input -> [lowest, highest, the operator that has these bounds].

    A bound that depends on symbols of the inputs is a text (:func:`optdnn.dim_text.parse_dim`). Bounds that depend on other sizes,
    or on symbols without plain names, are left out.
    """
    bounds: dict[str, tuple[DimLike, DimLike, str]] = {}
    symbols = graph.symbols().keys()
    for op in graph.order():
        limits = _limits(graph, op)
        if limits is None:
            continue
        slot, *ends = limits
        if not all(_is_plain(d, symbols) for d in ends):
            continue
        value, low, high = _origin(graph, op.input(slot), *ends)
        if value is None or graph.op(value).kind != "Input" or graph.type(value).dtype.kind not in "iu":
            continue
        name = graph.output(value).name
        before = bounds.get(name)
        if before is not None:
            low, high = dim_max(low, before[0]), dim_min(high, before[1])
        if before is None or (low, high) != before[:2]:
            bounds[name] = (low, high, f"{op.kind} {' + '.join(sorted(op.src)[:2]) or op.name}")
    return {n: [*(str(d) if isinstance(d, Dim) else d for d in ends), whose] for n, (*ends, whose) in bounds.items()}


def _origin(graph: Graph, value: Value | None, low: DimLike, high: DimLike) -> tuple[Value | None, DimLike, DimLike]:
    """Trace a value back through views, additions of a number and maxima with a number. Returns the first value of the chain, and
    the bounds for it that keep the given value within ``low`` and ``high``."""
    while value is not None:
        op = graph.op(value)
        if op.kind in _SAME:
            value = op.inputs[0]
            continue
        stages = op.attrs.epilogue if op.kind == "Pointwise" else (Stage(op.kind, tuple(range(len(op.inputs)))),)
        place: int | None = ~len(stages) if op.kind == "Pointwise" else ~1
        while place is not None and ~place > 0:
            place, low, high = _operand(graph, op, stages[~place - 1], low, high)
        if place is None:
            return value, low, high
        value = op.inputs[0 if place < 0 else place]
    return None, low, high


def _operand(graph: Graph, op: Op, stage: Stage, low: DimLike, high: DimLike) -> tuple[int | None, DimLike, DimLike]:
    """The only argument of a stage that is not a constant, and its bounds; None for any other computation."""
    numbers = {a: _number(graph, op.inputs[a]) for a in stage.args if a is not None and a >= 0}
    variable = [a for a in stage.args if a is not None and numbers.get(a) is None]
    number = next((n for n in numbers.values() if n is not None), None)
    if len(variable) != 1 or (number is None) != (stage.kind == "Cast"):
        return None, low, high
    (place,) = variable
    if stage.kind == "Cast":
        return place, low, high
    assert number is not None
    if stage.kind == "Add" or (stage.kind == "Sub" and stage.args[0] == place):
        shift = number if stage.kind == "Add" else -number
        return place, low - shift, high - shift
    if stage.kind in ("Max", "Clip") and len(stage.args) == 2 and isinstance(low, int) and low <= number:
        return place, LOWEST, high
    return None, low, high


def _number(graph: Graph, value: Value | None) -> int | None:
    """The integer that every element of a constant equals; None if there is none."""
    array = graph.constant_value(value)
    if array is None or array.dtype.kind not in "iu" or not array.size or (array != array.flat[0]).any():
        return None
    return int(array.flat[0])


def _is_plain(d: DimLike, symbols: Set[str]) -> bool:
    """Whether a bound can be written down: as an integer, or as a text that depends only on ``symbols``."""
    if isinstance(d, int):
        return True
    names = {s.name for s in d.symbols()}
    read = parse_dim(str(d))  # "a + b" may be the name of one symbol
    return names <= symbols and read is not None and names == {s.name for s in read.symbols()}


def _limits(graph: Graph, op: Op) -> tuple[int, DimLike, DimLike] | None:
    """The operand with positions or lengths, its lowest and its highest value; None if the operator has none."""

    def shape(value: Value | None) -> Shape:
        return () if value is None else graph.type(value).dims

    first = op.input(0)
    if first is None or any(v is not None and graph.type(v).shape is None for v in op.inputs):
        return None
    if op.kind in ("LSTM", "GRU", "RNN") and op.input(4) is not None:
        return 4, 0, shape(first)[0]
    if op.kind == "ReverseSequence":
        return 1, 0, shape(first)[op.attrs.time_axis]
    if op.kind in ("Gather", "GatherElements", "PackedGather"):
        size = shape(first)[normalize_axis(getattr(op.attrs, "axis", 0), len(shape(first)))]
        return 1, -size, size - 1
    if op.kind == "TensorScatter" and op.attrs.mode == "linear":
        axis = normalize_axis(op.attrs.axis, len(shape(first)))
        return 2, 0, shape(first)[axis] - shape(op.input(1))[axis]
    if op.kind == "Attention" and op.input(6) is not None:
        return 6, 0, shape(op.input(1))[2]
    return None
