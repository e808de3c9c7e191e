"""Convolutions whose windows do not overlap, as matrix products on Hopper's kernel: patch embeddings."""

from __future__ import annotations

import numpy as np

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, channels_last, products, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution, copy_seconds
from optdnn.kernels.conv.hopper import HopperConv, bias_of, entering, has_computed_bias, on_images
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.tactic import costlier


class BlockConv(hopper_launch.HopperKernel):
    """A convolution whose stride equals its kernel size. Blocks of pixels become channels, and the convolution a
    product (ViT, ConvNeXt)."""

    name = "blocks_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim != 4 or a.group != 1 or 0 in op.outputs[0].type.static_shape:
            return "it is not an ungrouped convolution of images with constant weights"
        if has_computed_bias(b, op):
            return "its bias is not constant"
        if tuple(a.strides) != weight.shape[2:] or any(a.pads) or any(d != 1 for d in a.dilations):
            return "its windows overlap, are padded or are dilated"
        if max(a.strides) == 1:
            return "its windows are single pixels already"
        x = b.graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
        if x[2] % weight.shape[2] or x[3] % weight.shape[3]:
            return "its windows do not cover the image"
        return hopper_launch.refuse(b.arch, products(b, op), [((1, 1), *conv_maps.POINTWISE)])

    def defer(self, b: Builder, op: Op) -> str | None:
        """Implicit GEMM reads channels-last images in place; here a launch copies them. Without such images both need a copy.
        With ``row_invariant``, implicit GEMM then goes first at every batch size: it sums in another order."""
        other = HopperConv()
        if other.refuse(b, op) is not None:
            return None
        own, theirs = self.convolution(b, op), other.convolution(b, op)
        if any(feed.x.make is not None for feed in theirs.feeds):
            return None
        if b.row_invariant:
            return "another kernel reads its images in place"
        return costlier(
            b, op, self, other, more=sum(map(copy_seconds, own.copied)) - sum(map(copy_seconds, theirs.copied))
        )

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The 1x1 convolution of the blocks, which a copy makes."""
        weight, x = b.weights(op), entering(b, op)
        (n, _, h, w), (filters, channels, kh, kw) = x.shape, weight.shape
        shape = (n, channels * kh * kw, h // kh, w // kw)
        strides = channels_last(shape, up(shape[1], 8))

        def make() -> int:
            image, rows = b.made(x), b.new(f"{op.outputs[0].name}.blocks", x.dtype, shape, strides)
            (sn, sc, sh, sw), (rn, _, rh, rw) = image.strides, strides
            # channel (dy * kw + dx) * channels + c, so that neighboring channels stay neighbors
            split = (n, kh, kw, channels, *shape[2:])
            source = image.view(split, (sn, sh, sw, sc, sh * kh, sw * kw))
            copy(b, op, source, rows.view(split, (rn, kw * channels, channels, 1, rh, rw)))
            return rows.buffer

        matrix = b.kept.once(
            "blocks", [weight],
            lambda: np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).reshape(filters, shape[1], 1, 1),
        )  # fmt: skip
        feed = conv_maps.Feed(unmade(x.dtype, shape, strides, make), matrix, *conv_maps.POINTWISE)
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        return on_images(b, op, (feed,), ep.added_to(bias_of(b, op)), ep)
