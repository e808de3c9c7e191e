"""Operators of detectors: NonMaxSuppression, RoiAlign, MaxRoiPool, AffineGrid, GridSample, DeformConv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.dim import dim_max, dim_min
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, PRODUCT_TOL, STEPS_TOL, Attrs, Call, Cost, Result, Unsupported, promote_types
from optdnn.ops.checks import agree, agree_all, elements, extent, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, NodeSpec, Ref, read_attrs
from optdnn.ops.window import check_window, read_window
from optdnn.runtime.reference.window import output_sizes
from optdnn.types import INT64, RANK_LIMIT, TensorType, is_float


@dataclass(frozen=True)
class NMSAttrs(Attrs):
    """``center_point_box`` 0: two corners (y, x), (y, x); 1: center and size (x, y, width, height)."""

    center_point_box: int = 0


@dataclass(frozen=True)
class RoiAlignAttrs(Attrs):
    """``sampling_ratio`` 0: as many samples as a bin has pixels. The regions may have another float type than the input.

    ``coordinate_transformation_mode`` is "half_pixel" or "output_half_pixel", ``mode`` "avg" or "max".
    """

    output_height: int = 1
    output_width: int = 1
    sampling_ratio: int = 0
    spatial_scale: float = 1.0
    mode: str = "avg"
    coordinate_transformation_mode: str = "half_pixel"


@dataclass(frozen=True)
class MaxRoiPoolAttrs(Attrs):
    pooled_shape: tuple[int, ...]
    spatial_scale: float = 1.0


@dataclass(frozen=True)
class GridSampleAttrs(Attrs):
    """``mode``: linear, nearest or cubic; ``padding_mode``: zeros, border or reflection."""

    mode: str = "linear"
    padding_mode: str = "zeros"
    align_corners: bool = False


@dataclass(frozen=True)
class AffineGridAttrs(Attrs):
    align_corners: bool = False


@dataclass(frozen=True)
class DeformConvAttrs(Attrs):
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int = 1
    offset_group: int = 1


# ---------------------------------------------------------------- inference


def _infer_nms(call: Call) -> Result:
    boxes, scores = call.type(0), call.type(1)
    require_rank(boxes, 3, "NonMaxSuppression boxes")
    require_rank(scores, 3, "NonMaxSuppression scores")
    agree(boxes.dims[2], 4, f"NonMaxSuppression boxes {boxes} need four coordinates")
    agree(boxes.dims[0], scores.dims[0], "NonMaxSuppression: the batches of boxes and scores differ")
    agree(boxes.dims[1], scores.dims[2], "NonMaxSuppression: the numbers of boxes and scores differ")
    if call.attrs.center_point_box not in (0, 1):
        raise ShapeError(f"NonMaxSuppression center_point_box is {call.attrs.center_point_box}")
    per_class = call.ints(2) if call.has(2) else (0,)
    most = boxes.dims[1] if not per_class else dim_min(boxes.dims[1], dim_max(0, per_class[0]))
    return Result((TensorType(INT64, (call.fresh("selected", scores.dims[0] * scores.dims[1] * most), 3)),))


def _regions(call: Call, columns: int) -> tuple[TensorType, TensorType]:
    x, rois = call.type(0), call.type(1)
    require_rank(x, 4, f"{call.kind} input")
    require_rank(rois, 2, f"{call.kind} rois")
    agree(rois.dims[1], columns, f"{call.kind} rois {rois} need {columns} columns")
    if not is_float(rois.dtype):
        raise ShapeError(f"{call.kind} rois are {rois}; they must be floats")
    return x, rois


def _infer_roi_align(call: Call) -> Result:
    a: RoiAlignAttrs = call.attrs
    x, rois = _regions(call, 4)
    indices = call.type(2)
    require_rank(indices, 1, "RoiAlign batch_indices")
    agree(indices.dims[0], rois.dims[0], "RoiAlign has one batch index per region")
    if a.mode not in ("avg", "max"):
        raise ShapeError(f"RoiAlign mode is {a.mode!r}; it must be avg or max")
    if a.coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise ShapeError(f"RoiAlign coordinate_transformation_mode is {a.coordinate_transformation_mode!r}")
    if min(a.output_height, a.output_width) < 1 or a.sampling_ratio < 0:
        raise ShapeError(f"RoiAlign to {a.output_height} x {a.output_width} with {a.sampling_ratio} samples")
    return Result((x.with_shape((rois.dims[0], x.dims[1], a.output_height, a.output_width)),))


def _infer_max_roi_pool(call: Call) -> Result:
    x, rois = _regions(call, 5)
    if len(call.attrs.pooled_shape) != 2 or min(call.attrs.pooled_shape) < 1:
        raise ShapeError(f"MaxRoiPool pooled_shape is {call.attrs.pooled_shape}")
    return Result((x.with_shape((rois.dims[0], x.dims[1], *call.attrs.pooled_shape)),))


def _infer_grid_sample(call: Call) -> Result:
    x, grid, a = call.type(0), call.type(1), call.attrs
    rank = len(x.dims)
    if rank < 3 or not is_float(grid.dtype):
        raise ShapeError(f"GridSample of {x} at {grid}")
    require_rank(grid, rank, f"GridSample grid for {x}")
    agree(x.dims[0], grid.dims[0], "GridSample: the batches of the input and the grid differ")
    agree(grid.dims[-1], rank - 2, f"GridSample grid {grid} needs a coordinate per spatial axis of {x}")
    if a.mode not in ("linear", "nearest", "cubic") or a.padding_mode not in ("zeros", "border", "reflection"):
        raise ShapeError(f"GridSample mode {a.mode!r} with padding {a.padding_mode!r}")
    return Result((x.with_shape((*x.dims[:2], *grid.dims[1:-1])),))


def _infer_affine_grid(call: Call) -> Result:
    theta, size = call.type(0), call.type(1)
    require_rank(theta, 3, "AffineGrid theta")
    require_rank(size, 1, "AffineGrid size")
    rank, columns = theta.dims[1:]
    if not isinstance(rank, int) or rank > RANK_LIMIT or not is_float(theta.dtype):
        raise ShapeError(f"AffineGrid theta is {theta}")
    agree(columns, rank + 1, f"AffineGrid theta {theta} is not affine")
    agree(size.dims[0], rank + 2, f"AffineGrid size {size} does not go with theta {theta}")
    given = call.ints(1)
    spatial = given[2:] if given else tuple(call.fresh("grid") for _ in range(rank))
    return Result((theta.with_shape((theta.dims[0], *spatial, rank)),))


def _infer_deform_conv(call: Call) -> Result:
    x, w, offset = (call.type(i) for i in range(3))
    a: DeformConvAttrs = call.attrs
    for t, name in ((x, "input"), (w, "weights"), (offset, "offset")):
        require_rank(t, 4, f"DeformConv {name}")
    promote_types((x, w, offset), "DeformConv")
    check_window("DeformConv", 2, a.strides, a.pads, a.dilations)
    m, per_group, *kernel = w.dims
    agree(x.dims[1], per_group * a.group, f"DeformConv input {x} and weights {w} in {a.group} groups")
    if isinstance(x.dims[1], int) and x.dims[1] % a.offset_group:
        raise ShapeError(f"DeformConv: {a.offset_group} offset groups do not divide {x.dims[1]} channels")
    taps = kernel[0] * kernel[1] * a.offset_group
    sizes = output_sizes("NOTSET", a.pads, x.dims[2:], kernel, a.strides, a.dilations)
    wanted = [(offset, taps * 2, "offset")]
    if call.has(4):
        require_rank(call.type(4), 4, "DeformConv mask")
        wanted.append((call.type(4), taps, "mask"))
    for t, channels, name in wanted:
        agree_all(
            t.dims, (x.dims[0], channels, *sizes), f"DeformConv {name} {t} does not fit its input {x} and weights {w}"
        )
    if call.has(3):
        require_rank(call.type(3), 1, "DeformConv bias")
        agree(call.type(3).dims[0], m, "DeformConv bias length and output channels differ")
    return Result((x.with_shape((x.dims[0], m, *sizes)),))


# ---------------------------------------------------------------- import


def _import_roi_align(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    attrs = {"coordinate_transformation_mode": default, **node.attrs}
    return e.op("RoiAlign", node.inputs, read_attrs(RoiAlignAttrs)(replace(node, attrs=attrs)))


_OLD_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def _import_grid_sample(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    attrs = read_attrs(GridSampleAttrs)(node)
    return e.op("GridSample", node.inputs, replace(attrs, mode=_OLD_MODES.get(attrs.mode, attrs.mode)))


def _import_deform_conv(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, w = e.type(node.inputs[0]), e.type(node.inputs[1])
    if len(x.dims) != 4 or len(w.dims) != 4:
        raise Unsupported(f"DeformConv of {x}; only two spatial dimensions are supported")
    win = read_window(node, 2, x.dims[2:], w.dims[2:])
    attrs = read_attrs(DeformConvAttrs)(replace(node, attrs={**node.attrs, **vars(win)}))
    return e.op("DeformConv", node.inputs, attrs)


# ---------------------------------------------------------------- definitions


def _cost_nms(call: Call, result: Result) -> Cost:
    """The overlaps of the kept boxes with all others, as a bound; with one box in 64 if scores must exceed a threshold."""
    boxes, limit = extent(call.type(0).dims[1]), call.ints(2) if call.has(2) else None
    if call.has(4):
        boxes = -(-boxes // 64)
    kept = min(boxes, extent(*limit[:1])) if limit else boxes
    return Cost(10 * boxes * kept * extent(*call.type(1).dims[:2]))


def _cost_roi_align(call: Call, result: Result) -> Cost:
    return Cost(8 * max(1, call.attrs.sampling_ratio) ** 2 * elements(result.types[0]))


def _cost_grid_sample(call: Call, result: Result) -> Cost:
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[call.attrs.mode] ** (len(call.type(0).dims) - 2)
    return Cost(2 * taps * elements(result.types[0]))


def _cost_deform_conv(call: Call, result: Result) -> Cost:
    w = call.type(1).dims
    columns = extent(call.type(0).dims[1], *w[2:], *result.types[0].dims[2:], result.types[0].dims[0])
    return Cost(2 * elements(result.types[0]) * extent(*w[1:]) + 8 * columns)


DEFS: tuple[OpDef, ...] = (
    OpDef("NonMaxSuppression", _infer_nms, NMSAttrs, cost=_cost_nms, tol=EXACT),
    OpDef(
        "RoiAlign",
        _infer_roi_align,
        RoiAlignAttrs,
        _import_roi_align,
        cost=_cost_roi_align,
        tol=STEPS_TOL,
    ),
    OpDef("MaxRoiPool", _infer_max_roi_pool, MaxRoiPoolAttrs, tol=EXACT),
    OpDef(
        "GridSample",
        _infer_grid_sample,
        GridSampleAttrs,
        _import_grid_sample,
        cost=_cost_grid_sample,
        tol=PRODUCT_TOL,
    ),
    OpDef(
        "AffineGrid",
        _infer_affine_grid,
        AffineGridAttrs,
        cost=lambda call, result: Cost(2 * elements(result.types[0]) * extent(call.type(0).dims[2])),
        tol=PRODUCT_TOL,
    ),
    OpDef(
        "DeformConv", _infer_deform_conv, DeformConvAttrs, _import_deform_conv, cost=_cost_deform_conv, tol=PRODUCT_TOL
    ),
)
