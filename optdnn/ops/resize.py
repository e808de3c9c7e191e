"""Resize and Upsample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from optdnn.dim import DimLike, floordiv
from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result, Tol, Unsupported
from optdnn.ops.checks import elements, needs, require_length, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, read_attrs
from optdnn.runtime.reference.resize import aspect_scale, plan, scaled_size
from optdnn.types import is_float, normalize_axis

MODES = ("nearest", "linear", "cubic")
COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
POLICIES = ("stretch", "not_larger", "not_smaller")


@dataclass(frozen=True)
class ResizeAttrs(Attrs):
    """Resize; operands x, roi, scales, sizes (exactly one of scales and sizes is present).

    ``axes`` (None: all) are the axes that roi, scales and sizes refer to. "tf_half_pixel_for_nn" (opset 11 and 12 only)
    stays if half_pixel cannot express it. Without tf_crop_and_resize there is no roi. Output sizes are
    floor(size * scale) with tf_crop_and_resize, too, as in ONNX's own shape inference.
    """

    mode: str = "nearest"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    extrapolation_value: float = 0.0
    antialias: bool = False
    keep_aspect_ratio_policy: str = "stretch"
    axes: tuple[int, ...] | None = None


def _axes(attrs: ResizeAttrs, rank: int) -> tuple[int, ...]:
    if attrs.axes is None:
        return tuple(range(rank))
    axes = tuple(normalize_axis(a, rank, "Resize axis") for a in attrs.axes)
    if len(set(axes)) != len(axes):
        raise ShapeError(f"Resize axes {list(attrs.axes)} name one axis twice")
    return axes


def _check_length(call: Call, i: int, n: int, what: str) -> None:
    dims = call.type(i).dims
    if len(dims) != 1 or (isinstance(dims[0], int) and dims[0] != n):
        raise ShapeError(f"Resize {what} has shape {list(dims)}, [{n}] is needed")


def _infer(call: Call) -> Result:
    a: ResizeAttrs = call.attrs
    x = call.type(0)
    axes = _axes(a, len(x.dims))
    if a.mode != "nearest" and not (is_float(x.dtype) or x.dtype.kind in "iu"):
        raise ShapeError(f"Resize in mode {a.mode} of {x}")
    if call.has(2) == call.has(3):
        raise ShapeError("Resize needs scales or sizes, and not both")
    if a.coordinate_transformation_mode == "tf_crop_and_resize":
        if not call.has(1):
            raise ShapeError("Resize with tf_crop_and_resize needs a roi")
        _check_length(call, 1, 2 * len(axes), "roi")
    operand = 2 if call.has(2) else 3
    _check_length(call, operand, len(axes), "scales" if operand == 2 else "sizes")
    out = list(x.dims)
    for axis, size in zip(axes, _scaled(call, axes) if operand == 2 else _sized(call, axes), strict=True):
        if isinstance(size, int) and size < 0:
            raise ShapeError(f"Resize to a size of {size}")
        out[axis] = size
    return Result((x.with_shape(out),))


def _scaled(call: Call, axes: Sequence[int]) -> list[DimLike]:
    scales = call.value(2)
    dims = [call.type(0).dims[a] for a in axes]
    if scales is None:
        return [call.fresh("resized") for _ in dims]
    out: list[DimLike] = []
    for d, s in zip(dims, scales.reshape(-1), strict=True):
        scale = float(s)
        if not scale > 0 or not np.isfinite(scale):
            raise ShapeError(f"Resize scale {scale} must be positive")
        if isinstance(d, int):
            out.append(scaled_size(d, scale))
            continue
        ratio = Fraction(scale)
        # fp32 rounds the product of other scales, so its floor is not a function of integers.
        out.append(
            floordiv(d * ratio.numerator, ratio.denominator) if ratio.denominator <= 256 else call.fresh("resized")
        )
    return out


def _sized(call: Call, axes: Sequence[int]) -> list[DimLike]:
    sizes = call.ints(3)
    if sizes is None:
        return [call.fresh("resized") for _ in axes]
    policy = call.attrs.keep_aspect_ratio_policy
    if policy == "stretch":
        return list(sizes)
    lengths = [call.type(0).dims[a] for a in axes]
    known = [d for d in lengths if isinstance(d, int)]
    given = [s for s in sizes if isinstance(s, int)]
    if len(known) != len(axes) or len(given) != len(axes) or 0 in known:
        return [call.fresh("resized") for _ in axes]
    scale = aspect_scale(known, given, policy)
    return [int(np.floor(scale * n + 0.5)) for n in known]


def _choice(node: NodeSpec, name: str, default: str, allowed: Sequence[str]) -> str:
    value = str(node.get(name, default))
    if value not in allowed:
        raise ShapeError(f"{node.op_type} {name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def _present(ref: Ref | None, e: Emit) -> Ref | None:
    """None for an absent or empty operand: before opset 13, an absent operand was written as an empty tensor."""
    return None if ref is None or e.type(ref).shape == (0,) else ref


def _import_resize(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if node.opset < 11:
        return _import_old(node, e)
    mode = _choice(node, "mode", "nearest", MODES)
    transform = _choice(node, "coordinate_transformation_mode", "half_pixel", COORDINATES)
    nearest = _choice(node, "nearest_mode", "round_prefer_floor", NEAREST)
    if transform == "tf_half_pixel_for_nn" and mode == "nearest" and nearest in ("floor", "round_prefer_floor"):
        # Half a pixel less, rounded half a pixel up, is the same: floor(u) = floor((u - 1/2) + 1/2).
        transform, nearest = "half_pixel", "round_prefer_ceil" if nearest == "floor" else "ceil"
    _choice(node, "keep_aspect_ratio_policy", "stretch", POLICIES)
    attrs = read_attrs(ResizeAttrs)(node)
    attrs = replace(attrs, coordinate_transformation_mode=transform, nearest_mode=nearest)
    if attrs.antialias and mode == "nearest":
        raise Unsupported("antialias with mode=nearest, which ONNX does not define")
    roi = _present(node.input(1), e) if transform == "tf_crop_and_resize" else None
    return e.op("Resize", [node.input(0), roi, _present(node.input(2), e), _present(node.input(3), e)], attrs)


def _import_old(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Resize 10 and Upsample 7 and 9: asymmetric coordinates, and for nearest, floor (ceil along axes that shrink)."""
    if node.op_type == "Upsample" and node.opset < 9:
        (x,) = needs(node, 0)
        values: Any = np.asarray(required(node, "scales"), np.float32)
        scales = values
    else:
        x, scales = needs(node, 0, 1)
        values = e.value(scales)
    mode = _choice(node, "mode", "nearest", ("nearest", "linear", "bilinear"))
    mode = "linear" if mode == "bilinear" else mode
    base = ResizeAttrs(mode, "asymmetric", "floor")
    if mode == "linear" or node.op_type == "Upsample":
        return e.op("Resize", [x, None, scales], base)
    if values is None:
        raise Unsupported("mode=nearest with scales that are not known: rounding depends on them")
    flat = np.asarray(values, np.float32).reshape(-1)
    require_length(flat.tolist(), len(e.type(x).dims), "Resize scales")
    if (flat < 1).any() and (flat > 1).any():
        (x,) = e.op("Resize", [x, None, np.maximum(flat, 1)], base)
        flat = np.minimum(flat, 1)
    shrinks = bool((flat < 1).any())
    return e.op("Resize", [x, None, flat], ResizeAttrs(mode, "asymmetric", "ceil" if shrinks else "floor"))


