"""Bounds of magnitudes that hold for all finite inputs of a network.

A normalization bounds its results whatever it reads: no element of a normalized row of n numbers exceeds sqrt(n), and the row's
length is sqrt(n) at most. From there bounds pass through products with constant weights (Cauchy-Schwarz: a row's length times a
column's), activations, attention (an average of the values) and additions. Values that depend on an input in another way have no
bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.base import Stage
from optdnn.passes.support.facts import VIEWS, operand, scalar
from optdnn.types import Array, is_float, normalize_axis


@dataclass(frozen=True)
class Bound:
    """``most``: of the magnitudes of all elements. ``length``: of the Euclidean norm of each vector along the last axis."""

    most: float
    length: float

    def scaled(self, factor: float) -> Bound:
        return Bound(self.most * factor, self.length * factor)

    def __add__(self, other: Bound) -> Bound:
        return Bound(self.most + other.most, self.length + other.length)

    def __mul__(self, other: Bound) -> Bound:
        if self.most == 0 or other.most == 0:
            return Bound(0.0, 0.0)
        return Bound(self.most * other.most, min(self.most * other.length, self.length * other.most))


class Bounds:
    """The bounds of a graph's computed values, and those of constants, which are found when they are asked for."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._found: dict[Value, Bound | None] = {}

    def get(self, value: Value | None) -> Bound | None:
        """The bound of a value; None if it has none."""
        if value is None:
            return None
        if value not in self._found and (array := self.graph.constant_value(value)) is not None:
            self._found[value] = _constant(array)
        return self._found.get(value)

    def put(self, value: Value, bound: Bound | None) -> None:
        """Note a bound. The length is at most that of a vector of the largest elements."""
        if bound is not None and math.isfinite(bound.most):
            width = self.graph.type(value).dims[-1:] or (1,)
            within = bound.most * math.sqrt(width[0]) if isinstance(width[0], int) else math.inf
            self._found[value] = Bound(bound.most, min(bound.length, within))


def magnitudes(graph: Graph, feeds: Mapping[str, Array] | None = None) -> Bounds:
    """The bounds of the floating-point values that have one. ``feeds``: arrays by input, if the bounds need hold for these only."""
    found = Bounds(graph)
    for port in (graph.op(i) for i in graph.inputs):
        if feeds is not None and is_float(port.outputs[0].type.dtype):
            found.put(port.value, _constant(feeds[port.outputs[0].name]))
    for op in graph.order():
        results = (
            () if op.kind in STRUCTURAL else op.values if op.kind == "Split" else op.values[:1]
        )  # others: statistics
        for value in results:
            if is_float(graph.type(value).dtype) and graph.type(value).shape is not None:
                found.put(value, _of(graph, op, found))
    return found


