"""Signals and special transforms: DFT, STFT, MelWeightMatrix, Col2Im, Det, BitCast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.dim import DimLike, floordiv
from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, STEPS_TOL, Attrs, Call, Cost, Result, Tol, Traits, Unsupported
from optdnn.ops.checks import agree, elements, extent, floating, free, per_element, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.ops.values import concrete_ints, require, static_ints
from optdnn.ops.window import check_window
from optdnn.types import FP32, RANK_LIMIT, DType, TensorType, normalize_axis


@dataclass(frozen=True)
class DFTAttrs(Attrs):
    """``axis`` is used if operand 2 is absent."""

    axis: int = -2
    inverse: bool = False
    onesided: bool = False


@dataclass(frozen=True)
class STFTAttrs(Attrs):
    onesided: bool = True


@dataclass(frozen=True)
class MelAttrs(Attrs):
    output_datatype: DType = FP32


@dataclass(frozen=True)
class Col2ImAttrs(Attrs):
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]


@dataclass(frozen=True)
class BitCastAttrs(Attrs):
    to: DType


# ---------------------------------------------------------------- inference


def _infer_dft(call: Call) -> Result:
    x, a = floating(call), call.attrs
    axis = normalize_axis(a.axis, len(x.dims), "DFT axis")
    if axis == len(x.dims) - 1:
        raise ShapeError(f"DFT of {x} along its last axis, which holds real and imaginary parts")
    if x.dims[-1] not in (1, 2):
        raise ShapeError(f"DFT of {x}; its last axis must hold 1 or 2 numbers")
    if a.onesided and not a.inverse and x.dims[-1] == 2:
        raise ShapeError(f"DFT of the complex {x} is not one-sided")
    length: DimLike = x.dims[axis]
    if call.has(1):
        given = call.ints(1)
        length = given[0] if given else call.fresh("dft")
    elif a.inverse and a.onesided:
        length = 2 * (length - 1)
    if a.onesided and not a.inverse:
        length = floordiv(length, 2) + 1
    parts = 1 if a.onesided and a.inverse else 2
    if call.has(2):  # along an axis that is known only at run time
        kept = not call.has(1) and not a.onesided
        sizes = x.dims[:-1] if kept else tuple(call.fresh("dft") for _ in x.dims[:-1])
        return Result((x.with_shape((*sizes, parts)),))
    return Result((x.with_shape((*x.dims[:axis], length, *x.dims[axis + 1 : -1], parts)),))


def _infer_stft(call: Call) -> Result:
    x = floating(call)
    if len(x.dims) not in (2, 3):
        raise ShapeError(f"STFT of {x}; it must have 2 or 3 dimensions")
    length: DimLike | None = None
    if call.has(2):
        require_rank(call.type(2), 1, "STFT window")
        length = call.type(2).dims[0]
    if call.has(3):
        given = call.ints(3)
        if given and length is not None:
            agree(given[0], length, "STFT frame_length and its window differ")
        length = given[0] if given else call.fresh("frame") if length is None else length
    if length is None:
        raise ShapeError("STFT needs a window or a frame_length")
    step = concrete_ints(call, 1)
    if step and step[0] < 1:
        raise ShapeError(f"STFT frame_step is {step[0]}")
    frames = call.fresh("frames") if not step else floordiv(x.dims[1] - length, step[0]) + 1
    bins = floordiv(length, 2) + 1 if call.attrs.onesided else length
    return Result((x.with_shape((x.dims[0], frames, bins, 2)),))


def _infer_mel(call: Call) -> Result:
    bins, length = call.ints(0), call.ints(1)
    rows: DimLike = floordiv(length[0], 2) + 1 if length else call.fresh("spectrum")
    return Result((TensorType(call.attrs.output_datatype, (rows, bins[0] if bins else call.fresh("mel"))),))


def _infer_col2im(call: Call) -> Result:
    x = call.type(0)
    require_rank(x, 3, "Col2Im input")
    rank = call.type(1).dims[0]
    image, block = call.ints(1), concrete_ints(call, 2)
    if not isinstance(rank, int):
        raise ShapeError("Col2Im needs an image_shape of known length")
    require(rank <= RANK_LIMIT, call, f"at most {RANK_LIMIT} sizes of an image", call.type(1))
    check_window("Col2Im", rank, call.attrs.strides, call.attrs.pads, call.attrs.dilations)
    channels = floordiv(x.dims[1], math.prod(block)) if block else call.fresh("channels")
    sizes = image or tuple(call.fresh("image") for _ in range(rank))
    return Result((x.with_shape((x.dims[0], channels, *sizes)),))


def _infer_det(call: Call) -> Result:
    x = floating(call)
    if len(x.dims) < 2:
        raise ShapeError(f"Det of {x}; it must have at least 2 dimensions")
    agree(x.dims[-1], x.dims[-2], f"Det of {x}, which is not square")
    return Result((x.with_shape(x.dims[:-2]),))


def _infer_bit_cast(call: Call) -> Result:
    x, to = call.type(0), call.attrs.to
    if x.dtype.itemsize != to.itemsize:
        raise ShapeError(f"BitCast of {x} to {to}, whose size differs")
    return Result((x.with_dtype(to),))


# ---------------------------------------------------------------- import and export


def _import_dft(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, length = node.inputs[0], node.input(1)
    axis = int(node.get("axis", 1))
    at = None
    if node.opset >= 20:
        given = static_ints(e, node.input(2))
        axis = given[0] if given else -2
        at = node.input(2) if not given else None
    attrs = DFTAttrs(
        normalize_axis(axis, len(e.type(x).dims)), bool(node.get("inverse", 0)), bool(node.get("onesided", 0))
    )
    return e.op("DFT", [x, length, at], attrs)


def _export_dft(a: DFTAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    x, length, at = [*inputs, "", ""][:3]
    operands = [x, length, at or e.const(np.array(a.axis), "axis")]
    return e.node("DFT", operands, inverse=int(a.inverse), onesided=int(a.onesided))


def _import_col2im(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    rank = e.type(node.inputs[1]).dims[0]
    if not isinstance(rank, int):
        raise Unsupported("an image_shape of unknown length")
    if rank > RANK_LIMIT:
        raise ShapeError(f"an image_shape of {rank} sizes; there may be at most {RANK_LIMIT}")
    attrs = Col2ImAttrs(
        node.ints("strides") or (1,) * rank,
        node.ints("pads") or (0,) * (2 * rank),
        node.ints("dilations") or (1,) * rank,
    )
    return e.op("Col2Im", node.inputs, attrs)


def _cost_dft(call: Call, result: Result) -> Cost:
    n = elements(call.type(0))
    return Cost(5 * n * math.log2(max(2.0, extent(call.type(0).dims[call.attrs.axis]))))


def _cost_stft(call: Call, result: Result) -> Cost:
    n = elements(result.types[0])
    return Cost(5 * n * math.log2(max(2.0, extent(result.types[0].dims[2]))))


_TOL = Tol(rtol=1e-5, atol=5e-6)

DEFS: tuple[OpDef, ...] = (
    OpDef("DFT", _infer_dft, DFTAttrs, _import_dft, _export_dft, cost=_cost_dft, tol=_TOL),
    OpDef("STFT", _infer_stft, STFTAttrs, cost=_cost_stft, tol=_TOL),
    OpDef("MelWeightMatrix", _infer_mel, MelAttrs),
    OpDef("Col2Im", _infer_col2im, Col2ImAttrs, _import_col2im, cost=per_element(1)),
    OpDef(
        "Det",
        _infer_det,
        cost=lambda call, result: Cost(elements(call.type(0)) * extent(call.type(0).dims[-1])),
        tol=STEPS_TOL,
    ),
    OpDef(
        "BitCast",
        _infer_bit_cast,
        BitCastAttrs,
        cost=free,
        tol=EXACT,
        traits=Traits(own_precision=True),
    ),
)
