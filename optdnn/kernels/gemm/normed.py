"""Products of normalized rows without a launch for the norm.

The product that makes the rows tells their moments (mean and squared deviations of each 64 channels). The product of the normalized rows
reads the rows as they are, with a matrix whose rows are scaled, and applies the norm to its sums (``conv_moments.cuh``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.fused import Convolution, bias_row
from optdnn.kernels.conv.problem import MOMENT_CHANNELS, Problem, RowNorm
from optdnn.kernels.gemm.hopper import HopperGemm, rows_of
from optdnn.kernels.norm.half_rows import HalfRows
from optdnn.kernels.tactic import Region
from optdnn.ops.fused import plain_stages
from optdnn.types import BF16, FP16, FP32, Array

_ALONE, _ROWS = HopperGemm(), HalfRows()
NORMS = {"LayerNormalization": True, "RMSNormalization": False}
"""Kind -> whether it takes the mean away."""
PRODUCTS = frozenset({"MatMul", "Gemm"})
ROUNDING = 2.0**-10
"""The most that rounding may change a column of the scaled matrix, relative to its length."""
TOLD = 0.2e-6
"""Seconds that a product takes longer where it tells the moments of its rows."""


@dataclass(frozen=True)
class _Around:
    """The norm in front of a product, and the product that makes its rows."""

    norm: Op
    maker: Op

    @property
    def rows(self) -> Value:
        """What is normalized."""
        found = self.norm.inputs[0]
        assert found is not None
        return found


def _around(graph: Graph, op: Op) -> _Around | None:
    """None where there is no such norm, or its rows are no product's."""
    norm = None if op.input(0) is None else graph.op(op.inputs[0])  # type: ignore[arg-type]
    if norm is None or norm.kind not in NORMS or norm.inputs[0] is None:
        return None
    maker = graph.op(norm.inputs[0])
    return _Around(norm, maker) if maker.kind in PRODUCTS else None


