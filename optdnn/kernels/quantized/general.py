"""8-bit convolutions and matrix products on the general tensor-core kernel: int8 from sm_80 on, fp8 from sm_89 on, and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import general
from optdnn.kernels.conv.general import groups_together
from optdnn.kernels.conv.maps import pitch_of
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.quantized.hopper import (
    HopperProduct,
    Product,
    QuantizedConv,
    QuantizedMatMul,
    QuantizedProduct,
    as_read,
    axes_of,
    channel_pairs,
    data_parameters,
    geometry_refusal,
    meaning_of,
    more_operands,
    numbers_of,
    problem_of,
    refusal,
)
from optdnn.kernels.tactic import costlier


class GeneralProduct(general.GeneralTactic, QuantizedProduct):
    """An 8-bit product on the general kernel."""

    def problem_of(self, op: Op, p: Product) -> Problem:
        return replace(problem_of(op, p), sources=(general.source_of(p.feed),))

    def stored(self, b: Builder, op: Op, out: TensorView) -> bool:
        return pitch_of(out) is not None

    def launch(self, b: Builder, op: Op, p: Product, problem: Problem, config: Any) -> None:
        meaning = ("QuantizedConv", meaning_of(op, p.feed), as_read(p.residual, data_parameters(b, op)))
        pairs, numbers, more = channel_pairs(b, op), numbers_of(op, p.residual), more_operands(b, op, problem, p.feed)
        general.launch(b, op, problem, p.feed, pairs, p.out, p.residual, meaning, config, numbers, more)


class GeneralQuantizedConv(GeneralProduct, QuantizedConv):
    """Convolutions of int8, uint8 or fp8 over one or two spatial axes, grouped or not. On Hopper, it runs the convolutions that Hopper's
    own kernel refuses, and small groups that Hopper's kernel would have to multiply together."""

    name = "conv_sm80_8bit"
    together = 4  # the 64 bytes of a K step

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if axes_of(b, op) not in (1, 2):
            return f"it has {axes_of(b, op)} spatial axes"
        if geometry_refusal(b, op) is not None:
            return None
        weight, groups = b.weights(op), op.attrs.group
        if groups == 1:
            return "Hopper's own kernel runs it"
        own = groups_together(groups, weight.shape[0] // groups, weight.shape[1], 16)
        fewer = general.together(b.arch, groups, weight) < own
        return None if fewer else f"Hopper's own kernel takes no more than {own} groups together, either"

    def groups(self, b: Builder, op: Op) -> int:
        weight = b.weights(op)
        return general.together(b.arch, op.attrs.group, weight)


class GeneralQuantizedMatMul(GeneralProduct, QuantizedMatMul):
    """Products of rows of int8, uint8 or fp8 with a constant matrix, before Hopper."""

    name = "gemm_sm80_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        return "Hopper's own kernel runs it" if b.arch.startswith("sm_90") else None


class BandedQuantizedConv(HopperProduct, QuantizedConv):
    """Convolutions of several groups over one or two spatial axes. Groups of a band are multiplied together, with zeros between them.
    The zeros add nothing to integer sums; in fp8, a NaN of one group reaches the other groups of its band."""

    name = "conv_bands_sm90_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if op.attrs.group == 1 or axes_of(b, op) not in (1, 2):
            return f"it has {op.attrs.group} groups and {axes_of(b, op)} spatial axes"
        return geometry_refusal(b, op)

    def defer(self, b: Builder, op: Op) -> str | None:
        """See :meth:`.BandedConv.defer`."""
        other = GeneralQuantizedConv()
        return None if other.refuse(b, op) is not None else costlier(b, op, self, other)

    def groups(self, b: Builder, op: Op) -> int:
        weight, groups = b.weights(op), op.attrs.group
        return groups_together(groups, weight.shape[0] // groups, weight.shape[1], 16 // weight.dtype.itemsize)
