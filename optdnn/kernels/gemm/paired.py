"""Two products of the same rows in one launch, one multiplied by the other: the gated linear units of transformers.

``f(x @ W) * g(x @ V)``: the launch's weights alternate channels of the two products, so that a thread has both sums and stores one
result. The launch is emitted at the product that multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue, read_once, summed_dtype
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, as_rows, map_dtype, products
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import Convolution, bias_row
from optdnn.kernels.conv.maps import Feed, weight_views
from optdnn.kernels.conv.packed import weight_operands, with_ranges
from optdnn.kernels.conv.paired import factors_of, faster_apart, in_halves, in_turn, stages_with_other
from optdnn.kernels.conv.parts import PartsGemm
from optdnn.kernels.gemm.hopper import HopperGemm, MatrixProduct, product_refusal
from optdnn.kernels.tactic import Region
from optdnn.ops.fused import plain_stages

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def multiplier(graph: Graph, op: Op) -> Op | None:
    """The other product of the same rows that multiplies ``op``, or None."""
    if not _alike(op, op):  # the output of a network, for instance
        return None
    for value in op.inputs[op.definition.arity or 0 :]:
        other = None if value is None else graph.op(value)
        if other is None or not _alike(op, other) or other.inputs[0] != op.inputs[0]:
            continue
        if not read_once(op, other.value):
            continue
        ep, user = plan_epilogue(graph, op, channel_axis=-1, allow_wide=True), graph.sole_user(other.value)
        if user is not None and user.id == op.id and ep.residual == value and ("mul",) in ep.rendered:
            return other
    return None


def _alike(op: Op, other: Op) -> bool:
    """Whether both are products of floats, or both products of packed weights."""
    return {op.kind, other.kind} <= _PRODUCTS or op.kind == other.kind == "PackedMatMul"


@dataclass(frozen=True)
class _Pair:
    """The product that multiplies, the other one, and their epilogues."""

    op: Op
    other: Op
    own: Epilogue
    beside: Epilogue


class PairedGemm(hopper_launch.HopperTactic, MatrixProduct):
    """Two MatMuls or Gemms of rows of floats with constant matrices, on Hopper's kernel."""

    name = "gemm_paired_sm90"
    one: ClassVar[HopperGemm] = HopperGemm()
    """The tactic that runs one product by itself."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := self.one.refuse(b, op)) is not None:
            return why
        other = multiplier(b.graph, op)
        if other is None:
            return "it is not multiplied by another product of the same rows"
        if (why := product_refusal(b, other)) is not None:
            return f"the other product {other.name}: {why}"
        if summed_dtype(b.graph, op) != op.outputs[0].type.dtype:
            return "its result has another type than its factors"
        pair = self._pair(b, op)
        if pair.own.constants or pair.beside.constants:
            return "its stages have constants"
        if pair.beside.rest or pair.beside.residual is not None:
            return f"what follows the other product {other.name} is more than an activation"
        if op.outputs[0].type.static_shape[-1] % 8:
            return "its number of columns is not a multiple of 8"
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        other = multiplier(b.graph, op)
        assert other is not None
        return faster_apart(b, (self, op), ((self.one, other), (self.one, op)))

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The product that multiplies ``op``."""
        other = multiplier(graph, op)
        return [] if other is None else [other]

    def region(self, b: Builder, op: Op) -> Region:
        """Both products."""
        other = multiplier(b.graph, op)
        assert other is not None
        return Region(op, before=(other,))

    @staticmethod
    def _pair(b: Builder, op: Op) -> _Pair:
        other = multiplier(b.graph, op)
        assert other is not None
        own, beside = (plan_epilogue(b.graph, x, channel_axis=-1, allow_wide=True) for x in (op, other))
        return _Pair(op, other, own, beside)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The convolution of all channels. The channels of the two products alternate."""
        pair, c = self._pair(b, op), super().convolution(b, op)
        (weight, own), (second, other) = (self.factors(b, x) for x in (op, pair.other))
        biases = [pair.own.added_to(own), pair.beside.added_to(other)]
        zeros = np.zeros(len(weight), np.float32)
        bias = in_turn([zeros if v is None else v for v in biases])
        joined = b.kept.once(("in turn",), [weight, second], lambda: in_turn([weight, second]))
        feed = replace(c.feed, weight=joined[:, :, None, None])
        return replace(c, feeds=(feed,), bias=bias, residual=None, covered=pair.other.src)

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> conv_problem.Problem:
        rows, columns = c.out.shape[:2]
        problem = conv_problem.Problem(
            rows, 2 * columns, (c.feed.source,), (("bias",), *c.ep.rendered), products(b, op), map_dtype(c.out.dtype),
            beside=(("bias",), *self._pair(b, op).beside.rendered), pitches=hopper_launch.paired_pitches(c.out),
        )  # fmt: skip
        return with_ranges(b, problem, c.feeds)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: conv_problem.Problem, config: Any) -> None:
        x, out = c.feed.x, c.out
        matrix, bias = weight_operands(b, op, problem, c.feeds), bias_row(b, op, c.bias, problem.channels)
        operands = {**matrix, "channel": bias, "output": out, **hopper_launch.pixels(c.feeds)}
        reads = [as_rows(x)]
        for part in halves(problem, c.feeds, matrix["weights"], bias):
            reads += part
        self.emit_pair(b, op, c, problem, config, operands, ("PairedProduct", self.stages(b, op), reads))

    def stages(self, b: Builder, op: Op) -> dict[str, Any]:
        """The stages of both products, as attributes of the meaning."""
        pair = self._pair(b, op)
        return {"epilogue": plain_stages(stages_with_other(pair.own)), "beside": plain_stages(pair.beside.stages)}

    @staticmethod
    def emit_pair(
        b: Builder, op: Op, c: Convolution, problem: conv_problem.Problem, config: Any, operands: dict[str, TensorView],
        meaning: tuple[str, dict[str, Any], Sequence[TensorView | None]],
    ) -> None:  # fmt: skip
        """Add the launch. The kernel writes one result per two channels, so its map of the output has elements of half the size."""
        made = hopper_launch.launch(problem, config, b.gpu, c.feeds, {**operands, "output": in_halves(c.out)})
        written = as_rows(c.out)
        hopper_launch.emit(b, op, made, problem, config, {**operands, "output": written}, meaning)


def halves(
    problem: conv_problem.Problem, feeds: Sequence[Feed], weights: TensorView, *channels: TensorView
) -> list[list[TensorView]]:
    """For each product: views of its packed weights, ``[N / 8, 8, K]``, and of its part of each row of ``channels``."""
    (packed,) = weight_views(weights, problem, feeds)
    return [
        [w.view(w.shape[:3], w.strides[:3]), *(x.view((problem.channels // 2,), (2,), k) for x in channels)]
        for k, w in enumerate(factors_of(problem, packed))
    ]


class PairedPartsGemm(PairedGemm):
    """Two products of fp32, in parts of fp16."""

    name = "gemm_paired_parts_sm90"
    one = PartsGemm()
    parts = True
