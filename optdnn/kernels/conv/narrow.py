"""The tactic of convolutions of few channels. wgmma would compute 64 channels of results, most of which do not exist."""

from __future__ import annotations

from dataclasses import replace

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.general import constants_refusal
from optdnn.kernels.conv.grouped import GroupedConv
from optdnn.kernels.conv.hopper import (
    FEW_CHANNELS,
    HopperConv,
    bias_of,
    entering,
    image,
    on_images,
    planar,
    planned,
    with_pitch,
)
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.tactic import MANY
from optdnn.types import BF16, FP16

MOST_READ, MOST_MADE = 48, 64
"""Most channels of the input and of the result. With more, wgmma's tiles are nearly full: 64 channels in and out took this kernel twice as
long."""
WIDE_TAKES = 1.15
"""Factor on the predicted times of the other kernel, which were too short by so much for 54 convolutions of few channels."""


class NarrowConv(GroupedConv):
    """Convolutions of 16-bit images with few channels in and out, without groups, on the kernel of narrow groups: as one
    band."""

    name = "conv_narrow_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := constants_refusal(b, op)) is not None:
            return why
        (out, inside), ep = b.weights(op).shape[:2], plan_epilogue(b.graph, op, channel_axis=1)
        if op.attrs.group != 1:
            return f"it has {op.attrs.group} groups"
        if not FEW_CHANNELS < inside <= MOST_READ or not FEW_CHANNELS < out <= MOST_MADE:
            return f"it takes {FEW_CHANNELS + 1} to {MOST_READ} channels in, and to {MOST_MADE} out: not {inside} and {out}"
        if set(b.weights(op).shape[2:]) == {1}:
            return "pixels under a filter of one tap share no loads"
        if op.outputs[0].type.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if op.attrs.prologue:
            return "its prologue would be a launch"
        if len(planned(b, op).rest) < len(ep.rest):
            return "its stages have operands for each channel"
        if HopperConv().added(b, op, ep) is not None:
            return "another kernel computes the convolution that it adds in the same launch"
        return None if self.configs(b, op) else "no tile of the kernel fits it"

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        wide = HopperConv()
        if wide.refuse(b, op) is not None:
            return None
        own, theirs = self.problem(b, op), wide.problem(b, op)
        if b.row_invariant:  # one decision for all batch sizes, at a large one
            own, theirs = replace(own, batch=MANY), replace(theirs, batch=MANY)
        one, other = (
            min((offer.predicted for offer in offers), default=0.0)
            for offers in (self.offers(own, b.gpu), hopper_launch.ranked(theirs, b.gpu))
        )
        other *= WIDE_TAKES
        if one < other:
            return None
        return f"{wide.name} is predicted to be as fast ({other * 1e6:.1f} us, not {one * 1e6:.1f})"

    def convolution(self, b: Builder, op: Op) -> Convolution:
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        feed = Feed(with_pitch(b, op, image(entering(b, op))), *planar(b.weights(op), op.attrs))
        return on_images(b, op, (feed,), ep.added_to(bias_of(b, op)), ep)
