"""Batch norms that no other operator absorbed, and local response normalization."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.pointwise.expressions import arithmetic, literal
from optdnn.kernels.pointwise.pointwise import copied, emit_pointwise
from optdnn.kernels.pool.window import Rendered, Window, emit_window
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import Stage, attrs_dict
from optdnn.types import FP64, is_float


class BatchNorm(Tactic):
    """A BatchNormalization that no other operator absorbed: a scale and a shift per channel, in fp32."""

    name = "pointwise"

    def refuse(self, b: Builder, op: Op) -> str | None:
        constant = all(b.graph.constant_value(v) is not None for v in op.inputs[1:])
        return None if constant else "its statistics are not constant"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        scale, shift, mean, var = (np.asarray(b.graph.constant_value(v), np.float64) for v in op.inputs[1:5])
        factor = scale / np.sqrt(var + op.attrs.epsilon)
        wide = np.float64 if x.dtype == FP64 else np.float32
        shape = (-1, *(1,) * (len(x.shape) - 2))
        column = [
            b.constant(v.astype(wide).reshape(shape), op.outputs[0].name) for v in (factor, shift - mean * factor)
        ]
        stages = [Stage("Mul", (-1, 1)), Stage("Add", (-2, 2))]
        emit_pointwise(b, op, stages, [x, *column], out, widened=True)


class LocalResponse(Tactic):
    """LRN: a window over the channels."""

    name = "lrn"

    def refuse(self, b: Builder, op: Op) -> str | None:
        x = b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        return None if is_float(x.dtype) and len(x.static_shape) >= 3 else "it is for feature maps of floating point"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        a, (n, c) = op.attrs, x.shape[:2]
        pixels = math.prod(x.shape[2:])
        flat = [reshaped(p, (n, c, pixels)) for p in (self._uniform(b, op, x), out)]
        source, target = (
            p.view((n, pixels, c), (p.strides[0], p.strides[2], p.strides[1])) for p in flat if p is not None
        )
        before = (a.size - 1) // 2
        window = Window.make((a.size,), (1,), (before, a.size - 1 - before), (1,))
        t = arithmetic(x.dtype)
        scale = f"{literal(a.bias, t)} + {literal(a.alpha / a.size, t)} * acc"
        parts = Rendered(
            f"{t} acc = 0;",
            f"{{ const {t} v = widen(at[c * p.xs[1]]); acc += v * v; }}",
            f"const {t} value = widen(x[c * p.xs[1] + w * p.xs[4]]) / pow({scale}, {literal(a.beta, t)});",
        )
        emit_window(
            b, op, window, source, target, parts, vec=1, kind="LRN", attrs=attrs_dict(a), reads=[x], writes=out
        )  # fmt: skip

    @staticmethod
    def _uniform(b: Builder, op: Op, x: TensorView) -> TensorView:
        """``x`` with one stride between pixels: a copy if necessary."""
        if reshaped(x, (x.shape[0], x.shape[1], math.prod(x.shape[2:]))) is not None:
            return x
        return copied(b, op, x, "dense")
