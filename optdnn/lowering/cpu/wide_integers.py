"""Integers that OpenVINO cannot hold.

OpenVINO's CPU plugin keeps int64, uint64 and uint32 as int32 (2026.4). Larger inputs, sums and products wrap around; larger
constants and casts from floats saturate. The same holds for elements that are only moved. Some operators compute in fp32, exact
up to 24 bits.

The inputs of OpenVINO's part are checked in each call: if one holds more than 24 bits, ONNX Runtime runs that call
(:mod:`optdnn.runtime.cpu.openvino`). From there on, the interval of each result follows by arithmetic. OpenVINO must not run an
operator whose result may not fit. Values that are only sizes are exempt: no tensor is that large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from optdnn.dim import INF, Dim, bounds, evaluate
from optdnn.errors import ShapeError
from optdnn.ir.body import bodies
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import FusedAttrs, Known, attrs_dict
from optdnn.runtime.cpu.library import EXACT_INTEGER
from optdnn.types import BOOL, DTYPES, FP32, INT32, INT64, DType, is_int, normalize_axis

Interval = tuple[float, float]
"""Lowest and highest value, inclusive; for floats, of the finite values. None: nothing is known of a float."""

WIDE = frozenset({INT64, DTYPES["uint32"], DTYPES["uint64"]})
"""Types that OpenVINO keeps as int32."""
UNKNOWN: Interval = (-(1 << 63), 1 << 64)
"""The interval of an unknown integer."""
_INT32: Interval = (-(1 << 31), (1 << 31) - 1)
_EXACT: Interval = (-EXACT_INTEGER, EXACT_INTEGER)
_POSITION: Interval = (0, EXACT_INTEGER)
"""Positions, sizes and counts."""
_IN_FLOATS = frozenset(
    {"Clip", "Div", "Gemm", "MatMul", "Pow", "Relu"}
    | {f"Reduce{r}" for r in ("L1", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")}
)
"""Kinds that OpenVINO computes in fp32."""
_DATA: dict[str, tuple[int, ...]] = {
    "OneHot": (2,), "Pad": (0, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2), "TensorScatter": (0, 1), "Where": (1, 2),
}  # fmt: skip
"""Operand slots whose elements a result may contain, if not only the first slot."""
_OF_FIRST = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "TopK", "Unique"})
"""Kinds with results between the smallest and the largest element of their first operand."""
LONGEST = 1 << 20
"""The assumed maximum of a dimension without a bound. A profile bounds it."""
_FEW = 64
"""Float constants with more elements are not examined."""
_FOUND = frozenset({"ArgMax", "ArgMin", "EyeLike", "MaxPool", "NonMaxSuppression", "NonZero", "Shape", "Size"})
"""Kinds whose integers are positions, sizes or counts. The further results of TopK and Unique are such integers, too."""
_TRUTHS = frozenset(
    {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
)


def beyond_32_bits(graph: Graph, parameters: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Op id -> which of its integers OpenVINO might be unable to hold.

    ``parameters``: the operand slots that hold positions or counts, by kind."""
    return _Walk(graph, parameters).refused


