"""Operators that OpenVINO accepts but runs wrongly, or crashes on: one rule on the graph for each known fault.

All were seen with OpenVINO 2026.4 on x86-64. The tests reproduce each in a small network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.base import FusedAttrs
from optdnn.types import INT8, UINT8, DType, Shape

_WRAPPING = frozenset({"Add", "BitShift", "Div", "Mul", "Neg", "Pow", "Sub", "Sum"})
_EIGHT = (INT8, UINT8)
_MOVING = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GlobalMaxPool", "Identity", "MaxPool", "Pad"}
    | {"ReduceMax", "ReduceMin", "Relu", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze"}
    | {"Tile", "Transpose", "Unsqueeze"}
)
"""Kinds that OpenVINO runs on quantized integers: it moves DequantizeLinear after them."""
_SCALING = frozenset({"Add", "AveragePool", "Clip", "Div", "Mul", "Neg", "Sub"})
"""Further kinds after which OpenVINO moves a DequantizeLinear, with another scale or zero point."""
_PASSING = frozenset({"Identity", "Slice", "Split", "Transpose"})
"""Kinds that do not prevent OpenVINO from writing quantized integers directly in the kernel that computes their input."""
_AVERAGED = frozenset({"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"})
_FEW_ROWS = 8
_CHANNELWISE = frozenset({"Add", "Div", "Mul", "Sub"})


def known_faults(graph: Graph) -> dict[int, str]:
    """Op id -> the fault of OpenVINO at this op."""
    found: dict[int, str] = {}
    for op in graph.order():
        if op.kind not in STRUCTURAL:
            wrong = (
                what for kinds, fault, what in _FAULTS if op.kind in kinds.split() or not kinds if fault(graph, op)
            )
            reason = next(wrong, None)
            if reason is not None:
                found[op.id] = reason
    return found


def _saturates(graph: Graph, op: Op) -> bool:
    """Sums, differences and products of 8-bit integers wrap around; OpenVINO saturates them."""
    return op.outputs[0].type.dtype in _EIGHT and not _WRAPPING.isdisjoint(_kinds(op))


def _remainder(graph: Graph, op: Op) -> bool:
    """Remainders of integers are computed in floating point, exact up to 24 bits."""
    return "Mod" in _kinds(op) and op.outputs[0].type.dtype.kind in "iu"


def _ranks_equals(graph: Graph, op: Op) -> bool:
    """Of equal elements ONNX ranks the one with the lower index first."""
    return len(op.outputs) > 1 and bool(graph.uses(Value(op.id, 1)))


def _window_in_padding(graph: Graph, op: Op) -> bool:
    """With ceil_mode ONNX leaves out a window that would begin in the padding at the end; OpenVINO counts it in the output size."""
    if not op.attrs.ceil_mode:
        return False
    dims = _dims(graph, op, 0)
    rank = len(op.attrs.kernel_shape)
    for axis in range(rank):
        begin, end = op.attrs.pads[axis], op.attrs.pads[rank + axis]
        stride, reach = op.attrs.strides[axis], (op.attrs.kernel_shape[axis] - 1) * op.attrs.dilations[axis] + 1
        if op.attrs.auto_pad == "NOTSET" and end + stride <= reach:
            continue  # no window begins in the padding for any size
        size = None if dims is None else dims[2 + axis]
        if not isinstance(size, int) or -(-(size + begin + end - reach) // stride) * stride >= size + begin:
            return True
    return False


def _strides_over_padding(graph: Graph, op: Op) -> bool:
    """A quantized 1x1 convolution with strides and pads gets another shape."""
    kernel = _dims(graph, op, 1)
    if kernel is None or not any(_reads(graph, op, slot, "DequantizeLinear") for slot in (0, 1)):
        return False
    return all(k == 1 for k in kernel[2:]) and max(op.attrs.strides) > 1 and any(op.attrs.pads)


def _requantizes(graph: Graph, op: Op) -> bool:
    """QuantizeLinear with a zero point, DequantizeLinear, QuantizeLinear: the compiler crashes if a Concat precedes them, and
    integers are wrong after a chain of products in one thread."""
    back = _reads(graph, op, 0, "DequantizeLinear")
    first = None if back is None else _reads(graph, back, 0, "QuantizeLinear")
    return first is not None and not _is_zero(graph, first.input(2))


def _truncates(graph: Graph, op: Op) -> bool:
    """Requantization between two int8 scales, both without a zero point, truncates the quotient instead of rounding it."""
    if op.outputs[0].type.dtype != INT8 or not _is_zero(graph, op.input(2)):
        return False
    return any(
        _dtype(graph, back, 0) == INT8
        and _is_zero(graph, back.input(2))
        and not _same_constant(graph, back.input(1), op.input(1))
        for back in _dequantized(graph, op.inputs[0], _MOVING)
    )


def _rounds_bounds(graph: Graph, op: Op) -> bool:
    """A Clip after a DequantizeLinear is moved before it; its bounds are then rounded to integers."""
    if "Clip" not in _kinds(op) or op.kind not in _MOVING | _SCALING | {"Pointwise"}:
        return False
    return any(_dequantized(graph, v, _MOVING | _SCALING) for v in op.inputs)


def _rounds_averages(graph: Graph, op: Op) -> bool:
    """An AveragePool after a DequantizeLinear rounds its averages to integers, unless they are results or quantized next."""
    readers = {graph.op(Value(use.op, 0)).kind for use in graph.uses(Value(op.id, 0))}
    return not readers <= {"QuantizeLinear", "Output"} and bool(_dequantized(graph, op.inputs[0], _MOVING | _SCALING))


def _averages_padding(graph: Graph, op: Op) -> bool:
    """DequantizeLinear is moved after an AveragePool; counted padding is then the integer 0 instead of the zero point."""
    if not op.attrs.count_include_pad or not (any(op.attrs.pads) or op.attrs.auto_pad.startswith("SAME")):
        return False
    moved = _dequantized(graph, op.inputs[0], _MOVING | _SCALING)
    return any(not _is_zero(graph, back.input(2)) for back in moved)


def _sums_three_axes(graph: Graph, op: Op) -> bool:
    """DequantizeLinear is moved after sums and averages; sums over three axes are then wrong in later rows."""
    x = op.inputs[0]
    return x is not None and graph.type(x).rank == 3 and bool(_dequantized(graph, x, _MOVING | _SCALING))


def _quantizes_extremes(graph: Graph, op: Op) -> bool:
    """ReduceMax and ReduceMin of floats return wrong integers if their results are quantized, directly or after elementwise steps.
    (Extremes of dequantized values are correct: OpenVINO compares their integers.)"""
    return not _reads(graph, op, 0, "DequantizeLinear") and bool(_quantized_behind(graph, op))


def _groups_between_zero_points(graph: Graph, op: Op) -> bool:
    """A grouped convolution with a zero point for its uint8 input and for its int8 output is wrong if another convolution reads
    it."""
    back = _reads(graph, op, 0, "DequantizeLinear")
    if op.attrs.group == 1 or back is None:
        return False
    if _dtype(graph, back, 0) != UINT8 or _is_zero(graph, back.input(2)):
        return False
    made, kernel = op.outputs[0].type.shape, _dims(graph, op, 1)
    if made is not None and kernel is not None and made[1] == op.attrs.group and kernel[1] == 1:
        return False  # a depthwise convolution is right
    behind = _quantized_behind(graph, op)
    return any(q.outputs[0].type.dtype == INT8 and not _is_zero(graph, q.input(2)) for q in behind)


def _one_column(graph: Graph, op: Op) -> bool:
    """A convolution with a stride whose result is one column of several rows reads wrong columns (from a kernel width of 3)."""
    made, kernel = op.outputs[0].type.shape, _dims(graph, op, 1)
    if kernel is None or made is None or len(made) < 4 or op.attrs.strides[-1] == 1:
        return False
    return made[-1] == 1 and any(n != 1 for n in made[2:-1]) and kernel[-1] not in (1, 2)


def _without_peepholes(graph: Graph, op: Op) -> bool:
    """Peepholes of an LSTM are left out."""
    return not _is_zero(graph, op.input(7))


def _as_many_heads_as_tokens(graph: Graph, op: Op) -> bool:
    """An attention whose heads are moved after its tokens is written without this transpose if both axes have the same fixed
    size."""
    product, dims = _reads(graph, op, 0, "MatMul"), op.outputs[0].type.shape
    if tuple(op.attrs.perm) != (0, 2, 1, 3) or product is None or dims is None:
        return False
    return _reads(graph, product, 0, "Softmax") is not None and dims[1] == dims[2] != 1


def _one_activation(graph: Graph, op: Op) -> bool:
    """Both directions of a recurrent network get the activations of the first."""
    half = len(op.attrs.activations) // 2
    return op.attrs.direction == "bidirectional" and bool(op.attrs.activations[:half] != op.attrs.activations[half:])


def _writes_over(graph: Graph, op: Op) -> bool:
    """Abs of a Concat along one axis is written over the Concat, even if the Concat has another reader or is a result."""
    given = [v for v in op.inputs if v is not None] if "Abs" in _kinds(op) else []
    return any(graph.op(v).kind == "Concat" and graph.type(v).rank == 1 and len(graph.uses(v)) > 1 for v in given)


def _few_rows(graph: Graph, op: Op) -> bool:
    """A chain of products with constants, of up to eight rows, becomes one kernel in one thread; it leaves out zero points."""
    if not _multiplies_few_rows(graph, op):
        return False
    back = op if op.kind == "QLinearMatMul" else _reads(graph, op, 0, "DequantizeLinear")
    if back is None or _is_zero(graph, back.input(2)):
        return False
    before = [v for v in op.inputs[:1] if v is not None]
    return _meets_product(graph, before, forwards=False) or _meets_product(graph, [Value(op.id, 0)], forwards=True)


def _multiplies_few_rows(graph: Graph, op: Op) -> bool:
    slot = {"MatMul": 1, "Gemm": 1, "QLinearMatMul": 3}.get(op.kind)
    dims = op.outputs[0].type.shape
    if slot is None or dims is None or len(dims) != 2 or not isinstance(dims[0], int) or dims[0] > _FEW_ROWS:
        return False
    back = _reads(graph, op, slot, "DequantizeLinear")
    return _reads(graph, *((op, slot) if back is None else (back, 0)), "Constant") is not None


def _meets_product(graph: Graph, values: Iterable[Value], *, forwards: bool) -> bool:
    """Whether one of these values meets another such product with only elementwise steps and quantization between."""
    stack, seen = list(values), set[int]()
    while stack:
        v = stack.pop()
        ops = [graph.op(Value(use.op, 0)) for use in graph.uses(v)] if forwards else [graph.op(v)]
        for op in ops:
            if op.id in seen:
                continue
            seen.add(op.id)
            if _multiplies_few_rows(graph, op):
                return True
            if op.kind in ("QuantizeLinear", "DequantizeLinear") or op.pointwise:
                stack += [Value(op.id, 0)] if forwards else [i for i in op.inputs if i is not None]
    return False


def _divides_by_more(graph: Graph, op: Op) -> bool:
    """OpenVINO adds a constant to the norm that LpNormalization divides by."""
    return True


def _channels_of_reduced(graph: Graph, op: Op) -> bool:
    """A constant per channel ([1, C, 1]) after a reduction to three axes is read at wrong positions in later rows."""
    if op.outputs[0].type.rank != 3 or _CHANNELWISE.isdisjoint(_kinds(op)) or not op.pointwise:
        return False
    for slot, v in enumerate(op.inputs):
        shape = _dims(graph, op, slot) or ()
        dims = (*(1,) * (3 - len(shape)), *shape)
        if v is not None and graph.op(v).kind == "Constant" and dims[0] == dims[2] == 1 and dims[1] != 1:
            others = [o for o in op.inputs if o is not None and o != v]
            if any(_reduces(graph.op(s)) for o in others for s in _elementwise_sources(graph, o)):
                return True
    return False


def _meets_its_norm(graph: Graph, op: Op) -> bool:
    """The compiler crashes if a GroupNormalization is added to, or multiplied by, its own operand or a function of the operand."""
    given = [v for v in op.inputs if v is not None] if op.pointwise else []
    norms = [v for v in given if graph.op(v).kind == "GroupNormalization"]
    return any(
        source == graph.op(norm).inputs[0]
        for norm in norms
        for other in given
        if other != norm
        for source in _elementwise_sources(graph, other)
    )


_FAULTS: tuple[tuple[str, Callable[[Graph, Op], bool], str], ...] = (
    ("", _saturates, "openvino saturates arithmetic on 8-bit integers that should wrap around"),
    ("", _remainder, "openvino computes the remainder of integers in floating point"),
    ("TopK", _ranks_equals, "openvino ranks equal elements in another order"),
    ("MaxPool", _window_in_padding, "openvino counts a window of ceil_mode that begins in the padding"),
    ("Conv", _strides_over_padding,
     "openvino gives a quantized 1x1 convolution with strides and pads another shape"),
    ("QuantizeLinear", _requantizes,
     "openvino may crash, or give wrong integers, if a value quantized with a zero point is quantized once more"),
    ("QuantizeLinear", _truncates, "openvino truncates where int8 is quantized again with another scale"),
    ("", _rounds_bounds, "openvino rounds the bounds of a Clip of quantized values"),
    ("AveragePool", _rounds_averages, "openvino rounds the averages of quantized values to integers"),
    ("AveragePool", _averages_padding,
     "openvino averages padding of quantized values as the integer 0, not as their zero point"),
    ("GlobalAveragePool ReduceMean ReduceSum", _sums_three_axes,
     "openvino sums quantized values of three axes wrongly"),
    ("GlobalMaxPool ReduceMax ReduceMin", _quantizes_extremes,
     "openvino gives wrong integers where largest or smallest elements of floats are quantized"),
    ("Conv", _groups_between_zero_points,
     "openvino computes a grouped convolution wrongly from uint8 to int8, both with zero points"),
    ("Conv", _one_column, "openvino computes a convolution with a stride wrongly if its result has one column"),
    ("LSTM", _without_peepholes, "openvino leaves out the peepholes of an LSTM"),
    ("Transpose", _as_many_heads_as_tokens,
     "openvino leaves out the transpose of an attention's heads and tokens if their numbers are equal"),
    ("RNN GRU LSTM", _one_activation,
     "openvino gives both directions of a recurrent network the activations of the first"),
    ("", _writes_over, "openvino writes Abs over the Concat that it reads"),
    ("", _few_rows, "openvino leaves out zero points in products of few rows, one after the other"),
    ("LpNormalization", _divides_by_more, "openvino adds a constant to the norm of LpNormalization"),
    ("", _channels_of_reduced,
     "openvino reads constants per channel at wrong places after a reduction that leaves three axes"),
    ("", _meets_its_norm, "openvino's compiler crashes if a GroupNormalization meets its own operand"),
)  # fmt: skip
"""Kinds of operators ("" for all), the test for a fault at one of them, and the fault in words."""


def _reduces(op: Op) -> bool:
    return op.kind in _AVERAGED or op.kind.startswith("Reduce")


def _is_zero(graph: Graph, value: Value | None) -> bool:
    """Whether a zero point is absent, or known to be 0."""
    known = None if value is None else graph.constant_value(value)
    return value is None or (known is not None and not np.any(known))


def _same_constant(graph: Graph, a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return a == b
    x, y = graph.constant_value(a), graph.constant_value(b)
    return a == b or (x is not None and y is not None and np.array_equal(x, y))


def _dequantized(graph: Graph, value: Value | None, through: Collection[str]) -> list[Op]:
    """The DequantizeLinear ops of data at the start of a value's chain of ops of these kinds (fused ops: through all stages)."""
    stack, seen, found = [value], set[int](), list[Op]()
    while stack:
        v = stack.pop()
        op = None if v is None else graph.op(v)
        if op is None or op.id in seen:
            continue
        seen.add(op.id)
        if op.kind == "DequantizeLinear" and graph.op(op.inputs[0]).kind != "Constant":  # type: ignore[arg-type]
            found.append(op)
        elif op.kind not in STRUCTURAL and _kinds(op) - {"Pointwise"} <= set(through):
            stack += op.inputs
    return found


