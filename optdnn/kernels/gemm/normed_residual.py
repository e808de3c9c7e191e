"""Products that add normalized rows without a launch for the norm: networks whose norms come after the addition (BERT).

One product reads ``LN(x)``, and the next one adds it as its residual. The first applies the norm to its sums
(:mod:`.normed`). The second reads ``x`` as its residual and normalizes it in its epilogue, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, as_rows
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import Convolution, bias_row
from optdnn.kernels.conv.packed import packed_weights
from optdnn.kernels.conv.paired import stages_with_other
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.gemm.hopper import HopperGemm, rows_of
from optdnn.kernels.gemm.normed import TakesNorm
from optdnn.kernels.gemm.row_norms import (
    ADDED,
    BESIDE,
    PLAIN,
    ROWS,
    Normed,
    added,
    norm_attrs,
    refuse_order,
    refuse_residual,
    seconds_of,
)
from optdnn.kernels.tactic import Region
from optdnn.ops.fused import plain_stages


class NormedResidualGemm(HopperGemm):
    """One product that normalizes its residual. It may also write the moments of its own rows."""

    name = "gemm_normed_residual_sm90"

    @staticmethod
    def _normed(b: Builder, op: Op) -> Normed:
        found = added(b.graph, op)
        assert found is not None
        return found

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refuse_residual(b, op)) is not None:
            return why
        found = self._normed(b, op)
        others = [u for u in b.graph.users(found.norm.value) if u.id != op.id]
        takes = [isinstance(b.chosen.get(u.id), TakesNorm) for u in others]
        if not takes or not all(takes) or found.norm.value in b.reserved:
            return "others read the normalized rows"
        return refuse_order(op, self._order(b, op))

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        norm, alone, own = seconds_of(b, (ROWS, self._normed(b, op).norm), (PLAIN, op), (self, op))
        stays = alone + (min(norm, BESIDE) if b.lanes else norm)
        if own + ADDED < stays:
            return None
        return f"norm and product are predicted to take {stays * 1e6:.1f} us, one launch {(own + ADDED) * 1e6:.1f}"

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The norm, and the producer of its rows."""
        found = added(graph, op)
        return [] if found is None else [found.norm, found.producer]

    def region(self, b: Builder, op: Op) -> Region:
        """The norm, whose other readers normalize the rows themselves, and the product."""
        return Region(op, before=(self._normed(b, op).norm,))

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The product with the rows before the norm as its residual."""
        c, found = super().convolution(b, op), self._normed(b, op)
        shift, residual, bias = found.shift(b), rows_of(b.source(found.rows)), c.bias
        if shift is not None:
            bias = shift.astype(np.float32) if bias is None else bias + shift.astype(np.float32)
        return replace(c, residual=residual, bias=bias, covered=c.covered | found.norm.src)

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Problem:
        """The problem with the norm of the residual."""
        return replace(super().problem_of(b, op, c), residual_norm=self._normed(b, op).kind)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        """Add the launch. It also writes the moments of its rows if a later launch normalizes them."""
        found, moments = self._normed(b, op), b.together.get(op.id)
        assert c.residual is not None
        weights, bias = packed_weights(b, op, problem, c.feeds), bias_row(b, op, c.bias, problem.channels)
        (weight,) = conv_maps.weight_views(weights, problem, c.feeds)
        scale, given = b.constant(found.scale(b).astype(np.float32), f"{found.norm.name}.scale"), found.moments(b)
        operands = {"weights": weights, "channel": bias, "output": c.out, "residual": c.residual}
        operands |= {"columns": scale, "given": given, **hopper_launch.pixels(c.feeds)}
        attrs = {**norm_attrs(problem.residual_norm), "epilogue": plain_stages(stages_with_other(c.ep))}
        kind, reads = "NormedResidual", [as_rows(c.feed.x), as_rows(weight), bias, as_rows(c.residual), given, scale]
        if moments is not None:
            problem, operands["moments"] = replace(problem, moments=True), moments
            kind, attrs = hopper_launch.with_moments(kind, attrs)
        made = hopper_launch.launch(problem, config, b.gpu, c.feeds, operands)
        hopper_launch.emit(b, op, made, problem, config, operands, (kind, attrs, reads), as_rows(c.out), moments)
