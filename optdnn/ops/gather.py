"""Reading and writing by index: Gather, GatherND, GatherElements, ScatterND, ScatterElements, OneHot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.dim import DimLike, bounds
from optdnn.errors import ShapeError
from optdnn.ops.base import NO_TRAITS, Attrs, Call, Result, attrs_dict, promote_types
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, normalized_axis
from optdnn.ops.indices import refuse_outside
from optdnn.ops.shape import define_free
from optdnn.ops.values import Values, concrete_ints, moved, require, require_ints, with_values
from optdnn.types import TensorType, normalize_axis, show_shape


@dataclass(frozen=True)
class GatherAttrs(Attrs):
    axis: int = 0


@dataclass(frozen=True)
class GatherNDAttrs(Attrs):
    batch_dims: int = 0


@dataclass(frozen=True)
class ScatterNDAttrs(Attrs):
    """``reduction`` is "none", "add", "mul", "max" or "min"."""

    reduction: str = "none"


@dataclass(frozen=True)
class ScatterElementsAttrs(Attrs):
    axis: int = 0
    reduction: str = "none"


@dataclass(frozen=True)
class OneHotAttrs(Attrs):
    axis: int = -1


def _infer_gather(call: Call) -> Result:
    x, indices = call.type(0), call.type(1)
    require_ints(call, 1)
    if x.shape is None or indices.shape is None:
        return Result((x.with_shape(None),))
    require(len(x.shape) > 0, call, "a tensor of rank 1 or more", x)
    axis = normalize_axis(call.attrs.axis, len(x.shape))
    refuse_outside(call)
    return Result((x.with_shape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]),))


def _infer_gather_nd(call: Call) -> Result:
    x, indices, batch = call.type(0), call.type(1), call.attrs.batch_dims
    require_ints(call, 1)
    if x.shape is None or indices.shape is None:
        return Result((x.with_shape(None),))
    require(len(indices.shape) > batch, call, f"indices of a rank above batch_dims {batch}", x, indices)
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        return Result((x.with_shape(None),))
    if not 0 < depth <= len(x.shape) - batch:
        raise ShapeError(f"GatherND indexes {depth} axes of {x} after {batch} batch axes")
    _same_dims(call, x.shape[:batch], indices.shape[:batch])
    refuse_outside(call)
    return Result((x.with_shape([*indices.shape[:-1], *x.shape[batch + depth :]]),))


def _infer_gather_elements(call: Call) -> Result:
    x, indices = call.type(0), call.type(1)
    require_ints(call, 1)
    if x.shape is None or indices.shape is None:
        return Result((x.with_shape(indices.shape),))
    require(len(x.shape) == len(indices.shape) > 0, call, "indices of the operand's rank", x, indices)
    _within(call, indices.shape, x.shape, normalize_axis(call.attrs.axis, len(x.shape)))
    refuse_outside(call)
    return Result((x.with_shape(indices.shape),))


def _within(call: Call, indices: Sequence[DimLike], x: Sequence[DimLike], axis: int) -> None:
    """Raise ShapeError if the indices are longer than the operand along another axis."""
    for k, (a, b) in enumerate(zip(indices, x, strict=True)):
        if k != axis and bounds(a - b)[0] > 0:
            raise ShapeError(f"{call.kind} has {a} indices along axis {k} of {call.type(0)}")


def _same_dims(call: Call, a: Sequence[DimLike], b: Sequence[DimLike]) -> None:
    differ = len(a) != len(b) or any(
        isinstance(p, int) and isinstance(q, int) and p != q for p, q in zip(a, b, strict=True)
    )
    if differ:
        shown = ", ".join(map(str, (t for t in call.types if t is not None)))
        raise ShapeError(f"{call.kind} of {shown}: {show_shape(a)} must equal {show_shape(b)}")


_REDUCTIONS = ("none", "add", "mul", "max", "min")


def _infer_scatter_nd(call: Call) -> Result:
    x, indices, updates = call.type(0), call.type(1), call.type(2)
    _check_scatter(call, x, updates)
    if x.shape is not None and indices.shape is not None and updates.shape is not None:
        require(len(indices.shape) > 0, call, "indices of rank 1 or more", indices)
        depth = indices.shape[-1]
        if isinstance(depth, int):
            if depth > len(x.shape):
                raise ShapeError(f"ScatterND indexes {depth} axes of {x}")
            _same_dims(call, updates.shape, [*indices.shape[:-1], *x.shape[depth:]])
            refuse_outside(call)
    return Result((x,))


def _infer_scatter_elements(call: Call) -> Result:
    x, indices, updates = call.type(0), call.type(1), call.type(2)
    _check_scatter(call, x, updates)
    if x.shape is not None and indices.shape is not None and updates.shape is not None:
        require(len(x.shape) == len(indices.shape) > 0, call, "indices of the operand's rank", x, indices)
        _same_dims(call, updates.shape, indices.shape)
        _within(call, indices.shape, x.shape, normalize_axis(call.attrs.axis, len(x.shape)))
        refuse_outside(call)
    return Result((x,))


def _check_scatter(call: Call, x: TensorType, updates: TensorType) -> None:
    require_ints(call, 1)
    promote_types((x, updates), call.kind)
    require(call.attrs.reduction in _REDUCTIONS, call, f"a known reduction, not {call.attrs.reduction!r}")


def _scatter_values(call: Call, values: Values) -> Sequence[Any]:
    data = tuple(v if v is None or i == 1 else v.astype(object) for i, v in enumerate(values))
    return moved(0, 2)(call, data) if call.attrs.reduction == "none" else ()


def _infer_one_hot(call: Call) -> Result:
    indices, values = call.type(0), call.type(2)
    require(values.shape is None or len(values.shape) == 1, call, "a pair of values", values)
    if indices.shape is None:
        return Result((values.with_shape(None),))
    depth = concrete_ints(call, 1)
    rank = len(indices.shape) + 1
    axis = normalize_axis(call.attrs.axis, rank)
    size: DimLike = depth[0] if depth is not None else call.fresh("depth")
    return Result((values.with_shape([*indices.shape[:axis], size, *indices.shape[axis:]]),))


# ---------------------------------------------------------------- import and export


def _import_gather(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op(node.op_type, node.inputs, GatherAttrs(normalized_axis(node, e, 0)))


def _import_scatter_elements(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """ScatterElements, and Scatter, its name in opset 9."""
    attrs = ScatterElementsAttrs(normalized_axis(node, e, 0), node.get("reduction", "none"))
    return e.op("ScatterElements", node.inputs, attrs)


def _export_scatter(kind: str) -> Any:
    def to_onnx(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
        return e.node(kind, inputs, **{k: v for k, v in attrs_dict(attrs).items() if v != "none"})

    return to_onnx


_SCATTER_ELEMENTS = dict.fromkeys(("ScatterElements", "Scatter"), _import_scatter_elements)

DEFS: tuple[OpDef, ...] = (
    define_free("Gather", _infer_gather, GatherAttrs, symbolic=moved(0), onnx=_import_gather),
    define_free("GatherND", _infer_gather_nd, GatherNDAttrs, symbolic=moved(0)),
    define_free("GatherElements", _infer_gather_elements, GatherAttrs, symbolic=moved(0), onnx=_import_gather),
    OpDef(
        "ScatterND",
        with_values(_infer_scatter_nd, _scatter_values),
        ScatterNDAttrs,
        to_onnx=_export_scatter("ScatterND"),
    ),
    OpDef(
        "ScatterElements",
        with_values(_infer_scatter_elements, _scatter_values),
        ScatterElementsAttrs,
        _SCATTER_ELEMENTS,
        _export_scatter("ScatterElements"),
    ),
    define_free("OneHot", _infer_one_hot, OneHotAttrs, traits=NO_TRAITS),
)
