"""Tactics of ungrouped convolutions on Hopper's implicit GEMM, and helpers that other tactics of convolutions share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.activations import keeps_zeros
from optdnn.ir.epilogue import Epilogue, plan_epilogue, read_once
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, products, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import Convolution, result_place
from optdnn.kernels.conv.row_forms import MOMENT_ROWS
from optdnn.kernels.conv.space_to_depth import space_to_depth, space_to_depth_weights
from optdnn.kernels.conv.stem_input import channel_affine, emit_space_to_depth, pixel_source
from optdnn.kernels.pointwise.pointwise import emit_pointwise, shared_copy
from optdnn.kernels.pointwise.prologue import rendered_prologue
from optdnn.kernels.tactic import Region, least_seconds
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs, of_one_channel
from optdnn.runtime.cuda.compile import render
from optdnn.types import BF16, FP16, Array

SEPARATE_S, SEPARATE_RATE = 1.2e-6, 3e12
"""A separate launch for a prologue: its seconds as a dependent launch, and its bytes per second."""
FEW_CHANNELS = 4
"""A strided convolution of up to this many channels reads blocks of pixels as channels."""


def bias_of(b: Builder, op: Op) -> Array | None:
    """The constant bias operand in fp32, or None if there is none."""
    array = b.graph.constant_value(op.input(2))
    return None if array is None else array.astype(np.float32)


def has_computed_bias(b: Builder, op: Op) -> bool:
    """Whether the operator has a bias that is not constant."""
    return op.input(2) is not None and bias_of(b, op) is None


_Pair = tuple[int, int]


def folded(b: Builder, op: Op) -> int:
    """Row length with which a 1-D convolution becomes one of an image: its dilation; 0 if the line stays one row.

    In rows of that length, taps are vertical neighbors, so TMA can read a line whose taps are far apart (WaveNet).
    """
    a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
    if weight is None or weight.ndim != 3 or op.inputs[0] is None:
        return 0
    (dilation,), pads, length = a.dilations, a.pads, b.graph.type(op.inputs[0]).static_shape[-1]
    if hopper_launch.far(weight.shape[2:], pads, a.dilations) is None or set(a.strides) != {1}:
        return 0
    whole = not any(n % dilation for n in (length, *pads)) and op.outputs[0].type.static_shape[-1] == length
    return dilation if whole else 0


def planar(weight: Array, a: ConvAttrs, width: int = 0) -> tuple[Array, _Pair, tuple[int, int, int, int], _Pair]:
    """Weights, strides, pads and dilations of a convolution over one or two axes, as a convolution over two axes. ``width``: row
    length of a line that is folded into rows (:func:`folded`); 0: a line is one row."""
    if width:
        before, after = (pad // width for pad in a.pads)
        return (
            weight[:, :, :, None],
            (1, 1),
            (before, 0, after, 0),
            (a.dilations[0] // width if weight.shape[2] > 1 else 1, 1),
        )
    (sh, sw), (dh, dw) = (1, *a.strides)[-2:], (1, *a.dilations)[-2:]
    if weight.ndim == 3:
        return weight[:, :, None], (1, sw), (0, a.pads[0], 0, a.pads[1]), (1, dw)
    top, left, bottom, right = a.pads
    return weight, (sh, sw), (top, left, bottom, right), (dh, dw)


def entering(b: Builder, op: Op) -> TensorView:
    """Operand 0, with the operator's prologue applied by a separate launch if it has one."""
    x = b.source(op.inputs[0])
    if not op.attrs.prologue:
        return x

    def make() -> int:
        out = b.new(f"{op.outputs[0].name}.prologue", x.dtype, x.shape, strides)
        operands = [b.made(x), *(None if v is None else b.operand(v) for v in op.inputs[1:])]
        emit_pointwise(b, op, *only_used(op.attrs.prologue, operands), out)
        return out.buffer

    strides = channels_last(x.shape, up(x.shape[1], 8))
    return unmade(x.dtype, x.shape, strides, make)


def only_used(
    stages: Sequence[Stage], operands: Sequence[TensorView | None]
) -> tuple[list[Stage], list[TensorView | None]]:
    """The stages with only those operands (and operand 0) that they read."""
    used = sorted({a for s in stages for a in s.args if a is not None and a > 0})
    slot = {0: 0, **{a: i + 1 for i, a in enumerate(used)}}
    moved = [replace(s, args=tuple(a if a is None or a < 0 else slot[a] for a in s.args)) for s in stages]
    return moved, [operands[0], *(operands[a] for a in used)]


def with_pitch(b: Builder, op: Op, x: TensorView, *, added: bool = False, unit: int = 8) -> TensorView:
    """``x`` (logical NCHW) in a channels-last order that TMA can read: itself, or a copy, shared by all readers, that is still
    to be made. ``added``: ``x`` is a residual, which is read in the way results are written. ``unit``: the pitch of a copy is a
    multiple of this."""
    if conv_maps.storable(b, x) if added else conv_maps.pitch_of(x) is not None:
        return x
    return shared_copy(b, op, x, "nhwc", channels_last(x.shape, up(x.shape[1], unit)))


