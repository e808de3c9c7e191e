"""Norms without a launch, for rows that one product makes and other products read or add.

The producer of the rows also writes their moments. A product that reads the normalized rows applies the norm to its sums
(:mod:`optdnn.kernels.gemm.normed`). A product that adds them applies it to the residual
(:mod:`optdnn.kernels.gemm.normed_residual`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue, summed_dtype
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.fused import Convolution, bias_row
from optdnn.kernels.conv.packed import packed_weights
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.conv.row_forms import MOMENT_CHANNELS, RowNorm
from optdnn.kernels.gemm.hopper import HopperGemm, rows_of
from optdnn.kernels.gemm.hopper_matmul import HopperMatMul
from optdnn.kernels.norm.rows_once import RowsOnce
from optdnn.kernels.tactic import Tactic
from optdnn.types import BF16, FP16, Array

PLAIN, ROWS = HopperGemm(), RowsOnce()
KINDS = {"LayerNormalization": True, "RMSNormalization": False}
"""Kind of a norm -> whether it subtracts the mean."""
PRODUCTS = frozenset({"MatMul", "Gemm"})
TOLD = 0.3e-6
"""Seconds that writing the moments of its rows adds to a product."""
ADDED = 0.4e-6
"""Seconds that normalizing its residual adds to a product."""
ROUNDING = 2.0**-10
"""Largest relative error, in the 2-norm, by which rounding may change a column of the scaled matrix."""
BESIDE = 1.3e-6
"""Seconds of a norm's launch that stays beside the product for other readers: its edges in the CUDA graph."""


