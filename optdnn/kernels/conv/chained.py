"""Two 1x1 convolutions, one after the other, in one launch: the second one finds the first one's result in shared memory.

The last convolution of a bottleneck adds the residual, and its result is wide. The first one of the next bottleneck reads it, and so
does the addition after that. So the launch stores both results, but nothing reads the wide one for the second convolution. Where that is
all that reads it (a perceptron with one hidden layer), it is not stored.

The launch is emitted at the first convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import chained_kernel as chained
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import bias_row, conv_attrs, stage_operands
from optdnn.kernels.conv.hopper import HopperConv, bias_of, with_pitch
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.separable import is_pointwise
from optdnn.kernels.tactic import MANY, Offer, Region, Tactic
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, Array

GAIN = 0.95
"""One launch has to promise at most this fraction of what two take."""


def pointwise_behind(graph: Graph, op: Op) -> Op | None:
    """The 1x1 convolution that reads the result of another one, which others may read as well; None where there is not exactly one."""
    if not is_pointwise(graph, op):
        return None
    readers = [
        u for u in graph.users(op.value) if u.kind == "Conv" and u.inputs[0] == op.value and is_pointwise(graph, u)
    ]
    return readers[0] if len(readers) == 1 else None


@lru_cache(maxsize=1024)
def _offers(problem: chained.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The kernel's configurations, the best predicted first. All of them sum a result in the same order."""
    return tuple(Offer(c, chained.estimate(problem, c, gpu)) for c in chained.candidates(problem, gpu))


@lru_cache(maxsize=1024)
def _apart(problem: chained.Problem, gpu: GpuFacts) -> float:
    """Predicted seconds of two launches."""

    def best(depth: int, channels: int, stages: tuple[render.Stage, ...]) -> float:
        images = (Source(*problem.size, depth),)
        offers = hopper_launch.ranked(conv_problem.Problem(problem.batch, channels, images, stages, problem.dtype), gpu)
        return min((o.seconds or 0.0 for o in offers), default=np.inf)

    p = problem
    return best(p.depth, p.middle, p.first) + best(p.middle, p.channels, p.second)


@dataclass(frozen=True)
class _Pair:
    """The two convolutions as the kernel has them."""

    second: Op
    epilogues: tuple[Epilogue, Epilogue]
    problem: chained.Problem


