"""Two depthwise convolutions of the same form in one launch, one multiplied by the other: gates of filtered features
(NAFNet, Restormer).

``f(conv(x)) * g(conv'(y))``: x and y are halves of the channels of one image, or two images. The launch is emitted at
the convolution that multiplies. The result of the other one is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.epilogue import Epilogue, plan_epilogue, read_once
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.depthwise import TiledDepthwise
from optdnn.kernels.conv.depthwise_images import columns_of, geometry, image_of, unit_of
from optdnn.kernels.conv.paired import faster_apart, stages_with_other
from optdnn.kernels.tactic import Region
from optdnn.ops.fused import plain_stages

_SECOND = {"input": "second", "weights": "second_weights", "bias": "second_bias"}
"""Operand name of the first convolution -> operand name of the second one in the launch."""


def multiplier(graph: Graph, op: Op) -> Op | None:
    """The other depthwise convolution, of the same geometry, that multiplies ``op`` and that only ``op`` reads; or None."""
    for value in op.inputs[op.definition.arity or 0 :]:
        other = None if value is None else graph.op(value)
        if other is None or other.kind != "Conv" or graph.sole_user(other.value) != op:
            continue
        ep = plan_epilogue(graph, op, channel_axis=1)
        if _form(graph, op) != _form(graph, other) or not read_once(op, other.value):
            continue
        if ep.residual == value and ("mul",) in ep.rendered:
            return other
    return None


def _form(graph: Graph, op: Op) -> tuple[Any, ...]:
    a, weight = op.attrs, graph.constant_value(op.inputs[1])
    shape = None if weight is None else weight.shape
    # Results may have equal sizes although the images have not.
    sizes = graph.type(op.inputs[0]).dims  # type: ignore[arg-type]
    return shape, sizes, a.strides, a.pads, a.dilations, a.group, a.auto_pad, graph.type(op.value)


SINGLE = TiledDepthwise()
"""The tactic that runs one convolution by itself."""


class PairedDepthwise(TiledDepthwise):
    """A depthwise convolution of floats that is multiplied by another one, optionally with the means of the result."""

    name = "depthwise_paired"

    def refuse(self, b: Builder, op: Op) -> str | None:
        other = multiplier(b.graph, op)
        if other is None:
            return "it is not multiplied by another depthwise convolution of its form"
        for conv in (op, other):
            if (why := super().refuse(b, conv)) is not None:
                return f"{conv.name}: {why}"
            if conv.attrs.prologue or columns_of(b, conv) > 1:
                return f"{conv.name} reads its image through a ReLU, or columns of it as channels"
        ep, beside = (plan_epilogue(b.graph, x, channel_axis=1) for x in (op, other))
        if ep.constants or beside.constants:
            return "its stages have constants"
        if beside.rest or beside.residual is not None:
            return f"what follows the other convolution {other.name} is more than an activation"
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides: by themselves, convolutions of large filters run on tensor cores."""
        return faster_apart(b, (self, op), ((SINGLE, op), (SINGLE, self._other(b, op))))

    def stages(self, b: Builder, op: Op) -> Epilogue:
        """The epilogue. The kernel of a pair reads one number per channel, the bias."""
        return plan_epilogue(b.graph, op, channel_axis=1)

    @staticmethod
    def _other(b: Builder, op: Op) -> Op:
        other = multiplier(b.graph, op)
        assert other is not None
        return other

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that take the means of the result, and the convolution that multiplies it."""
        other = multiplier(graph, op)
        return [*super().neighbors(graph, op), *([] if other is None else [other])]

    def region(self, b: Builder, op: Op) -> Region:
        """Both convolutions, and the means of their product."""
        return replace(super().region(b, op), before=(self._other(b, op),))

    def covers(self, b: Builder, op: Op) -> Op:
        return replace(op, src=op.src | self._other(b, op).src)

    def problem(self, b: Builder, op: Op) -> depthwise.Problem:
        if (other := multiplier(b.graph, op)) is None:  # the base class asks about each of the two by itself
            return super().problem(b, op)
        own, second = super().problem(b, op), image_of(b.source(other.inputs[0]))
        unit = min(own.unit, unit_of(second))
        beside = plan_epilogue(b.graph, other, channel_axis=1)
        places = conv_maps.image_places(second, unit) or (0, 0)
        return replace(own, beside=(("bias",), *beside.rendered), second_places=places, unit=unit)

    def residual(self, b: Builder, op: Op, unit: int, columns: int) -> TensorView | None:
        """None: in its place, the stages read the other convolution's result."""
        return None

    def reads(self, b: Builder, op: Op, columns: int = 1) -> dict[str, TensorView]:
        second = super().reads(b, self._other(b, op))
        return super().reads(b, op, columns) | {_SECOND[name]: x for name, x in second.items()}

    def meaning(
        self, b: Builder, op: Op, ep: Epilogue, operands: dict[str, TensorView], columns: int
    ) -> tuple[str, dict[str, Any], list[TensorView | None]]:
        other = self._other(b, op)
        strides, pads, dilations = geometry(op.attrs)
        attrs = {
            "strides": strides, "pads": pads, "dilations": dilations, "group": op.attrs.group, "auto_pad": "NOTSET",
            "epilogue": plain_stages(stages_with_other(ep)),
            "beside": plain_stages(plan_epilogue(b.graph, other, channel_axis=1).stages),
        }  # fmt: skip
        second = {name: operands[other] for name, other in _SECOND.items()}
        return "GatedConv", attrs, [*self.filtered(b, op, operands), *self.filtered(b, other, second)]
