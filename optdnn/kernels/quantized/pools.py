"""Tactics of pools on 8-bit integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from optdnn.errors import InternalError
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, up
from optdnn.kernels.launch import Launch
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.pool.window import MOST_APART, pads_of, pool_attrs
from optdnn.kernels.quantized import pool_kernel as pool_int8
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict


class Int8MaxPool(Tactic):
    """Max pooling of int8 or uint8 channels-last images without gaps: 16 channels per thread."""

    name = "max_pool_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        x = b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        if x.dtype.name not in ("int8", "uint8") or len(op.outputs) != 1 or x.rank != 4:
            return "it is for int8 or uint8 images"
        if any(d != 1 for d in op.attrs.dilations) or x.static_shape[1] % 16:
            return "its windows are dilated, or its number of channels is not a multiple of 16"
        if math.prod(op.attrs.kernel_shape) > MOST_APART:
            return f"its windows have more than {MOST_APART} elements, which a thread would hold at once"
        places = [b.operand(op.inputs[0]), *b.fixed(op.value)]
        if op.value not in b.reserved and op.outputs[0].type.layout != "nhwc":
            return "its result is not channels-last"
        if any(not p.is_like(channels_last(p.shape, p.shape[1])) or p.offset % 16 for p in places):
            return "its images have gaps or another order"
        try:
            self._launch(b, op)
        except InternalError as error:
            return error.message
        return None

    def _launch(self, b: Builder, op: Op) -> Launch:
        a, x = op.attrs, b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        n, c, h, w = x.static_shape
        out = op.outputs[0].type.static_shape
        pads = pads_of(op, x.static_shape, a.kernel_shape)
        ends = [
            (o - 1) * s + k - p - i
            for o, s, k, p, i in zip(out[2:], a.strides, a.kernel_shape, pads[:2], (h, w), strict=True)
        ]
        pads = (pads[0], pads[1], ends[0], ends[1])
        return pool_int8.max_pool(x.dtype.name, b.arch, (n, h, w, c), a.kernel_shape, a.strides, pads)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        b.emit(op, self._launch(b, op), {"input": x, "output": out}, "MaxPool", pool_attrs(op, x.shape), [x], [out])


class Int8Mean(Tactic):
    """Global average pooling of int8 or uint8 images. The kernel reads channels-last images, without gaps or padded to a multiple of 16
    channels; other images are copied."""

    name = "mean_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        x = b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        if any(dtype.name not in ("int8", "uint8") for dtype in (x.dtype, op.outputs[0].type.dtype)):
            return "it is for int8 or uint8 operands and results"
        return "its number of channels is not a multiple of 4" if x.static_shape[1] % 4 else None

    @staticmethod
    def _pitch(x: TensorView) -> int | None:
        """Channels from a pixel to the next; None if the kernel cannot read or write ``x``."""
        c = x.shape[1]
        found = (p for p in (c, up(c, 16)) if x.is_like(channels_last(x.shape, p)) and x.offset % 4 == 0)
        return next(found, None)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        a, x, target = op.attrs, b.operand(op.inputs[0]), b.target(op.value)
        n, c, *spatial = x.shape
        if (pitch := self._pitch(x)) is None:
            given, x = x, b.new(f"{op.outputs[0].name}.image", x.dtype, x.shape, channels_last(x.shape, c))
            copy(b, op, given, x)
            pitch = c
        out = target
        if (wide := self._pitch(target)) is None:
            out = b.new(f"{op.outputs[0].name}.mean", target.dtype, target.shape, channels_last(target.shape, c))
            wide = c
        made = pool_int8.global_average_pool(
            x.dtype.name,
            b.arch,
            (n, int(np.prod(spatial)), 1, c),
            a.input_zero,
            a.factor,
            (a.low, a.high),
            a.zero,
            (pitch, wide),
        )
        b.emit(op, made, {"input": x, "output": out}, op.kind, attrs_dict(a), [x], [out])
        if out is not target:
            copy(b, op, out, target)
