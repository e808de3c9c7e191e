"""Quantized operators: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear, and the products of integers.

Scales and zero points are operands: one value per tensor, one per entry of ``axis``, or one per block of ``axis``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.dim import DimLike, bounds
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, Attrs, Call, Result, Traits, Unsupported, attrs_dict
from optdnn.ops.checks import agree, agree_all, per_element, require_rank
from optdnn.ops.conv import ConvAttrs, ConvGeometry, infer_conv, operand_types, window_attrs
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, FromOnnx, NodeSpec, Ref, ToOnnx, normalized_axis, onnx_dtype
from optdnn.ops.fused import product_cost
from optdnn.ops.gemm import MatMulAttrs, infer_matmul
from optdnn.ops.values import ceil_div
from optdnn.ops.window import read_window
from optdnn.types import DTYPES, FP32, INT8, INT32, NARROW_FLOATS, NARROW_INTEGERS, UINT8, DType, TensorType, is_float

_INTEGERS = (UINT8, INT8, DTYPES["uint16"], DTYPES["int16"], *NARROW_INTEGERS)


@dataclass(frozen=True)
class QuantizeAttrs(Attrs):
    """``saturate`` applies only to fp8 outputs; the quotient has the type ``precision`` (None: the scale's)."""

    output_dtype: DType
    axis: int = 1
    block_size: int = 0
    saturate: bool = True
    precision: DType | None = None


@dataclass(frozen=True)
class DequantizeAttrs(Attrs):
    """``output_dtype`` None: the scale's type."""

    axis: int = 1
    block_size: int = 0
    output_dtype: DType | None = None


@dataclass(frozen=True)
class IntegerConvAttrs(ConvGeometry):
    """A convolution without stages."""


# ---------------------------------------------------------------- inference


def _check_parameter(call: Call, i: int, name: str, x: TensorType, like: TensorType | None = None) -> TensorType:
    """A scale or zero point fits x per tensor, per axis or per block (and has the shape of ``like``)."""
    t, a = call.type(i), call.attrs
    what = f"{call.kind} {name} {t}"
    if like is not None and t.dims in ((), (1,)) and like.dims in ((), (1,)):
        return t  # one value either way
    if like is not None:
        require_rank(t, len(like.dims), f"{what} with a scale {like}: it")
        agree_all(t.dims, like.dims, f"{what} does not have the shape of the scale {like}")
        return t
    if a.block_size:
        require_rank(t, len(x.dims), f"{what}, in blocks of {x},")
        for k, (d, size) in enumerate(zip(t.dims, x.dims, strict=True)):
            wanted = ceil_div(size, a.block_size) if k == a.axis % len(x.dims) else size
            agree(d, wanted, f"{what} does not fit {x} in blocks of {a.block_size} along axis {a.axis}")
    elif len(t.dims) == 1 and t.dims[0] != 1:
        if not -len(x.dims) <= a.axis < len(x.dims):
            raise ShapeError(f"{call.kind} axis {a.axis} is out of range for {x}")
        agree(t.dims[0], x.dims[a.axis], f"{what} does not fit axis {a.axis} of {x}")
    elif len(t.dims) > 1:
        raise ShapeError(f"{what} has more than one dimension, which only blocks do")
    return t


def _check_scale(call: Call, i: int, *, divides: bool) -> None:
    """A known scale must be finite, and positive if it divides: otherwise no integer has a meaning."""
    value = call.value(i)
    if value is None:
        return
    numbers = np.asarray(value, np.float64).reshape(-1)
    odd = numbers[~(np.isfinite(numbers) & ((numbers > 0) if divides else True))]
    if odd.size:
        many = f" (and {odd.size - 1} more)" if odd.size > 1 else ""
        rule = "positive and finite" if divides else "finite"
        zero = "an all-zero tensor can have any positive scale, for instance 1"
        masked = "leave out the nodes of masks (nodes_to_exclude in ONNX Runtime's tools): their numbers have no scale"
        raise ShapeError(
            f"{call.kind} scale {odd[0]:g}{many} must be {rule}",
            hint=f"quantize the model again; {zero if np.isfinite(odd[0]) else masked}",
        )


def _infer_quantize(call: Call) -> Result:
    a: QuantizeAttrs = call.attrs
    _check_scale(call, 1, divides=True)
    x, scale = call.type(0), _check_parameter(call, 1, "scale", call.type(0))
    if not is_float(scale.dtype) or not (is_float(x.dtype) or x.dtype == INT32):
        raise ShapeError(f"QuantizeLinear of {x} with the scale {scale}")
    if call.has(2) and _check_parameter(call, 2, "zero point", x, scale).dtype != a.output_dtype:
        raise ShapeError(f"QuantizeLinear zero point is {call.type(2)}, its output {a.output_dtype}")
    return Result((x.with_dtype(a.output_dtype),))


def _infer_dequantize(call: Call) -> Result:
    _check_scale(call, 1, divides=False)
    x, scale = call.type(0), _check_parameter(call, 1, "scale", call.type(0))
    if not is_float(scale.dtype):
        raise ShapeError(f"DequantizeLinear scale is {scale}; it must be floating-point")
    if call.has(2) and _check_parameter(call, 2, "zero point", x, scale).dtype != x.dtype:
        raise ShapeError(f"DequantizeLinear zero point is {call.type(2)}, its input {x}")
    return Result((x.with_dtype(call.attrs.output_dtype or scale.dtype),))


def _infer_dynamic(call: Call) -> Result:
    x = call.type(0)
    if not is_float(x.dtype):
        raise ShapeError(f"DynamicQuantizeLinear of {x}; it must be floating-point")
    return Result((x.with_dtype(UINT8), TensorType(FP32, ()), TensorType(UINT8, ()))[: call.n_outputs])


def _infer_range(call: Call) -> Result:
    """The scale and the zero point of DynamicQuantizeLinear, which a GPU computes before it quantizes."""
    return Result(_infer_dynamic(replace(call, n_outputs=3)).types[1:])


def _bytes(call: Call, *slots: int) -> None:
    for i in slots:
        if call.has(i) and call.type(i).dtype not in (INT8, UINT8):
            raise ShapeError(f"{call.kind} operand {i} is {call.type(i)}; it must be int8 or uint8")


def _same_as(call: Call, i: int, data: int) -> None:
    if call.has(i) and call.type(i).dtype != call.type(data).dtype:
        raise ShapeError(f"{call.kind} zero point {call.type(i)} is not of the type of its operand {call.type(data)}")


def _check_row(call: Call, i: int, size: DimLike, what: str) -> None:
    """A parameter that is one value or one value per ``size``."""
    if not call.has(i):
        return
    t = call.type(i)
    if len(t.dims) == 1 and t.dims[0] != 1:
        agree(t.dims[0], size, f"{call.kind} {what} {t} does not fit")


def _float_call(call: Call, kind: str, attrs: Attrs, *operands: int) -> Call:
    """The same operands in fp32, for another kind."""
    types = tuple(call.type(i).with_dtype(FP32) for i in operands)
    return Call(kind, attrs, types, (None,) * len(types), 1, call.fresh)


def _product(call: Call, b: int, what: str, of_a: Sequence[int], of_b: Sequence[int]) -> TensorType:
    """The product of operands 0 and ``b``, with their parameters (per row of A, per column of B) as operands."""
    rows, columns = call.type(0).dims, call.type(b).dims
    y = infer_matmul(_float_call(call, "MatMul", MatMulAttrs(), 0, b)).types[0]
    for i in of_a:
        _check_row(call, i, rows[-2] if len(rows) > 1 else 1, f"{what} of A")
    for i in of_b:
        _check_row(call, i, columns[-1] if len(columns) > 1 else 1, f"{what} of B")
    return y


def _scalar(call: Call, *slots: int) -> None:
    for i in slots:
        t = call.type(i)
        if len(t.dims) > 1 or (t.dims and bounds(t.dims[0])[0] > 1):
            raise ShapeError(f"{call.kind} operand {i} is {t}; it must be one number")


def _infer_integer_product(call: Call) -> Result:
    """MatMulInteger, ConvInteger, and QLinearMatMul and QLinearConv, which also have scales as operands."""
    linear = call.kind.startswith("QLinear")
    b, of_a, of_b = (3, (1, 2), (4, 5)) if linear else (1, (2,), (3,))
    what = "scale or zero point" if linear else "zero point"
    _bytes(call, 0, b)
    _same_as(call, of_a[-1], 0)
    _same_as(call, of_b[-1], b)
    if call.kind in ("ConvInteger", "QLinearConv"):
        y = _convolved(call, b, of_a, of_b, what)
    else:
        y = _product(call, b, what, of_a, of_b)
    if not linear:
        return Result((y.with_dtype(INT32),))
    _bytes(call, 7)
    for i, divides in ((1, False), (4, False), (6, True)):
        _check_scale(call, i, divides=divides)
    _scalar(call, 6, 7)
    return Result((y.with_dtype(call.type(7).dtype),))


def _convolved(call: Call, w: int, of_x: Sequence[int], of_w: Sequence[int], what: str) -> TensorType:
    """The convolution of operands 0 and ``w``, with their parameters (one value for x, per channel for w) as operands."""
    _scalar(call, *(i for i in of_x if call.has(i)))
    y = infer_conv(_float_call(call, "Conv", ConvAttrs(**attrs_dict(call.attrs)), 0, w)).types[0]
    channels = call.type(w).dims[0]
    for i in of_w:
        _check_row(call, i, channels, f"{what} of the weights")
    if call.has(8):
        bias = call.type(8)
        require_rank(bias, 1, "QLinearConv bias")
        agree(bias.dims[0], channels, "QLinearConv bias length and output channels differ")
        if bias.dtype != INT32:
            raise ShapeError(f"QLinearConv bias is {bias}; it must be int32")
    return y


# ---------------------------------------------------------------- import


def _block(node: NodeSpec) -> int:
    size = int(node.get("block_size", 0))
    if size < 0:
        raise ShapeError(f"{node.op_type} block_size is {size}")
    return size


def _axis(node: NodeSpec, e: Emit) -> int:
    """The axis, counted from the front; 0 if one value serves the whole tensor (the default may exceed its rank)."""
    scale = e.type(node.inputs[1])
    if not _block(node) and scale.dims in ((), (1,)):
        return 0
    return normalized_axis(node, e, 1)


def _import_quantize(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    zero, asked = node.input(2), int(node.get("output_dtype", 0))
    dtype = onnx_dtype(asked) if asked else None if zero is None else e.type(zero).dtype
    if zero is not None and dtype != e.type(zero).dtype:
        raise ShapeError(f"QuantizeLinear output_dtype {dtype} is not the type of its zero point, {e.type(zero)}")
    dtype = dtype or UINT8
    if dtype not in (*_INTEGERS, *NARROW_FLOATS) or dtype == DTYPES["fp8_e8m0"]:
        raise Unsupported(f"QuantizeLinear to {dtype}")
    precision = int(node.get("precision", 0))
    attrs = QuantizeAttrs(
        dtype,
        _axis(node, e),
        _block(node),
        bool(node.get("saturate", 1)),
        onnx_dtype(precision) if precision else None,
    )
    x, scale = node.inputs[:2]
    # No narrow float has a zero point other than 0.
    return e.op("QuantizeLinear", [x, scale, None if is_float(dtype) else zero], attrs)


def _import_dequantize(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    asked = int(node.get("output_dtype", 0))
    x, scale = node.inputs[:2]
    if is_float(e.type(x).dtype) and e.type(x).dtype.itemsize > 1:
        raise ShapeError(
            f"DequantizeLinear of {e.type(x)}; its operand must hold integers, or floats of 8 bits or fewer",
            hint="if these are weights, their quantizer has not finished: export with its own function "
            "(get_onnx_bytes_and_metadata of NVIDIA ModelOpt)",
        )
    zero = None if is_float(e.type(x).dtype) else node.input(2)
    dtype = onnx_dtype(asked) if asked else None
    if dtype == e.type(scale).dtype:
        dtype = None
    return e.op("DequantizeLinear", [x, scale, zero], DequantizeAttrs(_axis(node, e), _block(node), dtype))


def _import_conv(weights: int) -> FromOnnx:
    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        x, w = operand_types(node, e, weights)
        win = read_window(node, len(w.dims) - 2, x.dims[2:], w.dims[2:])
        return e.op(node.op_type, node.inputs, IntegerConvAttrs(**vars(win), group=int(node.get("group", 1))))

    return from_onnx


# ---------------------------------------------------------------- export


def _export_quantize(a: QuantizeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    scale = e.type(inputs[1])
    fields: dict[str, Any] = {}
    operands = [n for n in inputs if n]
    if len(operands) < 3 and a.output_dtype != UINT8:  # the zero point determines the type
        fields["output_dtype"] = a.output_dtype
    if a.precision is not None and a.precision != scale.dtype:
        fields["precision"] = a.precision
    if scale.dims not in ((), (1,)):
        fields["axis"] = a.axis
    if a.block_size:
        fields["block_size"] = a.block_size
    if not a.saturate:
        fields["saturate"] = 0
    return e.node("QuantizeLinear", operands, **fields)


def _export_dequantize(a: DequantizeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    scale = e.type(inputs[1])
    fields: dict[str, Any] = {}
    if scale.dims not in ((), (1,)):
        fields["axis"] = a.axis
    if a.block_size:
        fields["block_size"] = a.block_size
    y = e.node("DequantizeLinear", inputs, **fields)
    return y if a.output_dtype is None else e.node("Cast", y, to=a.output_dtype)


def _export_range(a: Attrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    return e.node("DynamicQuantizeLinear", inputs, 3)[1:]


def _export_conv(kind: str, weights: int) -> ToOnnx:
    def to_onnx(a: IntegerConvAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
        return e.node(kind, inputs, **window_attrs(a, e.type(inputs[weights])))

    return to_onnx


# ---------------------------------------------------------------- definitions


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "QuantizeLinear",
        _infer_quantize,
        QuantizeAttrs,
        _import_quantize,
        _export_quantize,
        cost=per_element(4),
        tol=EXACT,
        traits=Traits(own_precision=True),
    ),
    OpDef(
        "DequantizeLinear",
        _infer_dequantize,
        DequantizeAttrs,
        _import_dequantize,
        _export_dequantize,
        cost=per_element(2),
    ),
    OpDef("DynamicQuantizeLinear", _infer_dynamic, cost=per_element(6), traits=Traits(own_precision=True)),
    OpDef(
        "DynamicRange",
        _infer_range,
        onnx={},
        to_onnx=_export_range,
        cost=per_element(2),
        traits=Traits(own_precision=True),
    ),
    OpDef("MatMulInteger", _infer_integer_product, cost=product_cost, tol=EXACT),
    OpDef("QLinearMatMul", _infer_integer_product, cost=product_cost, tol=EXACT),
    OpDef(
        "ConvInteger",
        _infer_integer_product,
        IntegerConvAttrs,
        _import_conv(1),
        _export_conv("ConvInteger", 1),
        cost=product_cost,
        tol=EXACT,
    ),
    OpDef(
        "QLinearConv",
        _infer_integer_product,
        IntegerConvAttrs,
        _import_conv(3),
        _export_conv("QLinearConv", 3),
        cost=product_cost,
        tol=EXACT,
    ),
)
