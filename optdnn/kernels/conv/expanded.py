"""A 1x1 convolution and the depthwise one that is its only reader, in one launch: the expanded image is never stored.

The launch is emitted at the depthwise convolution, and may also compute the means of its result. The cost model
(:meth:`Expanded.defer`) predicts, or the autotuner measures, whether two launches are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import expanded_kernel as expanded
from optdnn.kernels.conv import hopper_launch, separable
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.depthwise import MakesMeans, Tile, emit_squeezed, suits, with_invariant
from optdnn.kernels.conv.depthwise import ranked as depthwise_ranked
from optdnn.kernels.conv.fused import bias_row, finish, result_place, stage_operands
from optdnn.kernels.conv.hopper import bias_of, with_pitch
from optdnn.kernels.conv.pair import DEPTHWISE, POINTWISE, ConvPair, Pair, pair_attrs, scalars
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.separable_kernel import pack_filters
from optdnn.kernels.gemm.gemv_pair import adds_sums
from optdnn.kernels.tactic import MANY, Offer, least_seconds
from optdnn.runtime.cuda.gpu_facts import GpuFacts

GAIN = 1.0
"""One launch must be predicted to take at most this fraction of the time of other launches."""
LEAST = 15e-6
"""Predicted seconds of the other launches below which only tuning tries one launch. EfficientNet-B0 at batch 1 took
179.9 us with some configurations, 195.9 us with those that the cost model prefers now, and 186.2 us without this
kernel."""
LONG, LONGER = 60e-6, 1.2
"""Other launches that are predicted to take at least LONG seconds took at least LONGER times as long, in
EfficientNet-B0 and MobileNetV2 at batch 128 on an H200 (112x112x16 -> 96, stride 2: 265 us, not 199; 56x56x24 -> 144:
159, not 119)."""


@lru_cache(maxsize=1024)
def _offers(problem: expanded.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The kernel's configurations, the best predicted first. All of them sum results in the same order, but not the means."""
    found = [(expanded.estimate(problem, c, gpu), c) for c in expanded.candidates(problem, gpu)]
    if not problem.filtered.squeeze:
        return tuple(Offer(c, seconds) for seconds, c in found)
    many = expanded.candidates(expanded.with_batch(problem, MANY), gpu, 1)
    return with_invariant(found, many[0] if many else None, lambda c: expanded.estimate(problem, c, gpu))


@lru_cache(maxsize=1024)
def _apart(problem: expanded.Problem, gpu: GpuFacts) -> tuple[float, float]:
    """Predicted seconds of the two separate launches."""
    f = problem.filtered
    image = Source(f.source.height, f.source.width, problem.depth)
    product = conv_problem.Problem(f.batch, f.channels, (image,), problem.between, f.dtype)
    first = least_seconds(hopper_launch.ranked(product, gpu))
    return first, min((t for t, _ in depthwise_ranked(f, gpu)), default=np.inf)


