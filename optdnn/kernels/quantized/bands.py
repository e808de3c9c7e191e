"""Grouped convolutions on 8-bit numbers on Hopper's kernels: the bands of :mod:`.conv_bands`."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv.bands import costlier, groups_together
from optdnn.kernels.conv.problem import banded
from optdnn.kernels.quantized.general import GeneralQuantizedConv
from optdnn.kernels.quantized.hopper import HopperQuantizedConv, axes_of, geometry_refusal, refusal


class BandedQuantizedConv(HopperQuantizedConv):
    """Convolutions of several groups over one or two spatial axes. Zeros add nothing to sums of integers; of fp8, a NaN of one group
    reaches the others of its band."""

    name = "conv_bands_sm90_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if op.attrs.group == 1 or axes_of(b, op) not in (1, 2):
            return f"it has {op.attrs.group} groups and {axes_of(b, op)} spatial axes"
        return geometry_refusal(b, op)

    def defer(self, b: Builder, op: Op) -> str | None:
        """As :meth:`.conv_bands.BandedConv.defer`."""
        other = GeneralQuantizedConv()
        return None if other.refuse(b, op) is not None else costlier(b, op, self, other)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight, groups = b.graph.constant_value(op.inputs[1]), op.attrs.group
        assert weight is not None
        aligned = 16 // weight.dtype.itemsize
        together = groups_together(groups, weight.shape[0] // groups, weight.shape[1], aligned)
        feed = self.feed(b, op, banded(weight, groups, together), groups // together)
        return self.emit_feed(b, op, feed, feed.x, config)
