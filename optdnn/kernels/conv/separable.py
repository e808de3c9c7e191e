"""A depthwise convolution and the 1x1 convolution that is its only reader, in one launch: nothing is stored between them.

The launch is emitted at the 1x1 convolution. The cost model (:meth:`Separable.defer`) predicts, or the autotuner
measures, whether two launches are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv import separable_cost as cost
from optdnn.kernels.conv import separable_kernel as separable
from optdnn.kernels.conv.depthwise import ranked as depthwise_ranked
from optdnn.kernels.conv.depthwise import relu_before
from optdnn.kernels.conv.fused import bias_row, finish, result_place, stage_operands
from optdnn.kernels.conv.hopper import HopperConv, bias_of, with_pitch
from optdnn.kernels.conv.pair import DEPTHWISE, POINTWISE, ConvPair, Pair, pair_attrs, scalars
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import MANY, Offer, best_first, least_seconds
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

FEW = 2
"""Further configurations whose order of summation does not depend on sizes."""
MEASURED = 9, 160
"""Most taps, and most channels of the result, with which one launch was measured against two. Only tuning tries more."""
PROJECTED = 2
"""Least factor by which the result has fewer channels, for good predictions of one launch. For 147x147x64 -> 128 and
128 -> 128 at batch 16, it took 118 and 148 us on an H200, but 66 and 98 us were predicted."""
GAIN = 0.97
"""One launch must be predicted to take at most this fraction of the time of two."""


@lru_cache(maxsize=1024)
def _offers(problem: separable.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The kernel's configurations, the best predicted first."""
    found = [*cost.candidates(problem, gpu), *cost.candidates(problem, gpu, FEW, ordered=True)]
    offers = [Offer(c, cost.estimate(problem, c, gpu), cost.in_one_order(c)) for c in dict.fromkeys(found)]
    return best_first(offers)


@lru_cache(maxsize=1024)
def _apart(problem: separable.Problem, gpu: GpuFacts) -> float:
    """Predicted seconds of two launches."""
    s = replace(problem.source, channels=up(problem.inner, 8))
    first = depthwise_ranked(depthwise.Problem(problem.batch, s, problem.between, problem.dtype), gpu)
    middle = Source(*problem.out_size, s.channels)
    second = hopper_launch.ranked(
        conv_problem.Problem(problem.batch, problem.channels, (middle,), problem.epilogue, problem.dtype), gpu
    )
    seconds = [min((t for t, _ in first), default=np.inf), least_seconds(second)]
    return float(sum(seconds))


