"""Transposed convolutions on the kernels of ordinary convolutions, as blocks of pixels (:mod:`optdnn.kernels.conv.subpixel`)."""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, products, up
from optdnn.kernels.conv import fp32 as conv_fp32
from optdnn.kernels.conv import fp32_kernel as fp32
from optdnn.kernels.conv import general, hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution, ConvolutionKernel, result_place
from optdnn.kernels.conv.hopper import bias_of, entering, has_computed_bias, image, with_pitch
from optdnn.kernels.conv.parameters import Scatter
from optdnn.kernels.conv.parts import slower_than_scalar
from optdnn.kernels.conv.subpixel import Axis, block_weights, emit_depth_to_space
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.ops.conv import resolved_transpose
from optdnn.runtime.reference.conv import transpose_pads
from optdnn.types import Array

PLANAR = 8
"""Fewest channels of a result with a plane per channel that is copied from a channels-last tensor. Written directly, 64 channels of
1024 x 1024 pixels took 1,739 us on an H200 (155 GB/s)."""


def axes_of(b: Builder, op: Op) -> tuple[tuple[Axis, Axis], tuple[int, int]]:
    """The two spatial axes and their dilations. A 1-D convolution has a first axis of size 1."""
    assert op.inputs[1] is not None
    x, weight = b.graph.type(op.inputs[0]), b.graph.type(op.inputs[1])  # type: ignore[arg-type]
    a = resolved_transpose(op.attrs, x, weight)
    sizes, outs, kernel = x.static_shape[2:], op.outputs[0].type.static_shape[2:], weight.static_shape[2:]
    found = []
    for i, (k, s, d) in enumerate(zip(kernel, a.strides, a.dilations, strict=True)):
        pad = a.pads[i]
        if a.auto_pad != "NOTSET":
            # The output is the input times the stride; the excess is cut off on both sides.
            total = (sizes[i] - 1) * s + (k - 1) * d + 1 + a.output_padding[i] - outs[i]
            pad = transpose_pads(max(total, 0), a.auto_pad)[0]
        found.append(Axis.of(sizes[i], outs[i], k, s, d, pad))
    if len(found) == 1:
        found, dilations = [Axis.of(1, 1, 1, 1, 1, 0), *found], (1, *a.dilations)
    else:
        dilations = tuple(a.dilations)
    return (found[0], found[1]), (dilations[0], dilations[1])


def _geometry(axes: tuple[Axis, Axis]) -> conv_maps.Geometry:
    """The geometry of the ordinary convolution. Negative pads count as 0, since :func:`_read` cuts those pixels off its input."""
    (high, wide) = axes
    pads = [max(p, 0) for p in (high.pads[0], wide.pads[0], high.pads[1], wide.pads[1])]
    return (1, 1), (pads[0], pads[1], pads[2], pads[3]), (high.dilation, wide.dilation)


def _read(x: TensorView, axes: tuple[Axis, Axis]) -> TensorView:
    """The part of the NCHW input that the convolution reads."""
    n, c, h, w = x.shape
    (top, bottom), (left, right) = (tuple(max(-p, 0) for p in axis.pads) for axis in axes)
    return x.view((n, c, h - top - bottom, w - left - right), x.strides, top * x.strides[2] + left * x.strides[3])