class _Walk:
    """One pass over a graph, operands first."""

    def __init__(self, graph: Graph, parameters: Mapping[str, Sequence[int]]):
        self.graph, self.parameters = graph, parameters
        self.refused: dict[int, str] = {}
        self.intervals: dict[Value, Interval | None] = {}
        self._sizes: set[Value] = set()
        """Shape arithmetic whose results are used only as sizes, directly or after further shape arithmetic."""
        order = list(graph.order())
        for op in reversed(order):
            self._sizes |= {v for v in _values(op) if graph.known(v) is not None and self._says_sizes(v)}
        for op in order:
            self._visit(op)

    def _says_sizes(self, value: Value) -> bool:
        users = [(self.graph.op(Value(use.op, 0)), use.slot) for use in self.graph.uses(value)]
        return all(
            slot in self.parameters.get(op.kind, ()) or (op.kind != "Output" and self._sizes.issuperset(_values(op)))
            for op, slot in users
        )

    def _visit(self, op: Op) -> None:
        if op.kind == "Output":
            return
        operands = [None if v is None else self.intervals[v] for v in op.inputs]
        reason = None if op.kind in ("Input", "Constant") else self._operand(op, operands)
        for value, out in zip(_values(op), op.outputs, strict=True):
            dtype = out.type.dtype
            found = self._interval(op, value.port, operands)
            if op.kind not in ("Input", "Constant") and value not in self._sizes:
                reason = reason or self._misfit(op, out.name, dtype, operands, found)
            self.intervals[value] = _held(dtype) if reason else found
        if reason is not None:
            self.refused[op.id] = reason

    def _operand(self, op: Op, operands: Sequence[Interval | None]) -> str | None:
        """Why an op cannot read its operands: a constant does not fit, or a body gets more than its inputs are assumed to hold."""
        sizes = self.parameters.get(op.kind, (0,) if op.kind == "Loop" else ())
        inner = bodies(op)
        for slot, (value, interval) in enumerate(zip(op.inputs, operands, strict=True)):
            if value is None or interval is None or slot in sizes or self.graph.type(value).dtype not in WIDE:
                continue
            if not _inside(interval, _EXACT if inner else _INT32):
                return f"openvino keeps integers in 32 bits; {self.graph.output(value).name!r} may hold more"
        for body in inner if op.kind in ("Loop", "Scan") else []:
            inside = _Walk(body.graph, self.parameters)
            for i in body.graph.outputs:
                value = body.graph.op(i).inputs[0]
                assert value is not None
                interval = inside.intervals[value]
                wide = body.graph.type(value).dtype in WIDE
                if wide and interval is not None and not _inside(interval, _EXACT):
                    return f"openvino keeps integers in 32 bits; {body.graph.output(value).name!r} may grow beyond them"
        return None

    def _interval(self, op: Op, port: int, operands: Sequence[Interval | None]) -> Interval | None:
        value, dtype = Value(op.id, port), op.outputs[port].type.dtype
        known = self.graph.known(value)
        if op.kind == "Input":
            return _held(dtype)
        if known is not None and (dtype in WIDE | {INT32} or known.size <= _FEW):
            return _of_known(known)
        return _typed(dtype, None if op.kind == "Constant" else self._computed(op, port, operands))

    def _computed(self, op: Op, port: int, operands: Sequence[Interval | None]) -> Interval | None:
        if op.kind in _FOUND or (port > 0 and op.kind in ("TopK", "Unique")):
            return _POSITION
        if op.kind == "ConstantOfShape":
            value = complex(op.attrs.value).real
            return (value, value) if math.isfinite(value) else None
        if op.kind in ("If", "Loop", "Scan"):
            return _INT32 if op.kind == "If" else _EXACT
        if op.kind in _DATA:
            added = getattr(op.attrs, "reduction", "none") not in ("none", None)
            return None if added else _hull([operands[k] for k in _DATA[op.kind] if op.input(k) is not None])
        if op.kind in ("Concat", "Range"):
            return _hull(operands)
        if op.kind in _OF_FIRST or op.definition.traits.movement:
            return _hull(operands[:1])
        if op.kind in _REPEATED:
            first = operands[0]
            return None if first is None else _REPEATED[op.kind](first, self._count(op))
        if op.kind == "Pointwise":
            return self._staged(op, operands)[0]
        if _has_stages(op):
            return None
        return _pointwise(op.kind, is_int(op.outputs[port].type.dtype), operands)

    def _staged(self, op: Op, operands: Sequence[Interval | None]) -> tuple[Interval | None, bool]:
        """The result of a fused chain, and whether a stage may produce integers that OpenVINO cannot hold."""
        given = [(FP32 if v is None else self.graph.type(v).dtype, i) for v, i in zip(op.inputs, operands, strict=True)]
        registers, misfits = [given[0]], False
        for stage in op.attrs.epilogue:
            read = [None if a is None else given[a] if a >= 0 else registers[~a] for a in stage.args]
            first = read[1] if stage.kind == "Where" else read[0]
            assert first is not None
            dtype = BOOL if stage.kind in _TRUTHS else attrs_dict(stage.attrs).get("to", first[0])
            intervals = [None if r is None else r[1] for r in read]
            found = _typed(dtype, _pointwise(stage.kind, is_int(dtype), intervals))
            misfits = misfits or not _fits(stage.kind, dtype, [found, *intervals])
            registers.append((dtype, found))
        return registers[-1][1], misfits

    def _misfit(
        self, op: Op, name: str, dtype: DType, operands: Sequence[Interval | None], found: Interval | None
    ) -> str | None:
        """Why OpenVINO cannot hold a result, or one of its intermediate values."""
        if op.kind == "Pointwise" and self._staged(op, operands)[1]:
            return f"openvino keeps integers in 32 bits; intermediate values of {name!r} may be larger"
        if _has_stages(op) and any(v is not None and self.graph.type(v).dtype in WIDE for v in op.inputs):
            return f"openvino keeps integers in 32 bits; intermediate values of {name!r} may be larger"
        if _fits(op.kind, dtype, [found, *operands]):
            return None
        if op.kind in _IN_FLOATS:
            return f"openvino computes {op.kind} of integers in floating point; {name!r} may have more than 24 bits"
        return f"openvino keeps integers in 32 bits; {name!r} may hold more"

    def _count(self, op: Op) -> int:
        """The most elements that are summed into one element of the result."""
        x = op.inputs[0]
        assert x is not None
        dims = self.graph.type(x).shape
        axes = self.graph.known(op.input(1))
        if dims is None:
            return EXACT_INTEGER
        over = range(len(dims))
        if axes is not None and axes.size and axes.dtype != object:
            over = [normalize_axis(int(a), len(dims)) for a in axes.reshape(-1)]  # type: ignore[assignment]
        return min(EXACT_INTEGER, math.prod(max(1, int(_of_size(dims[a])[1])) for a in over))


