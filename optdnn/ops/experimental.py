"""Operators that were experimental in ONNX up to opset 9, as older converters write them, with ONNX Runtime's meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.checks import emit, needs, require_length, require_rank, required
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.types import Array


def _number(node: NodeSpec, e: Emit, name: str, default: float = 1.0) -> Array:
    """An attribute as a scalar of the operand's type."""
    return np.asarray(float(node.get(name, default)), e.type(node.inputs[0]).dtype)


def _image_scaler(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """x * scale + bias, one bias per channel (axis 1)."""
    (x,) = needs(node, 0)
    require_rank(e.type(x), 4, "ImageScaler input")
    bias = np.asarray(required(node, "bias"), e.type(x).dtype).reshape(-1, 1, 1)
    return (emit(e, "Add", emit(e, "Mul", x, _number(node, e, "scale")), bias),)


def _scale(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    (x,) = needs(node, 0)
    return (emit(e, "Mul", x, _number(node, e, "scale")),)


def _affine(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    (x,) = needs(node, 0)
    scaled = emit(e, "Mul", x, _number(node, e, "alpha"))
    return (emit(e, "Add", scaled, _number(node, e, "beta", 0.0)),)


def _scaled(kind: str) -> FromOnnx:
    """alpha * kind(beta * x)."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        (x,) = needs(node, 0)
        y = emit(e, kind, emit(e, "Mul", x, _number(node, e, "beta")))
        return (emit(e, "Mul", y, _number(node, e, "alpha")),)

    return from_onnx


def _crop(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """``border``: pixels on the left, above, on the right, below; with ``scale``, the height and width from the top left corner."""
    (x,) = needs(node, 0)
    require_rank(e.type(x), 4, "Crop input")
    border, size = node.ints("border", ()) or (), node.ints("scale")
    require_length(border, 4, "Crop border")
    left, top, right, bottom = border
    if min(border) < 0:
        raise ShapeError(f"Crop border {list(border)} has a negative number")
    last = np.iinfo(np.int64).max
    ends = [-bottom or last, -right or last]
    if size:
        require_length(size, 2, "Crop scale")
        ends = [top + size[0], left + size[1]]
    return (emit(e, "Slice", x, np.array([top, left]), np.array(ends), np.array([2, 3])),)


IMPORTERS: dict[str, FromOnnx] = {
    "ImageScaler": _image_scaler,
    "Scale": _scale,
    "Affine": _affine,
    "ScaledTanh": _scaled("Tanh"),
    "ParametricSoftplus": _scaled("Softplus"),
    "Crop": _crop,
}
"""Their import functions, by name."""
