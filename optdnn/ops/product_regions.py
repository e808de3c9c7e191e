"""Regions of a lowered program around products of rows with matrices; see :mod:`optdnn.ops.regions`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.ops.base import PRODUCT_TOL, STEPS_TOL, Attrs, Call, FusedAttrs, Result, Stage
from optdnn.ops.checks import agree, agree_all, per_element, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.fused import with_stages
from optdnn.ops.held import region
from optdnn.types import FP32, INT8, TensorType


@dataclass(frozen=True)
class PairedProductAttrs(Attrs):
    """Stages of two products. ``beside``: the second one's. ``epilogue``: the first one's, which read the second as operand 1."""

    epilogue: tuple[Stage, ...]
    beside: tuple[Stage, ...]


@dataclass(frozen=True)
class RowProductAttrs(Attrs):
    """``epilogue``: stages of the product, which read operand 1: the second product, after its stages ``beside``, or the residual.
    ``epsilon``: of the preceding norm, if operand 1 is its scale."""

    epilogue: tuple[Stage, ...]
    beside: tuple[Stage, ...] = ()
    epsilon: float = 1e-5


@dataclass(frozen=True)
class TiledPackedMatMulAttrs(FusedAttrs):
    """Like :class:`optdnn.ops.packed_layout.PackedMatMulAttrs`, with ``N`` outputs and a scale for each row.

    Weights, scales and zero points are stored in tiles (:func:`optdnn.runtime.reference.packed.numbers_of_tiles`).
    """

    code: str
    K: int
    N: int
    block_size: int


@dataclass(frozen=True)
class UnpackedTilesAttrs(Attrs):
    """See the fields of :class:`TiledPackedMatMulAttrs`."""

    code: str
    K: int
    N: int
    block_size: int


@dataclass(frozen=True)
class PackedRowProductAttrs(UnpackedTilesAttrs):
    """Like :class:`RowProductAttrs`, with weights as in :class:`TiledPackedMatMulAttrs`."""

    epilogue: tuple[Stage, ...]
    beside: tuple[Stage, ...] = ()
    epsilon: float = 1e-5


@dataclass(frozen=True)
class NormedProductAttrs(Attrs):
    """``mean``: whether the mean is subtracted (a layer norm); otherwise the norm is by the mean square.

    ``epilogue``: stages of the product, which read a second product of the rows, after its stages ``beside``, as operand 1.
    ``image``: number of rows that are normalized together, by the moments of equal groups of rows; 0: each row alone.
    """

    mean: bool
    epsilon: float
    epilogue: tuple[Stage, ...] = ()
    beside: tuple[Stage, ...] = ()
    image: int = 0


# ---------------------------------------------------------------- shapes


def _check_second_weights(kind: str, weights: TensorType, others: TensorType) -> None:
    agree_all(weights.dims, others.dims, f"{kind} weights {weights} and {others} differ")


def _infer_paired_product(call: Call) -> Result:
    x, weights = call.type(0), call.type(1)
    require_rank(x, 2, "PairedProduct rows")
    require_rank(weights, 3, "PairedProduct weights")
    agree(x.dims[1], weights.dims[2], f"PairedProduct weights {weights} do not fit rows {x}")
    _check_second_weights("PairedProduct", weights, call.type(3))
    return Result((x.with_shape((x.dims[0], weights.dims[0] * weights.dims[1])),))


def _infer_row_product(call: Call) -> Result:
    x, weights = call.type(0), call.type(2)
    require_rank(x, 2, "RowProduct rows")
    require_rank(weights, 2, "RowProduct weights")
    agree(x.dims[1], weights.dims[1], f"RowProduct weights {weights} do not fit rows {x}")
    if call.has(4):
        _check_second_weights("RowProduct", weights, call.type(4))
    return Result((x.with_shape((x.dims[0], weights.dims[0])),))


def _infer_selected_product(call: Call) -> Result:
    x, weights, index = call.type(0), call.type(1), call.type(2)
    require_rank(x, 2, "SelectedProduct rows")
    require_rank(weights, 3, "SelectedProduct weights")
    agree(x.dims[1], weights.dims[2], f"SelectedProduct weights {weights} do not fit rows {x}")
    require_rank(index, 2, "SelectedProduct indices")
    agree(x.dims[0], index.dims[0], f"SelectedProduct indices {index} are not some for each row of {x}")
    return Result((x.with_shape((*index.dims, weights.dims[1])),))


def _infer_normed_product(call: Call) -> Result:
    x, moments, weights = call.type(0), call.type(1), call.type(2)
    require_rank(x, 2, "NormedProduct rows")
    require_rank(moments, 3, "NormedProduct moments")
    rows, image = x.dims[0], call.attrs.image
    *columns, depth = weights.dims
    agree(x.dims[1], depth, f"NormedProduct weights {weights} do not fit rows {x}")
    if image:
        agree(rows % image, 0, f"NormedProduct rows {x} are not whole images of {image}")
        agree(moments.dims[1] % (rows // image), 0, f"NormedProduct moments {moments} are not of images of {x}")
    else:
        agree(rows, moments.dims[1], f"NormedProduct moments {moments} are not of rows {x}")
    if call.has(5):
        _check_second_weights("NormedProduct", weights, call.type(5))
    return Result((x.with_shape((rows, math.prod(columns))),))


def _packed_product(call: Call, kind: str, weights: int) -> Result:
    """``weights``: the slot of the weights."""
    x, a = call.type(0), call.attrs
    require_rank(call.type(weights), 3, f"{kind} weights")
    agree(x.dims[-1], a.K, f"{kind} of {x}: its rows are not K={a.K} wide")
    return Result((x.with_shape((*x.dims[:-1], a.N)),))


def _infer_tiled_product(call: Call) -> Result:
    return _packed_product(call, "TiledPackedMatMul", 1)


def _infer_packed_rows(call: Call) -> Result:
    return _packed_product(call, "PackedRowProduct", 2)


def _infer_unpacked(call: Call) -> Result:
    require_rank(call.type(0), 3, "UnpackedTiles")
    return Result((TensorType(FP32, (call.attrs.N, call.attrs.K)),))


def _infer_unpacked_bytes(call: Call) -> Result:
    require_rank(call.type(0), 3, "UnpackedBytes")
    return Result((TensorType(INT8, (call.attrs.N, call.attrs.K)),))


def _infer_row_bytes(call: Call) -> Result:
    x = call.type(0)
    require_rank(x, 2, "RowBytes")
    return Result((x.with_dtype(INT8), TensorType(FP32, x.dims[:1])))


# ---------------------------------------------------------------- definitions

DEFS: tuple[OpDef, ...] = (
    region("NormedProduct", _infer_normed_product, NormedProductAttrs, tol=STEPS_TOL),
    region("PackedRowProduct", _infer_packed_rows, PackedRowProductAttrs, tol=STEPS_TOL),
    region("PairedProduct", _infer_paired_product, PairedProductAttrs, tol=PRODUCT_TOL),
    region("RowBytes", _infer_row_bytes, cost=per_element(4)),
    region("RowProduct", _infer_row_product, RowProductAttrs, tol=PRODUCT_TOL),
    region("SelectedProduct", _infer_selected_product, tol=PRODUCT_TOL),
    region("TiledPackedMatMul", with_stages(_infer_tiled_product), TiledPackedMatMulAttrs, tol=STEPS_TOL, arity=4),
    region("UnpackedBytes", _infer_unpacked_bytes, UnpackedTilesAttrs, cost=per_element(2)),
    region("UnpackedTiles", _infer_unpacked, UnpackedTilesAttrs, cost=per_element(2)),
)
