"""Operators on shapes: Reshape, Flatten, Transpose, Squeeze, Expand, Shape, Range, Identity, and the like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, bounds, dim_max, floordiv, mod
from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ops.base import (
    EXACT,
    Attrs,
    Call,
    Cost,
    Emit,
    Export,
    FromOnnx,
    Infer,
    NodeSpec,
    OpDef,
    Ref,
    Result,
    ToOnnx,
    Traits,
    Unsupported,
    known_array,
    onnx_dtype,
    onnx_number,
    promote_types,
    read_attrs,
    same_type,
    simple_import,
)
from optdnn.ops.values import (
    Symbolic,
    Values,
    ceil_div,
    concrete_ints,
    moved,
    require,
    require_ints,
    static_ints,
    with_values,
)
from optdnn.runtime.reference.shape import KERNELS
from optdnn.types import (
    FP32,
    INT64,
    DType,
    Shape,
    TensorType,
    broadcast_dims,
    is_float,
    normalize_axis,
    product,
    show_shape,
)


@dataclass(frozen=True)
class ReshapeAttrs(Attrs):
    """``allowzero``: a 0 in the target shape means an empty dimension instead of "copy from the operand"."""

    allowzero: bool = False


@dataclass(frozen=True)
class AxisAttrs(Attrs):
    """``axis`` of Flatten."""

    axis: int = 1


@dataclass(frozen=True)
class TransposeAttrs(Attrs):
    """``perm``: output axis i is operand axis ``perm[i]``; None reverses the axes."""

    perm: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ShapeAttrs(Attrs):
    """The dimensions ``start:end`` as in Python slicing."""

    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class ConstantOfShapeAttrs(Attrs):
    value: int | float | complex = 0.0
    dtype: DType = FP32


@dataclass(frozen=True)
class EyeLikeAttrs(Attrs):
    """``dtype`` None: that of the operand. ``k``: the diagonal that holds ones."""

    dtype: DType | None = None
    k: int = 0


@dataclass(frozen=True)
class TriluAttrs(Attrs):
    upper: bool = True


# ---------------------------------------------------------------- inference


def target_dims(call: Call, i: int, hint: str) -> tuple[DimLike, ...] | None:
    """The shape that operand i asks for; new symbols where only its length is known, None where not even that is."""
    t = call.type(i)
    require_ints(call, i)
    require(t.shape is None or len(t.shape) == 1, call, f"a 1-D tensor as operand {i}", t)
    values = call.ints(i)
    if values is not None:
        return values
    length = t.shape[0] if t.shape else None
    return tuple(call.fresh(hint) for _ in range(length)) if isinstance(length, int) else None


def _infer_reshape(call: Call) -> Result:
    x = call.type(0)
    target = target_dims(call, 1, "reshape")
    if target is None or (x.shape is None and (-1 in target or (0 in target and not call.attrs.allowzero))):
        return Result((x.with_shape(None if target is None else [call.fresh("reshape") for _ in target]),))
    if x.shape is None or call.value(1) is None:
        return Result((x.with_shape(target),))
    return Result((x.with_shape(reshaped(x.shape, target, call.attrs.allowzero)),))


def reshaped(dims: Shape, target: Sequence[DimLike], allowzero: bool = False) -> Shape:
    """The shape ONNX Reshape gives to ``dims`` for ``target`` (0 copies, -1 takes the rest). Raises ShapeError."""
    what = f"shape {show_shape(dims)} cannot be reshaped to {show_shape(target)}"
    if any(d == 0 and i >= len(dims) for i, d in enumerate(target)) and not allowzero:
        raise ShapeError(f"{what}: a 0 copies a dimension that is not there")
    out = [dims[i] if d == 0 and not allowzero else d for i, d in enumerate(target)]
    holes = [i for i, d in enumerate(out) if d == -1]
    if len(holes) > 1:
        raise ShapeError(f"{what}: more than one -1")
    # Equal dimensions cancel first, so that only what really changes is divided.
    left, right = list(dims), [d for d in out if d != -1]
    for d in tuple(right):
        if d in left and d != 0:
            left.remove(d)
            right.remove(d)
    have, want = product(left), product(right)
    if not holes:
        low, high = bounds(have - want)
        if low > 0 or high < 0:
            raise ShapeError(f"{what}: {product(dims)} elements against {product(out)}")
        return tuple(out)
    if want == 0:
        if have != 0 or allowzero:
            raise ShapeError(f"{what}: -1 beside an empty dimension")
        out[holes[0]] = 0
        return tuple(out)
    rest = mod(have, want)
    if isinstance(rest, int) and rest != 0:
        raise ShapeError(f"{what}: {have} is not a multiple of {want}")
    out[holes[0]] = floordiv(have, want)
    return tuple(out)


def _infer_flatten(call: Call) -> Result:
    x = call.type(0)
    if x.shape is None:
        return Result((x.with_shape((call.fresh("flatten"), call.fresh("flatten"))),))
    rank, axis = len(x.shape), call.attrs.axis
    if not -rank <= axis <= rank:
        raise ShapeError(f"Flatten axis {axis} is out of range for {x}")
    axis = axis + rank if axis < 0 else axis
    return Result((x.with_shape((product(x.shape[:axis]), product(x.shape[axis:]))),))


def _infer_transpose(call: Call) -> Result:
    x, perm = call.type(0), call.attrs.perm
    if x.shape is None:
        return Result((x if perm is None else x.with_shape([call.fresh("transpose") for _ in perm]),))
    perm = tuple(reversed(range(len(x.shape)))) if perm is None else perm
    if sorted(perm) != list(range(len(x.shape))):
        raise ShapeError(f"Transpose perm {list(perm)} is not a permutation of the axes of {x}")
    return Result((x.with_shape([x.shape[p] for p in perm]),))


def known_axes(call: Call, i: int, rank: int) -> list[int] | None:
    """Axes given by operand i, counted from the front and checked; None where they are unknown."""
    require_ints(call, i)
    values = concrete_ints(call, i)
    if values is None:
        return None
    axes = [normalize_axis(a, rank) for a in values]
    if len(set(axes)) != len(axes):
        raise ShapeError(f"{call.kind} axes {list(values)} name an axis twice")
    return axes


def _infer_squeeze(call: Call) -> Result:
    x = call.type(0)
    if x.shape is None:
        return Result((x,))
    if call.has(1):
        axes = known_axes(call, 1, len(x.shape))
        if axes is None:
            return Result((x.with_shape(None),))
        for a in axes:
            if isinstance(x.shape[a], int) and x.shape[a] != 1:
                raise ShapeError(f"Squeeze removes axis {a} of {x}, whose size is not 1")
    else:
        for d in x.shape:
            if isinstance(d, Dim) and bounds(d)[0] <= 1 <= bounds(d)[1]:
                raise ShapeError(f"Squeeze without axes: whether dimension {d} of {x} is 1 depends on the input")
        axes = [i for i, d in enumerate(x.shape) if d == 1]
    return Result((x.with_shape([d for i, d in enumerate(x.shape) if i not in axes]),))


def _infer_unsqueeze(call: Call) -> Result:
    x, values = call.type(0), concrete_ints(call, 1)
    if x.shape is None or values is None:
        return Result((x.with_shape(None),))
    rank = len(x.shape) + len(values)
    axes = known_axes(call, 1, rank) or []
    rest = iter(x.shape)
    return Result((x.with_shape([1 if i in axes else next(rest) for i in range(rank)]),))


def _infer_expand(call: Call) -> Result:
    x, target = call.type(0), target_dims(call, 1, "expand")
    if x.shape is None or target is None:
        return Result((x.with_shape(None),))
    return Result((x.with_shape(broadcast_dims(x.shape, target)),))


def _infer_shape(call: Call) -> Result:
    x = call.type(0)
    if x.shape is None:
        return Result((TensorType(INT64, (call.fresh("rank"),)),))
    dims = x.shape[call.attrs.start : call.attrs.end]
    return Result((TensorType(INT64, (len(dims),)),), (known_array(dims),))


def _infer_size(call: Call) -> Result:
    x, scalar = call.type(0), TensorType(INT64, ())
    if x.shape is None:
        return Result((scalar,))
    return Result((scalar,), (known_array([product(x.shape)]).reshape(()),))


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


def _import_flatten(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    axis, rank = int(node.get("axis", 1)), e.type(node.input(0)).rank
    return e.op("Flatten", node.inputs, AxisAttrs(axis if rank is None or axis >= 0 else axis + rank))


def _import_transpose(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    perm, rank = node.ints("perm"), e.type(node.input(0)).rank
    if perm is None and rank is not None:
        perm = tuple(reversed(range(rank)))
    return e.op("Transpose", node.inputs, TransposeAttrs(perm))


def _import_squeeze(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Squeeze and Unsqueeze; axes were an attribute before opset 13. Known axes are counted from the front and sorted."""
    x = node.input(0)
    axes: Any = node.input(1)
    given = node.ints("axes") if node.opset < 13 else static_ints(e, axes)
    t = e.type(x)
    if node.op_type == "Squeeze" and axes is None and given is None and t.shape is not None:
        unsure = any(isinstance(d, Dim) and bounds(d)[0] <= 1 <= bounds(d)[1] for d in t.shape)
        given = None if unsure else tuple(i for i, d in enumerate(t.shape) if d == 1)
    if given is not None and t.rank is not None:
        rank = t.rank + (len(given) if node.op_type == "Unsqueeze" else 0)
        given = tuple(sorted(normalize_axis(a, rank) for a in given))
    if given is not None:
        axes = np.asarray(given, dtype=np.int64)
    return e.op(node.op_type, [x] if axes is None else [x, axes])


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


