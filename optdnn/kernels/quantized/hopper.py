"""Tactics of 8-bit convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from optdnn.config import GPU_PRECISIONS
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import EIGHT_BITS, Builder, TensorView, channels_last, map_dtype, row_major, up
from optdnn.kernels.conv import hopper_launch as conv_sm90
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.hopper import image, planar
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.norm.half_rows import emit_description
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.quantized import pool_kernel as pool_int8
from optdnn.kernels.quantized import stem as quantized
from optdnn.kernels.quantized.quantizer import quantization
from optdnn.kernels.tactic import DryRunConfigs
from optdnn.ops import requantize
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.types import BF16, DTYPES, FP16, FP32, Array, DType


def _pixels(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Strides of a channels-last tensor whose pixels begin at multiples of 16 bytes."""
    return channels_last(shape, up(shape[1], 16 // dtype.itemsize))


def _pitch(x: TensorView) -> int | None:
    """Elements between pixels of ``x`` (NCHW); those of one pixel have the pitch that is asked for: that of its channels."""
    n, c, h, w = x.shape
    pitch = conv_maps.pitch_of(x)
    return up(c, conv_maps.aligned(x)) if pitch is not None and n * h * w == 1 else pitch


def _stored_at(out: TensorView) -> bool:
    """Whether the kernel stores at an image's pitch: what it stores from registers (fp32) is at that of its own channels, and so not
    in a wider image's part."""
    pitch = _pitch(out)
    return pitch is not None and (out.dtype.itemsize < 4 or pitch == up(out.shape[1], 16 // out.dtype.itemsize))


def _with_pitch(b: Builder, op: Op, x: TensorView) -> TensorView:
    """``x`` (NCHW) in an order that TMA can read: itself, or a copy (one for all who ask)."""
    if conv_maps.pitch_of(x) is not None:
        return x
    key = (x, ())
    if key not in b._copies:
        made = b.new(f"{op.outputs[0].name}.nhwc", x.dtype, x.shape, _pixels(x.shape, x.dtype))
        copy(b, op, x, made)
        b._copies[key] = made
    return b._copies[key]


def _padded_image(b: Builder, op: Op, x: TensorView, pads: tuple[int, ...], zero: int) -> TensorView:
    """A copy of an image with the zero point around it: TMA pads with zeros (one for all who ask)."""
    key = (x, (*pads, zero))
    if key not in b._copies:
        (n, c, h, w), (top, left, bottom, right) = x.shape, pads
        shape = (n, c, h + top + bottom, w + left + right)
        made = b.new(f"{op.outputs[0].name}.padded", x.dtype, shape, _pixels(shape, x.dtype))
        pitch = conv_maps.pitch_of(x)
        assert pitch is not None
        reads = [
            x,
            b.constant(np.array([0, 0, top, left, 0, 0, bottom, right]), "pads"),
            b.constant(np.array(zero, x.dtype), "zero"),
        ]
        emit_description(
            b, op, pool_int8.recipe(x.dtype.name, b.arch), pool_int8.pad_image((n, h, w, c), pitch, (top, left, bottom, right), zero),
            {"input": x, "output": made}, kind="Pad", attrs={"mode": "constant"}, reads=reads, writes=[made],
        )  # fmt: skip
        b._copies[key] = made
    return b._copies[key]


def refusal(b: Builder, op: Op) -> str | None:
    """Why no kernel has the types, stages or constants of an 8-bit product."""
    x = b.graph.type(op.inputs[0]).dtype.name  # type: ignore[arg-type]
    if (needed := "fp8" if "float8" in x else "int8") not in GPU_PRECISIONS.get(b.arch, ()):
        return f"the tensor cores of {b.arch} do not multiply {needed}"
    if b.graph.constant_value(op.inputs[1]) is None or b.graph.constant_value(op.inputs[2]) is None:
        return "its weights and scales are not constant"
    out = op.outputs[0].type
    if out.dtype.name not in EIGHT_BITS and out.dtype not in (FP16, BF16, FP32):
        return f"its results are not {out.dtype.name}"
    if 0 in out.static_shape:
        return "it is empty"
    if x not in EIGHT_BITS or (out.dtype.name in EIGHT_BITS and ("float8" in x) != ("float8" in out.dtype.name)):
        return f"no kernel turns {x} into {out.dtype.name}"
    names = [str(s[0]) for s in op.attrs.stages]
    missing = sorted(set(names) - render.STAGES.keys())
    if missing or len(render.constants_of(op.attrs.stages)) > conv_params.MAX_CONSTANTS:
        return f"it has stages that the kernel has not: {', '.join(missing) or 'too many constants'}"
    if op.input(3) is not None:
        residual = b.graph.type(op.inputs[3])  # type: ignore[arg-type]
        if residual.dtype.itemsize != out.dtype.itemsize:
            return f"its residual is of {residual.dtype.name}, its result of {out.dtype.name}"
    return None


def _quantized_image(b: Builder, value: Value) -> tuple[Value, float, str] | None:
    """The float image, scale and 8-bit type of a value that is nothing but an image quantized with zero point 0."""
    op = b.graph.op(value)
    while op.kind == "Layout" and op.inputs[0] is not None:
        op = b.graph.op(op.inputs[0])
    found = quantization(b.graph, op)
    if found is None or found[1].zero or found[1].dtype not in ("int8", "uint8"):
        return None
    source, to = found
    return (source, to.scale, to.dtype) if b.graph.type(source).dtype in (FP32, FP16) else None


def _stem(
    b: Builder, op: Op, weight: Array, strides: tuple[int, ...], pads: tuple[int, ...], dilations: tuple[int, ...],
    together: int, suits: Callable[[Builder, conv_problem.Problem], bool],
) -> tuple[conv_maps.Feed, TensorView] | None:  # fmt: skip
    """A strided convolution of a quantized few-channel image: blocks of pixels as channels, so many neighbouring blocks read
    ``together`` (see :func:`optdnn.kernels.quantized.stem.overlapped`), the quantization folded in. Also what the convolution reads,
    as NCHW. ``suits``: whether there is a kernel for the problem that it becomes."""
    channels, stride = weight.shape[1], strides[0]
    few = channels * stride * stride <= quantized.LANES and strides == (stride, stride) and stride > 1
    found = _quantized_image(b, op.inputs[0]) if few and set(dilations) == {1} else None  # type: ignore[arg-type]
    if found is None or len(op.outputs[0].type.static_shape) != 4:
        return None
    value, scale, dtype = found
    raw = b.operand(value)
    n, _, h, w = raw.shape
    source = conv_problem.Source(h, w, channels, weight.shape[2:], strides, pads)  # type: ignore[arg-type]
    if not raw.dense or conv_problem.space_to_depth(source).channels != quantized.LANES:
        return None
    seen, (before, _, width) = quantized.overlapped(source, together), quantized.row_padding(source, together)
    out, added = op.outputs[0].type, op.input(3)
    residual = "" if added is None else map_dtype(b.graph.type(added).dtype)
    channels_out = up(out.static_shape[1], 16 // out.dtype.itemsize)
    if not suits(
        b, conv_problem.Problem(n, channels_out, (seen,), tuple(op.attrs.stages), dtype, map_dtype(out.dtype), residual)
    ):
        return None
    row = width * quantized.LANES
    blocks = b.new(
        f"{op.outputs[0].name}.blocks", DTYPES[dtype], (n, quantized.LANES, seen.height, width),
        (seen.height * row, 1, row, quantized.LANES),
    )  # fmt: skip
    made = pool_int8.pack_image(n, source, together, requantize.QuantParams(dtype, scale))
    recipe = pool_int8.recipe(dtype, b.arch, channels=channels, block=stride, image=raw.dtype.name)
    attrs = {
        "block": stride,
        "lanes": quantized.LANES,
        "before": before,
        "width": width,
        "scale": scale,
        "dtype": DTYPES[dtype],
    }
    emit_description(
        b,
        op,
        recipe,
        made,
        {"input": raw, "output": blocks},
        kind="QuantizedBlocks",
        attrs=attrs,
        reads=[raw],
        writes=[blocks],
    )
    feed = conv_maps.Feed(
        blocks, quantized.overlapped_weights(source, weight, together), seen.stride, seen.padding, seen.dilation, seen
    )
    reads = blocks.view((n, seen.channels, seen.height, seen.width), (seen.height * row, 1, row, quantized.LANES))
    return feed, reads


def problem_of(
    op: Op, feed: conv_maps.Feed, residual: TensorView | None, out: TensorView, reads: TensorView
) -> conv_problem.Problem:
    """What the launch computes; its arguments are :func:`_emit`'s."""
    a, second = op.attrs, map_dtype(residual.dtype) if residual is not None else ""
    return conv_problem.Problem(
        out.shape[0], up(out.shape[1], 16 // out.dtype.itemsize * feed.bands), (feed.source,), tuple(a.stages), map_dtype(reads.dtype),
        map_dtype(out.dtype), second, a.zero != 0, bands=feed.bands,
    )  # fmt: skip


def numbers_of(op: Op, residual: TensorView | None) -> Requantize:
    """The numbers of its epilogue that are the whole tensor's."""
    a, second = op.attrs, map_dtype(residual.dtype) if residual is not None else ""
    return Requantize(a.residual_scale, requantize.byte_bias(second) + a.residual_zero, a.low, a.high, a.zero)


def meaning_of(op: Op, feed: conv_maps.Feed) -> dict[str, Any]:
    """The attributes of what the launch computes."""
    attrs = {k: v for k, v in attrs_dict(op.attrs).items() if k not in ("strides", "pads", "dilations", "group")}
    geometry = {"strides": feed.strides, "pads": feed.pads, "dilations": feed.dilations, "group": feed.bands}
    return attrs | geometry | {"input_zero": 0}


def _emit(
    b: Builder,
    op: Op,
    feed: conv_maps.Feed,
    residual: TensorView | None,
    out: TensorView,
    reads: TensorView,
    config: Any,
) -> str:
    """The launch; ``out`` and ``residual`` are NCHW, ``reads`` is operand 0 as the meaning reads it (its logical shape)."""
    channel = b.graph.constant_value(op.inputs[2])
    assert channel is not None
    channels = out.shape[1]
    problem = problem_of(op, feed, residual, out, reads)
    dense = all(_pitch(p) == problem.channels for p in (out, residual) if p is not None)
    offers = (
        conv_sm90.ranked(problem, dense, b.gpu)
        if config is None
        else (conv_sm90.offered(problem, config, dense, b.gpu),)
    )
    b.offer(offers)
    config = offers[0].config
    way = ("conv_sm90", problem.block, problem.out_item, problem.dtype)
    made = b.kept.once(way, [feed.weight], lambda: conv_params.pack_weights(problem, [feed.weight]), final=True)
    packed = b.constant(made, f"{op.outputs[0].name}.weights")
    pairs = b.constant(requantize.pad_channels(channel), f"{op.outputs[0].name}.scales")
    operands = conv_sm90.Operands(packed, pairs, out, residual)
    weight = _weight_view(packed, problem, feed)
    tail = [residual] if residual is not None else []
    meaning = ("QuantizedConv", meaning_of(op, feed), [reads, weight, pairs.view((channels, 2), (2, 1)), *tail])
    conv_sm90.launch(b, op, problem, config, [feed], operands, meaning, numbers_of(op, residual))
    return str(config)


def _has_room(b: Builder, x: TensorView, *, alone: bool) -> bool:
    """Whether there is room behind the last channel of ``x`` (NCHW) for all that a kernel reads or writes: whole 16 bytes.

    Between pixels their pitch leaves it; of one pixel the buffer must, which another tensor shares where ``x`` is not ``alone``.
    """
    n, c, h, w = x.shape
    channels = up(c, conv_maps.aligned(x))
    if n * h * w != 1 or c == channels:
        return True
    return alone and x.offset + channels <= conv_maps.elements_around(b, x)


def _roomy(b: Builder, op: Op, x: TensorView) -> TensorView:
    """The residual ``x`` (NCHW), or a copy with room for what is read behind its last channel."""
    if _has_room(b, x, alone=True):
        return x
    wide = b.new(f"{op.outputs[0].name}.residual", x.dtype, x.shape, _pixels(x.shape, x.dtype))
    copy(b, op, x, wide)
    return wide


def _weight_view(packed: TensorView, problem: conv_problem.Problem, feed: conv_maps.Feed) -> TensorView:
    """The logical weights inside the packed ones: OIHW, or ``[sixteens, 8, 2, i, h, w]`` where rows are permuted."""
    o, i, r, s = feed.weight.shape
    depth, lane = problem.k_steps * problem.block, up(problem.sources[0].channels, problem.block)
    if problem.out_item > 1:
        return packed.view((o, i, r, s), (depth, 1, s * lane, lane))
    return packed.view((up(o, 16) // 16, 8, 2, i, r, s), (16 * depth, depth, 8 * depth, 1, s * lane, lane))


def geometry_refusal(b: Builder, op: Op) -> str | None:
    """Why Hopper's kernels do not walk as the convolution does."""
    a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
    assert weight is not None
    geometry = (weight.shape[2:], a.strides, a.pads, a.dilations)
    return conv_sm90.refuse(b.arch, b.graph.type(op.inputs[0]).dtype.name, [geometry])  # type: ignore[arg-type]


def axes_of(b: Builder, op: Op) -> int:
    """Spatial axes of a convolution."""
    weight = b.graph.constant_value(op.inputs[1])
    assert weight is not None
    return weight.ndim - 2


class HopperQuantizedConv(DryRunConfigs):
    """Ungrouped convolutions of int8, uint8 or fp8 over one or two spatial axes."""

    name = "conv_sm90_8bit"
    together: ClassVar[int] = 2
    """Blocks of pixels of a stem's image that are read as one pixel: two fill the 32 bytes of one product's depth."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if op.attrs.group != 1 or axes_of(b, op) not in (1, 2):
            return f"it has {op.attrs.group} groups and {axes_of(b, op)} spatial axes"
        return geometry_refusal(b, op)

    def read(self, name: str) -> Any:
        """See :class:`optdnn.kernels.tactic.Tactic`."""
        return conv_sm90.read(name)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        stem = _stem(b, op, *planar(weight, op.attrs), self.together, self._suits)
        if stem is not None:
            return self.emit_feed(b, op, *stem, config)
        feed = self.feed(b, op, weight)
        return self.emit_feed(b, op, feed, feed.x, config)

    @staticmethod
    def feed(b: Builder, op: Op, weight: Array, bands: int = 1) -> conv_maps.Feed:
        """The image as it is read, a zero point around it where there is one, and these weights."""
        assert op.inputs[0] is not None
        x = _with_pitch(b, op, image(b.operand(op.inputs[0])))
        weight, strides, pads, dilations = planar(weight, op.attrs)
        if op.attrs.input_zero and any(pads):
            x, pads = _padded_image(b, op, x, pads, op.attrs.input_zero), (0, 0, 0, 0)
        return conv_maps.Feed(x, weight, strides, pads, dilations, bands=bands)

    def emit_feed(self, b: Builder, op: Op, feed: conv_maps.Feed, x: TensorView, config: Any) -> str:
        """The launch and what it needs around it; ``x`` as in :func:`_emit`. Returns the configuration's name."""
        target = b.target(op.value)
        out = image(target)
        residual = None
        if op.input(3) is not None:
            residual = self._added(b, op, _with_pitch(b, op, image(b.operand(op.inputs[3]))))  # type: ignore[arg-type]
        between = out
        if not self._stored(b, op, out):
            between = b.new(f"{op.outputs[0].name}.conv", out.dtype, out.shape, _pixels(out.shape, out.dtype))
        used = self._launch(b, op, feed, residual, between, x, config)
        if between is not out:
            copy(b, op, between, out)
        return used

    @staticmethod
    def _suits(b: Builder, problem: conv_problem.Problem) -> bool:
        """Whether a stem of overlapping pixels can run."""
        return bool(conv_sm90.ranked(problem, True, b.gpu))

    @staticmethod
    def _added(b: Builder, op: Op, residual: TensorView) -> TensorView:
        """The residual as the launch reads it."""
        return _roomy(b, op, residual)

    @staticmethod
    def _stored(b: Builder, op: Op, out: TensorView) -> bool:
        """Whether the launch can write there."""
        return _stored_at(out) and _has_room(b, out, alone=op.value not in b.reserved)

    @staticmethod
    def _launch(
        b: Builder,
        op: Op,
        feed: conv_maps.Feed,
        residual: TensorView | None,
        out: TensorView,
        reads: TensorView,
        config: Any,
    ) -> str:
        return _emit(b, op, feed, residual, out, reads, config)


class HopperQuantizedMatMul(DryRunConfigs):
    """Products of rows of int8, uint8 or fp8 with a constant matrix: a 1 x 1 convolution over rows."""

    name = "gemm_sm90_8bit"
    conv: ClassVar[type[HopperQuantizedConv]] = HopperQuantizedConv
    """Whose launches are made."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        return refusal(b, op) or conv_sm90.refuse(b.arch, b.graph.type(op.inputs[0]).dtype.name, [])  # type: ignore[arg-type]

    def read(self, name: str) -> Any:
        """See :class:`optdnn.kernels.tactic.Tactic`."""
        return conv_sm90.read(name)

    def place(self, b: Builder, op: Op) -> None:
        """Rows that begin at multiples of 16 bytes, unless the place is reserved."""
        out, t = op.outputs[0], op.outputs[0].type
        unit = 16 // t.dtype.itemsize
        if op.value not in b.reserved and t.static_shape[-1] % unit:
            b.place[op.value] = b.new(out.name, t.dtype, t.static_shape, _padded(t.static_shape, unit))
        super().place(b, op)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        assert op.inputs[0] is not None
        x = self._rows(b, op, b.operand(op.inputs[0]))
        residual = None
        if op.input(3) is not None:
            residual = self.conv._added(b, op, self._rows(b, op, b.operand(op.inputs[3])))  # type: ignore[arg-type]
        feed = conv_maps.Feed(x, np.ascontiguousarray(weight)[:, :, None, None], (1, 1), (0, 0, 0, 0), (1, 1))
        unit = 16 // op.outputs[0].type.dtype.itemsize
        target = b.target(op.value)
        between, out = target, _rows_of(target)
        if out is None or not self.conv._stored(b, op, out):
            between = b.new(f"{op.outputs[0].name}.gemm", target.dtype, target.shape, _padded(target.shape, unit))
            out = _rows_of(between)
            assert out is not None
        used = self.conv._launch(b, op, feed, residual, out, x, config)
        if between is not target:
            copy(b, op, between, target)
        return used

    @staticmethod
    def _rows(b: Builder, op: Op, x: TensorView) -> TensorView:
        found = _rows_of(x)
        if found is None:
            dense = b.new(f"{op.outputs[0].name}.rows", x.dtype, x.shape, _padded(x.shape, 16 // x.dtype.itemsize))
            copy(b, op, x, dense)
            found = _rows_of(dense)
            assert found is not None
        return found


def _padded(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Strides of a dense tensor but for rows that start at multiples of ``unit`` elements."""
    return (*(s * up(shape[-1], unit) for s in row_major(shape[:-1])), 1)


def _rows_of(x: TensorView) -> TensorView | None:
    """A tensor of any rank as NCHW of 1 x 1 images, one per row, where its rows lie at one pitch that TMA can read."""
    flat = reshaped(x, (int(np.prod(x.shape[:-1])), x.shape[-1]))
    if flat is None:
        return None
    (n, k), (pitch, step) = flat.shape, flat.strides
    if k > 1 and step != 1:
        return None
    found = flat.view((n, k, 1, 1), (pitch if n > 1 else up(k, conv_maps.aligned(x)), 1, pitch, pitch))
    return found if conv_maps.pitch_of(found) is not None else None
