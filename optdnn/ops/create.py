"""Operators that create tensors: Range, ConstantOfShape, EyeLike, Trilu, Constant; Identity and Dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, dim_max
from optdnn.errors import ShapeError
from optdnn.ops.base import DEFAULT_TOL, Attrs, Call, Result, Traits, Unsupported, known_array, promote_types, same_type
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, simple_import
from optdnn.ops.shape import ShapeAttrs, define_free, target_dims
from optdnn.ops.values import Values, ceil_div, moved, require, require_ints
from optdnn.types import FP32, DType, TensorType, is_float, product, show_shape


@dataclass(frozen=True)
class ConstantOfShapeAttrs(Attrs):
    value: int | float | complex = 0.0
    dtype: DType = FP32


@dataclass(frozen=True)
class EyeLikeAttrs(Attrs):
    """``dtype`` None: the operand's dtype. ``k``: the diagonal of ones."""

    dtype: DType | None = None
    k: int = 0


@dataclass(frozen=True)
class TriluAttrs(Attrs):
    upper: bool = True


def _scalar(call: Call, i: int) -> Any:
    """The known value of a one-element operand (int, float or Dim), or None."""
    v = call.value(i)
    if v is None or v.size != 1:
        return None
    x = v.reshape(-1)[0]
    return x if isinstance(x, Dim) else x.item()


def _infer_range(call: Call) -> Result:
    types = [call.type(i) for i in range(3)]
    dtype = promote_types(types, "Range")
    for t in types:
        require(t.shape is None or product(t.shape) == 1, call, "scalars", *types)
    start, limit, delta = (_scalar(call, i) for i in range(3))
    count: DimLike | None = None
    if delta == 0:
        raise ShapeError("Range has a step of zero")
    if start is not None and limit is not None and delta is not None and not isinstance(delta, Dim):
        if is_float(dtype):
            count = max(0, math.ceil((limit - start) / delta))
        else:
            count = dim_max(0, ceil_div(limit - start if delta > 0 else start - limit, abs(delta)))
    return Result((TensorType(dtype, (call.fresh("range") if count is None else count,)),))


def _range_values(call: Call, values: Values) -> Sequence[Any]:
    start, limit, delta = (_scalar(call, i) for i in range(3))
    if isinstance(delta, Dim):
        return ()
    count = dim_max(0, ceil_div(limit - start if delta > 0 else start - limit, abs(delta)))
    return (known_array([start + i * delta for i in range(count)]),) if isinstance(count, int) else ()


def _infer_constant_of_shape(call: Call) -> Result:
    dims = target_dims(call, 0, "filled")
    for d in dims or ():
        if isinstance(d, int) and d < 0:
            raise ShapeError(f"ConstantOfShape has a negative dimension: {show_shape(dims)}")
    return Result((TensorType(call.attrs.dtype, dims),))


def _infer_eye_like(call: Call) -> Result:
    x = call.type(0)
    require(x.shape is None or len(x.shape) == 2, call, "a 2-D tensor", x)
    return Result((x if call.attrs.dtype is None else x.with_dtype(call.attrs.dtype),))


def _infer_trilu(call: Call) -> Result:
    x = call.type(0)
    require(x.shape is None or len(x.shape) >= 2, call, "a tensor of rank 2 or more", x)
    if call.has(1):
        require_ints(call, 1)
    return Result((x,))


# ---------------------------------------------------------------- import


def _import_range(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if int(node.get("stash_type", 1)) != 1:
        raise Unsupported("only stash_type 1 (float) is supported")
    return e.op("Range", node.inputs)


def _import_constant_of_shape(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    value = node.get("value")
    if value is None:
        return e.op("ConstantOfShape", node.inputs, ConstantOfShapeAttrs())
    array = np.asarray(value)
    scalar = array.astype(np.float64) if is_float(array.dtype) else array
    return e.op("ConstantOfShape", node.inputs, ConstantOfShapeAttrs(scalar.reshape(-1)[0].item(), array.dtype))


def _import_dropout(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Dropout of an inference graph: the identity, with a mask of ones. Training mode is refused."""
    x, ratio, training = node.input(0), node.input(1), node.input(2)
    if training is not None:
        mode = e.value(training)
        dropped = None if ratio is None else e.value(ratio)
        never = dropped is not None and dropped.size == 1 and float(dropped.reshape(-1)[0]) == 0.0
        if not never and (mode is None or bool(np.any(mode))):
            fix = "" if mode is not None else " (--value NAME=... or values={...} fixes the input that decides it)"
            raise Unsupported(
                f"training_mode must be a constant false{fix}; a build with --random-seed N (random_seed=N) drops elements where "
                "it is true, except in loops"
            )
    (y,) = e.op("Identity", [x])
    if len(node.outputs) < 2 or not node.outputs[1]:
        return (y,)
    t = e.type(x)
    dtype = np.dtype(bool) if node.opset >= 10 else t.dtype
    (shape,) = e.op("Shape", [x], ShapeAttrs())
    return (y, *e.op("ConstantOfShape", [shape], ConstantOfShapeAttrs(True if dtype.kind == "b" else 1.0, dtype)))


def _import_constant(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Constant, every form: ``value`` an array; ``sparse_value`` a dense array or a tuple (values, indices, dims)."""
    a = node.attrs
    if "value" in a:
        return (e.const(np.asarray(a["value"])),)
    for name, dtype in (("float", np.float32), ("floats", np.float32), ("int", np.int64), ("ints", np.int64)):
        if f"value_{name}" in a:
            return (e.const(np.asarray(a[f"value_{name}"], dtype=dtype)),)
    if "sparse_value" in a:
        sparse = a["sparse_value"]
        return (e.const(densify(*sparse) if isinstance(sparse, tuple) else np.asarray(sparse)),)
    raise Unsupported("string constants are not supported" if any("string" in k for k in a) else "no value is given")


def densify(values: Any, indices: Any, dims: Sequence[int]) -> Any:
    """The dense array of an ONNX SparseTensorProto: ``indices`` are [nnz] linear or [nnz, rank] coordinates."""
    values, indices = np.asarray(values), np.asarray(indices, dtype=np.int64)
    dense = np.zeros(tuple(dims), dtype=values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


# ---------------------------------------------------------------- export


def _export_constant_of_shape(
    attrs: ConstantOfShapeAttrs, inputs: Sequence[str], n_outputs: int, e: Export
) -> Sequence[str]:
    return e.node("ConstantOfShape", inputs, value=np.asarray([attrs.value]).astype(attrs.dtype))


# ---------------------------------------------------------------- the table

DEFS: tuple[OpDef, ...] = (
    define_free("Range", _infer_range, symbolic=_range_values, onnx=_import_range, traits=Traits(), tol=DEFAULT_TOL),
    define_free(
        "ConstantOfShape",
        _infer_constant_of_shape,
        ConstantOfShapeAttrs,
        onnx=_import_constant_of_shape,
        to_onnx=_export_constant_of_shape,
        traits=Traits(),
    ),
    define_free(
        "Identity",
        same_type,
        symbolic=moved(),
        onnx={"Identity": simple_import("Identity"), "Dropout": _import_dropout, "Constant": _import_constant},
        traits=Traits(pointwise=True, monotone=True, movement=True),
    ),
    define_free(
        "EyeLike",
        _infer_eye_like,
        EyeLikeAttrs,
        traits=Traits(shape_only=True),
    ),
    define_free("Trilu", _infer_trilu, TriluAttrs),
)