class Separable(ConvPair):
    """Depthwise, then 1x1 convolutions of 16-bit images, on Hopper."""

    name = "separable_sm90"
    needs = "wgmma and TMA"
    kinds = DEPTHWISE, POINTWISE

    def takes_prologue(self, first: Op) -> bool:
        return relu_before(first)

    def unfit(self, b: Builder, op: Op, first: Op) -> str | None:
        pair = self.pair(b, op)
        if pair.between.rest or pair.between.residual is not None:
            return f"what follows the depthwise convolution {first.name} is more than an activation"
        if self._joins(b, op, pair.epilogue):
            return "the convolution that is added is a part of its launch"
        if (why := separable.no_kernel(pair.problem)) is not None:
            return why
        if not _offers(pair.problem, b.gpu):
            return "no tile of the kernel fits it"
        if b.row_invariant:  # one decision for all batch sizes, at a large one
            return _slower(replace(pair.problem, batch=MANY), b.gpu, True)
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        return None if b.row_invariant else _slower(self.pair(b, op).problem, b.gpu)

    @staticmethod
    def _joins(b: Builder, op: Op, ep: Epilogue) -> bool:
        """Whether :class:`HopperConv` would compute the convolution that is added in its own launch."""
        return ep.residual is not None and HopperConv().added(b, op, ep) is not None

    def pair(self, b: Builder, op: Op) -> Pair[separable.Problem]:
        """The two convolutions and the kernel's problem."""
        first = self.first(b.graph, op)
        weight = b.weights(first)
        n, c, h, w = b.graph.type(first.inputs[0]).static_shape  # type: ignore[arg-type]
        a, channels = first.attrs, up(op.outputs[0].type.static_shape[1], 8)
        between = plan_epilogue(b.graph, first, channel_axis=1, allow_residual=False)
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        problem = separable.Problem(
            n, Source(h, w, c, weight.shape[2:], a.strides, a.pads, a.dilations), channels,
            (("bias",), *between.rendered), (("bias",), *ep.rendered), map_dtype(op.outputs[0].type.dtype),
            relu=relu_before(first),
        )  # fmt: skip
        return Pair(first, between, ep, problem)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return _offers(self.pair(b, op).problem, b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pair = self.pair(b, op)
        first, ep, problem = pair.first, pair.epilogue, pair.problem
        assert first.inputs[0] is not None
        x, residual = b.made(with_pitch(b, op, b.operand(first.inputs[0]))), None
        if ep.residual is not None:
            residual = b.made(with_pitch(b, op, b.operand(ep.residual), added=True))
        target = b.target(op.value)
        out = b.made(result_place(b, op, ep, target, conv_maps.storable_whole(b, target)))
        channels = target.shape[1]
        pitches = [conv_maps.pitch_of(t) if t is not None else 0 for t in (x, out, residual)]
        problem = replace(problem, pitches=(pitches[0] or 0, pitches[1] or 0, pitches[2] or 0))
        operands, reads = self._operands(b, op, pair, problem, x)
        operands |= {"output": out} | ({"residual": residual} if residual is not None else {})
        attrs = pair_attrs(first, op, pair.between, ep, problem.dtype)
        joint = replace(op, src=op.src | first.src)
        tail = stage_operands(b, ep, residual)
        read = [x, *reads[:2], *scalars(b, pair.between), *reads[2:], *tail]
        made = separable.launch(problem, config, b.gpu, rows=channels)
        b.emit(joint, made, operands, "SeparableConv", attrs, read, [out])
        finish(b, op, ep, out, target)

    @staticmethod
    def _operands(
        b: Builder, op: Op, pair: Pair[separable.Problem], problem: separable.Problem, x: TensorView
    ) -> tuple[dict[str, TensorView], list[TensorView]]:
        """The input and the constants by operand name, and filters, their bias, weights and their bias as the two
        convolutions read them."""
        first = pair.first
        filters, weight = b.weights(first), b.weights(op)
        (inner, _, _, taps_w), channels, name = filters.shape, len(weight), op.outputs[0].name
        shift, bias = pair.between.added_to(bias_of(b, first)), pair.epilogue.added_to(bias_of(b, op))
        made = {
            "filters": b.constant(separable.pack_filters(filters), f"{name}.filters"),
            "shifts": b.constant(
                separable.pack_shifts(np.zeros(inner, np.float32) if shift is None else shift), f"{name}.shifts"
            ),
            "weights": b.constant(_packed(b, weight), f"{name}.weights"),
            "bias": bias_row(b, op, bias, problem.channels),
        }
        row, depth = problem.filter_row, made["weights"].shape[1]
        views = [
            made["filters"].view(filters.shape, (row, row, taps_w, 1)), made["shifts"].view((inner,), (1,)),
            made["weights"].view(weight.shape, (depth, 1, 1, 1)), made["bias"].view((channels,), (1,)),
        ]  # fmt: skip
        return {**made, "input": x}, views


def saved(b: Builder, op: Op) -> float:
    """Predicted seconds that one launch for a depthwise convolution and the 1x1 convolution after it saves; 0 without
    such a launch."""
    tactic, after = Separable(), b.graph.sole_user(op.value)
    if after is None or tactic.find_first(b.graph, after) != op:
        return 0.0
    if tactic.refuse(b, after) is not None or tactic.defer(b, after) is not None:
        return 0.0
    problem = tactic.pair(b, after).problem
    if b.row_invariant:  # one decision for all batch sizes, at a large one
        problem = replace(problem, batch=MANY)
    one = least_seconds(o for o in _offers(problem, b.gpu) if o.row_invariant or not b.row_invariant)
    return max(0.0, _apart(problem, b.gpu) - one)


def _packed(b: Builder, weight: Array) -> Array:
    return b.kept.once(("separable",), [weight], lambda: separable.pack_weights(weight))


def _slower(problem: separable.Problem, gpu: GpuFacts, invariant: bool = False) -> str | None:
    """Why the cost models predict two launches to be better, or None. ``invariant``: only configurations that serve
    every batch size."""
    taps, channels = MEASURED
    if problem.taps > taps or problem.channels > channels:
        return f"with more than {taps} taps or {channels} channels, only tuning tries one launch"
    if PROJECTED * problem.channels > problem.inner:
        return f"{problem.inner} channels become {problem.channels}: only tuning tries one launch with so small a reduction"
    one = least_seconds(o for o in _offers(problem, gpu) if o.row_invariant or not invariant)
    return two_are_better(one, _apart(problem, gpu), GAIN)
