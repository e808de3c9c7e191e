"""A convolution and the pixel shuffle of its result in one launch, which stores each block of channels at its pixel (Shi et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution, copy_seconds
from optdnn.kernels.conv.hopper import HopperConv, bias_of, is_half, planar, with_pitch
from optdnn.kernels.conv.parameters import Scatter
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import Region


def shuffle_behind(graph: Graph, op: Op) -> Op | None:
    """The DepthToSpace that is the only reader of the result and takes the channels of a pixel from neighbors, or None."""
    user = graph.sole_user(op.value)
    return user if user is not None and user.kind == "DepthToSpace" and user.attrs.mode == "DCR" else None


class ShuffledConv(HopperConv):
    """Convolutions of 16-bit floats whose only reader is a DepthToSpace. The launch writes the shuffled image."""

    name = "conv_shuffle_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if shuffle_behind(b.graph, op) is None:
            return "no DepthToSpace of whole blocks of channels is the only reader of the result"
        if not is_half(op):
            return "it is for images of 16-bit floats"
        if (why := super().refuse(b, op)) is not None:
            return why
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        if op.attrs.prologue or ep.rest or ep.residual is not None:
            return "its stages read other tensors than constants"
        if self._scatter(b, op) is None:
            return "the shuffled image is not channels-last, with a multiple of 8 channels"
        offers = self.configs(b, op)
        if not offers:
            return "no configuration stores blocks"
        apart = min(o.predicted for o in HopperConv().configs(b, op))
        return two_are_better(offers[0].predicted, apart + copy_seconds(b.result(op.value)), 1.0)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The DepthToSpace after it."""
        shuffle = shuffle_behind(graph, op)
        return [] if shuffle is None else [shuffle]

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution and the DepthToSpace."""
        return Region(op, after=tuple(self.neighbors(b.graph, op)))

    def place(self, b: Builder, op: Op) -> None:
        """Place the shuffled image. The convolution's own result is not stored."""
        b.target(self.neighbors(b.graph, op)[0].value)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution; its output is the shuffled image."""
        (shuffle,) = self.neighbors(b.graph, op)
        out, ep = b.result(shuffle.value), plan_epilogue(b.graph, op, channel_axis=1)
        feed = conv_maps.Feed(with_pitch(b, op, b.source(op.inputs[0])), *planar(b.weights(op), op.attrs))
        bias, scatter = ep.added_to(bias_of(b, op)), self._scatter(b, op)
        return Convolution((feed,), bias, ep, None, out, out, scatter, covered=shuffle.src)

    def finish(self, b: Builder, op: Op, c: Convolution) -> None:
        """Nothing: the launch leaves no stages."""

    def _scatter(self, b: Builder, op: Op) -> Scatter | None:
        """The destination of the blocks; None if 8 neighboring channels are not one access."""
        (shuffle,) = self.neighbors(b.graph, op)
        out, k = b.result(shuffle.value), shuffle.attrs.blocksize
        return Scatter.of(out, (k, k), (0, 0), 8)
