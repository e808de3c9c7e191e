"""A network's first convolution and the max pool after it, in one launch: the result before pooling is never stored
(ResNet, DenseNet).

The launch is emitted at the convolution and writes the pool's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, channels_last, unmade, up
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import stem_pool_kernel as stem_pool
from optdnn.kernels.conv import stem_pool_sm90_cost as sm90_cost
from optdnn.kernels.conv import stem_pool_sm90_kernel as sm90
from optdnn.kernels.conv.fused import stage_operands
from optdnn.kernels.conv.pooled import OVERLAP, max_pool_behind
from optdnn.kernels.conv.stem import StemConv, stem_offers
from optdnn.kernels.pool.max_pool import predicted
from optdnn.kernels.pool.window import pads_of
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import Offer, Region, best_first, kernel_offers
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, DType

GAIN = 0.97
"""One launch must be predicted to take at most this fraction of the time of two."""


@lru_cache(maxsize=1024)
def _offers(problem: stem_pool.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations on mma.sync and on Hopper's wgmma, the best predicted first."""
    return best_first((*kernel_offers(stem_pool, problem, gpu), *wgmma_offers(problem, gpu)))


def wgmma_offers(problem: stem_pool.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations on Hopper's wgmma. Those on mma.sync serve every batch size: tensor cores add in another order there."""
    return kernel_offers(sm90_cost, sm90.of(problem), gpu, row_invariant=False)


class PooledStem(StemConv):
    """A first convolution, with 16-bit factors, whose only reader is a max pool of windows of 2 x 2 or 3 x 3 with a stride of 2."""

    name = "conv_stem_pool"
    dtypes: ClassVar[tuple[DType, ...]] = (FP16, BF16)

    def refuse(self, b: Builder, op: Op) -> str | None:
        pool = max_pool_behind(b.graph, op)
        if pool is None:
            return "no max pool is the only reader of the result"
        if (why := super().refuse(b, op)) is not None:
            return why
        a = pool.attrs
        square = tuple(a.kernel_shape) in ((2, 2), (3, 3)) and tuple(a.strides) == (2, 2)
        if len(pool.outputs) > 1 or not square or any(d != 1 for d in a.dilations):
            return "the pool after it gives indices, or has other windows than 2 x 2 or 3 x 3 with a stride of 2"
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        if ep.rest or ep.residual is not None:
            return "its epilogue reads other tensors than constants"
        if not conv_maps.storable_whole(b, b.result(pool.value)):
            return "the pool's result is not channels-last"
        problem = self._pooled(b, op, pool)
        if (why := stem_pool.no_kernel(problem)) is not None:
            return why
        if not _offers(problem, b.gpu):
            return "no tile of the kernel fits it"
        return self._slower(b, op, pool, problem)

    def _slower(self, b: Builder, op: Op, pool: Op, problem: stem_pool.Problem) -> str | None:
        """Why the cost models predict two launches to be better, or None. With ``row_invariant``, one launch serves
        every batch size."""
        if b.row_invariant:
            return None
        x, out = (
            unmade(t.dtype, t.static_shape, channels_last(t.static_shape, up(t.static_shape[1], 8)))
            for t in (op.outputs[0].type, pool.outputs[0].type)
        )
        a = pool.attrs
        two = stem_offers(problem.conv, b.gpu)[0].predicted - OVERLAP
        two += predicted(x, out, a.kernel_shape, a.strides, b.gpu)
        return two_are_better(_offers(problem, b.gpu)[0].predicted, two, GAIN)

    def _column(self, b: Builder, op: Op) -> bool:
        """The pool's windows are along both axes: a column stays one."""
        return False

    def defer(self, b: Builder, op: Op) -> str | None:
        """Never: :meth:`refuse` decides."""
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The pool after it."""
        pool = max_pool_behind(graph, op)
        return [] if pool is None else [pool]

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution and the pool."""
        return Region(op, after=(self._pool(b, op),))

    def place(self, b: Builder, op: Op) -> None:
        """Place the pool's result. The convolution's own result is not stored."""
        b.target(self._pool(b, op).value)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return _offers(self._pooled(b, op, self._pool(b, op)), b.gpu)

    @staticmethod
    def _pool(b: Builder, op: Op) -> Op:
        pool = max_pool_behind(b.graph, op)
        assert pool is not None
        return pool

    def _pooled(self, b: Builder, op: Op, pool: Op) -> stem_pool.Problem:
        conv, window = self._problem(b, op), pool.attrs.kernel_shape[0]
        top, left = pads_of(pool, op.outputs[0].type.static_shape, pool.attrs.kernel_shape)[:2]
        _, _, high, wide = pool.outputs[0].type.static_shape
        return stem_pool.Problem(conv, window, top, left, (high, wide))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pool, ep = self._pool(b, op), plan_epilogue(b.graph, op, channel_axis=1)
        problem, out = self._pooled(b, op, pool), b.target(pool.value)
        wgmma = isinstance(config, sm90.Config)
        problem = sm90.of(problem) if wgmma else problem
        operands, attrs, reads = self._described(b, op, problem.conv, ep)
        pitch, normalization = conv_maps.pitch_of(out) or problem.conv.channels, (attrs["factors"], attrs["shifts"])
        made = (sm90 if wgmma else stem_pool).launch(problem, config, b.gpu, pitch, normalization)
        attrs |= {"window": problem.window, "begins": (problem.top, problem.left), "size": problem.size}
        joint = replace(op, src=op.src | pool.src)
        b.emit(
            joint,
            made,
            {**operands, "output": out},
            "PooledImageConv",
            attrs,
            [*reads, *stage_operands(b, ep, None)],
            [out],
        )