def _import_eye_like(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    number = node.get("dtype")
    return e.op(
        "EyeLike", node.inputs, EyeLikeAttrs(None if number is None else onnx_dtype(number), int(node.get("k", 0)))
    )


def _import_dropout(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Dropout of an inference graph: the identity, with a mask of ones. Training mode is refused."""
    x, ratio, training = node.input(0), node.input(1), node.input(2)
    if training is not None:
        mode = e.value(training)
        dropped = None if ratio is None else e.value(ratio)
        never = dropped is not None and dropped.size == 1 and float(dropped.reshape(-1)[0]) == 0.0
        if not never and (mode is None or bool(np.any(mode))):
            raise Unsupported("training_mode must be a constant false")
    (y,) = e.op("Identity", [x])
    if len(node.outputs) < 2 or not node.outputs[1]:
        return (y,)
    t = e.type(x)
    dtype = np.dtype(bool) if node.opset >= 10 else t.dtype
    if t.is_static:
        return (y, e.const(np.ones(t.static_shape, dtype=dtype)))
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


def _export_reshape(attrs: ReshapeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    if not attrs.allowzero:
        return e.node("Reshape", inputs)
    if e.opset < 14:
        raise UnsupportedError("Reshape with allowzero cannot be written", hint="export to opset 14 or later")
    return e.node("Reshape", inputs, allowzero=1)


def _export_shape(attrs: ShapeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    if attrs.start == 0 and attrs.end is None:
        return e.node("Shape", inputs)
    if e.opset >= 15:
        end: dict[str, Any] = {} if attrs.end is None else {"end": attrs.end}
        return e.node("Shape", inputs, start=attrs.start, **end)
    stop = np.iinfo(np.int64).max if attrs.end is None else attrs.end
    start, end_ = (e.const(np.asarray([v], dtype=np.int64)) for v in (attrs.start, stop))
    return e.node("Slice", [e.node("Shape", inputs)[0], start, end_])


def _export_constant_of_shape(
    attrs: ConstantOfShapeAttrs, inputs: Sequence[str], n_outputs: int, e: Export
) -> Sequence[str]:
    return e.node("ConstantOfShape", inputs, value=np.asarray([attrs.value]).astype(attrs.dtype))


def _export_eye_like(attrs: EyeLikeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    dtype: dict[str, Any] = {} if attrs.dtype is None else {"dtype": onnx_number(attrs.dtype)}
    return e.node("EyeLike", inputs, k=attrs.k, **dtype)


def _export_trilu(attrs: TriluAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    if e.opset < 14:
        raise UnsupportedError("Trilu cannot be written", hint="export to opset 14 or later")
    return e.node("Trilu", inputs, upper=int(attrs.upper))


# ---------------------------------------------------------------- the table


def free(call: Call, result: Result) -> Cost:
    """Cost of an operator that computes nothing."""
    return Cost(0.0)


def _define(
    kind: str,
    infer: Infer,
    attrs: type[Attrs] = Attrs,
    *,
    symbolic: Symbolic | None = None,
    onnx: dict[str, FromOnnx] | None = None,
    to_onnx: ToOnnx | None = None,
    traits: Traits = Traits(movement=True),  # noqa: B008 - frozen
) -> OpDef:
    return OpDef(
        kind,
        with_values(infer, symbolic),
        KERNELS[kind],
        attrs,
        onnx={kind: simple_import(kind, read_attrs(attrs))} if onnx is None else onnx,
        to_onnx=to_onnx,
        cost=free,
        tol=EXACT,
        traits=traits,
    )


_SHAPE_ONLY = Traits(shape_only=True)

DEFS: tuple[OpDef, ...] = (
    _define("Reshape", _infer_reshape, ReshapeAttrs, symbolic=moved(0), to_onnx=_export_reshape),
    _define("Flatten", _infer_flatten, AxisAttrs, symbolic=moved(), onnx={"Flatten": _import_flatten}),
    _define("Transpose", _infer_transpose, TransposeAttrs, symbolic=moved(), onnx={"Transpose": _import_transpose}),
    _define("Squeeze", _infer_squeeze, symbolic=moved(0), onnx={"Squeeze": _import_squeeze}),
    _define("Unsqueeze", _infer_unsqueeze, symbolic=moved(0), onnx={"Unsqueeze": _import_squeeze}),
    _define("Expand", _infer_expand, symbolic=moved(0)),
    _define("Shape", _infer_shape, ShapeAttrs, to_onnx=_export_shape, traits=_SHAPE_ONLY),
    _define("Size", _infer_size, traits=_SHAPE_ONLY),
    _define("Range", _infer_range, symbolic=_range_values, onnx={"Range": _import_range}, traits=Traits()),
    _define(
        "ConstantOfShape",
        _infer_constant_of_shape,
        ConstantOfShapeAttrs,
        onnx={"ConstantOfShape": _import_constant_of_shape},
        to_onnx=_export_constant_of_shape,
        traits=Traits(),
    ),
    _define(
        "Identity",
        same_type,
        symbolic=moved(),
        onnx={"Identity": simple_import("Identity"), "Dropout": _import_dropout, "Constant": _import_constant},
        traits=Traits(pointwise=True, monotone=True, idempotent=True, movement=True),
    ),
    _define(
        "EyeLike",
        _infer_eye_like,
        EyeLikeAttrs,
        onnx={"EyeLike": _import_eye_like},
        to_onnx=_export_eye_like,
        traits=_SHAPE_ONLY,
    ),
    _define("Trilu", _infer_trilu, TriluAttrs, to_onnx=_export_trilu),
)