def _quantized_behind(graph: Graph, op: Op) -> list[Op]:
    """The QuantizeLinear ops that read the op's results, or values computed from these elementwise."""
    stack, seen, found = [op], {op.id}, list[Op]()
    while stack:
        at = stack.pop()
        for use in (u for v in at.values for u in graph.uses(v)):
            reader = graph.op(Value(use.op, 0))
            if reader.id in seen:
                continue
            seen.add(reader.id)
            if reader.kind == "QuantizeLinear":
                found.append(reader)
            elif reader.pointwise or reader.kind in _PASSING:
                stack.append(reader)
    return found


def _reads(graph: Graph, op: Op, slot: int, kind: str) -> Op | None:
    """The op that produces an operand, if it is of this kind."""
    value = op.input(slot)
    return graph.op(value) if value is not None and graph.op(value).kind == kind else None


def _dims(graph: Graph, op: Op, slot: int) -> Shape | None:
    """The shape of an operand; None if the operand is absent or of unknown rank."""
    value = op.input(slot)
    return None if value is None else graph.type(value).shape


def _dtype(graph: Graph, op: Op, slot: int) -> DType | None:
    value = op.input(slot)
    return None if value is None else graph.type(value).dtype


def _kinds(op: Op) -> set[str]:
    """The kinds of the op and of its fused stages."""
    stages = (*op.attrs.prologue, *op.attrs.epilogue) if isinstance(op.attrs, FusedAttrs) else ()
    return {op.kind, *(stage.kind for stage in stages)}


def _elementwise_sources(graph: Graph, value: Value) -> Iterator[Value]:
    """A value, and all values from which it is computed elementwise."""
    stack, seen = [value], set[Value]()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        yield v
        op = graph.op(v)
        if op.pointwise:
            stack += [o for o in op.inputs if o is not None]
