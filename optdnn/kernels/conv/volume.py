"""Convolutions over three axes on Hopper's kernels: TMA loads the frames under the taps in place, and no launch copies them.

The passes turn such a convolution into one over two axes. The channels of its image are the frames under the taps along depth
(:mod:`optdnn.passes.conv3d_to_conv2d`). The region of this tactic is the operators that make this image, and the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, up
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.cost_terms import LATENCY, MEMORY
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.hopper import HopperConv, bias_of, is_half, on_images, planar
from optdnn.kernels.conv.parameters import TOGETHER_CHANNELS
from optdnn.kernels.conv.problem import Depth
from optdnn.kernels.conv.unfold import Frames, equally_distant, frames, slice_along
from optdnn.kernels.pointwise.pointwise import shared_copy
from optdnn.kernels.tactic import Region
from optdnn.types import Array

OVERLAP = 0.5e-6
"""Seconds of a copy's prediction that overlap with the end of the previous launch."""
_IMAGES = (0, 3, 1, 2)
"""The order of (N, H, W, C) as NCHW."""


@dataclass(frozen=True)
class Volume:
    """A volume ``x`` (N, D, H, W, C), and ``ops``, which make the image of a convolution from it, in the graph's order."""

    x: Value
    depth: Depth
    ops: tuple[Op, ...]

    def view(self, b: Builder) -> TensorView:
        """The volume as NCDHW."""
        x = b.source(self.x)
        return replace(x, shape=channels_second(x.shape), strides=channels_second(x.strides))

    def weights(self, weight: Array) -> Array:
        """OIHW weights of the image -> OIDHW ones of the volume."""
        out, _, *kernel = weight.shape
        return weight.reshape(out, self.depth.taps, -1, *kernel).swapaxes(1, 2)


def channels_second(sizes: Sequence[int]) -> tuple[int, ...]:
    n, d, h, w, c = sizes
    return n, c, d, h, w


def volume_of(graph: Graph, op: Op) -> Volume | None:
    """The volume whose frames form the image of a convolution over two axes; None if the image is something else."""
    turned = graph.op(op.inputs[0]) if op.inputs[0] is not None else op
    if turned.kind != "Transpose" or turned.attrs.perm != _IMAGES:
        return None
    joined = graph.op(turned.inputs[0])  # type: ignore[arg-type]
    if joined.kind != "Reshape" or not joined.outputs[0].type.is_static:
        return None
    taken = graph.op(joined.inputs[0])  # type: ignore[arg-type]
    if not taken.outputs or not taken.outputs[0].type.is_static or len(taken.outputs[0].type.static_shape) != 5:
        return None
    n, d, *rest = taken.outputs[0].type.static_shape
    if joined.outputs[0].type.static_shape != (n * d, *rest):
        return None
    found = _frames(graph, taken) if taken.kind == "Concat" else _every(graph, taken)
    if found is None or not found.depth.is_convolution:
        return None
    return replace(found, ops=(*found.ops, joined, turned))


def _frames(graph: Graph, op: Op) -> Volume | None:
    """The volume of a Concat along the channels."""
    slices = list({v.op: graph.op(v) for v in op.inputs if v is not None}.values())
    found = frames(graph, op) or _slid(graph, op, slices)
    if (
        found is None
        or found.fill
        or found.step < 1
        or found.axis != 1
        or op.attrs.axis not in (4, -1)
        or not graph.type(found.x).is_static
    ):
        return None
    depth = Depth(
        graph.type(found.x).static_shape[1], found.count, len(op.inputs), found.step, found.first, found.distance
    )
    padded: Value = slices[0].inputs[0]  # type: ignore[assignment]
    pads = () if padded == found.x else (graph.op(padded),)
    return Volume(found.x, depth, (*pads, *slices, op))


def _slid(graph: Graph, op: Op, slices: Sequence[Op]) -> Frames | None:
    """Slices at equal distances along axis 1 of one tensor without padding, or None."""
    if any(s.kind != "Slice" or s.inputs[0] is None or s.inputs[0] != slices[0].inputs[0] for s in slices):
        return None
    source = slices[0].inputs[0]
    if source is None or not graph.type(source).is_static:
        return None
    taken = [slice_along(graph, graph.op(v), 1) for v in op.inputs if v is not None]
    return equally_distant(source, 1, taken, before=0)


def _every(graph: Graph, op: Op) -> Volume | None:
    """The volume of a Slice along depth."""
    if op.kind != "Slice" or op.inputs[0] is None or not graph.type(op.inputs[0]).is_static:
        return None
    taken = slice_along(graph, op, 1)
    if not taken or taken.step < 1:
        return None
    depth = Depth(graph.type(op.inputs[0]).static_shape[1], len(taken), 1, taken.step, taken.start)
    return Volume(op.inputs[0], depth, (op,))


def with_volumes(graph: Graph, op: Op, others: Sequence[Op] = ()) -> Region:
    """The region of a convolution, of ``others`` whose results it adds, and of the operators that make their images and
    that nothing else reads."""
    own = {x.id: x for x in (op, *others)}
    for each in tuple(own.values()):
        found = volume_of(graph, each)
        for earlier in reversed(found.ops if found is not None else ()):
            if all(user.id in own for user in graph.users(earlier.value)):
                own[earlier.id] = earlier
    return Region(op, before=tuple(x for x in graph.order() if x.id in own and x.id != op.id))


