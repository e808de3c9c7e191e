"""Operators that OpenVINO takes and runs wrongly, or crashes on: what is known of them, each as a rule on the graph.

All were seen with OpenVINO 2026.4 on x86-64; the tests hold each in a small network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.base import FusedAttrs
from optdnn.types import INT8, UINT8

_WRAPPING = frozenset({"Add", "BitShift", "Div", "Mul", "Neg", "Pow", "Sub", "Sum"})
_EIGHT = (INT8, UINT8)
_MOVING = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GlobalMaxPool", "Identity", "MaxPool", "Pad"}
    | {"ReduceMax", "ReduceMin", "Relu", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze"}
    | {"Tile", "Transpose", "Unsqueeze"}
)
"""Kinds that OpenVINO runs on quantized integers: it moves DequantizeLinear behind them."""
_SCALING = frozenset({"Add", "AveragePool", "Clip", "Div", "Mul", "Neg", "Sub"})
"""Further kinds that OpenVINO moves a DequantizeLinear behind, with another scale or zero point."""
_PASSING = frozenset({"Identity", "Slice", "Split", "Transpose"})
"""Kinds that do not keep OpenVINO from writing quantized integers at once, in the kernel of what they read."""
_AVERAGED = frozenset({"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"})
_FEW_ROWS = 8
_CHANNELWISE = frozenset({"Add", "Div", "Mul", "Sub"})


def known_faults(graph: Graph) -> dict[int, str]:
    """Op id -> what OpenVINO does wrongly there."""
    found: dict[int, str] = {}
    for op in graph.order():
        if op.kind not in STRUCTURAL:
            reason = next(filter(None, (fault(graph, op) for fault in _FAULTS)), None)
            if reason is not None:
                found[op.id] = reason
    return found


def _saturates(graph: Graph, op: Op) -> str | None:
    """Sums, differences and products of 8-bit integers wrap around; OpenVINO saturates them."""
    if op.outputs[0].type.dtype in _EIGHT and not _WRAPPING.isdisjoint(_kinds(op)):
        return "openvino saturates arithmetic on 8-bit integers that should wrap around"
    return None


def _remainder(graph: Graph, op: Op) -> str | None:
    """Remainders of integers are computed in floating point, exact up to 24 bits."""
    if "Mod" in _kinds(op) and op.outputs[0].type.dtype.kind in "iu":
        return "openvino computes the remainder of integers in floating point"
    return None


def _ranks_equals(graph: Graph, op: Op) -> str | None:
    """Of equal elements ONNX ranks the one with the lower index first."""
    if op.kind == "TopK" and len(op.outputs) > 1 and graph.uses(Value(op.id, 1)):
        return "openvino ranks equal elements in another order"
    return None


def _window_in_padding(graph: Graph, op: Op) -> str | None:
    """With ceil_mode ONNX leaves out a window that would begin in the padding at the end; OpenVINO has it in its sizes."""
    if op.kind != "MaxPool" or not op.attrs.ceil_mode:
        return None
    x = op.inputs[0]
    dims = None if x is None else graph.type(x).shape
    rank = len(op.attrs.kernel_shape)
    for axis in range(rank):
        begin, end = op.attrs.pads[axis], op.attrs.pads[rank + axis]
        stride, reach = op.attrs.strides[axis], (op.attrs.kernel_shape[axis] - 1) * op.attrs.dilations[axis] + 1
        if op.attrs.auto_pad == "NOTSET" and end + stride <= reach:
            continue  # no window begins in the padding, whatever the size
        size = None if dims is None else dims[2 + axis]
        if not isinstance(size, int) or -(-(size + begin + end - reach) // stride) * stride >= size + begin:
            return "openvino counts a window of ceil_mode that begins in the padding"
    return None


def _strides_over_padding(graph: Graph, op: Op) -> str | None:
    """A quantized convolution by a kernel of one element with strides and pads gets another shape."""
    if op.kind != "Conv" or not any(v is not None and graph.op(v).kind == "DequantizeLinear" for v in op.inputs[:2]):
        return None
    w = op.inputs[1]
    kernel = None if w is None else graph.type(w).shape
    if kernel is not None and all(k == 1 for k in kernel[2:]) and max(op.attrs.strides) > 1 and any(op.attrs.pads):
        return "openvino gives a quantized convolution of one element with strides and pads another shape"
    return None


def _requantizes(graph: Graph, op: Op) -> str | None:
    """QuantizeLinear with a zero point, DequantizeLinear, QuantizeLinear: the compiler crashes where a Concat is before them, and
    integers are wrong behind a chain of products in one thread."""
    back = _maker(graph, op, 0) if op.kind == "QuantizeLinear" else None
    first = _maker(graph, back, 0) if back is not None and back.kind == "DequantizeLinear" else None
    if first is None or first.kind != "QuantizeLinear" or first.input(2) is None:
        return None
    zero = graph.constant_value(first.input(2))
    if zero is None or np.any(zero):
        return "openvino may crash, or give wrong integers, where what was quantized with a zero point is quantized once more"
    return None


def _truncates(graph: Graph, op: Op) -> str | None:
    """Between two int8 scales, both without a zero point, the quotient is truncated rather than rounded."""
    if op.kind != "QuantizeLinear" or op.outputs[0].type.dtype != INT8 or not _is_zero(graph, op.input(2)):
        return None
    for back in _dequantized(graph, op.inputs[0], _MOVING):
        data = back.inputs[0]
        same = _same_constant(graph, back.input(1), op.input(1))
        if data is not None and graph.type(data).dtype == INT8 and _is_zero(graph, back.input(2)) and not same:
            return "openvino truncates where int8 is quantized again with another scale"
    return None


def _rounds_bounds(graph: Graph, op: Op) -> str | None:
    """A Clip of what is dequantized is moved before the DequantizeLinear; its bounds are then rounded to integers."""
    if "Clip" not in _kinds(op) or op.kind not in _MOVING | _SCALING | {"Pointwise"}:
        return None
    if any(_dequantized(graph, v, _MOVING | _SCALING) for v in op.inputs):
        return "openvino rounds the bounds of a Clip of quantized values"
    return None


def _rounds_averages(graph: Graph, op: Op) -> str | None:
    """An AveragePool of what is dequantized rounds its averages to integers, unless they are results or quantized at once."""
    if op.kind != "AveragePool" or not _dequantized(graph, op.inputs[0], _MOVING | _SCALING):
        return None
    readers = {graph.op(Value(use.op, 0)).kind for use in graph.uses(Value(op.id, 0))}
    if not readers <= {"QuantizeLinear", "Output"}:
        return "openvino rounds the averages of quantized values to integers"
    return None


def _averages_padding(graph: Graph, op: Op) -> str | None:
    """DequantizeLinear is moved behind an AveragePool; padding that counts is then the integer 0 in place of the zero point."""
    if op.kind != "AveragePool" or not op.attrs.count_include_pad:
        return None
    padded = any(op.attrs.pads) or op.attrs.auto_pad.startswith("SAME")
    moved = _dequantized(graph, op.inputs[0], _MOVING | _SCALING) if padded else []
    if any(not _is_zero(graph, back.input(2)) for back in moved):
        return "openvino averages padding of quantized values as the integer 0, not as their zero point"
    return None


def _sums_three_axes(graph: Graph, op: Op) -> str | None:
    """DequantizeLinear is moved behind sums and averages; those of three axes are then wrong in later rows."""
    x = op.inputs[0] if op.kind in ("GlobalAveragePool", "ReduceMean", "ReduceSum") else None
    if x is not None and graph.type(x).rank == 3 and _dequantized(graph, x, _MOVING | _SCALING):
        return "openvino sums quantized values of three axes wrongly"
    return None


def _quantizes_extremes(graph: Graph, op: Op) -> str | None:
    """Largest and smallest elements of floats that are quantized, at once or after elementwise steps, are those of other integers."""
    if op.kind not in ("GlobalMaxPool", "ReduceMax", "ReduceMin"):
        return None
    back = _maker(graph, op, 0)
    dequantized = back is not None and back.kind == "DequantizeLinear"  # integers are compared in its place, rightly
    if not dequantized and _quantized_behind(graph, op):
        return "openvino gives wrong integers where largest or smallest elements of floats are quantized"
    return None


def _groups_between_zero_points(graph: Graph, op: Op) -> str | None:
    """A grouped convolution of uint8 with a zero point, quantized as int8 with one, is wrong where another convolution reads it."""
    back = _maker(graph, op, 0) if op.kind == "Conv" and op.attrs.group > 1 else None
    data = back.inputs[0] if back is not None and back.kind == "DequantizeLinear" else None
    if back is None or data is None or graph.type(data).dtype != UINT8 or _is_zero(graph, back.input(2)):
        return None
    made, w = op.outputs[0].type.shape, op.inputs[1]
    kernel = None if w is None else graph.type(w).shape
    if made is not None and kernel is not None and made[1] == op.attrs.group and kernel[1] == 1:
        return None  # a depthwise convolution is right
    for q in _quantized_behind(graph, op):
        if q.outputs[0].type.dtype == INT8 and not _is_zero(graph, q.input(2)):
            return "openvino computes a grouped convolution wrongly from uint8 to int8, both with zero points"
    return None


def _one_column(graph: Graph, op: Op) -> str | None:
    """A convolution with a stride whose result is one column of several rows reads wrong columns (from a kernel width of 3)."""
    w = op.inputs[1] if op.kind == "Conv" else None
    kernel = None if w is None else graph.type(w).shape
    made = op.outputs[0].type.shape
    if kernel is None or made is None or len(made) < 4 or op.attrs.strides[-1] == 1:
        return None
    if made[-1] == 1 and any(n != 1 for n in made[2:-1]) and kernel[-1] not in (1, 2):
        return "openvino computes a convolution with a stride wrongly where its result has one column"
    return None


def _without_peepholes(graph: Graph, op: Op) -> str | None:
    """Peepholes of an LSTM are left out."""
    if op.kind == "LSTM" and not _is_zero(graph, op.input(7)):
        return "openvino leaves out the peepholes of an LSTM"
    return None


def _as_many_heads_as_tokens(graph: Graph, op: Op) -> str | None:
    """An attention whose heads are moved behind its tokens is written with these axes in place, where both have one fixed size."""
    if op.kind != "Transpose" or tuple(op.attrs.perm) != (0, 2, 1, 3):
        return None
    product = _maker(graph, op, 0)
    weights = None if product is None or product.kind != "MatMul" else _maker(graph, product, 0)
    dims = op.outputs[0].type.shape
    if weights is not None and weights.kind == "Softmax" and dims is not None and dims[1] == dims[2] != 1:
        return "openvino leaves heads and tokens of an attention in their places where there are as many of both"
    return None


def _one_activation(graph: Graph, op: Op) -> str | None:
    """Both directions of a recurrent network get the activations of the first."""
    if op.kind not in ("RNN", "GRU", "LSTM") or op.attrs.direction != "bidirectional":
        return None
    half = len(op.attrs.activations) // 2
    if op.attrs.activations[:half] != op.attrs.activations[half:]:
        return "openvino gives both directions of a recurrent network the activations of the first"
    return None


def _writes_over(graph: Graph, op: Op) -> str | None:
    """Abs of a Concat of one axis is written over the Concat, also where something else reads that or it is a result."""
    if "Abs" not in _kinds(op):
        return None
    for v in op.inputs:
        made = None if v is None else graph.op(v)
        if (
            made is not None
            and v is not None
            and made.kind == "Concat"
            and graph.type(v).rank == 1
            and len(graph.uses(v)) > 1
        ):
            return "openvino writes Abs over the Concat that it reads"
    return None


def _few_rows(graph: Graph, op: Op) -> str | None:
    """Products by constants, one behind the other, of up to eight rows are one kernel in one thread; it leaves out zero points."""
    if not _multiplies_few_rows(graph, op):
        return None
    back = _maker(graph, op, 0)
    zero = op.input(2) if op.kind == "QLinearMatMul" else None
    if op.kind != "QLinearMatMul" and back is not None and back.kind == "DequantizeLinear":
        zero = back.input(2)
    if _is_zero(graph, zero):
        return None
    before = (v for v in op.inputs[:1] if v is not None)
    if _meets_product(graph, before, forwards=False) or _meets_product(graph, [Value(op.id, 0)], forwards=True):
        return "openvino leaves out zero points in products of few rows, one behind the other"
    return None


def _multiplies_few_rows(graph: Graph, op: Op) -> bool:
    slot = {"MatMul": 1, "Gemm": 1, "QLinearMatMul": 3}.get(op.kind)
    dims = op.outputs[0].type.shape
    if slot is None or dims is None or len(dims) != 2 or not isinstance(dims[0], int) or dims[0] > _FEW_ROWS:
        return False
    w = _maker(graph, op, slot)
    if w is not None and w.kind == "DequantizeLinear":
        w = _maker(graph, w, 0)
    return w is not None and w.kind == "Constant"


def _meets_product(graph: Graph, values: Iterable[Value], *, forwards: bool) -> bool:
    """Whether elementwise steps and quantization alone lie between one of these values and another such product."""
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
            if op.kind in ("QuantizeLinear", "DequantizeLinear") or (
                op.kind not in STRUCTURAL and op.definition.traits.pointwise
            ):
                stack += [Value(op.id, 0)] if forwards else [i for i in op.inputs if i is not None]
    return False


def _norm_of_little(graph: Graph, op: Op) -> str | None:
    """OpenVINO adds a constant to the norm that LpNormalization divides by."""
    return "openvino adds a constant to the norm of LpNormalization" if op.kind == "LpNormalization" else None


def _channels_of_reduced(graph: Graph, op: Op) -> str | None:
    """A constant per channel ([1, C, 1]) after a reduction that leaves three axes is read at wrong places in later rows."""
    if op.outputs[0].type.rank != 3 or _CHANNELWISE.isdisjoint(_kinds(op)) or not op.definition.traits.pointwise:
        return None
    for v in op.inputs:
        if v is None or graph.op(v).kind != "Constant":
            continue
        shape = graph.type(v).shape or ()
        dims = (*(1,) * (3 - len(shape)), *shape)
        if dims[0] == dims[2] == 1 and dims[1] != 1:
            others = [o for o in op.inputs if o is not None and o != v]
            if any(_reduces(graph.op(s)) for o in others for s in _elementwise_sources(graph, o)):
                return "openvino reads constants per channel at wrong places after a reduction that leaves three axes"
    return None


def _meets_its_norm(graph: Graph, op: Op) -> str | None:
    """The compiler crashes where a GroupNormalization is added to, or multiplied by, its own operand or a function of that."""
    if not op.definition.traits.pointwise or len(op.inputs) < 2:
        return None
    for v in op.inputs:
        norm = None if v is None else graph.op(v)
        if norm is not None and norm.kind == "GroupNormalization":
            others = [o for o in op.inputs if o is not None and o != v]
            if any(source == norm.inputs[0] for o in others for source in _elementwise_sources(graph, o)):
                return "openvino's compiler crashes where a GroupNormalization meets its own operand"
    return None


_FAULTS = (
    _saturates,
    _remainder,
    _ranks_equals,
    _window_in_padding,
    _strides_over_padding,
    _requantizes,
    _truncates,
    _rounds_bounds,
    _rounds_averages,
    _averages_padding,
    _sums_three_axes,
    _quantizes_extremes,
    _groups_between_zero_points,
    _one_column,
    _without_peepholes,
    _as_many_heads_as_tokens,
    _one_activation,
    _writes_over,
    _few_rows,
    _norm_of_little,
    _channels_of_reduced,
    _meets_its_norm,
)


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
    """The DequantizeLinear of data that a value comes from, through ops of these kinds (fused ones: through all their stages)."""
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
    """The QuantizeLinear that read the op's results, or what is computed from them elementwise."""
    stack, seen, found = [op], {op.id}, list[Op]()
    while stack:
        at = stack.pop()
        for use in (u for slot in range(len(at.outputs)) for u in graph.uses(Value(at.id, slot))):
            reader = graph.op(Value(use.op, 0))
            if reader.id in seen:
                continue
            seen.add(reader.id)
            if reader.kind == "QuantizeLinear":
                found.append(reader)
            elif reader.kind not in STRUCTURAL and (reader.definition.traits.pointwise or reader.kind in _PASSING):
                stack.append(reader)
    return found


def _maker(graph: Graph, op: Op, slot: int) -> Op | None:
    value = op.input(slot)
    return None if value is None else graph.op(value)


def _kinds(op: Op) -> set[str]:
    """The op's kind and those of the stages that are fused into it."""
    stages = (*op.attrs.prologue, *op.attrs.epilogue) if isinstance(op.attrs, FusedAttrs) else ()
    return {op.kind, *(stage.kind for stage in stages)}


def _elementwise_sources(graph: Graph, value: Value) -> Iterator[Value]:
    """A value, and all that it is computed from elementwise."""
    stack, seen = [value], set[Value]()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        yield v
        op = graph.op(v)
        if op.kind not in STRUCTURAL and op.definition.traits.pointwise:
            stack += [o for o in op.inputs if o is not None]
