"""Transposed depthwise convolutions of floats by tiles: each result reads only the taps that meet it.

Learned upsampling with one filter per channel (MedNeXt, the neck of CenterNet's DLA). With a stride of 2 along each axis, a result of
an image meets a quarter of the taps, a result of a volume an eighth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv.depthwise import TiledDepthwise
from optdnn.kernels.conv.depthwise_images import Walked, walk
from optdnn.kernels.conv.direct import with_pads


class TiledDepthwiseTranspose(TiledDepthwise):
    """Transposed convolutions with one filter per channel of channels-last images, sequences and volumes."""

    name = "depthwise_transpose_tiles"
    kind = "ConvTranspose"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a = op.attrs
        if any(d != 1 for d in a.dilations):
            return "its filter has holes"
        if any(pad < 0 for pad in self.walked(b, op)[1]):
            return "its pads are negative"
        return super().refuse(b, op)

    def pools(self, graph: Graph, op: Op) -> Sequence[Op]:
        """None: the launch computes no means."""
        return ()

    def walked(self, b: Builder, op: Op) -> Walked:
        return walk(with_pads(b, op))

    def problem(self, b: Builder, op: Op) -> depthwise.Problem:
        (*_, high, wide) = (*op.outputs[0].type.static_shape[2:], 1)[: max(2, len(op.attrs.strides))]
        return replace(super().problem(b, op), grown=(high, wide))

    def more_attrs(self, b: Builder, op: Op) -> dict[str, Any]:
        extra = with_pads(b, op).output_padding
        return {"output_padding": extra if len(extra) > 1 else (*extra, 0), "output_shape": ()}
