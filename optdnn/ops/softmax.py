"""Softmax, LogSoftmax, Hardmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ops.base import DEFAULT_TOL, EXACT, Attrs, Call, Result, Tol
from optdnn.ops.checks import emit, floating, needs, per_element
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.types import normalize_axis


@dataclass(frozen=True)
class SoftmaxAttrs(Attrs):
    """The axis along which values are normalized (Softmax, LogSoftmax, Hardmax)."""

    axis: int = -1


def _infer(call: Call) -> Result:
    x = floating(call)
    normalize_axis(call.attrs.axis, len(x.dims), f"{call.kind} axis")
    return Result((x,))


def _import(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    kind = node.op_type
    (x,) = needs(node, 0)
    t = e.type(x)
    rank = len(t.dims)
    if node.opset >= 13:
        axis = normalize_axis(int(node.get("axis", -1)), rank, f"{kind} axis")
        return e.op(kind, [x], SoftmaxAttrs(axis))
    # Before opset 13, the axes from ``axis`` on are normalized together, as the columns of a matrix.
    axis = normalize_axis(int(node.get("axis", 1)), rank, f"{kind} axis") if int(node.get("axis", 1)) != rank else rank
    wide = [i for i in range(axis, rank) if t.dims[i] != 1]
    if len(wide) <= 1 and axis < rank:
        return e.op(kind, [x], SoftmaxAttrs(wide[0] if wide else axis))
    shape = np.array(t.static_shape, np.int64) if t.is_static else emit(e, "Shape", x)
    matrix = emit(e, "Flatten", x, axis=axis)
    (y,) = e.op(kind, [matrix], SoftmaxAttrs(1))
    return (emit(e, "Reshape", y, shape),)


def _def(kind: str, flops: float, tol: Tol) -> OpDef:
    return OpDef(kind, _infer, SoftmaxAttrs, _import, cost=per_element(flops), tol=tol)


DEFS: tuple[OpDef, ...] = (
    # Per element: maximum, subtract, exp (counted as one), sum, divide.
    _def("Softmax", 5, DEFAULT_TOL),
    _def("LogSoftmax", 5, DEFAULT_TOL),
    _def("Hardmax", 2, EXACT),
)
