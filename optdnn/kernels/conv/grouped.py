"""The tactic of convolutions with narrow groups that multiplies no zeros. It can also compute the means of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, map_dtype, up
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import grouped_kernel as grouped
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.depthwise import MakesMeans, Tile, emit_squeezed, suits, with_invariant
from optdnn.kernels.conv.fused import Convolution, ConvolutionKernel, bias_row, conv_attrs, stage_operands
from optdnn.kernels.conv.general import BandedConv, constants_refusal
from optdnn.kernels.conv.grouped_kernel import Config, Problem
from optdnn.kernels.conv.hopper import bias_of, entering, image, on_images, planar, with_pitch
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.gemm.gemv_pair import adds_sums
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.tactic import MANY, Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16

MEANS = 2.0e-6
"""Seconds by which a launch that computes the means of a result exceeds one that adds up sums of tiles."""


def together(groups: int, channels: int) -> int | None:
    """The fewest neighboring groups, of ``channels`` channels each, that together have a multiple of eight channels;
    None if only all groups or no number of groups has."""
    return next((n for n in range(1, groups) if groups % n == 0 and n * channels % 8 == 0), None)


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations, the best predicted first. All sum results in the same order, but a squeeze sums each tile first."""

    def ranked(of: Problem) -> list[tuple[float, Config]]:
        return [(grouped.estimate(of, c, gpu), c) for c in grouped.candidates(of, gpu)]

    if not problem.squeeze:
        return tuple(Offer(c, seconds) for seconds, c in ranked(problem))
    ((_, many),) = ranked(replace(problem, batch=MANY))[:1] or ((0.0, None),)
    return with_invariant(ranked(problem), many, lambda c: grouped.estimate(problem, c, gpu))


class GroupedConv(MakesMeans, ConvolutionKernel):
    """Convolutions of 16-bit images with narrow groups, which have as many input as output channels, a multiple of 8.
    Groups of fewer channels are joined with a few neighbors, with zeros between them. An Inf or NaN of one group then
    reaches the others."""

    name = "conv_grouped_sm90"

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that take the means of the result."""
        if op.attrs.group == 1:
            return ()
        return [user for user in graph.users(op.value) if user.kind == "GlobalAveragePool"]

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := constants_refusal(b, op)) is not None:
            return why
        a, weight = op.attrs, b.weights(op)
        if a.group == 1:
            return "it has one group"
        if op.outputs[0].type.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if weight.shape[0] != a.group * weight.shape[1] or weight.shape[1] == 1:
            return "the kernel takes groups with as many channels in as out, and more than one"
        if together(a.group, weight.shape[1]) is None:
            return "no small number of its groups has a multiple of 8 channels"
        if plan_epilogue(b.graph, op, channel_axis=1).residual is not None:
            return "its epilogue adds a residual"
        return None if self.configs(b, op) else "no tile of the kernel fits it"

    def defer(self, b: Builder, op: Op) -> str | None:
        """If groups with zeros between them, with a separate launch for the means, are predicted to be faster, they go first."""
        if b.row_invariant:
            return None
        offers = _offers(self.problem_of(b, op, self.convolution(b, op), False), b.gpu)
        if not offers:
            return None  # it refuses
        own = min(o.predicted for o in offers)
        more = MEANS if self._pools(b, op) else 0.0
        bands = BandedConv()
        if bands.refuse(b, op) is not None:
            return None
        theirs = min((o.predicted for o in bands.configs(b, op)), default=own)
        if theirs + more >= own:
            return None
        return f"it is predicted to take {own * 1e6:.1f} us, {bands.name} {theirs * 1e6:.1f}"

    def _pools(self, b: Builder, op: Op) -> list[Op]:
        """The global average pools whose means the kernel can compute."""
        if plan_epilogue(b.graph, op, channel_axis=1).rest or len(op.outputs[0].type.static_shape) != 4:
            return []
        return [user for user in self.neighbors(b.graph, op) if suits(b, op, user)]

    def pool(self, b: Builder, op: Op) -> Op | None:
        """The global average pool (squeeze-and-excitation) whose means the kernel computes. None if the tactic defers
        the convolution to others, which could not run the pool."""
        pools = self._pools(b, op)
        return pools[0] if pools and self.defer(b, op) is None else None

    def convolution(self, b: Builder, op: Op) -> Convolution:
        a, weight = op.attrs, b.weights(op)
        ep, n = plan_epilogue(b.graph, op, channel_axis=1), together(a.group, weight.shape[1])
        assert n is not None
        x = with_pitch(b, op, image(entering(b, op)))
        feed = Feed(x, *planar(weight, a), bands=a.group // n, together=n)
        return on_images(b, op, (feed,), ep.added_to(bias_of(b, op)), ep)

    def problem_of(self, b: Builder, op: Op, c: Convolution, squeeze: bool = True) -> Problem:
        (batch, channels, *_), dense = c.out.shape, c.feed.bands == 1
        # The tensor's own channels: its tensor map fills a chunk's further ones with zeros, and memory there may hold anything.
        source = replace(c.feed.source, channels=c.feed.x.shape[1])
        read, written = conv_maps.pitch_of(c.feed.x), conv_maps.pitch_of(c.out)
        added = 0 if c.residual is None else conv_maps.pitch_of(c.residual)
        assert read is not None
        assert written is not None
        assert added is not None
        pool = self.pool(b, op) if squeeze else None
        return Problem(
            batch, source, c.feed.bands, (("bias",), *c.ep.rendered),
            map_dtype(c.out.dtype), pool is not None, (read, written, added), channels if dense else 0,
            pool is not None and adds_sums(b, pool),
        )  # fmt: skip

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Config) -> None:
        feed, channels = c.feed, c.out.shape[1]
        packed = b.constant(grouped.pack_weights(feed.weight), f"{op.outputs[0].name}.weights")
        (o, i, r, s), row, deep = feed.weight.shape, packed.shape[2], problem.chunks * 8
        bias = bias_row(b, op, c.bias, up(channels, 8))
        operands = {"input": feed.x, "output": c.out, "weights": packed, "bias": bias}
        if c.residual is not None:
            operands["residual"] = c.residual
        attrs = conv_attrs(feed.geometry, feed.bands, c.ep.stages)
        weights = packed.view((o, i, r, s), (r * row, 1, row, deep))
        reads = [feed.x, weights, bias.view((channels,), (1,)), *stage_operands(b, c.ep, c.residual)]
        made, pool = grouped.launch(problem, config, b.gpu), self.pool(b, op)
        if pool is None:
            b.emit(op, made, operands, "Conv", attrs, reads, [c.out])
            return
        walk = grouped.walk(problem, config)
        _, x, y = walk.tiles(problem.source)
        tile = Tile(walk.squeeze_mode(problem.source, True), config.tile, x * y)
        pixels = problem.out_size[0] * problem.out_size[1]
        recipe = depthwise.squeeze_recipe(depthwise.Problem(1, problem.source, dtype=problem.dtype), b.gpu.arch)
        second = depthwise.finish_squeeze(recipe, problem.batch, tile.count, channels, QuantizedStore(1.0 / pixels))
        emit_squeezed(b, op, pool, tile, (made, second), operands, attrs, reads)
