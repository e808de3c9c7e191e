"""Common parts of the launches of convolutions and products: the bias, the operands of stages, and the attributes of
the meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import RESIDUAL, Epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import NOWHERE, Builder, TensorView, channels_last, up
from optdnn.kernels.conv.maps import Feed, storable
from optdnn.kernels.conv.parameters import Scatter
from optdnn.kernels.pointwise.pointwise import copy, emit_pointwise
from optdnn.kernels.tactic import ProblemTactic
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array

COPY_S, COPY_RATE = 2e-6, 3e12
"""Seconds of a copy's launch, and bytes per second that it reads and writes."""


@dataclass(frozen=True)
class Convolution:
    """A convolution before its launch: ``out = stages(sum over the feeds + bias)``. Its NCHW tensors are in place or
    still to be made.

    ``ep`` are the stages. Another launch runs the stages that ``ep`` leaves; it reads ``between``, which is ``out`` in
    the shape of the operator's result. ``residual`` has the form of ``out``. ``gate``: a factor per image and channel, as
    images of 1 x 1. With ``scatter``, channels are blocks of ``out``'s pixels. ``prologue``: stages on the pixels of the
    only feed. ``pooled``: ``out`` is the maximum of each 2 x 2 pixels. ``covered``: nodes that the launch computes besides
    the operator's.
    """

    feeds: tuple[Feed, ...]
    bias: Array | None
    ep: Epilogue
    residual: TensorView | None
    out: TensorView
    between: TensorView
    scatter: Scatter | None = None
    prologue: tuple[render.Stage, ...] = ()
    pooled: bool = False
    covered: frozenset[str] = frozenset()
    gate: TensorView | None = None

    @property
    def feed(self) -> Feed:
        """The only feed."""
        (found,) = self.feeds
        return found

    @property
    def channels(self) -> int:
        """Channels of the sum."""
        return len(self.feeds[0].weight)

    @property
    def copied(self) -> list[TensorView]:
        """Operands that separate launches still have to make."""
        return [
            x for x in (self.residual, self.gate, *(f.x for f in self.feeds)) if x is not None and x.make is not None
        ]

    def made(self, b: Builder) -> Convolution:
        """The convolution with all its tensors made."""
        feeds = tuple(feed.made(b) for feed in self.feeds)
        residual, gate = (None if x is None else b.made(x) for x in (self.residual, self.gate))
        out = b.made(self.out)
        between = self.between if self.between.buffer != NOWHERE else replace(self.between, buffer=out.buffer)
        return replace(self, feeds=feeds, residual=residual, gate=gate, out=out, between=between)


def copy_seconds(x: TensorView) -> float:
    """Predicted seconds of the launch that makes a copied operand."""
    return COPY_S + 2 * x.size * x.dtype.itemsize / COPY_RATE


class ConvolutionKernel(ProblemTactic):
    """A tactic that runs a :class:`Convolution` in one launch of its kernel, and the rest of the epilogue in a launch after it."""

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution that the launch computes."""
        raise NotImplementedError

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Any:
        """The kernel's problem."""
        raise NotImplementedError

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Any, config: Any) -> None:
        """Add the launch. Its tensors are made."""
        raise NotImplementedError

    def stored(self, b: Builder, x: TensorView) -> bool:
        """Whether the kernel can write the NCHW tensor, or read it as a residual, in place."""
        return storable(b, x)

    def problem(self, b: Builder, op: Op) -> Any:
        return self.problem_of(b, op, self.convolution(b, op))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        self.emit_planned(b, op, self.convolution(b, op), config)

    def emit_planned(self, b: Builder, op: Op, c: Convolution, config: Any) -> None:
        """Add the launches of a convolution."""
        problem, made = self.problem_of(b, op, c), c.made(b)
        self.launch(b, replace(op, src=op.src | c.covered), made, problem, config)
        self.finish(b, op, made)

    def finish(self, b: Builder, op: Op, c: Convolution) -> None:
        """Add the rest of the epilogue, from ``between`` to the place of the result (:func:`finish`)."""
        finish(b, op, c.ep, c.between, b.target(op.value))


def finish(b: Builder, op: Op, ep: Epilogue, between: TensorView, target: TensorView) -> None:
    """Add the rest of the epilogue, from ``between`` to the place of the result: nothing, a copy, or a pointwise launch."""
    if between is target:
        return
    if not ep.rest:
        copy(b, op, between, target)
    else:
        emit_pointwise(b, op, ep.rest, [between, *map(b.operand, ep.rest_operands)], target)


def conv_attrs(
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int]], group: int, epilogue: Sequence[Stage],
    prologue: Sequence[Stage] = (), arity: int = RESIDUAL,
) -> dict[str, Any]:  # fmt: skip
    """The attributes of a Conv as its reference kernel takes them. ``geometry``: strides, pads, dilations."""
    strides, pads, dilations = geometry
    return {
        "strides": strides, "pads": pads, "dilations": dilations, "group": group, "auto_pad": "NOTSET",
        "prologue": plain_stages(prologue), "epilogue": plain_stages(epilogue), "arity": arity,
    }  # fmt: skip


def bias_row(b: Builder, op: Op, bias: Array | None, size: int) -> TensorView:
    """The fp32 constant ``[size]`` of a bias (None: zeros), padded with zeros."""
    row = np.zeros(size, np.float32)
    if bias is not None:
        row[: len(bias)] = bias
    return b.constant(row, f"{op.outputs[0].name}.bias")


def stage_operands(
    b: Builder, ep: Epilogue, residual: TensorView | None, gate: TensorView | None = None
) -> list[TensorView | None]:
    """The operands of the stages, in the order in which they follow input, weights and bias."""
    others = [*(() if gate is None else (gate,)), *(b.constant(c, "scalar") for c in ep.constants)]
    return [residual, *others] if residual is not None or others else []


def result_place(
    b: Builder,
    op: Op,
    ep: Epilogue,
    target: TensorView,
    fits: bool,
    pitch: int = 0,
    strides: Sequence[int] | None = None,
) -> TensorView:
    """Where a launch writes: ``target``, or a tensor that is still to be made, if stages are left or the launch cannot
    write to ``target`` (``fits`` False). That tensor has these ``strides``; None: channels-last with this ``pitch`` (0:
    a multiple of 8)."""
    if fits and not ep.rest:
        return target
    if strides is None:
        strides = channels_last(target.shape, pitch or up(target.shape[1], 8))
    return b.later(f"{op.outputs[0].name}.conv", target.dtype, target.shape, strides)