@dataclass(frozen=True)
class Normed:
    """A norm, and the product that makes its rows."""

    norm: Op
    producer: Op

    @property
    def rows(self) -> Value:
        """The rows before the norm."""
        found = self.norm.inputs[0]
        assert found is not None
        return found

    @property
    def kind(self) -> RowNorm:
        """The norm as a field of a launch's problem."""
        return RowNorm(KINDS[self.norm.kind], self.norm.attrs.epsilon)

    def scale(self, b: Builder) -> Array:
        """The factor of each channel."""
        scale = b.graph.constant_value(self.norm.inputs[1])
        assert scale is not None
        return scale

    def shift(self, b: Builder) -> Array | None:
        """The addend of each channel, or None."""
        return b.graph.constant_value(self.norm.input(2))

    def moments(self, b: Builder) -> TensorView:
        """The moments of the rows, which the producer's launch writes: fp32 (channels / 64, rows, 2)."""
        if self.producer.id not in b.together:
            *rows, depth = b.graph.type(self.rows).static_shape
            shape = (depth // MOMENT_CHANNELS, int(np.prod(rows, dtype=np.int64)), 2)
            b.together[self.producer.id] = b.new(
                f"{self.producer.outputs[0].name}.moments", np.dtype(np.float32), shape
            )
        found: TensorView = b.together[self.producer.id]
        return found


def normed(graph: Graph, value: Value | None) -> Normed | None:
    """The norm that makes ``value``; None if there is none, or no product makes its rows."""
    norm = None if value is None else graph.op(value)
    if norm is None or norm.kind not in KINDS or norm.inputs[0] is None:
        return None
    producer = graph.op(norm.inputs[0])
    while producer.kind == "Reshape" and _same_rows(graph, producer):
        assert producer.inputs[0] is not None
        producer = graph.op(producer.inputs[0])
    return Normed(norm, producer) if producer.kind in PRODUCTS else None


def _same_rows(graph: Graph, reshape: Op) -> bool:
    """Whether a Reshape keeps rows whole. OPT's, for example, joins the tokens of all sequences of a batch."""
    assert reshape.inputs[0] is not None
    before, after = graph.type(reshape.inputs[0]).static_shape, reshape.outputs[0].type.static_shape
    return bool(before and after) and before[-1] == after[-1]


def stages_of(graph: Graph, op: Op) -> Epilogue:
    """The epilogue of a product."""
    return plan_epilogue(graph, op, channel_axis=-1)


def added(graph: Graph, op: Op) -> Normed | None:
    """The norm that makes the residual of a product."""
    return normed(graph, stages_of(graph, op).residual)


def refuse_norm(b: Builder, op: Op, found: Normed) -> str | None:
    """Why the launch of ``op`` cannot apply the norm by moments, whatever the layout of its operands, or None."""
    dtype = summed_dtype(b.graph, op)
    if dtype not in (FP16, BF16) or b.graph.type(found.rows).dtype != dtype:
        return "it is for 16-bit floats"
    if b.row_invariant:
        return "moments are summed in another order where the launch before has other tiles"
    if (why := ROWS.refuse_rows(b, found.norm)) is not None:
        return f"the norm: {why}"
    depth = b.graph.type(found.rows).static_shape[-1]
    if depth % MOMENT_CHANNELS:
        return f"rows of {depth} channels are not whole groups of {MOMENT_CHANNELS}"
    return None


def refuse_residual(b: Builder, op: Op) -> str | None:
    """Why a product cannot normalize its residual, whatever the layout of its operands, or None."""
    if (why := PLAIN.refuse(b, op)) is not None:
        return why
    found, ep = added(b.graph, op), stages_of(b.graph, op)
    if found is None:
        return "its residual is not the normalized rows of another product"
    if ep.rendered[0] != ("add",) or ep.constants:
        return "more is done to its sums than the addition of the residual"
    if op.inputs[0] == ep.residual:
        return "it multiplies the normalized rows as well"
    return refuse_norm(b, op, found)


def adder(b: Builder, found: Normed, others: list[Op]) -> Op | None:
    """The product that adds the normalized rows, if it is not planned yet and can normalize them itself.

    None if the norm's launch stays in any case. ``others``: the other readers of the rows."""
    if found.norm.value in b.reserved or len(others) != 1:
        return None
    (other,) = others
    waits = other.id not in b.chosen and other.kind in PRODUCTS
    return other if waits and refuse_residual(b, other) is None else None


def refuse_order(op: Op, order: tuple[int, ...]) -> str | None:
    """Why the product does not take its rows in the order of the moments, or None. ``order``: the product's order of axes."""
    logical = tuple(range(len(op.outputs[0].type.static_shape)))
    return None if order == logical else "its rows do not lie one after the other"


def refuse_places(b: Builder, op: Op, found: Normed, order: tuple[int, ...]) -> str | None:
    """Why ``op`` cannot read the producer's rows in place, with their moments, or None. ``order``: the order of axes in which
    ``op`` takes its rows."""
    tactic = b.chosen.get(found.producer.id)
    if not isinstance(tactic, HopperGemm | HopperMatMul):
        return f"{found.producer.name} runs by a tactic that gives no moments"
    if (why := refuse_order(op, order)) is not None:
        return why
    x = rows_of(b.source(found.rows))
    if x is None or (tactic if isinstance(tactic, HopperMatMul) else PLAIN).output_with_moments(b, found.producer) != x:
        return f"the launch of {found.producer.name} does not store the rows that are normalized"
    return None


def seconds_of(b: Builder, *launches: tuple[Tactic, Op]) -> list[float]:
    """The predicted seconds of each launch."""
    return [tactic.configs(b, op)[0].predicted for tactic, op in launches]


def scaled_refusal(b: Builder, weight: Array, scale: Array) -> str | None:
    """Why the matrix (columns, depth, 1, 1) times the norm's scale does not fit its 16-bit type, or None."""

    def error() -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and Inf fail the comparison
            exact = weight[:, :, 0, 0].astype(np.float32) * scale
            lost = np.linalg.norm(exact - exact.astype(weight.dtype).astype(np.float32), axis=1)
            whole = np.maximum(np.linalg.norm(exact, axis=1), np.float32(1e-30))
            return np.asarray((lost / whole).max(keepdims=True))

    limit = ROUNDING if weight.dtype == FP16 else 8 * ROUNDING
    fits = b.kept.once(("scaled matrix rounded",), [weight, scale], error)[0] <= limit
    return None if fits else "the matrix times the norm's scale does not fit 16 bits"


def behind(b: Builder, c: Convolution, x: TensorView, found: Normed) -> Convolution:
    """The product with the norm after it: ``x`` is not normalized yet, and the matrix is scaled."""
    shift, scale, weight, bias = found.shift(b), found.scale(b), c.feed.weight, c.bias

    def scaled() -> Array:
        return (weight.astype(np.float32) * scale.astype(np.float32)[:, None, None]).astype(weight.dtype)

    def through() -> Array:
        return np.asarray(weight[:, :, 0, 0].astype(np.float32) @ shift.astype(np.float32))  # type: ignore[union-attr]

    if shift is not None:
        more = b.kept.once(("shift through a matrix",), [weight, shift], through)
        bias = more if bias is None else bias + more
    feed = replace(c.feed, x=x, weight=b.kept.once(("scaled matrix",), [weight, scale], scaled))
    return replace(c, feeds=(feed,), bias=bias, covered=c.covered | found.norm.src)


def normed_operands(b: Builder, op: Op, c: Convolution, problem: Problem, given: TensorView) -> dict[str, TensorView]:
    """The operands of a product with the norm after it, by name, with its result. ``given``: the moments."""
    weights, bias = packed_weights(b, op, problem, c.feeds), bias_row(b, op, c.bias, problem.channels)
    scaled = c.feed.weight
    sums = b.kept.once(
        ("sums of columns",), [scaled], lambda: scaled[:, :, 0, 0].astype(np.float64).sum(1).astype(np.float32)
    )
    columns = bias_row(b, op, sums, problem.channels)
    operands = {"weights": weights, "channel": bias, "columns": columns, "given": given, "output": c.out}
    return operands | hopper_launch.pixels(c.feeds)


def norm_attrs(norm: RowNorm | None) -> dict[str, Any]:
    """The attributes of a launch that applies the norm."""
    assert norm is not None
    return {"mean": norm.mean, "epsilon": norm.epsilon}
