"""Pointwise operators of several operands: arithmetic, comparison, logic, Where, Clip; and Cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, dim_max, dim_min, mod
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, Attrs, Call, Infer, Result, promote_types
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, onnx_dtype, onnx_number
from optdnn.ops.unary import define_pointwise, is_numeric
from optdnn.ops.values import (
    Undecided,
    Values,
    elementwise,
    equal,
    folded,
    less,
    require,
    trunc_div,
    truth,
)
from optdnn.types import BOOL, DTYPES, FP32, DType, Shape, TensorType, broadcast_dims, is_float, is_int, product


@dataclass(frozen=True)
class ModAttrs(Attrs):
    """``fmod``: the result has the sign of the dividend (C's fmod) instead of the divisor's."""

    fmod: bool = False


@dataclass(frozen=True)
class BitShiftAttrs(Attrs):
    """``direction`` is "LEFT" or "RIGHT"."""

    direction: str = "LEFT"


@dataclass(frozen=True)
class CastAttrs(Attrs):
    """``to``: the result's dtype. ``saturate``: results of 8 and fewer bits are clamped to the largest finite value.
    ``round_mode`` is for E8M0: "up", "down" or "nearest"."""

    to: DType = FP32
    saturate: bool = True
    round_mode: str = "up"


# ---------------------------------------------------------------- inference


def broadcast_types(types: Sequence[TensorType]) -> Shape | None:
    """The broadcast shape of some operands; None if a rank is unknown."""
    if any(t.shape is None for t in types):
        return None
    return broadcast_dims(*(t.dims for t in types))


def _operands(call: Call) -> list[TensorType]:
    types = [t for t in call.types if t is not None]
    require(bool(types), call, "an operand")
    return types


def _infer(what: str, accepts: Callable[[DType], bool], to_bool: bool = False, count: int | None = 2) -> Infer:
    def infer(call: Call) -> Result:
        types = _operands(call)
        require(count is None or len(types) == count, call, f"{count} operands", *types)
        dtype = promote_types(types, call.kind)
        require(accepts(dtype), call, what, *types)
        return Result((TensorType(BOOL if to_bool else dtype, broadcast_types(types)),))

    return infer


def _infer_pow(call: Call) -> Result:
    x, y = call.type(0), call.type(1)
    require(is_numeric(x.dtype) and is_numeric(y.dtype), call, "numeric operands")
    return Result((TensorType(x.dtype, broadcast_types((x, y))),))


def _infer_prelu(call: Call) -> Result:
    x, slope = call.type(0), call.type(1)
    require(_fits(call, x, slope), call, "a slope that broadcasts to operand 0", x, slope)
    return Result((x,))


def _infer_snake(call: Call) -> Result:
    x, *numbers = (call.type(i) for i in range(3))
    fits = _fits(call, x, *numbers)
    require(fits and is_float(x.dtype), call, "floats, and a rate and a gain that broadcast to operand 0", x, *numbers)
    return Result((x,))


def _export_snake(attrs: Attrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    x, rate, gain = inputs
    (wave,) = e.node("Sin", e.node("Mul", [x, rate]))
    return e.node("Add", [x, *e.node("Mul", [gain, *e.node("Mul", [wave, wave])])])


def _fits(call: Call, x: TensorType, *others: TensorType) -> bool:
    """Whether the others are of the type of ``x`` (else ShapeError) and may broadcast to its shape."""
    promote_types((x, *others), call.kind)
    shape = broadcast_types((x, *others))
    if shape is None or len(shape) != len(x.dims):
        return shape is None
    return not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, x.dims, strict=True))


def _infer_where(call: Call) -> Result:
    condition, x, y = call.type(0), call.type(1), call.type(2)
    require(condition.dtype == BOOL, call, "a bool condition", condition)
    return Result((TensorType(promote_types((x, y), call.kind), broadcast_types((condition, x, y))),))


def _infer_clip(call: Call) -> Result:
    x = call.type(0)
    require(is_numeric(x.dtype), call, "numeric operands")
    for i in (1, 2):
        if call.has(i):
            bound = call.type(i)
            promote_types((x, bound), call.kind)
            require(bound.shape is None or product(bound.shape) == 1, call, "bounds of one element", x, bound)
    return Result((x,))


def _infer_cast(call: Call) -> Result:
    return Result((call.type(0).with_dtype(call.attrs.to),))


# ---------------------------------------------------------------- symbolic values


def _fmod(call: Call, values: Values) -> Sequence[Any]:
    def remainder(a: DimLike, b: DimLike) -> DimLike:
        return a - trunc_div(a, b) * b if call.attrs.fmod else mod(a, b)

    return elementwise(remainder)(call, values)


def _pow_value(base: DimLike, exponent: DimLike) -> DimLike:
    if isinstance(exponent, Dim) or exponent < 0 or exponent > 8:
        raise Undecided
    total: DimLike = 1
    for _ in range(exponent):
        total = total * base
    return total


def _where_values(call: Call, values: Values) -> Sequence[Any]:
    condition, x, y = (np.asarray(v) for v in values)
    return (np.where(condition, x.astype(object), y.astype(object)),)


def _clip_values(call: Call, values: Values) -> Sequence[Any]:
    out = values[0]
    for i, extreme in ((1, dim_max), (2, dim_min)):
        bound = values[i] if i < len(values) else None
        if bound is not None and out is not None:
            out = np.frompyfunc(extreme, 2, 1)(out.astype(object), bound.astype(object).reshape(()))
    return (np.asarray(out, dtype=object),)


def _cast_values(call: Call, values: Values) -> Sequence[Any]:
    (value,) = values
    if call.attrs.to == BOOL and value is not None:
        return (np.asarray(np.frompyfunc(truth, 1, 1)(value), dtype=object),)
    return (value,)


# ---------------------------------------------------------------- import and export


def _import_clip(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Clip; the bounds were attributes before opset 11, with the extreme float32 values for "no bound"."""
    if node.opset >= 11:
        return e.op("Clip", node.inputs)
    x = node.input(0)
    extreme = float(np.finfo(np.float32).max)
    bounds: list[Any] = []
    for name in ("min", "max"):
        value = node.get(name)
        unbounded = value is None or abs(value) >= extreme
        bounds.append(None if unbounded else np.asarray(value, dtype=e.type(x).dtype))
    while bounds and bounds[-1] is None:
        bounds.pop()
    return e.op("Clip", [x, *bounds])


def _import_cast(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op("Cast", node.inputs, _cast_attrs(node, onnx_dtype(node.get("to"))))


def _cast_attrs(node: NodeSpec, to: DType) -> CastAttrs:
    mode = str(node.get("round_mode", "up"))
    if mode not in ("up", "down", "nearest"):
        raise ShapeError(f"{node.op_type} round_mode is {mode!r}; it must be up, down or nearest")
    return CastAttrs(to, bool(node.get("saturate", 1)), mode if to == DTYPES["fp8_e8m0"] else "up")


def _import_cast_like(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    to = e.type(node.input(1)).dtype
    return e.op("Cast", [node.input(0)], _cast_attrs(node, to))


def _export_cast(attrs: CastAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    return e.node("Cast", inputs, to=onnx_number(attrs.to), saturate=int(attrs.saturate))


_ARITHMETIC = _infer("numeric operands", is_numeric)
_VARIADIC = _infer("numeric operands", is_numeric, count=None)
_FLOATS = _infer("floating-point operands", is_float, count=None)
_COMPARISON = _infer("numeric operands", is_numeric, to_bool=True)
_EQUALITY = _infer("numeric or bool operands", lambda d: is_numeric(d) or d == BOOL, to_bool=True)
_LOGIC = _infer("bool operands", lambda d: d == BOOL)
_BITS = _infer("integer operands", is_int)

DEFS: tuple[OpDef, ...] = (
    # Arithmetic.
    define_pointwise("Add", _ARITHMETIC, symbolic=elementwise(lambda a, b: a + b), commutative=True, monotone=True),
    define_pointwise("Sub", _ARITHMETIC, symbolic=elementwise(lambda a, b: a - b), monotone=True),
    define_pointwise("Mul", _ARITHMETIC, symbolic=elementwise(lambda a, b: a * b), commutative=True),
    define_pointwise("Div", _ARITHMETIC, symbolic=elementwise(trunc_div)),
    define_pointwise("Mod", _ARITHMETIC, ModAttrs, symbolic=_fmod),
    define_pointwise("Pow", _infer_pow, symbolic=elementwise(_pow_value), flops=8),
    define_pointwise("PRelu", _infer_prelu, flops=2),
    define_pointwise("Snake", _infer_snake, onnx={}, to_onnx=_export_snake, flops=9),
    define_pointwise("Min", _VARIADIC, symbolic=folded(dim_min), tol=EXACT, commutative=True, monotone=True),
    define_pointwise("Max", _VARIADIC, symbolic=folded(dim_max), tol=EXACT, commutative=True, monotone=True),
    define_pointwise("Sum", _VARIADIC, symbolic=folded(lambda a, b: a + b), commutative=True, monotone=True),
    define_pointwise("Mean", _FLOATS, commutative=True, monotone=True),
    define_pointwise("BitShift", _BITS, BitShiftAttrs, tol=EXACT),
    # Comparison.
    define_pointwise("Equal", _EQUALITY, symbolic=elementwise(equal), tol=EXACT, commutative=True),
    define_pointwise("Less", _COMPARISON, symbolic=elementwise(less), tol=EXACT),
    define_pointwise("LessOrEqual", _COMPARISON, symbolic=elementwise(lambda a, b: not less(b, a)), tol=EXACT),
    define_pointwise("Greater", _COMPARISON, symbolic=elementwise(lambda a, b: less(b, a)), tol=EXACT),
    define_pointwise("GreaterOrEqual", _COMPARISON, symbolic=elementwise(lambda a, b: not less(a, b)), tol=EXACT),
    # Logic.
    define_pointwise("And", _LOGIC, tol=EXACT, commutative=True),
    define_pointwise("Or", _LOGIC, tol=EXACT, commutative=True),
    define_pointwise("Xor", _LOGIC, tol=EXACT, commutative=True),
    define_pointwise("BitwiseAnd", _BITS, tol=EXACT, commutative=True),
    define_pointwise("BitwiseOr", _BITS, tol=EXACT, commutative=True),
    define_pointwise("BitwiseXor", _BITS, tol=EXACT, commutative=True),
    # Selection and conversion.
    define_pointwise("Where", _infer_where, symbolic=_where_values, tol=EXACT),
    define_pointwise(
        "Clip",
        _infer_clip,
        symbolic=_clip_values,
        onnx=_import_clip,
        flops=2,
        tol=EXACT,
        monotone=True,
    ),
    define_pointwise(
        "Cast",
        _infer_cast,
        CastAttrs,
        symbolic=_cast_values,
        onnx={"Cast": _import_cast, "CastLike": _import_cast_like},
        to_onnx=_export_cast,
        tol=EXACT,
    ),
)