class Subpixel(ConvolutionKernel):
    """Base of the tactics on the different kernels. A transposed convolution of stride 1 is an ordinary one with
    flipped weights."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        weight = b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4) or 0 in weight.shape or 0 in op.outputs[0].type.static_shape:
            return "its weights are not constant, or not of one or two spatial axes"
        if op.attrs.group != 1:
            return f"it has {op.attrs.group} groups"
        if has_computed_bias(b, op):
            return "its bias is not constant"
        axes, _ = axes_of(b, op)
        sizes = (1, *b.graph.type(op.inputs[0]).static_shape[2:])[-2:]  # type: ignore[arg-type]
        if any(sum(max(-p, 0) for p in axis.pads) >= n for axis, n in zip(axes, sizes, strict=True)):
            return "its pads cut off all results that depend on its input"
        return self.unfit(b, op, weight, axes)

    def unfit(self, b: Builder, op: Op, weight: Array, axes: tuple[Axis, Axis]) -> str | None:
        """Why the kernel cannot run the convolution, or None."""
        raise NotImplementedError

    def pitch(self, channels: int) -> int:
        """Channels per pixel of a channels-last tensor that the kernel writes."""
        return up(channels, 8)

    def read(self, b: Builder, op: Op, x: TensorView) -> TensorView:
        """The image as the kernel can read it: in place, or a copy that is still to be made."""
        return with_pitch(b, op, x)

    def scatter(self, out: TensorView, ep: Epilogue, axes: tuple[Axis, Axis]) -> Scatter | None:
        """How the kernel itself scatters blocks of pixels; None if another launch must."""
        return None

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution in one launch, if the kernel can scatter blocks of pixels."""
        weight, name = b.weights(op), op.outputs[0].name
        given = weight if weight.ndim == 4 else weight[:, :, None]
        axes, dilations = axes_of(b, op)
        places = axes[0].stride * axes[1].stride
        packed = b.kept.once(("blocks", axes, dilations), [given], lambda: block_weights(given, axes, dilations))
        ep = plan_epilogue(b.graph, op, channel_axis=1, allow_residual=places == 1)
        x = self.read(b, op, _read(image(entering(b, op)), axes))
        bias, feed, target = (
            ep.added_to(bias_of(b, op)),
            conv_maps.Feed(x, packed, *_geometry(axes)),
            b.result(op.value),
        )
        if places == 1:
            residual = None
            if ep.residual is not None:
                residual = with_pitch(b, op, image(b.source(ep.residual)), added=True)
            between = result_place(b, op, ep, target, self.stored(b, image(target)), self.pitch(target.shape[1]))
            return Convolution((feed,), bias, ep, residual, image(between), between)
        tiled = None if bias is None else np.tile(bias, places)
        pixels = self._pixels(b, op, target)
        scatter = self.scatter(image(pixels), ep, axes)
        if scatter is not None:
            return Convolution((feed,), tiled, ep, None, image(pixels), pixels, scatter)
        shape = (target.shape[0], len(packed), axes[0].blocks, axes[1].blocks)
        blocks = b.later(f"{name}.blocks", target.dtype, shape, channels_last(shape, self.pitch(len(packed))))
        return Convolution((feed,), tiled, ep, None, blocks, blocks)

    def _pixels(self, b: Builder, op: Op, target: TensorView) -> TensorView:
        """Where blocks become pixels: the place of the result, or a channels-last tensor that is copied there. A launch that scatters
        blocks reads neighboring channels, and cannot write them with others between."""
        if target.strides[1] == 1 or target.shape[1] < PLANAR:
            return target
        strides = channels_last(target.shape, self.pitch(target.shape[1]))
        return b.later(f"{op.outputs[0].name}.pixels", target.dtype, target.shape, strides)

    def finish(self, b: Builder, op: Op, c: Convolution) -> None:
        """Add the launch that scatters blocks of pixels and runs the rest of the epilogue, if the convolution's launch does not."""
        axes, _ = axes_of(b, op)
        if c.scatter is not None or axes[0].stride * axes[1].stride == 1:
            super().finish(b, op, c)
            return
        operands = [None, *map(b.operand, c.ep.rest_operands)]
        target = b.target(op.value)
        pixels = b.made(self._pixels(b, op, target))
        emit_depth_to_space(b, op, c.out, pixels, axes, c.ep.rest, operands)
        if pixels is not target:
            copy(b, op, pixels, target)


class HopperConvTranspose(hopper_launch.HopperKernel, Subpixel):
    """Transposed convolutions of 16-bit floats and tf32 on Hopper's kernels."""

    name = "subpixel_sm90"

    def unfit(self, b: Builder, op: Op, weight: Array, axes: tuple[Axis, Axis]) -> str | None:
        strides, pads, dilations = _geometry(axes)
        geometry = ((axes[0].taps, axes[1].taps), strides, pads, dilations)
        return hopper_launch.refuse(b.arch, products(b, op), [geometry], parts=self.parts)

    def scatter(self, out: TensorView, ep: Epilogue, axes: tuple[Axis, Axis]) -> Scatter | None:
        blocks = out.shape[1] * axes[0].stride * axes[1].stride  # channels of the launch, which must need no padding
        together = 16 // out.dtype.itemsize if not self.parts else 2
        return _scatter(out, axes, together) if not ep.rest and blocks % 8 == 0 else None


def _scatter(out: TensorView, axes: tuple[Axis, Axis], together: int) -> Scatter | None:
    """The destination of blocks of pixels in the NCHW image, if ``together`` neighboring channels are one access; else None."""
    high, wide = axes
    return Scatter.of(out, (high.stride, wide.stride), (high.crop, wide.crop), together)


class PartsConvTranspose(HopperConvTranspose):
    """Transposed convolutions of fp32."""

    name = "subpixel_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        return slower_than_scalar(b, op, self, TiledConvTranspose(), b.result(op.value))


class GeneralConvTranspose(general.GeneralKernel, Subpixel):
    """Transposed convolutions of 16-bit floats and of tf32, before Hopper."""

    name = "subpixel_sm80"

    def unfit(self, b: Builder, op: Op, weight: Array, axes: tuple[Axis, Axis]) -> str | None:
        if (why := general.refusal(b, op)) is not None:
            return why
        if b.arch.startswith("sm_90"):
            return "Hopper's own kernel runs it"
        return None


class TiledConvTranspose(conv_fp32.TiledKernel, Subpixel):
    """Transposed convolutions of true fp32, in one launch."""

    name = "subpixel_fp32"

    def unfit(self, b: Builder, op: Op, weight: Array, axes: tuple[Axis, Axis]) -> str | None:
        if (why := conv_fp32.refusal(b, op) or conv_fp32.too_large(b, op)) is not None:
            return why
        n, _, *sizes = b.graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
        if max(*sizes, *(max(a.blocks, a.taps * a.dilation, *a.pads) for a in axes)) >= 1 << 14:
            return "an image or a filter is larger than 16384 pixels"
        blocks = n * math.prod(a.blocks * a.stride for a in axes) * weight.shape[1]
        return "its tensors have more elements than 32-bit offsets can address" if blocks >= fp32.LARGEST else None

    def read(self, b: Builder, op: Op, x: TensorView) -> TensorView:
        """The operand in its own layout."""
        return x

    def scatter(self, out: TensorView, ep: Epilogue, axes: tuple[Axis, Axis]) -> Scatter | None:
        return _scatter(out, axes, 4) if not ep.rest else None
