"""Tactics of convolutions: Hopper's implicit GEMM first, the vectorized depthwise kernel, and a direct one that runs anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, products, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import Convolution, result_place, result_view
from optdnn.kernels.conv.stem_input import channel_affine, emit_space_to_depth, pixel_source
from optdnn.kernels.pointwise.pointwise import copy, emit_pointwise, shared_copy
from optdnn.kernels.pointwise.prologue import Prologue, plan_prologue, rendered_prologue
from optdnn.kernels.tactic import Region
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.runtime.cuda.compile import render
from optdnn.types import BF16, FP16, Array

FEW_CHANNELS = 4
"""A strided convolution of up to this many channels reads blocks of pixels as channels instead."""


def bias_of(b: Builder, op: Op) -> Array | None:
    """The constant bias operand in fp32, or None where it is absent."""
    array = b.graph.constant_value(op.input(2))
    return None if array is None else array.astype(np.float32)


_Pair = tuple[int, int]


def planar(weight: Array, a: ConvAttrs) -> tuple[Array, _Pair, tuple[int, int, int, int], _Pair]:
    """Weights, strides, pads and dilations of a convolution over one or two axes as those of one over two."""
    (sh, sw), (dh, dw) = (1, *a.strides)[-2:], (1, *a.dilations)[-2:]
    if weight.ndim == 3:
        return weight[:, :, None], (1, sw), (0, a.pads[0], 0, a.pads[1]), (1, dw)
    top, left, bottom, right = a.pads
    return weight, (sh, sw), (top, left, bottom, right), (dh, dw)


def entered(b: Builder, op: Op) -> TensorView:
    """Operand 0, or what :func:`entering` makes of it."""
    assert op.inputs[0] is not None
    x = b.source(op.inputs[0])
    return unmade(x.dtype, x.shape, channels_last(x.shape, up(x.shape[1], 8))) if op.attrs.prologue else x


def entering(b: Builder, op: Op) -> TensorView:
    """Operand 0 with the operator's prologue applied, by a kernel of its own where there is one."""
    assert op.inputs[0] is not None
    x = b.operand(op.inputs[0])
    if not op.attrs.prologue:
        return x
    out = b.made(entered(b, op), f"{op.outputs[0].name}.prologue")
    operands = [x, *(None if v is None else b.operand(v) for v in op.inputs[1:])]
    emit_pointwise(b, op, *only_used(op.attrs.prologue, operands), out)
    return out


def only_used(
    stages: Sequence[Stage], operands: Sequence[TensorView | None]
) -> tuple[list[Stage], list[TensorView | None]]:
    """The stages with only those operands (and operand 0) that they read."""
    used = sorted({a for s in stages for a in s.args if a is not None and a > 0})
    slot = {0: 0, **{a: i + 1 for i, a in enumerate(used)}}
    moved = [replace(s, args=tuple(a if a is None or a < 0 else slot[a] for a in s.args)) for s in stages]
    return moved, [operands[0], *(operands[a] for a in used)]


def finish(b: Builder, op: Op, ep: Epilogue, between: TensorView, target: TensorView) -> None:
    """What the kernel left of the epilogue: from ``between`` to the place of the result."""
    if between is target:
        return
    if not ep.rest:
        copy(b, op, between, target)
    else:
        emit_pointwise(b, op, ep.rest, [between, *map(b.operand, ep.rest_operands)], target)


def with_pitch(b: Builder, op: Op, x: TensorView, *, added: bool = False, unit: int = 8) -> TensorView:
    """``x`` in the order that :func:`.maps.readable` says: itself, or a copy (one for all who ask)."""
    wanted = conv_maps.readable(b, x, added=added, unit=unit)
    return x if wanted is x else shared_copy(b, op, x, "nhwc", wanted.strides)


def image(x: TensorView) -> TensorView:
    """A 1-D or 2-D feature map as NCHW."""
    if len(x.shape) == 4:
        return x
    (n, c, w), (sn, sc, sw) = x.shape, x.strides
    return x.view((n, c, 1, w), (sn, sc, sw * w, sw))


