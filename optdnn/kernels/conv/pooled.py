"""A convolution and the max pooling of its result by 2 x 2, in one launch: the result before pooling is never stored (VGG, YOLO, LeNet)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, unmade, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.hopper import HopperConv, bias_of, is_half, planar
from optdnn.kernels.pool.max_pool import predicted
from optdnn.kernels.tactic import Region
from optdnn.runtime.reference.window import resolve_pads

OVERLAP = 0.5e-6
"""Seconds of a pool's prediction that pass while the convolution before it ends."""


def max_pool_behind(graph: Graph, op: Op) -> Op | None:
    """The max pool that is the only reader of the result, or None."""
    user = graph.sole_user(op.value)
    return user if user is not None and user.kind == "MaxPool" else None


class PooledConv(HopperConv):
    """Convolutions of stride 1 whose only reader is a max pool with 2 x 2 windows that do not overlap. They run on the
    patch kernel, whose tiles are parts of images. The launch is emitted at the convolution and writes the pool's
    result."""

    name = "conv_pool_sm90"
    row_invariant: ClassVar[bool] = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        pool, x = max_pool_behind(b.graph, op), op.inputs[0]
        if pool is None:
            return "no max pool is the only reader of the result"
        if (why := _other_windows(b, pool)) is not None:
            return f"the pool after it: {why}"
        if not is_half(op) or len(op.outputs[0].type.static_shape) != 4:
            return "it is for images of 16-bit floats"
        if (why := super().refuse(b, op)) is not None:
            return why
        if op.attrs.prologue or x is None or conv_maps.pitch_of(b.operand(x)) is None:
            return "its operand needs a launch before it"
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        if ep.rest or ep.residual is not None:
            return "its epilogue reads other tensors than constants"
        place = b.reserved.get(pool.value)
        if not pool.outputs[0].type.layout or (place is not None and not _dense(place)):
            return "the pool's result is not channels-last without gaps"
        offers = self.configs(b, op)
        if not offers:
            return "no tile of whole windows fits"
        apart, pooling = self._apart(b, op, pool)
        together = offers[0].predicted
        if together >= apart + pooling - OVERLAP:
            return (
                f"{together * 1e6:.1f} us are predicted for both, {apart * 1e6:.1f} for the convolution alone and "
                f"{(pooling - OVERLAP) * 1e6:.1f} for the pool after it"
            )
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The pool after it, if its windows are 2 x 2."""
        pool = max_pool_behind(graph, op)
        return [pool] if pool is not None and pool.attrs.kernel_shape == (2, 2) else []

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution and the pool."""
        pool = max_pool_behind(b.graph, op)
        assert pool is not None
        return Region(op, after=(pool,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the pool's result. The convolution's own result is not stored."""
        pool = max_pool_behind(b.graph, op)
        assert pool is not None
        b.target(pool.value)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution with the pool: its output is the pool's result."""
        pool = max_pool_behind(b.graph, op)
        assert pool is not None
        return replace(self._alone(b, op, b.result(pool.value)), pooled=True, covered=pool.src)

    @staticmethod
    def _alone(b: Builder, op: Op, out: TensorView) -> Convolution:
        """The convolution without the pool."""
        weight, ep = b.weights(op), plan_epilogue(b.graph, op, channel_axis=1)
        feed = conv_maps.Feed(b.source(op.inputs[0]), *planar(weight, op.attrs))
        return Convolution((feed,), ep.added_to(bias_of(b, op)), ep, None, out, out)

    def finish(self, b: Builder, op: Op, c: Convolution) -> None:
        """Nothing: the launch leaves no stages."""

    def _apart(self, b: Builder, op: Op, pool: Op) -> tuple[float, float]:
        """Predicted seconds of the convolution and of the pool as separate launches."""
        x, out = (
            unmade(t.dtype, t.static_shape, channels_last(t.static_shape, up(t.static_shape[1], 8)))
            for t in (op.outputs[0].type, pool.outputs[0].type)
        )
        offers = hopper_launch.ranked(self.problem_of(b, op, self._alone(b, op, x)), b.gpu)
        return offers[0].predicted, predicted(x, out, pool.attrs.kernel_shape, pool.attrs.strides, b.gpu)


def _other_windows(b: Builder, pool: Op) -> str | None:
    """Why the pool's windows are not adjacent blocks of 2 x 2 pixels, or None."""
    a = pool.attrs
    assert pool.inputs[0] is not None
    size = b.graph.type(pool.inputs[0]).static_shape[2:]
    if len(pool.outputs) > 1:
        return "it gives indices"
    if tuple(a.kernel_shape) != (2, 2) or tuple(a.strides) != (2, 2) or any(d != 1 for d in a.dilations):
        return "its windows are not of 2 x 2, side by side"
    pads = resolve_pads(a.auto_pad, a.pads, size, a.kernel_shape, a.strides, a.dilations)
    if pads is None or any(pads) or pool.outputs[0].type.static_shape[2:] != tuple(n // 2 for n in size):
        return "its windows reach beyond the image"
    return None


def _dense(x: TensorView) -> bool:
    return x.offset % 8 == 0 and x.is_like(channels_last(x.shape, up(x.shape[1], 8)))
