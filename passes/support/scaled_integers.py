"""Constant integers (or fp8 numbers) that a DequantizeLinear turns into weights: their scales absorb factors of channels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import producer
from optdnn.types import Array, is_float


@dataclass(frozen=True)
class ScaledIntegers:
    """The integers ``stored`` with one scale, or one for each entry of ``axis``, which are the output channels."""

    op: Op
    stored: Array
    scale: Array
    zero: Array
    axis: int

    @staticmethod
    def of(graph: Graph, value: Value, axis: int) -> ScaledIntegers | None:
        """The constant weights of an operator; None for other values, for scales along another axis, and for scales per block."""
        op = producer(graph, value, {"DequantizeLinear"})
        if op is None or op.attrs.block_size:
            return None
        stored, scale, zero = (graph.constant_value(v) for v in (op.inputs[0], op.inputs[1], op.input(2)))
        if stored is None or scale is None or (op.input(2) is not None and zero is None):
            return None
        axis %= stored.ndim
        if scale.size > 1 and op.attrs.axis % stored.ndim != axis:
            return None
        return ScaledIntegers(op, stored, scale, np.zeros((), stored.dtype) if zero is None else zero, axis)

    def times(self, factors: Array) -> ScaledIntegers | str:
        """The weights times one factor, or one for each channel; or why no integers have these values.

        Scales stay positive: integers of channels with a negative factor change their signs."""
        channels = self.stored.shape[self.axis]
        wide = np.broadcast_to(factors.reshape(-1), (1 if factors.size == self.scale.size == 1 else channels,))
        own = self.scale.astype(np.float64).reshape(-1)
        scale = (own * np.where(wide == 0, 1.0, np.abs(wide))).astype(self.scale.dtype)
        if not (np.isfinite(scale) & (scale >= np.finfo(self.scale.dtype).tiny)).all():
            return "its scales would be no positive normal numbers"
        zero = np.broadcast_to(self.zero.reshape(-1), scale.shape)
        if (wide > 0).all():
            return replace(self, scale=scale, zero=zero)
        stored = np.moveaxis(self.stored, self.axis, -1).astype(np.float32)
        stored = np.where(wide == 0, zero.astype(np.float32), np.where(wide < 0, -stored, stored))
        if not is_float(self.stored.dtype):
            info = ml_dtypes.iinfo(self.stored.dtype)  # type: ignore[no-untyped-call]
            if zero[wide < 0].any() or stored.min(initial=0) < info.min or stored.max(initial=0) > info.max:
                return "its integers cannot change their signs"
        moved = np.ascontiguousarray(np.moveaxis(stored, -1, self.axis).astype(self.stored.dtype))
        return replace(self, stored=moved, scale=scale, zero=zero)

    def add_to(self, patch: Patch) -> Value:
        """Add the DequantizeLinear to a patch; returns its value."""
        operands = [
            patch.constant(a, name) for a, name in ((self.stored, "weight"), (self.scale, "scale"), (self.zero, "zero"))
        ]
        attrs = replace(self.op.attrs, axis=self.axis)
        return patch.add("DequantizeLinear", operands, attrs, src=self.op.src)
