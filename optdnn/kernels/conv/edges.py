"""Depthwise convolutions, transposed or not, that repeat the edges of their input themselves, without a launch that pads it.

The filters of anti-aliased activations need such padding (BigVGAN: Lee et al., 2023; Karras et al., 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.direct import Depthwise, DepthwiseTranspose, Meant
from optdnn.kernels.pool.window import Edges
from optdnn.kernels.tactic import TakesBefore
from optdnn.types import normalize_axis

LAUNCH_S = 1e-6
"""Seconds of a dependent launch."""


def padded_edges(graph: Graph, op: Op) -> tuple[Op, tuple[int, ...]] | str:
    """The Pad before a convolution that repeats the edges of its spatial axes, and the number of repetitions (begins,
    then ends); or why there is none."""
    pad = None if op.inputs[0] is None else graph.op(op.inputs[0])
    if pad is None or pad.kind != "Pad" or pad.attrs.mode != "edge" or op.attrs.prologue:
        return "no Pad before it repeats edges"
    user, shape = graph.sole_user(pad.value), graph.type(pad.inputs[0]).static_shape  # type: ignore[arg-type]
    if user is None or user.id != op.id:
        return "the padded tensor has other readers"
    pads, rank = graph.constant_value(pad.inputs[1]), len(shape)
    axes = None if pad.input(3) is None else graph.constant_value(pad.input(3))
    if pads is None or (pad.input(3) is not None and axes is None):
        return "its pads are not constant"
    which = range(rank) if axes is None else [normalize_axis(int(a), rank) for a in axes]
    begins, ends = [0] * rank, [0] * rank
    for i, axis in enumerate(which):
        begins[axis], ends[axis] = int(pads[i]), int(pads[i + len(which)])
    if any(begins[:2]) or any(ends[:2]) or min(begins + ends) < 0 or 0 in shape:
        return "it pads images or channels, or crops them"
    return pad, (*begins[2:], *ends[2:])


class EdgePadded(TakesBefore):
    """A tactic whose region is a Pad and a convolution."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = padded_edges(b.graph, op)
        return found if isinstance(found, str) else super().refuse(b, op)  # type: ignore[safe-super]

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The Pad."""
        found = padded_edges(graph, op)
        return [] if isinstance(found, str) else [found[0]]

    def source(self, b: Builder, op: Op) -> TensorView:
        """The input of the Pad."""
        pad, _ = self._found(b, op)
        return b.source(pad.inputs[0])

    def meant(self, b: Builder, op: Op, kind: str, attrs: dict[str, Any]) -> Meant:
        """The convolution of the padded tensor."""
        _, edges = self._found(b, op)
        half = len(edges) // 2
        lead = (0,) * (3 - half)
        held = {"of": kind, "own": tuple(sorted(attrs)), "edges": edges}
        return Meant("EdgePadded", {**held, **attrs}, (*lead, *edges[:half], *lead, *edges[half:]))

    @staticmethod
    def _found(b: Builder, op: Op) -> tuple[Op, Edges]:
        found = padded_edges(b.graph, op)
        assert not isinstance(found, str)
        return found


class EdgeDepthwise(EdgePadded, Depthwise):
    """A depthwise convolution of a tensor whose edges are repeated."""

    name = "depthwise_edges"


class EdgeDepthwiseTranspose(EdgePadded, DepthwiseTranspose):
    """A transposed depthwise convolution of a tensor whose edges are repeated."""

    name = "depthwise_transpose_edges"

    def seconds(self, b: Builder, op: Op) -> float | None:
        """Predicted seconds, from the instructions of all threads: large results are faster with a Pad and tiles. With 12 taps,
        4 x 64 channels of 8,192 results took 7.5 us on an H200."""
        return LAUNCH_S + self.instruction_seconds(b, op)