def _values(op: Op) -> list[Value]:
    return op.values


def _has_stages(op: Op) -> bool:
    """Whether an op has fused stages besides its own computation."""
    return op.kind != "Pointwise" and isinstance(op.attrs, FusedAttrs) and bool(op.attrs.prologue + op.attrs.epilogue)


def _fits(kind: str, dtype: DType, intervals: Sequence[Interval | None]) -> bool:
    """Whether OpenVINO can hold a result of this type. ``intervals``: of the result, then of the operands."""
    found, *operands = intervals
    if dtype in WIDE | {INT32} and kind in _IN_FLOATS:
        return all(i is None or _inside(i, _EXACT) for i in (found, *operands))
    return dtype not in WIDE or (found is not None and _inside(found, _INT32))


def _typed(dtype: DType, found: Interval | None) -> Interval | None:
    """The interval of a result of this type: arithmetic of narrower integers wraps around."""
    if dtype == BOOL:
        return 0, 1
    if not is_int(dtype):
        return found
    if dtype in WIDE:
        return UNKNOWN if found is None else found
    return found if found is not None and _inside(found, _of_type(dtype)) else _of_type(dtype)


def _pointwise(kind: str, integer: bool, operands: Sequence[Interval | None]) -> Interval | None:
    """The result of an elementwise operator; None if nothing is known of it. ``integer``: whether the result is an integer."""
    if kind in _BOUNDED:
        return _BOUNDED[kind]
    if kind == "Clip":
        return _clipped(*operands)
    given = [i for i in (operands[1:] if kind == "Where" else operands) if i is not None]
    if len(given) < len(operands) - (kind == "Where"):
        return None
    if kind in ("Mean", "Where", "Identity", "Relu"):
        return _hull(given)
    if kind in ("Cast", "Ceil", "Floor", "Round"):  # of floats, which may have been rounded themselves
        (low, high) = given[0]
        return (low, high) if type(low) is type(high) is int else (_loose(low, -1), _loose(high, 1))
    if kind == "Div" and given[1][0] <= 0 <= given[1][1]:
        most = _largest(given[0])
        return (-most, most) if integer else None
    return _ARITHMETIC[kind](given) if kind in _ARITHMETIC else None


def _clipped(x: Interval | None, low: Interval | None = None, high: Interval | None = None) -> Interval | None:
    """The interval within the bounds; an absent bound is None."""
    ends = [low or x, high or x]
    return None if None in ends else _hull(ends)


def _loose(end: float, by: int) -> int:
    return math.floor(end + by * (1 + abs(end) / 64))


def _product(given: Sequence[Interval]) -> Interval:
    a, b = given
    corners = [p * q for p in a for q in b]
    return min(corners), max(corners)


