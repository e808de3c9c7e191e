"""Tactic of norms of contiguous rows: LayerNorm, and GroupNorm and InstanceNorm in plain order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.norm import row_norm_tiles as tiles
from optdnn.kernels.norm.activation import ActivatedNorm, output_of
from optdnn.kernels.norm.group_norm import (
    emit_one_launch,
    emit_two_reads,
    groups_of,
    no_plain_norm,
    norm_operands,
    unlike_rows,
)
from optdnn.kernels.norm.rows_once import RowsOnce
from optdnn.kernels.tactic import MANY, Offer, best_first
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import normalize_axis

_ROWS = RowsOnce()


@lru_cache(maxsize=1024)
def row_tile_offers(problem: tiles.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The offers, best predicted first. The configuration sets the order of a row's sums; the best one for many rows serves every number
    of rows."""
    rows = MANY * problem.period if problem.period > 1 else 4096
    found, many = tiles.candidates(problem, gpu), tiles.candidates(replace(problem, rows=rows), gpu, limit=1)
    offers = [Offer(c, tiles.estimate(problem, c, gpu), c in many) for c in dict.fromkeys((*found, *many))]
    return best_first(offers)


class RowTiles(ActivatedNorm):
    """Rows of any length, in 16-bit floats or fp32, with statistics in fp32. Long rows are read twice, one tile per block; each short
    row has one block."""

    name = "row_tiles"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        if (why := no_kernels(b.arch) or no_plain_norm(b, op)) is not None:
            return why
        shape = t.static_shape
        if len(shape) < (1 if op.kind == "LayerNormalization" else 2) or 0 in shape:
            return "it has no rows"
        if op.kind == "LayerNormalization":
            if (why := unlike_rows(b, op)) is not None:
                return why
            if _ROWS.refuse(b, op) is None:
                return "its rows fit the registers of a block, which reads them once"
        result = output_of(b, op).value
        places = [b.operand(op.inputs[0]), *b.fixed(result)]
        if t.layout or any(not p.dense or p.offset % 8 for p in places):
            return "its rows are not contiguous and aligned"
        return None

    def problem(self, b: Builder, op: Op) -> tiles.Problem:
        t, to = op.outputs[0].type, output_of(b, op)
        shape, stages, dtype = t.static_shape, tuple(to.epilogue.rendered), map_dtype(t.dtype)
        if op.kind == "LayerNormalization":
            axis = normalize_axis(op.attrs.axis, len(shape))
            rows, length = math.prod(shape[:axis]), math.prod(shape[axis:])
            return tiles.Problem(rows, length, 1, 1, stages, dtype, op.attrs.epsilon)
        n, c, *spatial = shape
        groups, pixels = groups_of(op), math.prod(spatial)
        return tiles.Problem(n * groups, c // groups * pixels, pixels, groups, stages, dtype, op.attrs.epsilon)

    def offers(self, problem: tiles.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return row_tile_offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        to, problem = output_of(b, op), self.problem(b, op)
        made = tiles.launches(problem, config, b.gpu)
        operands = {"input": b.operand(op.inputs[0])}
        operands |= norm_operands(b, op, to, problem.period * problem.length // problem.run)
        if len(made) == 1:
            emit_one_launch(b, to, made[0], operands, self._parameter_shape(op))
            return
        vectors = problem.length // config.lanes
        shape = (problem.rows, config.lanes, vectors)
        source = operands["input"].view(shape, (problem.length, 1, config.lanes))
        emit_two_reads(b, to, made, operands, (source, 1, config.tiles), vectors, self._images(op, problem, operands))

    @staticmethod
    def _parameter_shape(op: Op) -> Sequence[int]:
        """The shape of scale and bias."""
        shape = op.outputs[0].type.static_shape
        return shape[normalize_axis(op.attrs.axis, len(shape)) :] if op.kind == "LayerNormalization" else shape[1:2]

    @staticmethod
    def _images(op: Op, problem: tiles.Problem, operands: dict[str, TensorView]) -> list[TensorView]:
        """Input and output as images with a scale and a bias for each channel."""
        channels = problem.period * problem.length // problem.run
        shape = (problem.rows // problem.period, channels, problem.run)
        return [operands[name].view(shape, (channels * problem.run, problem.run, 1)) for name in ("input", "output")]
