"""Tactics of 8-bit convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from optdnn.config import GPU_PRECISIONS
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import EIGHT_BITS, Builder, TensorView, channels_last, map_dtype, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.hopper import image, planar, with_pitch
from optdnn.kernels.conv.packed import packed_weights
from optdnn.kernels.conv.padding import edge_operands
from optdnn.kernels.conv.space_to_depth import space_to_depth
from optdnn.kernels.gemm.hopper import padded_rows, rows_of
from optdnn.kernels.pointwise.pointwise import copied_later, copy
from optdnn.kernels.quantized import pool_kernel as pool_int8
from optdnn.kernels.quantized import stem as quantized
from optdnn.kernels.quantized.quantizer import quantization
from optdnn.kernels.tactic import ProblemTactic
from optdnn.ops import requantize
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.types import BF16, DTYPES, FP16, FP32, Array, DType


def _pixels(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Strides of a channels-last tensor with pixels at multiples of 16 bytes."""
    return channels_last(shape, up(shape[1], 16 // dtype.itemsize))


def _pitch(x: TensorView) -> int | None:
    """Elements from a pixel of ``x`` (NCHW) to the next, or None. An image of one pixel has the pitch of its padded channels."""
    n, c, h, w = x.shape
    pitch = conv_maps.pitch_of(x)
    return up(c, conv_maps.aligned(x)) if pitch is not None and n * h * w == 1 else pitch


def _stored_at(out: TensorView) -> bool:
    """Whether the kernel can store with the image's pitch. fp32 results are stored from registers with the pitch of their own channels,
    and can therefore not be a part of a wider image."""
    pitch = _pitch(out)
    return pitch is not None and (out.dtype.itemsize < 4 or pitch == up(out.shape[1], 16 // out.dtype.itemsize))


PER_CHANNEL = ("channel_add", "channel_mul", "prelu")
"""Stages that read a further number of each channel."""


def refusal(b: Builder, op: Op) -> str | None:
    """Why no kernel supports the types, stages or constants of an 8-bit product, or None."""
    x = b.graph.type(op.inputs[0]).dtype.name  # type: ignore[arg-type]
    if (needed := "fp8" if "float8" in x else "int8") not in GPU_PRECISIONS.get(b.arch, ()):
        return f"the tensor cores of {b.arch} do not multiply {needed}"
    if b.graph.constant_value(op.inputs[1]) is None or b.graph.constant_value(op.inputs[2]) is None:
        return "its weights and scales are not constant"
    out = op.outputs[0].type
    if out.dtype.name not in EIGHT_BITS and out.dtype not in (FP16, BF16, FP32):
        return f"no kernel gives results of {out.dtype.name}"
    if 0 in out.static_shape:
        return "it is empty"
    if x not in EIGHT_BITS or (out.dtype.name in EIGHT_BITS and ("float8" in x) != ("float8" in out.dtype.name)):
        return f"no kernel turns {x} into {out.dtype.name}"
    names = [str(s[0]) for s in op.attrs.stages]
    missing = sorted(set(names) - render.STAGES.keys() - set(PER_CHANNEL))
    if missing or len(render.constants_of(op.attrs.stages)) > requantize.MAX_CONSTANTS:
        return f"the kernel does not support its stages: {', '.join(missing) or 'too many constants'}"
    if op.input(3) is not None:
        residual = b.graph.type(op.inputs[3])  # type: ignore[arg-type]
        if residual.dtype.itemsize != out.dtype.itemsize:
            return f"its residual is {residual.dtype.name}, its result {out.dtype.name}"
    return None


def _quantized_image(b: Builder, value: Value) -> tuple[Value, requantize.QuantParams] | None:
    """The float image and the parameters of a value that is a quantized image; None for any other value, and for an image that is
    not stored before it is quantized."""
    op = b.graph.op(value)
    while op.kind == "Layout" and op.inputs[0] is not None:
        op = b.graph.op(op.inputs[0])
    found = None if op.id in b.joined else quantization(b.graph, op)
    if found is None or found[1].dtype not in ("int8", "uint8"):
        return None
    return found if b.graph.type(found[0]).dtype in (FP32, FP16) else None


def _stem(
    b: Builder, op: Op, weight: Array, strides: tuple[int, int], pads: tuple[int, int, int, int], dilations: tuple[int, int],
    together: int,
) -> conv_maps.Feed | None:  # fmt: skip
    """The feed of a strided convolution of a quantized few-channel image; None for other convolutions.

    A separate launch quantizes the image and packs blocks of pixels as channels. ``together``: number of neighboring blocks that are
    read as one pixel (see :func:`optdnn.kernels.quantized.stem.overlapped`)."""
    channels, stride = weight.shape[1], strides[0]
    few = channels * stride * stride <= quantized.LANES and strides == (stride, stride) and stride > 1
    found = _quantized_image(b, op.inputs[0]) if few and set(dilations) == {1} else None  # type: ignore[arg-type]
    if found is None or len(op.outputs[0].type.static_shape) != 4:
        return None
    value, to = found
    if any(pads) and to.zero != op.attrs.input_zero:  # elements outside of the image get the image's zero point
        return None
    raw = b.source(value)
    n, _, h, w = raw.shape
    source = conv_problem.Source(h, w, channels, weight.shape[2:], strides, pads)
    if not raw.dense or space_to_depth(source).channels != quantized.LANES:
        return None
    seen, (before, _, width) = quantized.overlapped(source, together), quantized.row_padding(source, together)
    row = width * quantized.LANES
    shape, steps = (n, quantized.LANES, seen.height, width), (seen.height * row, 1, row, quantized.LANES)

    def make() -> int:
        image, blocks = b.made(raw), b.new(f"{op.outputs[0].name}.blocks", DTYPES[to.dtype], shape, steps)
        made = pool_int8.pack_image(n, source, together, raw.dtype.name, to, b.arch)
        attrs = {
            "block": stride, "lanes": quantized.LANES, "before": before, "width": width, "scale": to.scale, "dtype": DTYPES[to.dtype],
            "zero": to.zero,
        }  # fmt: skip
        b.emit(op, made, {"input": image, "output": blocks}, "QuantizedBlocks", attrs, [image], [blocks])
        return blocks.buffer

    packed = quantized.overlapped_weights(source, weight, together)
    blocks = unmade(DTYPES[to.dtype], shape, steps, make)
    return conv_maps.Feed(blocks, packed, seen.stride, seen.padding, seen.dilation, seen)


def _edge_zero(op: Op, feed: conv_maps.Feed) -> int:
    """The zero point that pads the pixels; 0 if nothing is padded."""
    return op.attrs.input_zero if any(feed.pads) else 0


def problem_of(op: Op, p: Product) -> conv_problem.Problem:
    """The launch's problem as plain data."""
    out, feed = p.out, p.feed
    second = map_dtype(p.residual.dtype) if p.residual is not None else ""
    return conv_problem.Problem(
        out.shape[0], up(out.shape[1], 16 // out.dtype.itemsize * feed.bands), (feed.source,), tuple(op.attrs.stages),
        map_dtype(feed.x.dtype), map_dtype(out.dtype), second, op.attrs.zero != 0, bands=feed.bands,
        dynamic=op.input(DATA_SCALE) is not None, edged=_edge_zero(op, feed) != 0,
    )  # fmt: skip


def numbers_of(op: Op, residual: TensorView | None) -> Requantize:
    """The per-tensor constants of the epilogue."""
    a, second = op.attrs, map_dtype(residual.dtype) if residual is not None else ""
    return Requantize(a.residual_scale, requantize.byte_bias(second) + a.residual_zero, a.low, a.high, a.zero)


def meaning_of(op: Op, feed: conv_maps.Feed) -> dict[str, Any]:
    """The attributes of the launch's meaning."""
    attrs = {k: v for k, v in attrs_dict(op.attrs).items() if k not in ("strides", "pads", "dilations", "group")}
    geometry = {"strides": feed.strides, "pads": feed.pads, "dilations": feed.dilations, "group": feed.bands}
    return attrs | geometry | {"input_zero": _edge_zero(op, feed)}


DATA_SCALE = 5
"""Operand slot of the scale of data that were quantized in the same run. The slot after it is their zero point."""


def data_parameters(b: Builder, op: Op) -> list[TensorView]:
    """Scale and zero point of data that were quantized in the same run; empty if they are constants."""
    return [b.operand(v) for v in op.inputs[DATA_SCALE:] if v is not None]


def more_operands(b: Builder, op: Op, problem: conv_problem.Problem, feed: conv_maps.Feed) -> dict[str, TensorView]:
    """The operands that only some launches read: computed scales and zero points, and what padding adds."""
    data = dict(zip(conv_params.DYNAMIC, data_parameters(b, op), strict=False))
    return data | edge_operands(b, op.outputs[0].name, problem, feed.weight, _edge_zero(op, feed))


def as_read(residual: TensorView | None, data: Sequence[TensorView]) -> list[TensorView | None]:
    """The last operands of a launch's meaning."""
    return [residual, None, *data] if data else [] if residual is None else [residual]


def channel_pairs(b: Builder, op: Op) -> TensorView:
    """Per-channel operand of the epilogue: scale and bias (and the sum of the weights)."""
    channel = b.graph.constant_value(op.inputs[2])
    assert channel is not None
    return b.constant(requantize.pad_channels(channel), f"{op.outputs[0].name}.scales")


def _has_room(b: Builder, x: TensorView, *, alone: bool) -> bool:
    """Whether a kernel may read or write ``x`` (NCHW) in whole accesses of 16 bytes, beyond its last channel.

    Between pixels, the pitch leaves room for this. For a single pixel, the buffer must have the room, and no other tensor may share the
    buffer (``alone``).
    """
    n, c, h, w = x.shape
    channels = up(c, conv_maps.aligned(x))
    if n * h * w != 1 or c == channels:
        return True
    return alone and x.offset + channels <= conv_maps.elements_around(b, x)


def geometry_refusal(b: Builder, op: Op) -> str | None:
    """Why Hopper's kernels cannot run the convolution's kernel size, strides, pads and dilations, or None."""
    a, weight = op.attrs, b.weights(op)
    geometry = (weight.shape[2:], a.strides, a.pads, a.dilations)
    return hopper_launch.refuse(b.arch, b.graph.type(op.inputs[0]).dtype.name, [geometry])  # type: ignore[arg-type]


def axes_of(b: Builder, op: Op) -> int:
    """Number of spatial axes of a convolution."""
    weight = b.weights(op)
    return weight.ndim - 2


@dataclass(frozen=True)
class Product:
    """An 8-bit product before its launch, on NCHW views of tensors that are placed, or still to be made. ``between`` is ``out`` in the
    shape of ``target``. If the launch cannot write ``target``, a copy follows from ``between`` to ``target``."""

    feed: conv_maps.Feed
    residual: TensorView | None
    out: TensorView
    between: TensorView
    target: TensorView


class QuantizedProduct(ProblemTactic):
    """An 8-bit convolution or matrix product in one launch."""

    def product(self, b: Builder, op: Op) -> Product:
        """The operands and results of the launch."""
        raise NotImplementedError

    def problem_of(self, op: Op, p: Product) -> conv_problem.Problem:
        """The kernel's problem."""
        raise NotImplementedError

    def launch(self, b: Builder, op: Op, p: Product, problem: conv_problem.Problem, config: Any) -> None:
        """Add the launch. The tensors of ``p`` have buffers."""
        raise NotImplementedError

    def stored(self, b: Builder, op: Op, out: TensorView) -> bool:
        """Whether the launch can write ``out``."""
        raise NotImplementedError

    def added(self, b: Builder, op: Op, x: TensorView) -> TensorView:
        """The launch's view of the residual ``x``: itself, or a copy that is still to be made."""
        return x

    def problem(self, b: Builder, op: Op) -> conv_problem.Problem:
        return self.problem_of(op, self.product(b, op))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        p = self.product(b, op)
        problem, feed = self.problem_of(op, p), p.feed.made(b)
        residual = None if p.residual is None else b.made(p.residual)
        made = replace(p, feed=feed, residual=residual, out=b.made(p.out))
        self.launch(b, op, made, problem, config)
        if p.between is not p.target:
            copy(b, op, replace(p.between, buffer=made.out.buffer), p.target)


class HopperProduct(hopper_launch.HopperTactic, QuantizedProduct):
    """An 8-bit product on Hopper's kernels."""

    def problem_of(self, op: Op, p: Product) -> conv_problem.Problem:
        found = problem_of(op, p)
        return replace(found, dense=all(_pitch(x) == found.channels for x in (p.out, p.residual) if x is not None))

    def added(self, b: Builder, op: Op, x: TensorView) -> TensorView:
        """The residual with room for the bytes that are read after its last channel. A residual of an fp32 result has the pitch of that
        result, see :func:`_stored_at`."""
        item = op.outputs[0].type.dtype.itemsize
        if item == FP32.itemsize and _pitch(x) != (pitch := up(x.shape[1], 16 // item)):
            return copied_later(b, op, x, "residual", channels_last(x.shape, pitch))
        return x if _has_room(b, x, alone=True) else copied_later(b, op, x, "residual", _pixels(x.shape, x.dtype))

    def stored(self, b: Builder, op: Op, out: TensorView) -> bool:
        return _stored_at(out) and _has_room(b, out, alone=op.value not in b.reserved)

    def launch(self, b: Builder, op: Op, p: Product, problem: conv_problem.Problem, config: Any) -> None:
        feed, residual, out = p.feed, p.residual, p.out
        packed, pairs = packed_weights(b, op, problem, [feed]), channel_pairs(b, op)
        operands = {"weights": packed, "channel": pairs, "output": out, **hopper_launch.pixels([feed])}
        operands |= {"residual": residual} if residual is not None else {}
        operands |= more_operands(b, op, problem, feed)
        width = pairs.shape[1]
        reads = [
            feed.seen,
            *conv_maps.weight_views(packed, problem, [feed]),
            pairs.view((out.shape[1], width), (width, 1)),
        ]
        meaning = ("QuantizedConv", meaning_of(op, feed), [*reads, *as_read(residual, data_parameters(b, op))])
        made = hopper_launch.launch(problem, config, b.gpu, [feed], operands, requantize=numbers_of(op, residual))
        hopper_launch.emit(b, op, made, problem, config, operands, meaning)


class QuantizedConv(QuantizedProduct):
    """Convolutions of int8, uint8 or fp8 over one or two spatial axes."""

    together: ClassVar[int] = 2
    """Blocks of pixels of a stem's image that are read as one pixel: two blocks fill the 32 bytes of a K step."""

    def groups(self, b: Builder, op: Op) -> int:
        """Number of neighboring groups that are multiplied as one, with zeros between them."""
        return 1

    def product(self, b: Builder, op: Op) -> Product:
        """The operands and results of the launch: over a stem's blocks, if a kernel supports that."""
        weight = b.weights(op)
        residual, target = None, image(b.result(op.value))
        if op.input(3) is not None:
            added = image(b.source(op.inputs[3]))
            residual = self.added(b, op, with_pitch(b, op, added, unit=conv_maps.aligned(added)))
        out = target
        if not self.stored(b, op, out):
            out = b.later(f"{op.outputs[0].name}.conv", out.dtype, out.shape, _pixels(out.shape, out.dtype))
        stem = _stem(b, op, *planar(weight, op.attrs), self.together) if op.attrs.group == 1 else None
        if stem is not None:
            found = Product(stem, residual, out, out, target)
            if self.offers(self.problem_of(op, found), b.gpu):
                return found
        return Product(self._feed(b, op, weight), residual, out, out, target)

    def _feed(self, b: Builder, op: Op, weight: Array) -> conv_maps.Feed:
        """The feed of the image."""
        x, n = image(b.source(op.inputs[0])), self.groups(b, op)
        x = with_pitch(b, op, x, unit=conv_maps.aligned(x))
        return conv_maps.Feed(x, *planar(weight, op.attrs), bands=op.attrs.group // n, together=n)


class HopperQuantizedConv(HopperProduct, QuantizedConv):
    """Ungrouped convolutions."""

    name = "conv_sm90_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if op.attrs.group != 1 or axes_of(b, op) not in (1, 2):
            return f"it has {op.attrs.group} groups and {axes_of(b, op)} spatial axes"
        return geometry_refusal(b, op)


class QuantizedMatMul(QuantizedProduct):
    """Products of rows of int8, uint8 or fp8 with a constant matrix: a 1 x 1 convolution over rows."""

    @staticmethod
    def _strides(op: Op) -> tuple[int, ...] | None:
        """Strides of a result without a place: rows begin at multiples of 16 bytes. None: without gaps."""
        t = op.outputs[0].type
        unit = 16 // t.dtype.itemsize
        return padded_rows(t.static_shape, unit=unit) if t.static_shape[-1] % unit else None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in rows at multiples of 16 bytes, unless its place is reserved."""
        b.target(op.value, self._strides(op))

    def product(self, b: Builder, op: Op) -> Product:
        weight, residual = b.weights(op), None
        x, matrix = _rows(b, op, b.source(op.inputs[0])), np.ascontiguousarray(weight)[:, :, None, None]
        if op.input(3) is not None:
            residual = self.added(b, op, _rows(b, op, b.source(op.inputs[3])))
        target, unit = b.result(op.value, self._strides(op)), 16 // op.outputs[0].type.dtype.itemsize
        between, out = target, rows_of(target, unit=unit)
        if out is None or not self.stored(b, op, out):
            name, shape = f"{op.outputs[0].name}.gemm", between.shape
            between = b.later(name, between.dtype, shape, padded_rows(shape, unit=unit))
            out = rows_of(between, unit=unit)
            assert out is not None
        return Product(conv_maps.Feed(x, matrix, *conv_maps.POINTWISE), residual, out, between, target)


def _rows(b: Builder, op: Op, x: TensorView) -> TensorView:
    """The rows of ``x``, or of a copy that is still to be made, as 1 x 1 images that TMA can read."""
    unit = conv_maps.aligned(x)
    found = rows_of(x, unit=unit)
    if found is None:
        found = rows_of(copied_later(b, op, x, "rows", padded_rows(x.shape, unit=unit)), unit=unit)
        assert found is not None
    return found


class HopperQuantizedMatMul(HopperProduct, QuantizedMatMul):
    """Products of rows on Hopper's kernels."""

    name = "gemm_sm90_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return refusal(b, op) or hopper_launch.refuse(b.arch, b.graph.type(op.inputs[0]).dtype.name, [])  # type: ignore[arg-type]