def _export(attrs: ResizeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    mode = attrs.coordinate_transformation_mode
    if mode == "tf_half_pixel_for_nn":
        raise Unsupported("tf_half_pixel_for_nn exists in opsets 11 and 12 only")
    operands = [*inputs, *[""] * (4 - len(inputs))]
    if mode == "align_corners" and operands[2]:
        attrs, operands = _aligned_by_sizes(attrs, operands, e)
        mode = attrs.coordinate_transformation_mode
    values: dict[str, Any] = {
        "mode": attrs.mode,
        "coordinate_transformation_mode": mode,
        "exclude_outside": int(attrs.exclude_outside),
    }
    if attrs.mode == "nearest":
        values["nearest_mode"] = attrs.nearest_mode
    if attrs.mode == "cubic":
        values["cubic_coeff_a"] = attrs.cubic_coeff_a
    if mode == "tf_crop_and_resize":
        values["extrapolation_value"] = attrs.extrapolation_value
    values["antialias"] = int(attrs.antialias)
    if attrs.keep_aspect_ratio_policy != "stretch":
        values["keep_aspect_ratio_policy"] = attrs.keep_aspect_ratio_policy
    if attrs.axes is not None:
        values["axes"] = attrs.axes
    while not operands[-1]:
        operands.pop()
    return e.node("Resize", operands, **values)


def _aligned_by_sizes(attrs: ResizeAttrs, operands: list[str], e: Export) -> tuple[ResizeAttrs, list[str]]:
    """align_corners with scales, written so that it has the same meaning everywhere.

    If size * scale is not an integer, ONNX's tests divide by it minus one, most implementations by its floor minus one. A
    crop, given by sizes, to the region that ONNX's tests read is unambiguous.
    """
    scales, t = e.value(operands[2]), e.type(operands[0])
    if scales is not None and all(float(s).is_integer() for s in scales):
        return attrs, operands
    if scales is None or not t.is_static:
        raise Unsupported("align_corners with fractional scales and sizes that are not known")
    plans = plan(t.static_shape, None, scales, None, attrs.axes, "stretch")
    if all(p.width == p.out for p in plans):
        return attrs, operands
    ends = [(p.out - 1) / (p.width - 1) if p.out > 1 else 0.0 for p in plans]
    roi = e.const(np.array([0.0] * len(plans) + ends, np.float32), "roi")
    sizes = e.const(np.array([p.out for p in plans], np.int64), "sizes")
    return replace(attrs, coordinate_transformation_mode="tf_crop_and_resize"), [operands[0], roi, "", sizes]


def _cost(call: Call, result: Result) -> Cost:
    taps = {"nearest": 0, "linear": 2, "cubic": 4}[call.attrs.mode]
    resized = sum(p != q for p, q in zip(call.type(0).dims, result.types[0].dims, strict=True))
    return Cost(2.0 * taps * resized * elements(result.types[0]))


DEFS: tuple[OpDef, ...] = (
    OpDef(
        kind="Resize",
        infer=_infer,
        attrs=ResizeAttrs,
        onnx={"Resize": _import_resize, "Upsample": _import_old},
        to_onnx=_export,
        cost=_cost,
        # Interpolation weights are differences of coordinates: implementations that compute those in fp32 differ by more
        # than a rounding of the result.
        tol=Tol(rtol=1e-5, atol=1e-5),
    ),
)
