"""Two convolutions of the same image in one launch, one multiplied by the other: the gates of WaveNet, and gated linear units.

``f(conv(x) + conv(m)) * g(conv'(x) + conv'(m))``; the second convolutions may be absent. As in
:mod:`optdnn.kernels.gemm.paired`, the launch's weights alternate channels of the two factors, so that a thread has both
sums and stores one result. The launch is emitted at the convolution that multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import RESIDUAL, Epilogue, plan_epilogue, read_once
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, products
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import Convolution, ConvolutionKernel, bias_row
from optdnn.kernels.conv.hopper import (
    FEW_CHANNELS,
    HopperConv,
    bias_of,
    image,
    on_images,
    planar,
    row_width,
    with_pitch,
)
from optdnn.kernels.conv.packed import weight_operands, with_ranges
from optdnn.kernels.conv.parts import PartsConv
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import FP16, UINT8, Array


@dataclass(frozen=True)
class Factor:
    """One factor: the convolution ``op``, and ``added``, the convolution whose result it adds first, or None. ``rest``
    is ``op`` without that stage."""

    op: Op
    added: Op | None
    rest: Op

    @property
    def convolutions(self) -> tuple[Op, ...]:
        """The convolutions that the factor sums."""
        return (self.op,) if self.added is None else (self.op, self.added)


def factor(graph: Graph, op: Op) -> Factor:
    """The factor of a convolution."""
    stages: Sequence[Stage] = op.attrs.epilogue
    slots = [a for a in stages[0].args if a is not None and a >= 0] if stages and stages[0].kind == "Add" else []
    value = op.inputs[slots[0]] if slots else None
    other = None if value is None else graph.op(value)
    if other is None or other.kind != "Conv" or not _read_by(graph, other, op):
        return Factor(op, None, op)
    if other.attrs.epilogue or other.attrs.prologue or graph.constant_value(other.inputs[1]) is None:
        return Factor(op, None, op)
    moved = tuple(
        replace(s, args=tuple(a if a is None or a >= 0 else min(a + 1, -1) for a in s.args)) for s in stages[1:]
    )
    return Factor(op, other, replace(op, attrs=replace(op.attrs, epilogue=moved)))


def multiplier(graph: Graph, own: Factor) -> Factor | None:
    """The other factor, of convolutions of the same images with the same geometry, or None."""
    for value in own.op.inputs[own.op.definition.arity or 0 :]:
        op = None if value is None else graph.op(value)
        if op is None or op.kind != "Conv" or not _read_by(graph, op, own.op):
            continue
        other = factor(graph, op)
        if [_walk(graph, x) for x in own.convolutions] != [_walk(graph, x) for x in other.convolutions]:
            continue
        ep = plan_epilogue(graph, own.rest, channel_axis=1)
        if ep.residual == value and ("mul",) in ep.rendered:
            return other
    return None


def _read_by(graph: Graph, op: Op, reader: Op) -> bool:
    """Whether only one stage of ``reader`` reads the result."""
    user = graph.sole_user(op.value)
    return user is not None and user.id == reader.id and read_once(reader, op.value)


def _walk(graph: Graph, op: Op) -> tuple[Any, ...]:
    """The image that a convolution reads, and its geometry."""
    a = op.attrs
    return op.inputs[0], graph.type(op.inputs[1]).shape, a.strides, a.pads, a.dilations, a.group, a.auto_pad  # type: ignore[arg-type]


def faster_apart(b: Builder, together: tuple[Tactic, Op], apart: Sequence[tuple[Tactic, Op]]) -> str | None:
    """Why two launches are better than one that multiplies their results, by the cost model; None if they are not. With ``row_invariant``, one
    launch serves every batch size: it rounds once."""
    if b.row_invariant:
        return None
    one, two = (sum(t.configs(b, op)[0].predicted for t, op in pairs) for pairs in ((together,), apart))
    return None if one < two else f"two launches are predicted to take {two * 1e6:.1f} us, one {one * 1e6:.1f}"


class PairedConv(hopper_launch.HopperTactic, ConvolutionKernel):
    """Two ungrouped convolutions of floats over one or two spatial axes, on Hopper's kernel."""

    name = "conv_paired_sm90"
    one: ClassVar[HopperConv] = HopperConv()
    """The tactic that runs one convolution by itself."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := self.one.refuse(b, op)) is not None:
            return why
        own = factor(b.graph, op)
        other = multiplier(b.graph, own)
        if other is None:
            return "it is not multiplied by another convolution of the same image"
        for conv in (*own.convolutions, *other.convolutions):
            if (why := self._unfit(b, conv)) is not None:
                return why
        if row_width(b, *own.convolutions) is None:
            return "its two convolutions read lines in rows of different lengths"
        if b.weights(op).shape[0] % 8:
            return "its number of channels is not a multiple of 8"
        ep, beside = (plan_epilogue(b.graph, f.rest, channel_axis=1) for f in (own, other))
        if ep.constants or beside.constants:
            return "its stages have constants"
        if beside.rest or beside.residual is not None:
            return f"what follows the other convolution {other.op.name} is more than an activation"
        return None

    def _unfit(self, b: Builder, conv: Op) -> str | None:
        """Why a convolution cannot be a source of the sum, or None."""
        if (why := self.one.refuse(b, conv)) is not None:
            return f"the convolution {conv.name}: {why}"
        if conv.attrs.prologue:
            return f"the convolution {conv.name} has a prologue"
        if b.weights(conv).shape[1] <= FEW_CHANNELS:
            return f"the convolution {conv.name} reads {b.weights(conv).shape[1]} channels, which leave most of a K step empty"
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        own = factor(b.graph, op)
        other = multiplier(b.graph, own)
        assert other is not None
        return faster_apart(b, (self, op), ((self.one, op), (self.one, other.op)))

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The convolution that ``op`` adds, and those of the other factor."""
        own = factor(graph, op)
        other = multiplier(graph, own)
        return [*own.convolutions[1:], *(() if other is None else other.convolutions)]

    def region(self, b: Builder, op: Op) -> Region:
        """All convolutions of both factors."""
        before = self.neighbors(b.graph, op)
        return Region(op, before=tuple(sorted(before, key=b.graph.order().index)))

    def _factors(self, b: Builder, op: Op) -> tuple[Factor, Factor]:
        own = factor(b.graph, op)
        other = multiplier(b.graph, own)
        assert other is not None
        return own, other

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution of all channels. The channels of the two factors alternate."""
        own, other = self._factors(b, op)
        ep = plan_epilogue(b.graph, own.rest, channel_axis=1)
        width = row_width(b, *own.convolutions)
        assert width is not None
        feeds = tuple(self._feed(b, *pair, width) for pair in zip(own.convolutions, other.convolutions, strict=True))
        rows = [_bias(b, f) for f in (own, other)]
        zeros = np.zeros(b.weights(op).shape[0], np.float32)
        bias = in_turn([zeros if v is None else v for v in rows])
        plain = on_images(b, op, feeds, bias, replace(ep, residual=None), width=width)
        covered = frozenset().union(*(x.src for x in self.neighbors(b.graph, op)))
        return replace(plain, covered=covered)

    @staticmethod
    def _feed(b: Builder, one: Op, other: Op, width: int) -> conv_maps.Feed:
        """One image, with the weights of both factors in alternate rows."""
        first, second = b.weights(one), b.weights(other)
        joined = b.kept.once(("in turn",), [first, second], lambda: in_turn([first, second]))
        assert one.inputs[0] is not None
        x = with_pitch(b, one, image(b.source(one.inputs[0]), width))
        return conv_maps.Feed(x, *planar(joined, one.attrs, width))

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> conv_problem.Problem:
        _, other = self._factors(b, op)
        beside = plan_epilogue(b.graph, other.rest, channel_axis=1)
        batch, channels = c.out.shape[:2]
        problem = conv_problem.Problem(
            batch, 2 * channels, tuple(f.source for f in c.feeds), (("bias",), *c.ep.rendered), products(b, op),
            map_dtype(c.out.dtype), beside=(("bias",), *beside.rendered), pitches=hopper_launch.paired_pitches(c.out),
        )  # fmt: skip
        return with_ranges(b, problem, c.feeds)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: conv_problem.Problem, config: Any) -> None:
        _own, other = self._factors(b, op)
        matrix = weight_operands(b, op, problem, c.feeds)
        bias, channels = bias_row(b, op, c.bias, problem.channels), c.out.shape[1]
        operands = {**matrix, "channel": bias, "output": in_halves(c.out), **hopper_launch.pixels(c.feeds)}
        reads: list[TensorView | None] = []
        for feed, view in zip(c.feeds, conv_maps.weight_views(matrix["weights"], problem, c.feeds), strict=True):
            reads += [feed.x, *factors_of(problem, view)]
        reads[3:3] = [bias.view((channels,), (2,), k) for k in range(2)]
        beside = plan_epilogue(b.graph, other.rest, channel_axis=1)
        attrs = {
            "sources": tuple(f.geometry for f in c.feeds),
            "epilogue": plain_stages(stages_with_other(c.ep)), "beside": plain_stages(beside.stages),
        }  # fmt: skip
        made = hopper_launch.launch(problem, config, b.gpu, c.feeds, operands)
        hopper_launch.emit(b, op, made, problem, config, {**operands, "output": c.out}, ("PairedConv", attrs, reads))


class PairedParts(PairedConv):
    """Two convolutions of fp32, in parts of fp16."""

    name = "conv_paired_parts_sm90"
    one = PartsConv()
    parts = True


def _bias(b: Builder, own: Factor) -> Array | None:
    """The sum of the biases of a factor, per channel; None without biases."""
    given = [bias_of(b, x) for x in own.convolutions]
    found = plan_epilogue(b.graph, own.rest, channel_axis=1).bias
    rows = [v for v in (*given, found) if v is not None]
    return None if not rows else np.asarray(np.sum(rows, axis=0, dtype=np.float32))


def in_turn(arrays: Sequence[Array]) -> Array:
    """Interleaved rows of the arrays: the first row of each, the second row of each, and so on."""
    return np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def stages_with_other(ep: Epilogue) -> list[Stage]:
    """The stages in a region of two factors, where the other factor is operand 1 in place of the residual."""
    return [replace(s, args=tuple(1 if a == RESIDUAL else a for a in s.args)) for s in ep.stages]


def in_halves(x: TensorView) -> TensorView:
    """A channels-last image (n, channels, h, w) of floats as one with elements of half the size and twice the channels."""
    n, channels, h, w = x.shape
    image_step, _, row, column = (2 * s for s in x.strides)
    dtype = UINT8 if x.dtype.itemsize == 2 else FP16
    return replace(
        x, dtype=dtype, shape=(n, 2 * channels, h, w), strides=(image_step, 1, row, column), offset=2 * x.offset
    )


def factors_of(problem: conv_problem.Problem, packed: TensorView) -> list[TensorView]:
    """Views of each factor's weights in the packed ones (of :func:`maps.weight_views`), as ``[O / 8, 8, I, H, W]``."""
    if problem.out_item == 1:
        (eights, eight, _, *shape), (far, near, half, *strides) = packed.shape, packed.strides
    else:
        (rows, *shape), (half, *strides) = packed.shape, packed.strides
        eights, eight, far, near = rows // 16, 8, 16 * half, 2 * half
    return [packed.view((eights, eight, *shape), (far, near, *strides), k * half) for k in range(2)]