def _of(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    own = OPERATORS.get(op.kind)
    if op.kind == "Pointwise":
        return _stages(graph, op, _operand(graph, op, op.inputs[0], found), found)
    if own is None:
        return _stage(graph, op, Stage(op.kind, tuple(range(len(op.inputs))), op.attrs), [], found)
    if getattr(op.attrs, "prologue", ()):
        return None
    bound = own(graph, op, found)
    stages: Sequence[Stage] = getattr(op.attrs, "epilogue", ())
    return _stages(graph, op, bound, found) if stages else bound


def _constant(array: Array) -> Bound | None:
    if not array.size or not np.isfinite(array).all():
        return None
    lengths = np.sqrt(np.einsum("...i,...i", *[np.atleast_1d(array).astype(np.float64)] * 2))
    return Bound(float(np.abs(array).max()), float(lengths.max()))


# ---------------------------------------------------------------- pointwise operators


def _operand(graph: Graph, op: Op, value: Value | None, found: Bounds) -> Bound | None:
    """The bound of an operand that is broadcast to the result."""
    bound = found.get(value)
    if bound is None or value is None:
        return None
    along = graph.type(value).dims[-1:] == graph.type(op.value).dims[-1:]
    return bound if along else Bound(bound.most, math.inf)


def _stages(graph: Graph, op: Op, first: Bound | None, found: Bounds) -> Bound | None:
    """The bound after the stages of an op, whose own result has the bound ``first``."""
    registers = [first]
    for stage in op.attrs.epilogue:
        registers.append(_stage(graph, op, stage, registers, found))
    return registers[-1]


def _stage(graph: Graph, op: Op, stage: Stage, registers: Sequence[Bound | None], found: Bounds) -> Bound | None:
    def value(a: int | None) -> Value | None:
        return None if a is None or a < 0 else op.inputs[a]

    def bound(a: int | None) -> Bound | None:
        return registers[~a] if a is not None and a < 0 else _operand(graph, op, value(a), found)

    attrs: Any = stage.attrs
    given = [bound(a) for a in stage.args]
    match stage.kind:
        case "Sigmoid" | "HardSigmoid" | "Tanh" | "Erf" | "Softsign" | "Sin" | "Cos" | "Sign":
            return Bound(1.0, math.inf)
        case "Clip":
            return _clipped(given[0], [scalar(graph, v) for a in stage.args[1:] if (v := value(a)) is not None])
        case "Relu" | "Gelu" | "HardSwish" | "Mish" | "Abs" | "Neg" | "Identity" | "Cast":
            return given[0]
        case "Swish" if attrs.alpha > 0:
            return given[0]
        case "LeakyRelu":
            return None if given[0] is None else given[0].scaled(max(1.0, abs(attrs.alpha)))
        case "Elu":
            return None if given[0] is None else given[0] + Bound(abs(attrs.alpha), math.inf)
        case "Add" | "Sub" | "Mul":
            first, second = given
            if first is None or second is None:
                return None
            return first * second if stage.kind == "Mul" else first + second
        case "Div" if given[0] is not None and (by := scalar(graph, value(stage.args[1]))):
            return given[0].scaled(1 / abs(by))
    return None


def _clipped(given: Bound | None, ends: Sequence[float | None]) -> Bound | None:
    if len(ends) == 2 and None not in ends:
        most = max(abs(e) for e in ends if e is not None)
        return Bound(most, math.inf) if given is None or most < given.most else given
    return None if given is None or any(e is None or e for e in ends) else given  # an end at 0 only shortens the range


# ---------------------------------------------------------------- other operators


def _first(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    """Moves, repeats or averages elements of operand 0, or selects some."""
    bound = found.get(op.inputs[0])
    if bound is None:
        return None
    before, after = (graph.type(v).dims for v in (operand(op), op.value))
    kept = op.kind in ("Identity", "Reshape", "Slice", "Split") and before[-1:] == after[-1:]
    kept = kept or (op.kind == "Transpose" and op.attrs.perm is not None and op.attrs.perm[-1] == len(before) - 1)
    return bound if kept else Bound(bound.most, math.inf)


def _concat(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    bounds = [found.get(v) for v in op.inputs if v is not None]
    return None if None in bounds else Bound(max(b.most for b in bounds if b is not None), math.inf)


def _pad(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    bound, number = _first(graph, op, found), op.input(2)
    by = 0.0 if number is None or op.attrs.mode != "constant" else scalar(graph, number)
    return None if bound is None or by is None else Bound(max(bound.most, abs(by)), math.inf)


def _norm(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    """LayerNormalization and RMSNormalization."""
    dims = graph.type(op.value).dims
    own = [d for d in dims[normalize_axis(op.attrs.axis, len(dims)) :] if isinstance(d, int)]
    if normalize_axis(op.attrs.axis, len(dims)) + len(own) < len(dims):
        return None
    most = math.sqrt(math.prod(own))
    length = most if len(own) == 1 else math.inf
    for slot, absent in ((1, 1.0), (2, 0.0)):
        value = op.input(slot)
        bound = Bound(absent, math.inf) if value is None else _operand(graph, op, value, found)
        if bound is None:
            return None
        if slot == 1:
            most, length = most * bound.most, length * bound.most
        elif value is not None:
            most, length = most + bound.most, length + bound.length
    return Bound(most, length)


def _unit(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    return Bound(1.0, math.inf)


def _attention(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    """Averages of values."""
    bound = found.get(op.inputs[2])
    return None if bound is None or len(op.inputs) > 4 or len(op.outputs) > 1 else bound


def _product(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    """Rows times a constant matrix, or a constant matrix times columns."""
    first = graph.constant_value(op.inputs[0])
    if first is not None and op.kind == "MatMul":
        bound = found.get(op.inputs[1])
        return (
            None
            if bound is None
            else Bound(bound.most * float(np.abs(first).sum(-1, np.float64).max(initial=0.0)), math.inf)
        )
    bound, weight = found.get(op.inputs[0]), graph.constant_value(op.inputs[1])
    if bound is None or weight is None or weight.ndim != 2 or getattr(op.attrs, "transA", False):
        return None
    matrix = weight.T if getattr(op.attrs, "transB", False) else weight
    squares = np.einsum("ij,ij->j", matrix, matrix, dtype=np.float64)
    made = Bound(bound.length * math.sqrt(squares.max(initial=0.0)), bound.length * math.sqrt(squares.sum()))
    if op.kind == "MatMul":
        return made
    made, added = made.scaled(abs(op.attrs.alpha)), op.input(2)
    more = Bound(0.0, 0.0) if added is None else _operand(graph, op, added, found)
    return None if more is None else made + more.scaled(abs(op.attrs.beta))


def _conv(graph: Graph, op: Op, found: Bounds) -> Bound | None:
    """Sums of a window's elements times constants."""
    bound, weight, added = found.get(op.inputs[0]), graph.constant_value(op.inputs[1]), op.input(2)
    more = Bound(0.0, 0.0) if added is None else found.get(added)
    if bound is None or weight is None or more is None:
        return None
    sums = np.abs(weight).sum(tuple(range(1, weight.ndim)), np.float64)
    return Bound(bound.most * float(sums.max(initial=0.0)) + more.most, math.inf)


OPERATORS: Mapping[str, Callable[[Graph, Op, Bounds], Bound | None]] = {
    **dict.fromkeys(
        (*VIEWS, "AveragePool", "DepthToSpace", "Expand", "Gather", "GatherElements", "GlobalAveragePool"), _first
    ),
    **dict.fromkeys(("GlobalMaxPool", "Identity", "MaxPool", "ReduceMax", "ReduceMean", "ReduceMin", "Slice"), _first),
    **dict.fromkeys(("SpaceToDepth", "Split", "Tile"), _first),
    "Attention": _attention,
    "Concat": _concat,
    "Conv": _conv,
    "Gemm": _product,
    "LayerNormalization": _norm,
    "MatMul": _product,
    "Pad": _pad,
    "RMSNormalization": _norm,
    "Softmax": _unit,
}
"""Kind -> the bound of its result, before its stages."""
