"""1x1 convolutions of images that are normalized as a whole, without a launch for the norm.

A group norm of one group (MobileViTV2: Mehta and Rastegari, 2022) is a factor and a shift of each image, then of each channel. The
1x1 convolution that makes the images also writes the moments of every eight pixels. The convolution of the normalized images reads
the images before the norm, reduces the moments of each image, and applies the norm to its sums, as products of normalized rows do
(:mod:`optdnn.kernels.gemm.normed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.hopper import HopperConv, image
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.conv.row_forms import MOMENT_CHANNELS, MOMENT_ROWS, RowNorm
from optdnn.kernels.gemm.row_norms import TOLD, Normed, behind, norm_attrs, normed_operands, scaled_refusal
from optdnn.kernels.norm.group_norm import GroupNorm, no_plain_norm
from optdnn.kernels.tactic import Region
from optdnn.ops.fused import plain_stages
from optdnn.types import BF16, FP16

NORM, PLAIN = GroupNorm(), HopperConv()


@dataclass(frozen=True)
class NormedImages(Normed):
    """A group norm of one group, and the convolution that makes its images."""

    @property
    def kind(self) -> RowNorm:
        return RowNorm(True, self.norm.attrs.epsilon, _size(self.norm)[2])

    def moments(self, b: Builder) -> TensorView:
        """The moments of every eight pixels, which the producer's launch writes: fp32 (channels / 64, pixels / 8, 2)."""
        if self.producer.id not in b.together:
            batch, channels, positions = _size(self.norm)
            shape = (channels // MOMENT_CHANNELS, batch * positions // MOMENT_ROWS, 2)
            b.together[self.producer.id] = b.new(
                f"{self.producer.outputs[0].name}.moments", np.dtype(np.float32), shape
            )
        found: TensorView = b.together[self.producer.id]
        return found


def normed_images(graph: Graph, op: Op) -> NormedImages | None:
    """The group norm of one group before a convolution, and the convolution that makes its images; None if there is no
    such pair."""
    value = op.inputs[0]
    norm = None if value is None else graph.op(value)
    if norm is None or norm.kind != "GroupNormalization" or norm.attrs.num_groups != 1 or norm.inputs[0] is None:
        return None
    producer = _before_views(graph, norm.inputs[0])
    return NormedImages(norm, producer) if producer is not None and _size(producer) == _size(norm) else None


def _before_views(graph: Graph, value: Value) -> Op | None:
    """The convolution that makes ``value``, directly or through views. The views may permute pixels within an image; else None."""
    op, batch = graph.op(value), graph.type(value).dims[:1]
    while op.kind in ("Reshape", "Transpose"):
        moved = op.kind == "Transpose" and (op.attrs.perm is None or op.attrs.perm[0] != 0)
        if moved or op.inputs[0] is None or graph.type(op.inputs[0]).dims[:1] != batch:
            return None
        op = graph.op(op.inputs[0])
    return op if op.kind == "Conv" else None


def _size(op: Op) -> tuple[int, ...]:
    """Images, channels and positions of a result."""
    batch, channels, *spatial = op.outputs[0].type.static_shape
    return batch, channels, math.prod(spatial)


class NormedConv(HopperConv):
    """A 1x1 convolution that applies the norm of its images. It may also write the moments of its own result."""

    name = "conv_normed_sm90"

    @staticmethod
    def _normed(b: Builder, op: Op) -> NormedImages:
        found = normed_images(b.graph, op)
        assert found is not None
        return found

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        found = normed_images(b.graph, op)
        if found is None:
            return "its images are not normalized as a whole after another convolution"
        if (why := self._refuse_norm(b, op, found)) is not None:
            return why
        c = super().convolution(b, op)
        if len(c.feeds) > 1 or not super().problem_of(b, op, c).rows_alone:
            return "it is not a 1x1 convolution of single pixels"
        if c.residual is not None or c.ep.constants or c.ep.scale is not None:
            return "its stages read other tensors"
        tactic = b.chosen.get(found.producer.id)
        if type(tactic) not in (HopperConv, NormedConv):
            return f"{found.producer.name} runs by a tactic that gives no moments"
        assert isinstance(tactic, HopperConv)
        stored = tactic.output_with_moments(b, found.producer) == image(b.source(found.producer.value))
        if not stored or conv_maps.pitch_of(image(b.source(found.rows))) is None:
            return f"the launch of {found.producer.name} does not store the images that are normalized, pixel by pixel"
        return scaled_refusal(b, c.feed.weight, found.scale(b))

    @staticmethod
    def _refuse_norm(b: Builder, op: Op, found: NormedImages) -> str | None:
        """Why no launch can apply the norm by moments, whatever the layout of its images, or None."""
        t, (_, channels, positions) = found.norm.outputs[0].type, _size(found.norm)
        if t.dtype not in (FP16, BF16) or op.outputs[0].type.dtype != t.dtype:
            return "it is for 16-bit floats"
        if b.row_invariant:
            return "moments are summed in another order where the launch before has other tiles"
        if (why := no_plain_norm(b, found.norm)) is not None:
            return f"the norm: {why}"
        if b.graph.sole_user(found.norm.value) != op or found.norm.value in b.reserved:
            return "others read the normalized images"
        if channels % MOMENT_CHANNELS or positions % MOMENT_ROWS:
            return (
                f"{positions} pixels of {channels} channels are no whole groups of {MOMENT_ROWS} by {MOMENT_CHANNELS}"
            )
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        if (why := super().defer(b, op)) is not None or NORM.refuse(b, self._normed(b, op).norm) is not None:
            return why
        pairs = ((NORM, self._normed(b, op).norm), (PLAIN, op), (self, op))
        norm, alone, own = (tactic.configs(b, x)[0].predicted for tactic, x in pairs)
        if own + TOLD < norm + alone:
            return None
        return f"norm and convolution are predicted to take {(norm + alone) * 1e6:.1f} us, one launch {(own + TOLD) * 1e6:.1f}"

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The norm, and the producer of its images."""
        found = normed_images(graph, op)
        return [] if found is None else [found.norm, found.producer]

    def region(self, b: Builder, op: Op) -> Region:
        """The norm and the convolution."""
        return Region(op, before=(self._normed(b, op).norm,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, and the moments that the producer writes."""
        super().place(b, op)
        self._normed(b, op).moments(b)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution of the images before the norm, with the scaled matrix."""
        found = self._normed(b, op)
        return behind(b, super().convolution(b, op), image(b.source(found.rows)), found)

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Problem:
        problem: Problem = super().problem_of(b, op, c)
        return replace(problem, norm=self._normed(b, op).kind)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        moments, norm = b.together.get(op.id), problem.norm
        assert norm is not None
        operands = normed_operands(b, op, c, problem, self._normed(b, op).moments(b))
        columns, depth = c.out.shape[1], c.feed.x.shape[1]
        weights = operands["weights"].view((columns, depth), (operands["weights"].shape[1], 1))
        sums, bias = (operands[n].view((columns,), (1,)) for n in ("columns", "channel"))
        attrs = {**norm_attrs(norm), "image": norm.image, "epilogue": plain_stages(c.ep.stages), "beside": ()}
        kind, rows, out = "NormedProduct", pixels_as_rows(c.feed.x), pixels_as_rows(c.out)
        if moments is not None:
            problem, operands["moments"] = replace(problem, moments=True, moment_rows=MOMENT_ROWS), moments
            kind, attrs = hopper_launch.with_moments(kind, attrs, rows=MOMENT_ROWS)
        made = hopper_launch.launch(problem, config, b.gpu, c.feeds, operands)
        reads = [rows, operands["given"], weights, sums, bias]
        hopper_launch.emit(b, op, made, problem, config, operands, (kind, attrs, reads), out, moments)


def pixels_as_rows(x: TensorView) -> TensorView:
    """Channels-last images without gaps between pixels, as rows."""
    n, channels, h, w = x.shape
    pitch = x.strides[3] if w > 1 else x.strides[2] if h > 1 else x.strides[0]
    return x.view((n * h * w, channels), (pitch, 1))
