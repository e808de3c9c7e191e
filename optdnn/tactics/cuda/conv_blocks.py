"""Convolutions whose windows do not overlap, as matrix products on Hopper's kernel: patch embeddings, and upsampling by 2 x 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.ops.base import Stage
from optdnn.ops.conv import resolved_transpose
from optdnn.tactics.cuda import conv_sm90
from optdnn.tactics.cuda.builder import Builder, channels_last, products, up
from optdnn.tactics.cuda.conv import bias_of, entering, finish, image, only_used, with_pitch
from optdnn.tactics.cuda.epilogue import Epilogue, plan_epilogue
from optdnn.tactics.cuda.pointwise import copy, emit_pointwise
from optdnn.tactics.cuda.tactic import Rehearsed

POINTWISE = ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1))
"""Geometry of a 1 x 1 convolution."""


class BlockConv(Rehearsed):
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
        return conv_sm90.refuse(b.arch, products(b, op), [POINTWISE])

    def read(self, name: str) -> conv_sm90.Config | None:
        """See :class:`optdnn.tactics.cuda.tactic.Tactic`."""
        return conv_sm90.read(name)

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
        residual = with_pitch(b, op, b.operand(ep.residual), added=True) if ep.residual is not None else None
        between = target
        if ep.rest or not conv_sm90.storable(b, target):
            strides = channels_last(target.shape, up(filters, 8))
            between = b.new(f"{op.outputs[0].name}.conv", target.dtype, target.shape, strides)
        feed = conv_sm90.Feed(rows, matrix, (1, 1), (0, 0, 0, 0), (1, 1))
        used = conv_sm90.emit_conv(b, op, [feed], bias, ep, residual, between, config)
        finish(b, op, ep, between, target)
        return used


class BlockConvTranspose(Rehearsed):
    """A transposed convolution whose stride is its kernel: a product, whose channels are then blocks of pixels (U-Net)."""

    name = "blocks_transposed_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        weight = b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4) or op.attrs.group != 1 or 0 in op.outputs[0].type.static_shape:
            return "it is not an ungrouped convolution of images with constant weights"
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        a = resolved_transpose(op.attrs, b.graph.type(op.inputs[0]), b.graph.type(op.inputs[1]))  # type: ignore[arg-type]
        plain = tuple(a.strides) == weight.shape[2:] and not any(a.pads) and not any(a.output_padding)
        if not plain or any(d != 1 for d in a.dilations) or a.auto_pad != "NOTSET":
            return "its windows overlap, are cut or have holes"
        return conv_sm90.refuse(b.arch, products(b, op), [POINTWISE])

    def read(self, name: str) -> conv_sm90.Config | None:
        """See :class:`optdnn.tactics.cuda.tactic.Tactic`."""
        return conv_sm90.read(name)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        weight = weight if weight.ndim == 4 else weight[:, :, None]
        inside, outside, kh, kw = weight.shape
        x, target = with_pitch(b, op, image(entering(b, op))), b.target(op.value)
        out = image(target)
        n, _, h, w = x.shape
        # channel (dy * kw + dx) * outside + o
        matrix = np.ascontiguousarray(weight.transpose(2, 3, 1, 0)).reshape(kh * kw * outside, inside, 1, 1)
        bias = bias_of(b, op)
        wide = None if bias is None else np.tile(bias, kh * kw)
        shape = (n, kh * kw * outside, h, w)
        made = b.new(f"{op.outputs[0].name}.blocks", out.dtype, shape, channels_last(shape, up(shape[1], 8)))
        feed = conv_sm90.Feed(x, matrix, (1, 1), (0, 0, 0, 0), (1, 1))
        used = conv_sm90.emit_conv(b, op, [feed], wide, Epilogue(), None, made, config)
        mn, _, mh, mw = made.strides
        split = (n, outside, h, kh, w, kw)
        source = made.view(split, (mn, 1, mh, kw * outside, mw, outside))
        on, oc, oh, ow = out.strides
        place = out.view(split, (on, oc, oh * kh, oh, ow * kw, ow))
        stages: list[Stage] = list(op.attrs.epilogue)
        if not stages:
            copy(b, op, source, place)
            return used
        # Operands that the stages read follow the result's axes, which the blocks have split.
        plain = b.new(f"{op.outputs[0].name}.conv", target.dtype, target.shape, b.strides_for(op.outputs[0].type))
        pn, pc, ph, pw = image(plain).strides
        copy(b, op, source, image(plain).view(split, (pn, pc, ph * kh, ph, pw * kw, pw)))
        operands = [plain, *(None if v is None else b.operand(v) for v in op.inputs[1:])]
        emit_pointwise(b, op, *only_used(stages, operands), target)
        return used
