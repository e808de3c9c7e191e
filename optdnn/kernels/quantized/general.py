"""8-bit convolutions and matrix products on the general tensor-core kernel: int8 from sm_80 on, fp8 from sm_89 on, and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import general
from optdnn.kernels.conv.general import costlier, groups_together
from optdnn.kernels.conv.maps import Feed, pitch_of
from optdnn.kernels.conv.problem import Problem, banded
from optdnn.kernels.quantized.hopper import (
    HopperQuantizedConv,
    HopperQuantizedMatMul,
    axes_of,
    channel_pairs,
    geometry_refusal,
    meaning_of,
    numbers_of,
    problem_of,
    refusal,
)


class GeneralQuantizedConv(HopperQuantizedConv):
    """Convolutions of int8, uint8 or fp8 over one or two spatial axes, grouped or not; on Hopper those that its own kernel refuses,
    and groups of which that takes more together."""

    name = "conv_sm80_8bit"
    together = 4  # the 64 bytes of a K step

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if axes_of(b, op) not in (1, 2):
            return f"it has {axes_of(b, op)} spatial axes"
        if geometry_refusal(b, op) is not None:
            return None
        weight, groups = b.graph.constant_value(op.inputs[1]), op.attrs.group
        assert weight is not None
        if groups == 1:
            return "Hopper's own kernel runs it"
        own = groups_together(groups, weight.shape[0] // groups, weight.shape[1], 16)
        fewer = general.together(b.arch, groups, weight) < own
        return None if fewer else f"Hopper's own kernel takes no more than {own} groups together, either"

    def read(self, name: str) -> Any:
        """Names do not tell."""
        return None

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight, groups = b.graph.constant_value(op.inputs[1]), op.attrs.group
        assert weight is not None
        if groups == 1:
            return super().emit(b, op, config)
        n = general.together(b.arch, groups, weight)
        return self.emit_feed(b, op, self.feed(b, op, banded(weight, groups, n), groups // n), config)

    @staticmethod
    def _suits(b: Builder, problem: Problem) -> bool:
        return True

    @staticmethod
    def _added(b: Builder, op: Op, residual: TensorView) -> TensorView:
        return residual  # no more than its own channels is read

    @staticmethod
    def _stored(b: Builder, op: Op, out: TensorView) -> bool:
        return pitch_of(out) is not None

    @staticmethod
    def _launch(b: Builder, op: Op, feed: Feed, residual: TensorView | None, out: TensorView, config: Any) -> str:
        problem = replace(problem_of(op, feed, residual, out), sources=(general.source_of(feed),))
        meaning = ("QuantizedConv", meaning_of(op, feed), [residual] if residual is not None else [])
        pairs, numbers = channel_pairs(b, op), numbers_of(op, residual)
        return general.launch(b, op, problem, feed, pairs, out, residual, meaning, config, numbers)


class GeneralQuantizedMatMul(HopperQuantizedMatMul):
    """Products of rows of int8, uint8 or fp8 with a constant matrix, before Hopper."""

    name = "gemm_sm80_8bit"
    conv = GeneralQuantizedConv

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        return "Hopper's own kernel runs it" if b.arch.startswith("sm_90") else None

    def read(self, name: str) -> Any:
        """Names do not tell."""
        return None


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
        """As :meth:`.BandedConv.defer`."""
        other = GeneralQuantizedConv()
        return None if other.refuse(b, op) is not None else costlier(b, op, self, other)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        weight, groups = b.graph.constant_value(op.inputs[1]), op.attrs.group
        assert weight is not None
        aligned = 16 // weight.dtype.itemsize
        together = groups_together(groups, weight.shape[0] // groups, weight.shape[1], aligned)
        return self.emit_feed(b, op, self.feed(b, op, banded(weight, groups, together), groups // together), config)
