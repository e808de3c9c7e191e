"""Products of many rows with packed weights: a separate launch before the product unpacks the weights to 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, as_rows, map_dtype, up
from optdnn.kernels.conv import general_kernel as general
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import bias_row, conv_attrs, stage_operands
from optdnn.kernels.conv.general import ranked
from optdnn.kernels.gemm.hopper import MatrixProduct, Rows
from optdnn.kernels.gemm.hopper_matmul import Stacks, emit_stacks, walkable
from optdnn.kernels.packed import dense_kernel as dense
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import OPERANDS, UnpackedProblem, described, packed_operands, refusal
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts

UNIT = 8
"""Elements in 16 bytes."""


@lru_cache(maxsize=1024)
def _offers(problem: UnpackedProblem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The product's configurations, without split-K of the general kernel: that needs a workspace, which this tactic does not have."""
    if gpu.hopper:
        found: Sequence[Offer] = hopper_launch.ranked(problem.product, gpu)
    else:
        found = [o for o in ranked(problem.product, gpu) if o.config.split == 1]
    first = dense.estimate(problem.packed)
    return tuple(replace(o, seconds=first + o.predicted) for o in found)


class PackedGemm(MatrixProduct):
    """PackedMatMul of any number of rows of 16-bit floats."""

    name = "packed_gemm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return refusal(b, op)

    def stored(self, b: Builder, x: TensorView) -> bool:
        """Whether the launch can write ``x``: TMA needs rows at multiples of 16 bytes; the general kernel needs one pitch."""
        return walkable(as_rows(x)) if b.gpu.hopper else conv_maps.pitch_of(x) is not None

    def problem(self, b: Builder, op: Op) -> UnpackedProblem:
        return self._problem(b, op, self.rows(b, op))

    @staticmethod
    def _problem(b: Builder, op: Op, rows: Rows) -> UnpackedProblem:
        packed = described(b, op, rows)
        hopper = b.gpu.hopper
        pitch = 0 if hopper else conv_maps.pitch_of(rows.x) or 0
        source = conv_problem.Source(1, 1, up(packed.depth, UNIT), pitch=pitch)
        product = conv_problem.Problem(
            packed.rows, up(packed.columns, UNIT), (source,), packed.epilogue, map_dtype(rows.out.dtype),
            stack=(1, 1) if hopper else None, dense=not hopper,
        )  # fmt: skip
        return UnpackedProblem(packed, product)

    def offers(self, problem: UnpackedProblem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        rows = self.rows(b, op)
        problem = self._problem(b, op, rows)
        x, out = b.made(rows.x), b.made(rows.out)
        residual = None if rows.residual is None else b.made(rows.residual)
        made = replace(rows, x=x, residual=residual, out=out)
        weights = self._unpacked(b, op, problem.packed, x)
        if b.gpu.hopper:
            self._by_wgmma(b, op, problem, made, weights, config)
        else:
            self._by_mma(b, op, problem, made, weights, config)
        rows.finish(b, op, out)

    @staticmethod
    def _unpacked(b: Builder, op: Op, packed: Problem, x: TensorView) -> TensorView:
        """Emits the launch that unpacks the weights to ``[columns, depth]``. Its meaning reads the rows, so that no plan unpacks the
        weights of many products before they are needed."""
        shape = (packed.columns, packed.depth)
        made = b.new(f"{op.outputs[0].name}.unpacked", op.outputs[0].type.dtype, shape, (dense.pitch(packed), 1))
        operands = packed_operands(b, op, packed)
        attrs = {"code": packed.code, "K": packed.depth, "N": packed.columns, "block_size": packed.block}
        reads = [*map(operands.get, OPERANDS), x]
        b.emit(op, dense.launch(packed, b.gpu), {**operands, "output": made}, "UnpackedTiles", attrs, reads, [made])
        return made

    @staticmethod
    def _by_wgmma(b: Builder, op: Op, problem: UnpackedProblem, rows: Rows, weights: TensorView, config: Any) -> None:
        read = [as_rows(rows.x), weights.view(weights.shape[::-1], weights.strides[::-1])]
        if rows.residual is not None:
            read.append(as_rows(rows.residual))
        stacks = Stacks(problem.product, rows.ep, as_rows(rows.out), read, [(0, 0)] * (len(read) + 1))
        emit_stacks(b, op, stacks, config)

    @staticmethod
    def _by_mma(b: Builder, op: Op, problem: UnpackedProblem, rows: Rows, weights: TensorView, config: Any) -> None:
        x, out, residual, packed = rows.x, rows.out, rows.residual, problem.packed
        own = conv_maps.pitch_of(out)
        assert own is not None
        if residual is not None and conv_maps.pitch_of(residual) != own:
            residual = copied(b, op, residual, "residual", out.strides)
        bias = bias_row(b, op, rows.ep.bias, up(packed.columns, 4))
        operands = {"pixels": x, "weights": weights, "channel": bias, "output": out}
        if residual is not None:
            operands["residual"] = residual
        made = general.launch(problem.product, config, b.gpu, channels=packed.columns, inside=packed.depth, pitch=own)
        logical = weights.view((packed.columns, packed.depth, 1, 1), (weights.strides[0], 1, 1, 1))
        reads = [x, logical, bias.view((packed.columns,), (1,)), *stage_operands(b, rows.ep, residual)]
        b.emit(op, made, operands, "Conv", conv_attrs(conv_maps.POINTWISE, 1, rows.ep.stages), reads, [out])