def _quotient(given: Sequence[Interval]) -> Interval:
    corners = [0.0, *(p / q for p in given[0] for q in given[1])]
    return min(corners), max(corners)


_ARITHMETIC: Mapping[str, Callable[[Sequence[Interval]], Interval]] = {
    "Abs": lambda g: (0, _largest(g[0])),
    "Add": lambda g: (sum(i[0] for i in g), sum(i[1] for i in g)),
    "BitwiseNot": lambda g: (-1 - g[0][1], -1 - g[0][0]),
    "Div": _quotient,
    "Max": lambda g: (max(i[0] for i in g), max(i[1] for i in g)),
    "Min": lambda g: (min(i[0] for i in g), min(i[1] for i in g)),
    "Mul": _product,
    "Neg": lambda g: (-g[0][1], -g[0][0]),
    "Sqrt": lambda g: (0, math.sqrt(max(g[0][1], 0))),
    "Sub": lambda g: (g[0][0] - g[1][1], g[0][1] - g[1][0]),
    "Sum": lambda g: (sum(i[0] for i in g), sum(i[1] for i in g)),
}
"""The interval of a result, computed from the intervals of all operands."""
_BOUNDED: Mapping[str, Interval] = {
    **dict.fromkeys(_TRUTHS, (0, 1)),
    **dict.fromkeys(("HardSigmoid", "Sigmoid"), (0, 1)),
    **dict.fromkeys(("Cos", "Erf", "Sign", "Sin", "Softsign", "Tanh"), (-1, 1)),
    "Log": (-746, 710),
}
"""Kinds whose finite results have fixed bounds (Log: for fp64)."""


def _total(i: Interval, n: int) -> Interval:
    return min(i[0], i[0] * n, 0), max(i[1], i[1] * n, 0)


def _largest(i: Interval) -> float:
    return max(abs(i[0]), abs(i[1]))


_REPEATED: Mapping[str, Callable[[Interval, int], Interval]] = {
    "CumSum": _total,
    "ReduceL1": lambda i, n: (0, _largest(i) * n),
    "ReduceSum": _total,
    "ReduceSumSquare": lambda i, n: (0, _largest(i) ** 2 * n),
}
"""Kind -> the number of elements that it sums."""


def _inside(interval: Interval, limits: Interval) -> bool:
    return limits[0] <= interval[0] and interval[1] <= limits[1]


def _hull(given: Sequence[Interval | None]) -> Interval | None:
    """The smallest interval that contains all of these and 0 (padding); None if one of them is unknown."""
    found = [i for i in given if i is not None]
    return (min(0, *(i[0] for i in found)), max(0, *(i[1] for i in found))) if len(found) == len(given) else None


def _of_type(dtype: DType) -> Interval:
    if dtype == BOOL:
        return 0, 1
    if dtype.kind not in "iu":  # of 4 bits and less
        return -8, 15
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _held(dtype: DType) -> Interval | None:
    """The interval of an input of a part. For wide types: the values that pass the check in each call."""
    if dtype in WIDE:
        return (0, EXACT_INTEGER) if dtype.kind == "u" else _EXACT
    return _of_type(dtype) if is_int(dtype) or dtype == BOOL else None


def _of_known(known: Known) -> Interval | None:
    """The interval of a constant, or of sizes that follow from the inputs' sizes."""
    if not known.size:
        return 0, 0
    if known.dtype.kind == "c":
        return None
    if known.dtype != object:
        number = int if is_int(known.dtype) or known.dtype == BOOL else float
        low, high = number(known.min()), number(known.max())
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    found = [_of_size(d) for d in known.reshape(-1)]
    return min(i[0] for i in found), max(i[1] for i in found)


def _of_size(d: int | Dim) -> Interval:
    """The interval of a size. If a symbol has no bound: from the size with all symbols at their minimum to the size with all at
    their maximum, or to LONGEST."""
    low, high = bounds(d)
    if not isinstance(d, Dim) or (low > -INF and high < INF):
        return low, high
    ends = ({s.name: s.lo for s in d.symbols()}, {s.name: min(s.hi, LONGEST) for s in d.symbols()})
    try:
        low, high = sorted(evaluate(d, end) for end in ends)
    except ShapeError:  # a division by 0
        return UNKNOWN
    return low, high
