"""Grouped convolutions on Hopper's kernels: groups of a few channels are multiplied in bands of 64, between groups with zeros."""

from __future__ import annotations

from typing import Any

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, products
from optdnn.kernels.conv import hopper_launch as conv_sm90
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.general import GeneralConv
from optdnn.kernels.conv.hopper import HopperConv, bias_of, entering, image, planar, with_pitch
from optdnn.kernels.conv.problem import banded
from optdnn.kernels.tactic import Region, Tactic

TILE = 64
"""Channels of wgmma's M, and of a step of K."""

MARGIN = 1.5
"""How much faster the kernel that computes no zeros must be predicted to be: its model is an older GPU's."""


def groups_together(groups: int, channels: int, inside: int = 0, aligned: int = 1) -> int:
    """How many neighbouring groups, of ``channels`` results each, make a band: the fewest that fill tiles, and read a multiple of
    ``aligned`` where each reads ``inside``; or all of them."""
    whole = (n for n in range(1, groups) if groups % n == 0 and n * channels % TILE == n * inside % aligned == 0)
    return next(whole, groups)


def costlier(b: Builder, op: Op, bands: Tactic, other: Tactic) -> str | None:
    """What is predicted, where ``bands`` take much longer than a kernel with fewer zeros."""
    own, theirs = (min((o.seconds or 0.0 for o in t.configs(b, op)), default=0.0) for t in (bands, other))
    if own <= MARGIN * theirs:
        return None
    return f"it is predicted to take {own * 1e6:.1f} us, {other.name} {theirs * 1e6:.1f}"


class BandedConv(HopperConv):
    """Convolutions of several groups over one or two spatial axes. Neighbouring groups are one band with zeros between them: tensor
    cores multiply those faster than others leave them out. An Inf or NaN of one group reaches the others of its band."""

    name = "conv_bands_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4) or 0 in weight.shape or 0 in op.outputs[0].type.static_shape:
            return "its weights are not constant, or not of one or two spatial axes"
        if a.group == 1:
            return "it has one group"
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        together = groups_together(a.group, weight.shape[0] // a.group)
        read, aligned = together * weight.shape[1], 16 // op.outputs[0].type.dtype.itemsize
        if together < a.group and read % aligned:
            return f"TMA addresses 16 bytes: a band of {read} channels is none of these"
        return conv_sm90.refuse(b.arch, products(b, op), [(weight.shape[2:], a.strides, a.pads, a.dilations)])

    def defer(self, b: Builder, op: Op) -> str | None:
        """Where the zeros are predicted to cost more than a kernel that has none, that goes first until both are measured."""
        other = GeneralConv()
        return None if b.row_invariant or other.refuse(b, op) is not None else costlier(b, op, self, other)

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution alone: a second source has no bands."""
        return Region(op)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        assert weight is not None
        together = groups_together(a.group, weight.shape[0] // a.group)
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        bias = ep.added_to(bias_of(b, op))
        weight, strides, pads, dilations = planar(banded(weight, a.group, together), a)
        x = with_pitch(b, op, image(entering(b, op)))
        feed = conv_maps.Feed(x, weight, strides, pads, dilations, bands=a.group // together)
        return self.emit_feeds(b, op, [feed], bias, ep, b.target(op.value), config)