class Expanded(ConvPair, MakesMeans):
    """1x1, then depthwise convolutions of 16-bit images, on Hopper."""

    name = "expanded_sm90"
    needs = "TMA"
    kinds = POINTWISE, DEPTHWISE

    def unfit(self, b: Builder, op: Op, first: Op) -> str | None:
        pair = self._pair(b, op)
        if any(ep.rest or ep.residual is not None for ep in (pair.between, pair.epilogue)):
            return "what follows one of the convolutions is more than an activation"
        if (why := expanded.no_kernel(pair.problem)) is not None:
            return why
        if not _offers(pair.problem, b.gpu):
            return "no tile of the kernel fits it"
        if b.row_invariant:  # one decision for all batch sizes, at a large one
            return self._slower(b, op, expanded.with_batch(pair.problem, MANY))
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        return None if b.row_invariant else self._slower(b, op, self._pair(b, op).problem)

    def _slower(self, b: Builder, op: Op, problem: expanded.Problem) -> str | None:
        """Why the cost models predict other launches to be better, or None. The others are a launch for each
        convolution, or one launch for the depthwise convolution and a 1x1 convolution after it."""
        invariant = b.row_invariant
        one = least_seconds(o for o in _offers(problem, b.gpu) if o.row_invariant or not invariant)
        others = sum(_apart(problem, b.gpu)) - separable.saved(b, op)
        if others < LEAST:
            return f"other launches are predicted to take only {others * 1e6:.2f} us: only tuning tries one launch"
        others *= LONGER if others >= LONG else 1.0
        if one <= GAIN * others:
            return None
        return f"other launches are predicted to be as fast ({others * 1e6:.2f} us; one: {one * 1e6:.2f} us)"

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The 1x1 convolution before it, and the pools that take the means of its result."""
        pools = [user for user in graph.users(op.value) if user.kind == "GlobalAveragePool"]
        return [*near, *pools] if (near := super().neighbors(graph, op)) else []

    def pool(self, b: Builder, op: Op) -> Op | None:
        """The global average pool (squeeze-and-excitation)."""
        pools = (u for u in b.graph.users(op.value) if u.kind == "GlobalAveragePool")
        return next((user for user in pools if suits(b, op, user)), None)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return _offers(self._pair(b, op).problem, b.gpu)

    def _pair(self, b: Builder, op: Op) -> Pair[expanded.Problem]:
        first = self.first(b.graph, op)
        weight, a = b.weights(op), op.attrs
        n, depth, h, w = b.graph.type(first.inputs[0]).static_shape  # type: ignore[arg-type]
        between = plan_epilogue(b.graph, first, channel_axis=1, allow_residual=False)
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        source = Source(h, w, weight.shape[0], weight.shape[2:], a.strides, a.pads, a.dilations)
        dtype, pool = map_dtype(op.outputs[0].type.dtype), self.pool(b, op)
        summed = pool is not None and adds_sums(b, pool)
        filtered = depthwise.Problem(n, source, (("bias",), *ep.rendered), dtype, pool is not None, summed=summed)
        return Pair(first, between, ep, expanded.Problem(filtered, depth, (("bias",), *between.rendered)))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pair = self._pair(b, op)
        first, ep, pool = pair.first, pair.epilogue, self.pool(b, op)
        assert first.inputs[0] is not None
        x, target = b.made(with_pitch(b, op, b.operand(first.inputs[0]))), b.target(op.value)
        out = b.made(result_place(b, op, ep, target, conv_maps.storable_whole(b, target)))
        read, written = (conv_maps.pitch_of(t) or 0 for t in (x, out))
        problem = replace(pair.problem, pitch=read, filtered=replace(pair.problem.filtered, pitches=(0, written, 0)))
        operands, reads = self._operands(b, op, pair, x)
        attrs = pair_attrs(first, op, pair.between, ep, problem.filtered.dtype)
        joint, tail = replace(op, src=op.src | first.src), stage_operands(b, ep, None)
        views = [x, *reads[:2], *scalars(b, pair.between), *reads[2:], *tail]
        made, operands = expanded.launch(problem, config, b.gpu), {**operands, "input": x, "output": out}
        if pool is None:
            b.emit(joint, made, operands, "SeparableConv", attrs, views, [out])
        else:
            _, tiles_x, tiles_y = expanded.tiles(problem, config)
            tile = Tile(expanded.squeeze_mode(problem, config), config.tile, tiles_x * tiles_y)
            second = depthwise.launch_squeeze(problem.filtered, tile.count, b.gpu)
            emit_squeezed(b, joint, pool, tile, (made, second), operands, attrs, views, of="SeparableConv")
        finish(b, op, ep, out, target)

    @staticmethod
    def _operands(
        b: Builder, op: Op, pair: Pair[expanded.Problem], x: TensorView
    ) -> tuple[dict[str, TensorView], list[TensorView]]:
        """The constants by operand name, and weights, their bias, filters and their bias as the two convolutions read them."""
        weight, filters, name = b.weights(pair.first), b.weights(op), op.outputs[0].name
        channels, taps_w = len(weight), filters.shape[3]
        shift, bias = pair.between.added_to(bias_of(b, pair.first)), pair.epilogue.added_to(bias_of(b, op))
        made = {
            "expansion": b.constant(expanded.pack_expansion(weight), f"{name}.expansion"),
            "shifts": bias_row(b, pair.first, shift, channels),
            "filters": b.constant(pack_filters(filters), f"{name}.filters"),
            "bias": bias_row(b, op, bias, channels),
        }
        depth, row = made["expansion"].shape[1], made["filters"].shape[1]
        views = [
            made["expansion"].view(weight.shape, (depth, 1, 1, 1)), made["shifts"].view((channels,), (1,)),
            made["filters"].view(filters.shape, (row, row, taps_w, 1)), made["bias"].view((channels,), (1,)),
        ]  # fmt: skip
        return made, views
