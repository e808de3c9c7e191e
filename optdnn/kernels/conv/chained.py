"""Two successive 1x1 convolutions, or products with matrices, in one launch: the second reads the first one's result from shared
memory.

The last convolution of a bottleneck adds the residual and has a wide result. The first convolution of the next
bottleneck reads this result, and so does the addition after that. So the launch stores both results, but the second
convolution does not load the wide one. If only the second product reads the first result (a perceptron with one hidden
layer), that result is not stored.

The launch is emitted at the first operator.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import chained_kernel as chained
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import bias_row, conv_attrs, stage_operands
from optdnn.kernels.conv.hopper import HopperConv, bias_of, has_computed_bias, with_pitch
from optdnn.kernels.conv.normed import NormedConv
from optdnn.kernels.conv.pair import POINTWISE
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import MANY, Offer, Region, Tactic, kernel_offers, least_seconds
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, Array

GAIN = 1.1
"""One launch must be predicted to take at most this fraction of the time of two. For twelve pairs measured on an H200,
two launches took 0.9 to 1.35 times their predicted time, and one launch 0.85 to 1.06 times. The more arithmetic there
is, the more one launch gains over its prediction. In 8 bits, for five pairs in ResNet-50 at batch 128, two launches
took 1.25 times their predicted time, and one launch 0.95 to 1.2 times."""

FEWEST = 4096
"""Least pixels or rows. With fewer, one launch is not faster in a network: ResNet-50 at batch 1 (3136 pixels) took
147.2 us with one launch and 147.5 with two, ConvNeXt-T 265.8 and 264.7."""


@lru_cache(maxsize=1024)
def _apart(problem: chained.Problem, gpu: GpuFacts) -> float:
    """Predicted seconds of two launches."""
    p, of = problem, problem.integers

    def best(depth: int, channels: int, stages: tuple[render.Stage, ...], types: tuple[Any, ...]) -> float:
        images = (Source(*p.size, depth),)
        found = hopper_launch.ranked(conv_problem.Problem(p.batch, channels, images, stages, *types), gpu)
        return least_seconds(found)

    first: tuple[Any, ...] = (p.dtype,)
    second: tuple[Any, ...] = (p.dtype,)
    if of is not None:
        first = of.image, of.middle, of.added, of.zeros[0]
        second = of.middle, of.output, of.added_last, of.zeros[1]
    return best(p.depth, p.middle, p.first, first) + best(p.middle, p.channels, p.second, second)


@dataclass(frozen=True)
class Pair:
    """The second operator, and the kernel's problem for both."""

    second: Op
    problem: chained.Problem


PairT = TypeVar("PairT", bound=Pair)


class ChainedPair(Tactic, Generic[PairT]):
    """Two products of floats or integers: the second reads the result of the first."""

    # The choice depends on the operand that the second one adds, whose place in the graph's order is no part of the first one's
    # signature.

    @staticmethod
    @abstractmethod
    def behind(graph: Graph, op: Op) -> Op | None:
        """The one product that reads the result, which other operators may read as well; None if there is not exactly one."""

    @abstractmethod
    def pair(self, b: Builder, op: Op, second: Op) -> PairT:
        """Both operators as a pair."""

    def refuse_problem(self, b: Builder, pair: Pair) -> str | None:
        """Why the kernel cannot run the problem, or two launches are better; None if neither holds."""
        if (why := chained.no_kernel(pair.problem)) is not None:
            return why
        if pair.problem.channels > pair.problem.middle:
            return f"{pair.second.name} has more channels than its operand: little is saved"
        if not kernel_offers(chained, pair.problem, b.gpu):
            return "no tile of the kernel fits it"
        return _slower(replace(pair.problem, batch=MANY) if b.row_invariant else pair.problem, b.gpu)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The product after it."""
        second = self.behind(graph, op)
        return [] if second is None else [second]

    def region(self, b: Builder, op: Op) -> Region:
        """Both products."""
        return Region(op, after=(self.pair_of(b, op).second,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the second result, and the first one if others read it."""
        pair = self.pair_of(b, op)
        if pair.problem.stored:
            b.target(op.value)
        b.target(pair.second.value)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The kernel's configurations. All of them sum results in the same order."""
        return kernel_offers(chained, self.pair_of(b, op).problem, b.gpu)

    def pair_of(self, b: Builder, op: Op) -> PairT:
        """The operator and the product after it."""
        second = self.behind(b.graph, op)
        assert second is not None
        return self.pair(b, op, second)


