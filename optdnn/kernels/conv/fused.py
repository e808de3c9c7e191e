"""What the launches of convolutions and products have in common: the bias, what stages read, and the attributes of the meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.epilogue import RESIDUAL, Epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, unmade, up
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.conv.parameters import Scatter
from optdnn.kernels.tactic import ProblemTactic
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import Array


@dataclass(frozen=True)
class Convolution:
    """A convolution before its launch, on NCHW tensors where they lie: ``out = stages(sum over the feeds + bias)``.

    ``ep`` are the stages; what they leave is another launch's. ``residual`` is a tensor like ``out``. With ``scatter`` channels are
    blocks of ``out``'s pixels.
    """

    feeds: tuple[Feed, ...]
    bias: Array | None
    ep: Epilogue
    residual: TensorView | None
    out: TensorView
    scatter: Scatter | None = None

    @property
    def feed(self) -> Feed:
        """The only one."""
        (found,) = self.feeds
        return found

    @property
    def channels(self) -> int:
        """Of the sum."""
        return len(self.feeds[0].weight)


class ConvolutionKernel(ProblemTactic):
    """A tactic that makes a :class:`Convolution` one launch of its kernel."""

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Any:
        """The problem of a convolution whose tensors are made, or still to be made."""
        raise NotImplementedError

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Any, config: Any) -> None:
        """Add the launch."""
        raise NotImplementedError

    def stored(self, b: Builder, x: TensorView) -> bool:
        """Whether the kernel writes the NCHW tensor, or adds it, where it lies."""
        raise NotImplementedError


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
    """The fp32 constant ``[size]`` of a bias (None: zeros), with zeros behind it."""
    row = np.zeros(size, np.float32)
    if bias is not None:
        row[: len(bias)] = bias
    return b.constant(row, f"{op.outputs[0].name}.bias")


def stage_operands(b: Builder, ep: Epilogue, residual: TensorView | None) -> list[TensorView | None]:
    """The operands of the stages, which stand behind input, weights and bias."""
    constants = [b.constant(c, "scalar") for c in ep.constants]
    return [residual, *constants] if residual is not None or constants else []


def result_view(ep: Epilogue, target: TensorView, fits: bool, pitch: int = 0) -> TensorView:
    """Where a launch writes: ``target``, or a channels-last tensor of this pitch (0: channels in eights), which is still to be made,
    where stages are left or the launch cannot write there (``fits``)."""
    if fits and not ep.rest:
        return target
    return unmade(target.dtype, target.shape, channels_last(target.shape, pitch or up(target.shape[1], 8)))


def result_place(b: Builder, op: Op, ep: Epilogue, target: TensorView, fits: bool, pitch: int = 0) -> TensorView:
    """:func:`result_view` in a buffer."""
    return b.made(result_view(ep, target, fits, pitch), f"{op.outputs[0].name}.conv")