class ImageConv(hopper_launch.HopperTactic):
    """What the tactics have in common that make a convolution one launch of Hopper's kernels, and leave what it cannot do of the
    epilogue to a launch behind it."""

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The launch's images where they lie, or are still to be made."""
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        feeds = self.feeds(b, op, ep)
        residual = None
        if ep.residual is not None:
            residual = conv_maps.readable(b, image(b.source(ep.residual)), added=True)
        target = b.result(op.value)
        out = image(result_view(ep, target, conv_maps.storable(b, image(target))))
        return Convolution(feeds, None, ep, residual, out)

    def feeds(self, b: Builder, op: Op, ep: Epilogue) -> tuple[conv_maps.Feed, ...]:
        """The sources, whose weights may lack their order. What these add to the sum is taken from the epilogue."""
        raise NotImplementedError

    def problem(self, b: Builder, op: Op) -> conv_problem.Problem:
        return hopper_launch.problem_of(b, op, self.convolution(b, op))

    def emit_feeds(
        self, b: Builder, op: Op, feeds: Sequence[conv_maps.Feed], bias: Array | None, ep: Epilogue, config: Any,
        before: Prologue | None = None, covered: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """The launch, and what it leaves of the epilogue. ``covered``: nodes besides the operator's that it computes."""
        problem, target = self.problem(b, op), b.target(op.value)
        op = replace(op, src=op.src | covered)
        residual = with_pitch(b, op, image(b.operand(ep.residual)), added=True) if ep.residual is not None else None
        between = result_place(b, op, ep, target, conv_maps.storable(b, image(target)))
        convolution = Convolution(tuple(feeds), bias, ep, residual, image(between))
        hopper_launch.emit_conv(b, op, convolution, problem, config, before)
        finish(b, op, ep, between, target)


class HopperConv(ImageConv):
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
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        if 0 in op.outputs[0].type.static_shape or 0 in weight.shape:
            return "it is empty"
        geometry = (weight.shape[2:], a.strides, a.pads, a.dilations)
        return hopper_launch.refuse(b.arch, products(b, op), [geometry])

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """Convolutions whose results are added."""
        others = [(v, graph.op(v)) for v in op.inputs[1:] if v is not None]
        return [other for v, other in others if other.kind == "Conv" and graph.sole_user(v) == op]

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution, and the one whose result is added, if one launch can sum both."""
        other = self.added(b, op, plan_epilogue(b.graph, op, channel_axis=1))
        return Region(op) if other is None else Region(op, before=(other,))

    def problem(self, b: Builder, op: Op) -> conv_problem.Problem:
        """With the prologue that the launch applies itself."""
        return hopper_launch.problem_of(b, op, self.convolution(b, op), self._prologue(b, op) or ())

    def feeds(self, b: Builder, op: Op, ep: Epilogue) -> tuple[conv_maps.Feed, ...]:
        """The image (or blocks of its pixels), and that of the convolution that is added."""
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        feed = blocks_of(b, op, *planar(weight, op.attrs))
        if feed is None:
            feed = conv_maps.Feed(conv_maps.readable(b, image(entered(b, op))), *planar(weight, op.attrs))
        other = self.added(b, op, ep)
        if other is None:
            return (feed,)
        ep.drop_residual()
        added = b.graph.constant_value(other.inputs[1])
        assert added is not None
        assert other.inputs[0] is not None
        x, a = conv_maps.readable(b, b.source(other.inputs[0])), other.attrs
        return feed, conv_maps.Feed(x, added, a.strides, a.pads, a.dilations)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        ep, before = plan_epilogue(b.graph, op, channel_axis=1), None
        bias = ep.added_to(bias_of(b, op))
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        assert op.inputs[0] is not None
        feed = stem_feed(b, op, *planar(weight, op.attrs))
        if feed is None:
            if self._prologue(b, op) is None:
                x = with_pitch(b, op, image(entering(b, op)))
            else:
                x = image(b.operand(op.inputs[0]))
                before = plan_prologue(b, op, x)
            feed = conv_maps.Feed(x, *planar(weight, op.attrs))
        feeds, covered = [feed], frozenset[str]()
        other = self.added(b, op, ep)
        if other is not None:
            ep.drop_residual()
            feed, more = self._second(b, other)
            feeds.append(feed)
            if more is not None:
                bias = more if bias is None else bias + more
            covered = other.src
        self.emit_feeds(b, op, feeds, bias, ep, config, before, covered)

    @staticmethod
    def _prologue(b: Builder, op: Op) -> list[render.Stage] | None:
        """The prologue, if the launch itself can apply it: each pixel is read once, by channels."""
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        assert op.inputs[0] is not None
        if not op.attrs.prologue or not is_half(op):
            return None
        feed = conv_maps.Feed(image(b.source(op.inputs[0])), *planar(weight, op.attrs))
        if feed.source.mode != conv_problem.ROWS or conv_maps.pitch_of(feed.x) is None:
            return None
        return rendered_prologue(b, op, feed.x)

    def added(self, b: Builder, op: Op, ep: Epilogue) -> Op | None:
        """The convolution whose result is added first, which can be a second source of this one: one sum over both, nothing stored
        between. It must have no other user and no stages of its own. ``ep``: the epilogue of ``op``."""
        if (
            ep.residual is None
            or not ep.stages
            or self._prologue(b, op) is not None
            or ep.rendered[0] != ("add",)
            or len(op.outputs[0].type.static_shape) != 4
        ):
            return None
        other = b.graph.op(ep.residual)
        plain = other.kind == "Conv" and not other.attrs.prologue and not other.attrs.epilogue
        if not plain or b.graph.sole_user(ep.residual) != op or self.refuse(b, other) is not None:
            return None
        weight = b.graph.constant_value(other.inputs[1])
        assert weight is not None
        assert other.inputs[0] is not None
        return other if weight.shape[1] > FEW_CHANNELS else None

    @staticmethod
    def _second(b: Builder, other: Op) -> tuple[conv_maps.Feed, Array | None]:
        """The second source, and its bias."""
        weight, a = b.graph.constant_value(other.inputs[1]), other.attrs
        assert weight is not None
        assert other.inputs[0] is not None
        x = with_pitch(b, other, b.operand(other.inputs[0]))
        return conv_maps.Feed(x, weight, a.strides, a.pads, a.dilations), bias_of(b, other)


def blocks_of(
    b: Builder, op: Op, weight: Array, strides: _Pair, pads: tuple[int, int, int, int], dilations: _Pair
) -> conv_maps.Feed | None:
    """A strided convolution of a few-channel image as one of stride 1 over blocks of pixels, which are still to be made; None for other
    convolutions."""
    few = weight.shape[1] <= FEW_CHANNELS and strides[0] == strides[1] > 1 and set(dilations) == {1}
    out = op.outputs[0].type
    if not few or channel_affine(b, op) is None or len(out.static_shape) != 4:
        return None
    assert op.inputs[0] is not None
    n, c, h, w = b.graph.type(pixel_source(b, op.inputs[0])).static_shape
    source = conv_problem.Source(h, w, c, weight.shape[2:], strides, pads)
    made = conv_problem.space_to_depth(source)
    shape = (n, made.channels, made.height, made.width)
    blocks = unmade(out.dtype, shape, channels_last(shape, made.channels))
    packed = conv_problem.space_to_depth_weights(source, weight)
    return conv_maps.Feed(blocks, packed, made.stride, made.padding, made.dilation)


def stem_feed(
    b: Builder, op: Op, weight: Array, strides: _Pair, pads: tuple[int, int, int, int], dilations: _Pair
) -> conv_maps.Feed | None:
    """:func:`blocks_of`, with the blocks made by a launch of their own: the cast and the image's normalization are folded in."""
    feed = blocks_of(b, op, weight, strides, pads, dilations)
    if feed is None:
        return None
    assert op.inputs[0] is not None
    blocks = b.made(feed.x, f"{op.outputs[0].name}.blocks")
    emit_space_to_depth(b, op, b.operand(pixel_source(b, op.inputs[0])), blocks, strides[0], channel_affine(b, op))
    return replace(feed, x=blocks)


def is_half(op: Op) -> bool:
    return op.outputs[0].type.dtype in (FP16, BF16)