class Chained(Tactic):
    """Two 1x1 convolutions of 16-bit images, on Hopper."""

    name = "chained_sm90"
    conditional = (
        True  # on what the second one adds: its place in the graph's order is no part of the first one's signature
    )

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        if not is_pointwise(b.graph, op):
            return "it is not a 1x1 convolution of an image with constant weights"
        second = pointwise_behind(b.graph, op)
        if second is None:
            return "no 1x1 convolution, or more than one, reads its result"
        if (why := self._other_tensors(b, op, second)) is not None:
            return why
        pair = self._pair(b, op, second)
        first_ep, second_ep = pair.epilogues
        if first_ep.rest or second_ep.rest:
            return "what follows one of the convolutions is more than its launch can do"
        if first_ep.residual is not None and HopperConv().added(b, op, first_ep) is not None:
            return "the convolution that is added is a part of its launch"
        added = second_ep.residual
        if added is not None and added not in b.place:
            return f"what {second.name} adds is computed later"
        if (why := chained.no_kernel(pair.problem)) is not None:
            return why
        if pair.problem.channels > pair.problem.middle:
            return f"{second.name} has more channels than what it reads: little is saved"
        if not _offers(pair.problem, b.gpu):
            return "no tile of the kernel fits it"
        return _slower(replace(pair.problem, batch=MANY) if b.row_invariant else pair.problem, b.gpu)

    @staticmethod
    def _other_tensors(b: Builder, op: Op, second: Op) -> str | None:
        """Why the convolutions are not of images that the kernel knows, or None."""
        dtype = op.outputs[0].type.dtype
        if dtype not in (FP16, BF16) or second.outputs[0].type.dtype != dtype:
            return "it is for 16-bit floats"
        for conv in (op, second):
            if conv.attrs.prologue:
                kinds = ", ".join(s.kind for s in conv.attrs.prologue)
                return f"{kinds} stands before {conv.name}"
            if conv.input(2) is not None and bias_of(b, conv) is None:
                return "a bias is not constant"
        if 0 in op.outputs[0].type.static_shape:
            return "it is empty"
        for value in (op.value, second.value):
            if not _storable(b, value):
                return f"{b.graph.output(value).name} does not lie in channels-last order"
        return None

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The 1x1 convolution after it."""
        second = pointwise_behind(graph, op)
        return [] if second is None else [second]

    def region(self, b: Builder, op: Op) -> Region:
        """Both convolutions."""
        return Region(op, after=(self._of(b, op).second,))

    def place(self, b: Builder, op: Op) -> None:
        """The second result, and the first one where others read it."""
        pair = self._of(b, op)
        if pair.problem.stored:
            b.target(op.value)
        b.target(pair.second.value)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return _offers(self._of(b, op).problem, b.gpu)

    def _of(self, b: Builder, op: Op) -> _Pair:
        second = pointwise_behind(b.graph, op)
        assert second is not None
        return self._pair(b, op, second)

    @staticmethod
    def _pair(b: Builder, op: Op, second: Op) -> _Pair:
        n, depth, h, w = b.graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
        middle, channels = (o.outputs[0].type.static_shape[1] for o in (op, second))
        eps = plan_epilogue(b.graph, op, channel_axis=1), plan_epilogue(b.graph, second, channel_axis=1)
        stored = op.value in b.reserved or [second] != list(b.graph.users(op.value))
        first_stages, second_stages = ((("bias",), *ep.rendered) for ep in eps)
        dtype = map_dtype(op.outputs[0].type.dtype)
        problem = chained.Problem(n, (h, w), depth, middle, channels, first_stages, second_stages, stored, dtype)
        return _Pair(second, eps, problem)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pair = self._of(b, op)
        second, (first_ep, second_ep), problem = pair.second, pair.epilogues, pair.problem
        x = b.made(with_pitch(b, op, b.operand(op.inputs[0])))  # type: ignore[arg-type]
        added, added_last = (
            None if ep.residual is None else b.made(with_pitch(b, op, b.operand(ep.residual), added=True))
            for ep in pair.epilogues
        )
        middle, out = b.target(op.value) if problem.stored else None, b.target(second.value)
        at = [0 if t is None else conv_maps.pitch_of(t) or 0 for t in (x, middle, out, added, added_last)]
        problem = replace(problem, pitches=chained.Pitches(*at))
        named = {"input": x, "output": out, "middle": middle, "added": added, "added_last": added_last}
        constants, (first_reads, second_reads) = self._constants(b, op, pair)
        tail, last_tail = stage_operands(b, first_ep, added), stage_operands(b, second_ep, added_last)
        geometry = conv_maps.POINTWISE
        attrs = {f"first_{k}": v for k, v in conv_attrs(geometry, 1, first_ep.stages).items()}
        attrs |= {f"second_{k}": v for k, v in conv_attrs(geometry, 1, second_ep.stages).items()}
        attrs |= {"through": problem.dtype, "operands": 3 + len(tail)}
        reads: list[TensorView | None] = [x, *first_reads, *tail, *second_reads, *last_tail]
        kind, writes = ("ChainedConv", [middle, out]) if middle is not None else ("SeparableConv", [out])
        operands = {**constants, **{name: t for name, t in named.items() if t is not None}}
        made = chained.launch(problem, config, b.gpu)
        b.emit(replace(op, src=op.src | second.src), made, operands, kind, attrs, reads, writes)

    @staticmethod
    def _constants(
        b: Builder, op: Op, pair: _Pair
    ) -> tuple[dict[str, TensorView], tuple[list[TensorView], list[TensorView]]]:
        """The constants by the kernel's names; and weights and bias as each convolution reads them."""
        made: dict[str, TensorView] = {}
        views: list[list[TensorView]] = []
        for name, conv, ep in zip(("first", "second"), (op, pair.second), pair.epilogues, strict=True):
            weight, label = b.weights(conv), conv.outputs[0].name
            made[name] = b.constant(_packed(b, weight), f"{label}.weights")
            made[f"{name}_bias"] = bias_row(b, conv, ep.added_to(bias_of(b, conv)), up(len(weight), chained.CHUNK))
            row = made[name].shape[1]
            views.append(
                [made[name].view(weight.shape, (row, 1, 1, 1)), made[f"{name}_bias"].view((len(weight),), (1,))]
            )
        return made, (views[0], views[1])


def _packed(b: Builder, weight: Array) -> Array:
    return b.kept.once(("chained",), [weight], lambda: chained.pack_weights(weight))


def _storable(b: Builder, value: Value) -> bool:
    """Whether the kernel writes a result where it will lie."""
    return conv_maps.storable(b, b.result(value))


def _slower(problem: chained.Problem, gpu: GpuFacts) -> str | None:
    """Why two launches are better, as far as the cost models know, or None."""
    one, two = min((o.seconds or 0.0 for o in _offers(problem, gpu)), default=np.inf), _apart(problem, gpu)
    if one <= GAIN * two:
        return None
    return f"two launches are predicted to be as fast ({two * 1e6:.2f} us; one: {one * 1e6:.2f} us)"
