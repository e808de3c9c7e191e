"""Reductions and ArgMax/ArgMin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce as fold

import numpy as np

from optdnn.dim import Dim, DimLike, dim_max, dim_min
from optdnn.errors import ShapeError
from optdnn.ops.base import DEFAULT_TOL, EXACT, Attrs, Call, Known, Result, Tol, Traits
from optdnn.ops.checks import needs, per_element
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.types import BOOL, INT64, Shape, TensorType, normalize_axis


@dataclass(frozen=True)
class ReduceAttrs(Attrs):
    """Operand 1, the axes, may be absent or empty: all axes, or none with ``noop_with_empty_axes``."""

    keepdims: bool = True
    noop_with_empty_axes: bool = False


@dataclass(frozen=True)
class ArgAttrs(Attrs):
    axis: int = 0
    keepdims: bool = True
    select_last_index: bool = False


def reduced_axes(attrs: ReduceAttrs, axes: Sequence[int] | None, rank: int, kind: str = "Reduce") -> tuple[int, ...]:
    """The axes that a reduction runs over, normalized and sorted; ``axes`` is None if the operand is absent.

    Raises ShapeError for an axis out of range or named twice.
    """
    if not axes:
        return () if attrs.noop_with_empty_axes else tuple(range(rank))
    which = sorted(normalize_axis(a, rank, f"{kind} axis") for a in axes)
    if len(set(which)) != len(which):
        raise ShapeError(f"{kind} axes {list(axes)} name one axis twice")
    return tuple(which)


def _known_axes(call: Call) -> tuple[int, ...] | None:
    """The axes if they are known (absent ones are the empty tuple), otherwise None."""
    if not call.has(1):
        return ()
    given = call.ints(1)
    if given is None or any(isinstance(a, Dim) for a in given):
        return None
    return tuple(int(a) for a in given if isinstance(a, int))


def _infer_reduce(call: Call) -> Result:
    a: ReduceAttrs = call.attrs
    x = call.type(0)
    if x.dtype == BOOL and call.kind not in ("ReduceMax", "ReduceMin"):
        raise ShapeError(f"{call.kind} of {x}; booleans have only ReduceMax and ReduceMin")
    rank = len(x.dims)
    axes = _known_axes(call)
    if axes is None:
        return Result((x.with_shape(_unknown(call, x, call.type(1))),))
    which = reduced_axes(a, axes, rank, call.kind)
    y = x.with_shape(_without(x.dims, which, a.keepdims))
    value = call.value(0)
    if value is None or call.kind not in _ON_KNOWN:
        return Result((y,))
    return Result((y,), (_reduce_known(value, which, a.keepdims, _ON_KNOWN[call.kind]),))


def _without(dims: Shape, axes: Sequence[int], keepdims: bool) -> tuple[DimLike, ...]:
    if keepdims:
        return tuple(1 if i in axes else d for i, d in enumerate(dims))
    return tuple(d for i, d in enumerate(dims) if i not in axes)


def _unknown(call: Call, x: TensorType, axes: TensorType) -> Shape | None:
    """Shape of a reduction over axes that are known only at run time."""
    if call.attrs.keepdims:
        return tuple(1 if d == 1 else call.fresh("reduced") for d in x.dims)
    count = axes.dims[0] if len(axes.dims) == 1 else None
    if not isinstance(count, int) or count == 0:
        return None
    return tuple(call.fresh("reduced") for _ in range(len(x.dims) - count))


Fold = Callable[[DimLike, DimLike], DimLike]
_ON_KNOWN: dict[str, tuple[Fold, DimLike | None]] = {
    "ReduceSum": (lambda a, b: a + b, 0),
    "ReduceProd": (lambda a, b: a * b, 1),
    "ReduceMax": (dim_max, None),
    "ReduceMin": (dim_min, None),
}
"""Reductions in shape computations: the folded function and its neutral element."""


def _reduce_known(value: Known, axes: Sequence[int], keepdims: bool, how: tuple[Fold, DimLike | None]) -> Known | None:
    """The reduction of a known (possibly symbolic) integer array."""
    function, neutral = how
    if value.dtype != object and value.dtype.kind not in "iu":
        return None
    kept = [i for i in range(value.ndim) if i not in axes]
    rows = value.transpose(*kept, *axes).reshape(*(value.shape[i] for i in kept), -1)
    if not rows.shape[-1] and neutral is None:
        return None
    out = np.empty(rows.shape[:-1], dtype=object)
    for at in np.ndindex(out.shape):
        entries = [v if isinstance(v, Dim) else int(v) for v in rows[at]]
        out[at] = fold(function, entries) if neutral is None else fold(function, entries, neutral)
    if keepdims:
        out = out.reshape([1 if i in axes else d for i, d in enumerate(value.shape)])
    if any(isinstance(v, Dim) for v in out.reshape(-1)):
        return out
    return out.astype(np.int64 if value.dtype == object else value.dtype)


def _infer_arg(call: Call) -> Result:
    x = call.type(0)
    axis = normalize_axis(call.attrs.axis, len(x.dims), f"{call.kind} axis")
    if x.dims and x.dims[axis] == 0:
        raise ShapeError(f"{call.kind} over axis {axis} of {x}, which is empty")
    return Result((TensorType(INT64, _without(x.dims, (axis,) if x.dims else (), call.attrs.keepdims)),))


def _import_reduce(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    kind = node.op_type
    (x,) = needs(node, 0)
    attrs = ReduceAttrs(bool(node.get("keepdims", 1)), bool(node.get("noop_with_empty_axes", 0)))
    axes = node.input(1)  # since opset 18 (ReduceSum: 13); an attribute before
    listed = node.ints("axes")
    if axes is None and listed is not None:
        axes = np.array(listed, np.int64)
    return e.op(kind, [x] if axes is None else [x, axes], attrs)


def _reduction(kind: str, flops: float, tol: Tol, *, monotone: bool = False) -> OpDef:
    cost, traits = per_element(flops), Traits(monotone=monotone)
    return OpDef(kind, _infer_reduce, ReduceAttrs, _import_reduce, cost=cost, tol=tol, traits=traits)


def _arg(kind: str) -> OpDef:
    return OpDef(kind, _infer_arg, ArgAttrs, cost=per_element(1), tol=EXACT)


_SUM = Tol(rtol=1e-5, atol=2e-6)

DEFS: tuple[OpDef, ...] = (
    _reduction("ReduceSum", 1, _SUM),
    _reduction("ReduceMean", 1, _SUM),
    _reduction("ReduceMax", 1, EXACT, monotone=True),
    _reduction("ReduceMin", 1, EXACT),
    _reduction("ReduceProd", 1, DEFAULT_TOL),
    _reduction("ReduceL1", 2, _SUM),
    _reduction("ReduceL2", 2, _SUM),
    _reduction("ReduceLogSum", 1, _SUM),
    _reduction("ReduceLogSumExp", 3, _SUM),
    _reduction("ReduceSumSquare", 2, _SUM),
    _arg("ArgMax"),
    _arg("ArgMin"),
)