class VolumeConv(HopperConv):
    """Ungrouped convolutions of 16-bit floats over three axes, alone or with one whose result is added first."""

    name = "conv3d_sm90"
    row_invariant: ClassVar[bool] = False
    flat: ClassVar[HopperConv] = HopperConv()
    """The tactic for copied frames."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = volume_of(b.graph, op)
        other = self._other(b, op)
        if found is None and (other is None or volume_of(b.graph, other) is None):
            return "its image is not made of the frames of a volume"
        if (why := super().refuse(b, op)) is not None:
            return why
        if op.attrs.prologue:
            return "other stages come before it"
        for each in (op, other):
            if each is not None and (why := self._unfit(b, each)) is not None:
                return why
        return None

    def _unfit(self, b: Builder, op: Op) -> str | None:
        """Why TMA cannot read the volume of a convolution; None if it can, or if there is no volume."""
        found = volume_of(b.graph, op)
        if found is None:
            return None
        return conv_maps.unfit_volume(self._feed(b, op, found))

    def defer(self, b: Builder, op: Op) -> str | None:
        """Why the cost model predicts copied frames to be faster, or None."""
        together = self.offers(self.problem(b, op), b.gpu)[0].predicted
        apart = self.offers(super().problem_of(b, op, self.flat.convolution(b, op)), b.gpu)[0].seconds
        copied = sum(copy_seconds(b, v) for o in (op, self._other(b, op)) if o and (v := volume_of(b.graph, o)))
        if together >= (apart or 0.0) + copied:
            return (
                f"{together * 1e6:.1f} us are predicted, {(apart or 0.0) * 1e6:.1f} after copies of its frames, "
                f"which take {copied * 1e6:.1f}"
            )
        return None

    def _other(self, b: Builder, op: Op) -> Op | None:
        """The convolution whose result ``op`` adds, if one launch can sum both."""
        if b.graph.constant_value(op.inputs[1]) is None or op.attrs.prologue:
            return None
        return self.added(b, op, plan_epilogue(b.graph, op, channel_axis=1))

    def _reads(self, b: Builder, other: Op) -> bool:
        """Whether the input of ``other`` is stored, or this tactic can read the volume from which its image is made."""
        made = {x.id for x in with_volumes(b.graph, other).before}
        return made.issuperset(x.id for x in b.joined.get(other.id, ()))

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that make the image."""
        found = volume_of(graph, op)
        return [*super().neighbors(graph, op), *(found.ops if found is not None else ())]

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution, the one whose result is added, and the operators that make their images and that nothing else reads."""
        other = self._other(b, op)
        return with_volumes(b.graph, op, () if other is None else (other,))

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution of the volume, with the one that is added as a second source."""
        ep, found = plan_epilogue(b.graph, op, channel_axis=1), volume_of(b.graph, op)
        bias, other = ep.added_to(bias_of(b, op)), self.added(b, op, ep)
        if found is None:
            return HopperConv.convolution(self, b, op)
        feed = self._feed(b, op, found)
        if other is None:
            return self._together(b, op, on_images(b, op, (feed,), bias, ep))
        ep.drop_residual()
        second, more = self._second(b, other)
        if more is not None:
            bias = more if bias is None else bias + more
        return replace(on_images(b, op, (feed, second), bias, ep), covered=other.src)

    def _together(self, b: Builder, op: Op, c: Convolution) -> Convolution:
        """The convolution with several frames of the result as one image, if few channels leave most of a tile idle and
        this is predicted to be faster."""
        depth = c.feed.depth
        assert depth is not None
        room = TOGETHER_CHANNELS // up(c.out.shape[1], 8)
        fitting = c.residual is None and depth.dilation == 1 and conv_maps.pitch_of(c.out) is not None and is_half(op)
        for count in (4, 2) if fitting else ():
            if count > room or depth.out % count:
                continue
            feed = replace(c.feed, depth=replace(depth, together=count))
            made = replace(c, feeds=(feed,))
            offers, alone = (self.offers(self.problem_of(b, op, x), b.gpu) for x in (made, c))
            if offers and offers[0].predicted < alone[0].predicted:
                return made
        return c

    def _feed(self, b: Builder, op: Op, found: Volume) -> conv_maps.Feed:
        x = found.view(b)
        if not conv_maps.readable_volume(x):
            x = shared_copy(b, op, x, "ndhwc", _ndhwc(x.shape))
        weight, strides, pads, dilations = planar(b.weights(op), op.attrs)
        return conv_maps.Feed(x, found.weights(weight), strides, pads, dilations, depth=found.depth)

    def _second(self, b: Builder, other: Op, width: int = 0) -> tuple[conv_maps.Feed, Array | None]:
        found = volume_of(b.graph, other)
        if found is None:
            return super()._second(b, other, width)
        return self._feed(b, other, found), bias_of(b, other)


def _ndhwc(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a volume NCDHW in channels-last order, with a pitch that is a multiple of 8."""
    _, c, d, h, w = shape
    pitch = up(c, 8)
    return d * h * w * pitch, 1, h * w * pitch, w * pitch, pitch


def copy_seconds(b: Builder, found: Volume) -> float:
    """Predicted seconds of the launch that copies the frames under the taps."""
    x = b.graph.type(found.x)
    read, taps = x.static_shape, found.depth.taps
    written = read[0] * found.depth.out * read[2] * read[3] * taps * read[4]
    touched = read[0] * min(read[1], found.depth.out * taps) * read[2] * read[3] * read[4]
    return moved_seconds((written + touched) * x.dtype.itemsize)


def moved_seconds(bytes: float) -> float:
    """Predicted seconds of a launch that only reads and writes so many bytes."""
    return bytes / MEMORY + LATENCY - OVERLAP
