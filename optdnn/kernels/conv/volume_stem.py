"""Convolutions over three axes of a volume of few channels, in one launch. The stem kernel reads the frames under the
taps along depth in place, as channels of one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv.hopper import planar
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.stem import StemConv, no_operands, no_tile
from optdnn.kernels.conv.stem_input import pixel_source
from optdnn.kernels.conv.volume import Volume, channels_second, copy_seconds, moved_seconds, volume_of, with_volumes
from optdnn.kernels.tactic import Region
from optdnn.runtime.cuda.gpu_facts import no_kernels
from optdnn.types import Array


class VolumeStem(StemConv):
    """The first convolution of a network for videos or scans, with 16-bit factors."""

    name = "conv3d_stem"
    move = "a copy of its frames"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := no_kernels(b.arch)) is not None:
            return why
        if volume_of(b.graph, op) is None:
            return "its image is not made of the frames of a volume"
        weight = b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim != 4 or 0 in weight.shape or op.attrs.group != 1 or op.attrs.prologue:
            return "it is not an ungrouped convolution with constant weights and without a prologue"
        if (why := no_operands(b, op)) is not None:
            return why
        if plan_epilogue(b.graph, op, channel_axis=1).residual is not None:
            return "a tensor is added to its result"
        return no_tile(b, self._problem(b, op))

    def _moving_seconds(self, b: Builder, op: Op) -> float:
        """Those of the copy, and of the conversion before it: this kernel reads the input of the conversion."""
        found, read = self._volume(b, op), self._source(b, op)
        own, item = copy_seconds(b, found), b.graph.type(found.x).dtype.itemsize
        return own if read.dtype.itemsize == item else own + moved_seconds(read.size * (read.dtype.itemsize + item))

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that make the image."""
        found = volume_of(graph, op)
        return found.ops if found is not None else ()

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution and the operators that make its image."""
        return with_volumes(b.graph, op)

    def _column(self, b: Builder, op: Op) -> bool:
        """The frames are read in place: a column stays one."""
        return False

    @staticmethod
    def _volume(b: Builder, op: Op) -> Volume:
        found = volume_of(b.graph, op)
        assert found is not None
        return found

    def _source(self, b: Builder, op: Op) -> TensorView:
        """The volume as NCDHW, before a cast and a change of the order of its axes."""
        value = pixel_source(b, self._volume(b, op).x)
        turned, order = b.graph.op(value), (0, 1, 2, 3, 4)
        if turned.kind == "Transpose" and turned.attrs.perm is not None:
            order, value = tuple(turned.attrs.perm), pixel_source(b, turned.inputs[0])
        x, axes = b.source(value), channels_second(order)
        return replace(x, shape=tuple(x.shape[i] for i in axes), strides=tuple(x.strides[i] for i in axes))

    def _problem(self, b: Builder, op: Op) -> stem.Problem:
        weight, strides, pads, dilations = planar(b.weights(op), op.attrs)
        x, depth = self._source(b, op), self._volume(b, op).depth
        n, c, _, h, w = x.shape
        stages = (("bias",), *plan_epilogue(b.graph, op, channel_axis=1).rendered)
        source = Source(h, w, c * depth.taps, weight.shape[2:], strides, pads, dilations, depth=depth)
        return stem.Problem(
            n * depth.out, source, up(weight.shape[0], 8), (x.strides[0], x.strides[1], *x.strides[3:]), map_dtype(x.dtype),  # type: ignore[arg-type]
            x.offset % 16, stages, map_dtype(op.outputs[0].type.dtype), frame=x.strides[2],
        )  # fmt: skip

    def _meant(self, b: Builder, op: Op, geometry: Any) -> Any:
        return conv_maps.depth_geometry(self._volume(b, op).depth, geometry)

    def _weight_shape(self, b: Builder, op: Op, weight: Array) -> tuple[int, ...]:
        return self._volume(b, op).weights(weight).shape

    def _written(self, b: Builder, op: Op, out: TensorView) -> TensorView:
        return conv_maps.volume_view(out, self._volume(b, op).depth.out)