def image(x: TensorView, width: int = 0) -> TensorView:
    """A 1-D or 2-D feature map as NCHW. ``width``: row length into which a 1-D map is folded (0: one row)."""
    if len(x.shape) == 4:
        return x
    (n, c, w), (sn, sc, sw) = x.shape, x.strides
    row = width or w
    return x.view((n, c, w // row if row else 1, row), (sn, sc, sw * row, sw))


def on_images(
    b: Builder, op: Op, feeds: tuple[conv_maps.Feed, ...], bias: Array | None, ep: Epilogue, *, added: bool = True, width: int = 0
) -> Convolution:  # fmt: skip
    """A convolution of channels-last images, without the stages that ``ep`` leaves to another launch. ``added``: False if the
    kernel needs no :func:`storable` tensors; ``width``: as of :func:`image`."""
    residual = None if ep.residual is None else with_pitch(b, op, image(b.source(ep.residual), width), added=added)
    target = b.result(op.value)
    place = image(target, width)
    fits = conv_maps.storable(b, place) if added else conv_maps.pitch_of(place) is not None
    between = result_place(b, op, ep, target, fits)
    return Convolution(feeds, bias, ep, residual, image(between, width), between)


class HopperConv(hopper_launch.HopperKernel):
    """Ungrouped convolutions of 16-bit floats over one or two spatial axes."""

    name = "conv_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None:
            return "its weights are not constant"
        if weight.ndim not in (3, 4):
            return f"it has {weight.ndim - 2} spatial axes"
        if a.group != 1:
            return f"it has {a.group} groups"
        if has_computed_bias(b, op):
            return "its bias is not constant"
        if 0 in op.outputs[0].type.static_shape or 0 in weight.shape:
            return "it is empty"
        if of_one_channel(weight.shape):
            return "its one filter of one channel would leave most of a tile empty"
        if (width := folded(b, op)) != 0:
            rows, strides, pads, dilations = planar(weight, a, width)
            return hopper_launch.refuse(
                b.arch, products(b, op), [(rows.shape[2:], strides, pads, dilations)], parts=self.parts
            )
        geometry = (weight.shape[2:], a.strides, a.pads, a.dilations)
        return hopper_launch.refuse(b.arch, products(b, op), [geometry], parts=self.parts)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The convolutions whose results this one adds."""
        others = [(v, graph.op(v)) for v in op.inputs[1:] if v is not None]
        return [other for v, other in others if other.kind == "Conv" and graph.sole_user(v) == op]

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution, and the one whose result it adds, if one launch can sum both."""
        other = self.added(b, op, planned(b, op))
        return Region(op) if other is None else Region(op, before=(other,))

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution of the image (or of blocks of its pixels), with the one that is added as a second source."""
        ep, weight, prologue = planned(b, op), b.weights(op), None
        other = self.added(b, op, ep)
        width = row_width(b, op, *(() if other is None else (other,)))
        assert width is not None
        geometry = planar(weight, op.attrs, width)
        bias, feed = ep.added_to(bias_of(b, op)), blocks_of(b, op, *geometry)
        if feed is None:
            prologue = self._prologue(b, op, width)
            x = b.source(op.inputs[0]) if prologue is not None else entering(b, op)
            x = image(x, width) if prologue is not None else with_pitch(b, op, image(x, width))
            feed = conv_maps.Feed(x, *geometry)
        if other is None:
            return replace(on_images(b, op, (feed,), bias, ep, width=width), prologue=tuple(prologue or ()))
        ep.drop_residual()
        second, more = self._second(b, other, width)
        if more is not None:
            bias = more if bias is None else bias + more
        return replace(on_images(b, op, (feed, second), bias, ep, width=width), covered=other.src)

    def _prologue(self, b: Builder, op: Op, width: int) -> list[render.Stage] | None:
        """The prologue, if the launch should apply it to pixels in channels-last order. Else None.

        It applies scales, shifts and gates if it reads each pixel once. It applies activations alone, for each tap, if the cost model
        prefers that to a launch. ``width``: as of :func:`image`."""
        weight = b.weights(op)
        if not op.attrs.prologue or not (is_half(op) or self.parts):
            return None
        feed = conv_maps.Feed(image(b.source(op.inputs[0]), width), *planar(weight, op.attrs, width))
        if conv_maps.pitch_of(feed.x) is None:
            return None
        stages, rows = rendered_prologue(b, op, feed.x), feed.source.mode == conv_problem.ROWS
        if stages is None:
            return None
        if self.parts and (not rows or render.INEXACT.intersection(name for name, *_ in stages)):
            return None
        if not keeps_zeros(stages):
            return stages if rows else None
        if feed.source.mode == conv_problem.VOLUME or feed.bands > 1:
            return None
        plain = self.problem_of(b, op, on_images(b, op, (feed,), bias_of(b, op), planned(b, op), width=width))
        one, two = (least_seconds(self.offers(p, b.gpu)) for p in (replace(plain, prologue=tuple(stages)), plain))
        stored = 2 * math.prod(feed.x.shape) * feed.x.dtype.itemsize
        return stages if one < two + SEPARATE_S + stored / SEPARATE_RATE else None

    def added(self, b: Builder, op: Op, ep: Epilogue) -> Op | None:
        """The convolution whose result ``op`` adds first, if it can be a second source of the same launch; else None.

        One sum then covers both, and nothing is stored between them. The convolution must have no other user and no stages.
        ``ep``: the epilogue of ``op``."""
        if ep.residual is None or not ep.stages or ep.rendered[0] != ("add",):
            return None
        if (width := row_width(b, op)) is None or self._prologue(b, op, width) is not None:
            return None
        if len(op.outputs[0].type.static_shape) not in (3, 4):
            return None
        other = b.graph.op(ep.residual)
        plain = other.kind == "Conv" and not other.attrs.prologue and not other.attrs.epilogue
        if not plain or not self._reads(b, other) or b.graph.sole_user(ep.residual) != op:
            return None
        if not read_once(op, ep.residual):
            return None
        if HopperConv.refuse(self, b, other) is not None:
            return None
        return other if b.weights(other).shape[1] > FEW_CHANNELS and row_width(b, op, other) is not None else None

    def output_with_moments(self, b: Builder, op: Op) -> TensorView | None:
        """View of the output whose moments the launch can write, or None if it cannot write moments."""
        c = self.convolution(b, op)
        alone = len(c.feeds) == 1 and not c.ep.rest and self.problem_of(b, op, c).rows_alone
        return c.out if alone else None

    def launch(
        self, b: Builder, op: Op, c: Convolution, problem: conv_problem.Problem, config: hopper_launch.Config
    ) -> None:
        """Add the launch. It also writes the moments of every 8 pixels if a later launch normalizes the images
        (:mod:`optdnn.kernels.conv.normed`)."""
        if (moments := b.together.get(op.id)) is not None:
            problem = replace(problem, moments=True, moment_rows=MOMENT_ROWS)
        hopper_launch.emit_conv(b, op, c, problem, config, moments)

    def _second(self, b: Builder, other: Op, width: int = 0) -> tuple[conv_maps.Feed, Array | None]:
        """The second source, from the convolution that is added, and its bias. ``width``: as of :func:`image`."""
        assert other.inputs[0] is not None
        x = with_pitch(b, other, image(b.source(other.inputs[0]), width))
        return conv_maps.Feed(x, *planar(b.weights(other), other.attrs, width)), bias_of(b, other)

    def _reads(self, b: Builder, other: Op) -> bool:
        """Whether the input of ``other`` is stored. It is not if the launch of ``other`` also computes the operators before it."""
        return other.id not in b.joined


def row_width(b: Builder, *ops: Op) -> int | None:
    """Common row length (:func:`folded`) of the lines that the convolutions read; 0: a line is one row; None: they differ.

    A filter of one tap works with any row length.
    """
    free = [b.weights(op).shape[2:] == (1,) and set(op.attrs.strides) == {1} and not any(op.attrs.pads) for op in ops]
    widths = {folded(b, op) for op, any_rows in zip(ops, free, strict=True) if not any_rows} or {0}
    return widths.pop() if len(widths) == 1 else None


def blocks_of(
    b: Builder, op: Op, weight: Array, strides: _Pair, pads: tuple[int, int, int, int], dilations: _Pair
) -> conv_maps.Feed | None:
    """A strided convolution of a few-channel image as one of stride 1 over blocks of pixels; None for other convolutions.

    A separate launch makes the blocks. It also applies the cast and the image's normalization."""
    few = weight.shape[1] <= FEW_CHANNELS and strides[0] == strides[1] > 1 and set(dilations) == {1}
    out, normalization = op.outputs[0].type, channel_affine(b, op)
    if not few or normalization is None or len(out.static_shape) != 4:
        return None
    raw = b.source(pixel_source(b, op.inputs[0]))
    n, c, h, w = raw.shape
    source = conv_problem.Source(h, w, c, weight.shape[2:], strides, pads)
    made = space_to_depth(source)
    shape = (n, made.channels, made.height, made.width)

    def make() -> int:
        blocks = b.new(f"{op.outputs[0].name}.blocks", out.dtype, shape, channels_last(shape, made.channels))
        emit_space_to_depth(b, op, b.made(raw), blocks, strides[0], normalization)
        return blocks.buffer

    blocks = unmade(out.dtype, shape, channels_last(shape, made.channels), make)
    packed = space_to_depth_weights(source, weight)
    return conv_maps.Feed(blocks, packed, made.stride, made.padding, made.dilation)


def planned(b: Builder, op: Op) -> Epilogue:
    """The epilogue of a convolution, as the kernels for 16-bit floats take it."""
    return plan_epilogue(b.graph, op, channel_axis=1, allow_scale=True, allow_numbers=is_half(op))


def is_half(op: Op) -> bool:
    return op.outputs[0].type.dtype in (FP16, BF16)
