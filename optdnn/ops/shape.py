"""Operators on shapes: Reshape, Flatten, Transpose, Squeeze, Expand, Shape, Range, Identity, and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, bounds, floordiv, mod
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, MOVEMENT, Attrs, Call, Infer, Result, Tol, Traits, known_array
from optdnn.ops.checks import free
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, FromOnnx, NodeSpec, Ref, ToOnnx
from optdnn.ops.values import (
    Symbolic,
    concrete_ints,
    moved,
    require,
    require_ints,
    static_ints,
    with_values,
)
from optdnn.types import (
    INT64,
    RANK_LIMIT,
    Shape,
    TensorType,
    broadcast_dims,
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


# ---------------------------------------------------------------- inference


def target_dims(call: Call, i: int, hint: str, most: int = RANK_LIMIT) -> tuple[DimLike, ...] | None:
    """The shape that operand i asks for: new symbols if only its length is known, None if not even its length is known.

    It has at most ``most`` sizes.
    """
    t = call.type(i)
    require_ints(call, i)
    require(t.shape is None or len(t.shape) == 1, call, f"a 1-D tensor as operand {i}", t)
    values = call.ints(i)
    if values is not None:
        return values
    length = t.shape[0] if t.shape else None
    require(not isinstance(length, int) or length <= most, call, f"at most {most} sizes as operand {i}", t)
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
    if not holes:
        low, high = bounds(product(dims) - product(out))
        if low > 0 or high < 0:
            raise ShapeError(f"{what}: {product(dims)} elements against {product(out)}")
        return tuple(out)
    # Equal dimensions cancel first, so that only real changes are divided (and an empty batch stays empty).
    left, right = list(dims), [d for d in out if d != -1]
    for d in tuple(right):
        if d in left:
            left.remove(d)
            right.remove(d)
    have, want = product(left), product(right)
    if want == 0:
        raise ShapeError(f"{what}: -1 next to an empty dimension could be anything")
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
    # A layout is an order of the original axes.
    return Result((replace(x.with_shape([x.shape[p] for p in perm]), layout=""),))


def known_axes(call: Call, i: int, rank: int) -> list[int] | None:
    """Axes given by operand i, counted from the front and checked; None if they are unknown."""
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


# ---------------------------------------------------------------- import


def _import_flatten(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    axis, rank = int(node.get("axis", 1)), e.type(node.input(0)).rank
    return e.op("Flatten", node.inputs, AxisAttrs(axis if rank is None or axis >= 0 else axis + rank))


def _import_transpose(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    perm, rank = node.ints("perm"), e.type(node.input(0)).rank
    if perm is None and rank is not None:
        perm = tuple(reversed(range(rank)))
    elif perm is not None:  # Keras counts axes from the last one, which ONNX does not have
        perm = tuple(p + len(perm) if p < 0 else p for p in perm)
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


# ---------------------------------------------------------------- export


def _export_reshape(attrs: ReshapeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    return e.node("Reshape", inputs, allowzero=1 if attrs.allowzero else None)


def _export_shape(attrs: ShapeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    whole = attrs.start == 0 and attrs.end is None
    return e.node("Shape", inputs, start=None if whole else attrs.start, end=attrs.end)


# ---------------------------------------------------------------- the table


def define_free(
    kind: str,
    infer: Infer,
    attrs: type[Attrs] = Attrs,
    *,
    symbolic: Symbolic | None = None,
    onnx: dict[str, FromOnnx] | FromOnnx | None = None,
    to_onnx: ToOnnx | None = None,
    traits: Traits = MOVEMENT,
    tol: Tol = EXACT,
) -> OpDef:
    """An operator that computes nothing: free, and exact data movement unless ``tol`` and ``traits`` differ."""
    return OpDef(kind, with_values(infer, symbolic), attrs, onnx, to_onnx, cost=free, tol=tol, traits=traits)


_SHAPE_ONLY = Traits(shape_only=True)

DEFS: tuple[OpDef, ...] = (
    define_free("Reshape", _infer_reshape, ReshapeAttrs, symbolic=moved(0), to_onnx=_export_reshape),
    define_free("Flatten", _infer_flatten, AxisAttrs, symbolic=moved(), onnx=_import_flatten),
    define_free("Transpose", _infer_transpose, TransposeAttrs, symbolic=moved(), onnx=_import_transpose),
    define_free("Squeeze", _infer_squeeze, symbolic=moved(0), onnx=_import_squeeze),
    define_free("Unsqueeze", _infer_unsqueeze, symbolic=moved(0), onnx=_import_squeeze),
    define_free("Expand", _infer_expand, symbolic=moved(0)),
    define_free("Shape", _infer_shape, ShapeAttrs, to_onnx=_export_shape, traits=_SHAPE_ONLY),
    define_free("Size", _infer_size, traits=_SHAPE_ONLY),
)
