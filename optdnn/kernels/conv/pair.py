"""Two convolutions in one launch: the base of the tactics of depthwise, 1x1 and one-pixel convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from optdnn.ir.epilogue import Epilogue, summed_dtype
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.fused import conv_attrs
from optdnn.kernels.conv.hopper import has_computed_bias
from optdnn.kernels.tactic import Region, Tactic
from optdnn.types import BF16, FP16

P = TypeVar("P")


class Kind(NamedTuple):
    """A kind of convolution with constant weights: its name in messages, and a predicate on operators."""

    words: str
    holds: Callable[[Graph, Op], bool]


def _is_pointwise(graph: Graph, op: Op) -> bool:
    weight = graph.constant_value(op.inputs[1]) if op.kind == "Conv" else None
    if weight is None or weight.ndim != 4 or weight.shape[2:] != (1, 1) or op.attrs.group != 1:
        return False
    return set(op.attrs.strides) == {1} and not any(op.attrs.pads)


def _is_depthwise(graph: Graph, op: Op) -> bool:
    weight = graph.constant_value(op.inputs[1]) if op.kind == "Conv" else None
    if weight is None or weight.ndim != 4:
        return False
    return bool(weight.shape[1] == 1 and weight.shape[0] == op.attrs.group > 1)


def _is_one_pixel(graph: Graph, op: Op) -> bool:
    return _is_pointwise(graph, op) and op.outputs[0].type.is_static and op.outputs[0].type.static_shape[2:] == (1, 1)


POINTWISE = Kind("1x1 convolution", _is_pointwise)
DEPTHWISE = Kind("depthwise convolution", _is_depthwise)
ONE_PIXEL = Kind("1x1 convolution of one pixel", _is_one_pixel)


@dataclass(frozen=True)
class Pair(Generic[P]):
    """The first of the two convolutions, the epilogues of both, and the kernel's problem."""

    first: Op
    between: Epilogue
    epilogue: Epilogue
    problem: P


class ConvPair(Tactic):
    """A convolution and a second one that is its only reader, of 16-bit floats on Hopper. The launch is emitted at the
    second one."""

    needs: ClassVar[str]
    """Features of Hopper that the kernel needs."""
    kinds: ClassVar[tuple[Kind, Kind]]
    """Kinds of the first and of the second convolution."""
    wide: ClassVar[bool] = False
    """Whether the launch may store its result in fp32."""

    def find_first(self, graph: Graph, op: Op) -> Op | None:
        """The first convolution, whose result ``op`` reads; None if the two are not of these kinds."""
        if op.inputs[0] is None or not self.kinds[1].holds(graph, op):
            return None
        before = graph.op(op.inputs[0])
        return before if self.kinds[0].holds(graph, before) else None

    def first(self, graph: Graph, op: Op) -> Op:
        """The first convolution, for an operator that is not refused."""
        found = self.find_first(graph, op)
        assert found is not None
        return found

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's {self.needs} (sm_90a), not {b.arch}"
        if not self.kinds[1].holds(b.graph, op):
            return f"it is not a {self.kinds[1].words} with constant weights"
        first = self.find_first(b.graph, op)
        if first is None:
            return f"its input is not the result of a {self.kinds[0].words}"
        dtype = summed_dtype(b.graph, op) if self.wide else op.outputs[0].type.dtype
        if dtype not in (FP16, BF16) or first.outputs[0].type.dtype != dtype:
            return "it is for 16-bit floats"
        for conv in (first, op):
            if conv.attrs.prologue and not (conv is first and self.takes_prologue(first)):
                return f"{', '.join(s.kind for s in conv.attrs.prologue)} stands before {conv.name}"
        if first.value in b.reserved or b.graph.sole_user(first.value) != op:
            who = ", ".join(u.name for u in b.graph.users(first.value) if u != op) or "the network's output"
            return f"the result of the {self.kinds[0].words} {first.name} has another reader ({who})"
        if any(has_computed_bias(b, c) for c in (first, op)):
            return "a bias is not constant"
        return self.unfit(b, op, first)

    def takes_prologue(self, first: Op) -> bool:
        """Whether the kernel can apply the prologue of the first convolution."""
        return False

    @abstractmethod
    def unfit(self, b: Builder, op: Op, first: Op) -> str | None:
        """Why the kernel cannot compute the pair, or None."""

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The first convolution."""
        first = self.find_first(graph, op)
        return [first] if first is not None and graph.sole_user(first.value) == op else []

    def region(self, b: Builder, op: Op) -> Region:
        """Both convolutions."""
        return replace(super().region(b, op), before=(self.first(b.graph, op),))


def pair_attrs(first: Op, op: Op, between: Epilogue, ep: Epilogue, through: str) -> dict[str, Any]:
    """The attributes of the launch's meaning. ``through``: the type of the values between the convolutions."""
    operands = 3 + (1 + len(between.constants) if between.constants else 0)
    attrs: dict[str, Any] = {"through": through, "operands": operands}
    for name, conv, stages in (("first", first, between), ("second", op, ep)):
        a = conv.attrs
        held = conv_attrs((a.strides, a.pads, a.dilations), a.group, stages.stages, a.prologue)
        attrs |= {f"{name}_{k}": v for k, v in held.items()}
    return attrs


def scalars(b: Builder, ep: Epilogue) -> list[TensorView | None]:
    """The operands of an epilogue's stages besides the bias, for the meaning: no residual, then the constants."""
    return [None, *(b.constant(c, "scalar") for c in ep.constants)] if ep.constants else []