@dataclass(frozen=True)
class _FloatPair(Pair):
    epilogues: tuple[Epilogue, Epilogue]


class ChainedProducts(ChainedPair[_FloatPair]):
    """Two products of 16-bit rows with constant matrices on Hopper: the second reads the result of the first."""

    name = "chained_sm90"
    axis: ClassVar[int]
    """The axis of the channels."""

    @abstractmethod
    def unfit(self, b: Builder, op: Op, second: Op) -> str | None:
        """Why the kernel cannot run these operators, or other launches are better for them; None if neither holds."""

    @staticmethod
    @abstractmethod
    def image(b: Builder, op: Op, value: Value) -> TensorView | None:
        """An operand's pixels as channels-last NCHW, in place or as a copy that is still to be made; None if that is
        not possible."""

    @staticmethod
    @abstractmethod
    def placed(b: Builder, value: Value) -> TensorView | None:
        """The place of a result, in the form of :meth:`image`."""

    @staticmethod
    @abstractmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        """The matrix (channels, depth), and the row that is added."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        second, dtype = self.behind(b.graph, op), op.outputs[0].type.dtype
        if second is None:
            return "it is no 1x1 convolution or product with a matrix whose result is read by exactly one other such operator"
        if dtype not in (FP16, BF16) or second.outputs[0].type.dtype != dtype:
            return "it is for 16-bit floats"
        if (why := self.unfit(b, op, second)) is not None:
            return why
        pair = self.pair(b, op, second)
        if any(ep.rest for ep in pair.epilogues):
            return "the launch cannot run all stages after one of the products"
        added = pair.epilogues[1].residual
        if added is not None and added not in b.place:
            return f"what {second.name} adds is computed later"
        if any(
            self.image(b, op, v) is None
            for v in (op.inputs[0], *(ep.residual for ep in pair.epilogues))
            if v is not None
        ):
            return "an operand's rows do not have a constant pitch"
        for value in (op.value, second.value):
            out = self.placed(b, value)
            if out is None or not conv_maps.storable(b, out):
                return f"{b.graph.output(value).name} has no rows of channels that the kernel can write"
        return self.refuse_problem(b, pair)

    def pair(self, b: Builder, op: Op, second: Op) -> _FloatPair:
        assert op.inputs[0] is not None
        types = b.graph.type(op.inputs[0]), op.outputs[0].type, second.outputs[0].type
        depth, middle, channels = (t.static_shape[self.axis] for t in types)
        first_ep, second_ep = (plan_epilogue(b.graph, x, channel_axis=self.axis) for x in (op, second))
        stored = op.value in b.reserved or [second] != list(b.graph.users(op.value))
        sizes = list(types[1].static_shape)
        del sizes[self.axis]
        # An image's height and width, or rows.
        size = (sizes[1], sizes[2]) if self.axis == 1 else (1, 1)
        first, second_stages = ((("bias",), *ep.rendered) for ep in (first_ep, second_ep))
        problem = chained.Problem(
            math.prod(sizes) // math.prod(size),
            size,
            depth,
            middle,
            channels,
            first,
            second_stages,
            stored,
            map_dtype(types[1].dtype),
        )
        return _FloatPair(second, problem, (first_ep, second_ep))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pair = self.pair_of(b, op)
        second, (first_ep, second_ep), problem = pair.second, pair.epilogues, pair.problem
        assert op.inputs[0] is not None
        x, added, added_last = (
            None if v is None else b.made(_known(self.image(b, op, v)))
            for v in (op.inputs[0], first_ep.residual, second_ep.residual)
        )
        for value in (op.value, second.value)[not problem.stored :]:
            b.target(value)
        middle = _known(self.placed(b, op.value)) if problem.stored else None
        out = _known(self.placed(b, second.value))
        at = [0 if t is None else conv_maps.pitch_of(t) or 0 for t in (x, middle, out, added, added_last)]
        problem = replace(problem, pitches=chained.Pitches(*at))
        named = {"input": x, "output": out, "middle": middle, "added": added, "added_last": added_last}
        constants, (first_reads, second_reads) = self._constants(b, op, pair)
        tail, last_tail = stage_operands(b, first_ep, added), stage_operands(b, second_ep, added_last)
        attrs: dict[str, Any] = {"through": problem.dtype, "operands": 3 + len(tail)}
        for prefix, ep in (("first", first_ep), ("second", second_ep)):
            attrs |= {f"{prefix}_{k}": v for k, v in conv_attrs(conv_maps.POINTWISE, 1, ep.stages).items()}
        reads: list[TensorView | None] = [x, *first_reads, *tail, *second_reads, *last_tail]
        kind, writes = ("ChainedConv", [middle, out]) if middle is not None else ("SeparableConv", [out])
        operands = {**constants, **{name: t for name, t in named.items() if t is not None}}
        made = chained.launch(problem, config, b.gpu)
        b.emit(replace(op, src=op.src | second.src), made, operands, kind, attrs, reads, writes)

    def _constants(
        self, b: Builder, op: Op, pair: _FloatPair
    ) -> tuple[dict[str, TensorView], tuple[list[TensorView], list[TensorView]]]:
        """The constants by operand name, and weights and bias of each product as the meaning reads them."""
        made: dict[str, TensorView] = {}
        views: list[list[TensorView]] = []
        for name, product, ep in zip(("first", "second"), (op, pair.second), pair.epilogues, strict=True):
            (weight, bias), label = self.factors(b, product), product.outputs[0].name
            (channels, depth), wide = weight.shape, up(len(weight), chained.TILE_CHANNELS)
            made[name] = b.constant(np.ascontiguousarray(weight), f"{label}.weights")
            made[f"{name}_bias"] = bias_row(b, product, ep.added_to(bias), wide)
            views.append(
                [
                    made[name].view((channels, depth, 1, 1), (depth, 1, 1, 1)),
                    made[f"{name}_bias"].view((channels,), (1,)),
                ]
            )
        return made, (views[0], views[1])


class ChainedConv(ChainedProducts):
    """Two 1x1 convolutions of images."""

    axis = 1

    @staticmethod
    def behind(graph: Graph, op: Op) -> Op | None:
        if not POINTWISE.holds(graph, op):
            return None
        readers = (u for u in graph.users(op.value) if u.kind == "Conv" and u.inputs[0] == op.value)
        found = [u for u in readers if POINTWISE.holds(graph, u)]
        return found[0] if len(found) == 1 else None

    def unfit(self, b: Builder, op: Op, second: Op) -> str | None:
        for conv in (op, second):
            if conv.attrs.prologue:
                kinds = ", ".join(s.kind for s in conv.attrs.prologue)
                return f"{kinds} stands before {conv.name}"
            if has_computed_bias(b, conv):
                return "a bias is not constant"
        if NormedConv().refuse(b, op) is None:
            return "the norm before it takes no launch of its own"
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        if ep.residual is not None and HopperConv().added(b, op, ep) is not None:
            return "the convolution that is added is a part of its launch"
        return None

    @staticmethod
    def image(b: Builder, op: Op, value: Value) -> TensorView:
        return with_pitch(b, op, b.operand(value), added=value != op.inputs[0])

    @staticmethod
    def placed(b: Builder, value: Value) -> TensorView:
        return b.result(value)

    @staticmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        return b.weights(op)[:, :, 0, 0], bias_of(b, op)


def _known(x: TensorView | None) -> TensorView:
    assert x is not None
    return x


def _slower(problem: chained.Problem, gpu: GpuFacts) -> str | None:
    """Why the cost models predict two launches to be better, or None."""
    if problem.pixels < FEWEST:
        return f"with {problem.pixels} pixels or rows, one launch takes as long as two ({FEWEST} are needed)"
    one = least_seconds(kernel_offers(chained, problem, gpu))
    return two_are_better(one, _apart(problem, gpu), GAIN)
