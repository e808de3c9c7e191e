"""Convolutions whose windows do not overlap, as matrix products on Hopper's kernel: patch embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, channels_last, products, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.hopper import HopperConv, bias_of, entering
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.tactic import DryRunConfigs


class BlockConv(DryRunConfigs):
    """A convolution whose stride is its kernel: blocks of pixels become channels, then it is a product (ViT, ConvNeXt)."""

    name = "blocks_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim != 4 or a.group != 1 or 0 in op.outputs[0].type.static_shape:
            return "it is not an ungrouped convolution of images with constant weights"
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        if tuple(a.strides) != weight.shape[2:] or any(a.pads) or any(d != 1 for d in a.dilations):
            return "its windows overlap, are padded or have holes"
        if max(a.strides) == 1:
            return "its windows are single pixels already"
        x = b.graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
        if x[2] % weight.shape[2] or x[3] % weight.shape[3]:
            return "its windows do not cover the image"
        return hopper_launch.refuse(b.arch, products(b, op), [((1, 1), *conv_maps.POINTWISE)])

    def read(self, name: str) -> hopper_launch.Config | None:
        """See :class:`optdnn.kernels.tactic.Tactic`."""
        return hopper_launch.read(name)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        filters, channels, kh, kw = weight.shape
        x, target = entering(b, op), b.target(op.value)
        n, _, h, w = x.shape
        size = (h // kh, w // kw)
        lanes, sn, sc, sh, sw = channels * kh * kw, *x.strides
        rows = b.new(
            f"{op.outputs[0].name}.blocks", x.dtype, (n, lanes, *size), channels_last((n, lanes, *size), up(lanes, 8))
        )
        rn, _, rh, rw = rows.strides
        # channel (dy * kw + dx) * channels + c, so that neighbouring channels stay neighbours
        split = (n, kh, kw, channels, *size)
        copy(
            b, op, x.view(split, (sn, sh, sw, sc, sh * kh, sw * kw)),
            rows.view(split, (rn, kw * channels, channels, 1, rh, rw)),
        )  # fmt: skip
        matrix = b.kept.once(
            "blocks", [weight], lambda: np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).reshape(filters, lanes, 1, 1)
        )
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        bias = ep.added_to(bias_of(b, op))
        feed = conv_maps.Feed(rows, matrix, *conv_maps.POINTWISE)
        return HopperConv.emit_feeds(b, op, [feed], bias, ep, target, config)
