"""Normalizations over the channels of images become one op each, between transpositions that layouts can remove.

ConvNeXt (Liu et al., 2022), Segment Anything (Kirillov et al., 2023) and MobileNetV5 normalize the channels of each position of an
image, and write this as arithmetic over axis 1. The kernels of norms read rows, and a channels-last image is rows of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optdnn.ir.graph import Graph, Value
from optdnn.ir.patch import Patch
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Miss, RulePass
from optdnn.passes.fuse_norm import FusedNorm, LayerNorm, NormRule, RMSNorm, norm_parameters, per_channel
from optdnn.passes.support.facts import channels_from_last, channels_to_last


@dataclass(frozen=True)
class ChannelNorm(FusedNorm):
    """A norm over the last axis, of ``x`` with its channels moved there; they are moved back after it."""

    def norm(self, patch: Patch, *parameters: Value) -> Value:
        rank = len(patch.type(self.x).dims)
        rows = patch.add("Transpose", [self.x], TransposeAttrs(channels_to_last(rank)))
        y = patch.add(self.kind, [rows, *parameters], self.attrs)
        return patch.add("Transpose", [y], TransposeAttrs(channels_from_last(rank)))


def _of_channels(
    rule: NormRule, graph: Graph, root: Value, axes: tuple[int, ...], epsilon: float, found: dict[str, Any]
) -> list[FusedNorm] | Miss:
    dims = graph.type(found["x"]).dims
    if axes != (1,) or len(dims) < 3:
        return []
    channels = dims[1]
    if not isinstance(channels, int):
        return Miss("the number of channels is not known")
    given = norm_parameters(graph, root, per_channel(len(dims), channels), found, shift=rule.centred)
    if given is None:
        return Miss("its scale or shift is not a constant for each channel")
    return [ChannelNorm(rule.kind, LayerNormAttrs(-1, epsilon), found["x"], given, (channels,))]


class LayerNormOfChannels(LayerNorm):
    """LayerNormalization over axis 1 of three or more."""

    name = "layer_norm_of_channels"
    options = _of_channels


class RMSNormOfChannels(RMSNorm):
    """RMSNormalization over axis 1 of three or more."""

    name = "rms_norm_of_channels"
    options = _of_channels


class ChannelNorms(RulePass):
    name = "channel_norms"
    rules = (LayerNormOfChannels(), RMSNormOfChannels())
    sinks_first = True