class NormedGemm(HopperGemm):
    """A product of rows of 16-bit floats that are normalized, and whose moments the launch that makes them can tell."""

    name = "gemm_normed_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        found = _around(b.graph, op)
        if found is None:
            return "its rows are not the normalized rows of another product"
        t = op.outputs[0].type
        if t.dtype not in (FP16, BF16) or b.graph.type(found.rows).dtype != t.dtype:
            return "it is for 16-bit floats"
        if b.row_invariant:
            return "moments are summed in another order where the launch before has other tiles"
        norm = found.norm
        if (why := _ROWS.refuse_rows(b, norm)) is not None:
            return f"the norm: {why}"
        if len(b.graph.uses(norm.value)) > 1 or norm.value in b.reserved or op.input(0) != norm.value:
            return "others read the normalized rows"
        depth = b.graph.type(found.rows).static_shape[-1]
        if depth % MOMENT_CHANNELS:
            return f"rows of {depth} channels are not whole groups of {MOMENT_CHANNELS}"
        return self._unplaced(b, op, found) or self._unfit(b, op, found)

    def _unplaced(self, b: Builder, op: Op, found: _Around) -> str | None:
        """Why the launches do not meet in the rows as they lie."""
        if not isinstance(b.chosen.get(found.maker.id), HopperGemm):
            return f"{found.maker.name} runs by a tactic that tells no moments"
        x = rows_of(b.source(found.rows))
        if x is None or self._order(b, op) != tuple(range(len(op.outputs[0].type.static_shape))):
            return "its rows do not lie one after the other"
        made = _ALONE.convolution(b, found.maker)
        if made.ep.rest or made.out != x:
            return f"the launch of {found.maker.name} does not store the rows that are normalized"
        return None

    def _unfit(self, b: Builder, op: Op, found: _Around) -> str | None:
        """Why the norm does not go behind the product."""
        c = super().convolution(b, op)
        if c.residual is not None or c.ep.constants:
            return "its stages read other tensors"
        weight, scale = self.factors(b, op)[0], self._scale(b, found.norm)

        def error() -> Array:
            exact = weight.astype(np.float32) * scale
            with np.errstate(over="ignore"):
                lost = np.linalg.norm(exact - exact.astype(weight.dtype).astype(np.float32), axis=1)
            return np.max(lost / np.maximum(np.linalg.norm(exact, axis=1), np.float32(1e-30)), keepdims=True)

        limit = ROUNDING if weight.dtype == FP16 else 8 * ROUNDING
        fits = b.kept.once(("scaled matrix rounded",), [weight, scale], error)[0] <= limit
        return None if fits else "the matrix times the norm's scale does not fit 16 bits"

    @staticmethod
    def _scale(b: Builder, norm: Op) -> Array:
        scale = b.graph.constant_value(norm.inputs[1])
        assert scale is not None
        return scale

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        found = _around(b.graph, op)
        assert found is not None
        norm, alone, own = (t.configs(b, x)[0].seconds or 0.0 for t, x in ((_ROWS, found.norm), (_ALONE, op), (self, op)))
        if own + TOLD < norm + alone:
            return None
        return f"norm and product are predicted to take {(norm + alone) * 1e6:.1f} us, one launch {(own + TOLD) * 1e6:.1f}"

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The norm, and what makes its rows."""
        found = _around(graph, op)
        return [] if found is None else [found.norm, found.maker]

    def region(self, b: Builder, op: Op) -> Region:
        """The norm and the product."""
        found = _around(b.graph, op)
        assert found is not None
        return Region(op, before=(found.norm,))

    def place(self, b: Builder, op: Op) -> None:
        """The result, and the moments that the launch before tells."""
        super().place(b, op)
        found = _around(b.graph, op)
        assert found is not None
        if found.maker.id not in b.together:
            *rows, depth = b.graph.type(found.rows).static_shape
            shape = (depth // MOMENT_CHANNELS, int(np.prod(rows, dtype=np.int64)), 2)
            b.together[found.maker.id] = b.new(f"{found.maker.outputs[0].name}.moments", FP32, shape)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """Of the rows that are not normalized yet, with the scaled matrix."""
        c, found = super().convolution(b, op), _around(b.graph, op)
        assert found is not None
        weight, shift = self.factors(b, op)[0], b.graph.constant_value(found.norm.input(2))
        scale, bias, x = self._scale(b, found.norm), c.bias, rows_of(b.source(found.rows))
        assert x is not None
        scaled = b.kept.once(
            ("scaled matrix",), [weight, scale], lambda: (weight.astype(np.float32) * scale.astype(np.float32)).astype(weight.dtype)
        )
        if shift is not None:
            more = b.kept.once(
                ("shift through a matrix",), [weight, shift], lambda: weight.astype(np.float32) @ shift.astype(np.float32)
            )
            bias = more if bias is None else bias + more
        return replace(c, feeds=(replace(c.feed, x=x, weight=scaled[:, :, None, None]),), bias=bias, covered=found.norm.src)

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Problem:
        found = _around(b.graph, op)
        assert found is not None
        norm = RowNorm(NORMS[found.norm.kind], found.norm.attrs.epsilon)
        return replace(super().problem_of(b, op, c), norm=norm)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        found = _around(b.graph, op)
        assert found is not None
        assert problem.norm is not None
        given, told, x, out = b.together[found.maker.id], b.together.get(op.id), c.feed.x, c.out
        rows, columns, depth = out.shape[0], out.shape[1], x.shape[1]
        weights, bias = hopper_launch.packed_weights(b, op, problem, c.feeds), bias_row(b, op, c.bias, problem.channels)
        scaled = c.feed.weight[:, :, 0, 0]
        sums = b.kept.once(("sums of columns",), [c.feed.weight], lambda: scaled.astype(np.float64).sum(1).astype(np.float32))
        operands = {"weights": weights, "channel": bias, "output": out, **hopper_launch.pixels(c.feeds), "given": given}
        operands["columns"] = bias_row(b, op, sums, problem.channels)
        reads: list[TensorView | None] = [
            x.view((rows, depth), x.strides[:2]), given, weights.view((columns, depth), (depth, 1)),
            operands["columns"].view((columns,), (1,)), bias.view((columns,), (1,)),
        ]  # fmt: skip
        kind, attrs = "NormedProduct", {
            "mean": problem.norm.mean, "epsilon": problem.norm.epsilon, "epilogue": plain_stages(c.ep.stages),
        }  # fmt: skip
        if told is not None:
            problem, operands["moments"] = replace(problem, moments=True), told
            kind, attrs = hopper_launch.with_moments(kind, attrs)
        made = hopper_launch.launch(problem, config, b.gpu, c.feeds, operands)
        written = out.view((rows, columns), out.strides[:2])
        hopper_launch.emit(b, op, made, problem, config, operands, (kind, attrs, reads), written, told)
