"""Selecting and ordering: TopK, NonZero, Unique, Compress, ReverseSequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import DimLike, bounds, dim_min
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, MOVEMENT, Attrs, Call, Result, attrs_dict
from optdnn.ops.checks import agree, per_element, require_rank, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, normalized_axis
from optdnn.ops.values import require_ints
from optdnn.types import INT64, TensorType, normalize_axis


@dataclass(frozen=True)
class TopKAttrs(Attrs):
    """The values are sorted even if ``sorted`` is 0; among equal values, the one with the lower index comes first, as in ONNX
    Runtime."""

    axis: int = -1
    largest: bool = True
    sorted: bool = True


@dataclass(frozen=True)
class UniqueAttrs(Attrs):
    """``axis`` None: the flattened input. Unsorted values are in order of appearance."""

    axis: int | None = None
    sorted: bool = True


@dataclass(frozen=True)
class CompressAttrs(Attrs):
    """``axis`` None: the flattened input."""

    axis: int | None = None


@dataclass(frozen=True)
class ReverseSequenceAttrs(Attrs):
    batch_axis: int = 1
    time_axis: int = 0


def _infer_top_k(call: Call) -> Result:
    x = call.type(0)
    axis = normalize_axis(call.attrs.axis, len(x.dims), "TopK axis")
    require_ints(call, 1)
    given = call.ints(1)
    k: DimLike = call.fresh("top_k", x.dims[axis]) if not given else given[0]
    if bounds(k)[1] < 0 or bounds(k - x.dims[axis])[0] > 0:
        raise ShapeError(f"TopK of {k} values along axis {axis} of {x}")
    shape = (*x.dims[:axis], k, *x.dims[axis + 1 :])
    return Result((x.with_shape(shape), TensorType(INT64, shape))[: call.n_outputs])


def _import_top_k(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    attrs = TopKAttrs(normalized_axis(node, e, -1), bool(node.get("largest", 1)), bool(node.get("sorted", 1)))
    k: Any = node.input(1) if node.opset >= 10 else np.array([int(required(node, "k"))])
    return e.op("TopK", [node.inputs[0], k], attrs, outputs=len(node.outputs))


def _export_top_k(a: TopKAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    fields = {name: int(value) for name, value in attrs_dict(a).items()}
    return e.node("TopK", inputs, 2, **fields)[:n_outputs]  # type: ignore[arg-type]


def _infer_non_zero(call: Call) -> Result:
    x = call.type(0)
    return Result((TensorType(INT64, (len(x.dims), call.fresh("nonzero", x.size))),))


def _infer_unique(call: Call) -> Result:
    x, axis = call.type(0), call.attrs.axis
    axis = None if axis is None else normalize_axis(axis, len(x.dims), "Unique axis")
    whole: DimLike = x.size if axis is None else x.dims[axis]
    n = call.fresh("unique", whole)
    shape = (n,) if axis is None else (*x.dims[:axis], n, *x.dims[axis + 1 :])
    one = TensorType(INT64, (n,))
    return Result((x.with_shape(shape), one, one.with_shape((whole,)), one)[: call.n_outputs])


def _infer_compress(call: Call) -> Result:
    x, condition, axis = call.type(0), call.type(1), call.attrs.axis
    require_rank(condition, 1, "Compress condition")
    if condition.dtype.kind != "b":
        raise ShapeError(f"Compress condition is {condition}; it must be bool")
    axis = None if axis is None else normalize_axis(axis, len(x.dims), "Compress axis")
    whole: DimLike = x.size if axis is None else x.dims[axis]
    if bounds(condition.dims[0] - whole)[0] > 0:
        raise ShapeError(f"Compress condition {condition} is longer than the {whole} slices of {x}")
    value = call.value(1)
    n: DimLike
    if value is None or value.dtype == object:
        n = call.fresh("compressed", dim_min(condition.dims[0], whole))
    else:
        n = int(np.count_nonzero(value))
    return Result((x.with_shape((n,) if axis is None else (*x.dims[:axis], n, *x.dims[axis + 1 :])),))


def _infer_reverse(call: Call) -> Result:
    x, lengths, a = call.type(0), call.type(1), call.attrs
    if sorted((a.batch_axis, a.time_axis)) != [0, 1] or len(x.dims) < 2:
        raise ShapeError(f"ReverseSequence of {x}: time and batch must be its first two axes")
    require_rank(lengths, 1, "ReverseSequence sequence_lens")
    require_ints(call, 1)
    agree(lengths.dims[0], x.dims[a.batch_axis], "ReverseSequence has one length per sample")
    return Result((x,))


DEFS: tuple[OpDef, ...] = (
    OpDef("TopK", _infer_top_k, TopKAttrs, _import_top_k, _export_top_k, cost=per_element(10), tol=EXACT),
    OpDef("NonZero", _infer_non_zero, cost=per_element(1), tol=EXACT),
    OpDef("Unique", _infer_unique, UniqueAttrs, cost=per_element(10), tol=EXACT),
    OpDef(
        "Compress",
        _infer_compress,
        CompressAttrs,
        cost=per_element(1),
        tol=EXACT,
        traits=MOVEMENT,
    ),
    OpDef(
        "ReverseSequence",
        _infer_reverse,
        ReverseSequenceAttrs,
        cost=per_element(1),
        tol=EXACT,
        traits=MOVEMENT,
    ),
)
