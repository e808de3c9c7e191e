"""Convolutions whose windows do not overlap, as matrix products on Hopper's kernel: patch embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, products, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.hopper import ImageConv, bias_of, entered, entering
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.types import Array


class BlockConv(ImageConv):
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

    def feeds(self, b: Builder, op: Op, ep: Epilogue) -> tuple[conv_maps.Feed, ...]:
        """Blocks of pixels as channels."""
        weight, x = b.graph.constant_value(op.inputs[1]), entered(b, op)
        assert weight is not None
        return (self._feed(b, _rows_of(x, weight), weight),)

    @staticmethod
    def _feed(b: Builder, rows: TensorView, weight: Array) -> conv_maps.Feed:
        matrix = b.kept.once(
            "blocks", [weight],
            lambda: np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).reshape(len(weight), rows.shape[1], 1, 1),
        )  # fmt: skip
        return conv_maps.Feed(rows, matrix, *conv_maps.POINTWISE)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        _, channels, kh, kw = weight.shape
        x = entering(b, op)
        rows = b.made(_rows_of(x, weight), f"{op.outputs[0].name}.blocks")
        (n, _, *size), (sn, sc, sh, sw), (rn, _, rh, rw) = rows.shape, x.strides, rows.strides
        # channel (dy * kw + dx) * channels + c, so that neighbouring channels stay neighbours
        split = (n, kh, kw, channels, *size)
        copy(
            b, op, x.view(split, (sn, sh, sw, sc, sh * kh, sw * kw)),
            rows.view(split, (rn, kw * channels, channels, 1, rh, rw)),
        )  # fmt: skip
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        self.emit_feeds(b, op, [self._feed(b, rows, weight)], ep.added_to(bias_of(b, op)), ep, config)


def _rows_of(x: TensorView, weight: Array) -> TensorView:
    """The blocks of an image, which are still to be made."""
    (n, _, h, w), (_, channels, kh, kw) = x.shape, weight.shape
    shape = (n, channels * kh * kw, h // kh, w // kw)
    return unmade(x.dtype, shape, channels_last(shape, up(shape[1], 8)))
