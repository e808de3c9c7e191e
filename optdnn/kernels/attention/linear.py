"""Tactics of normalized linear attention (EfficientViT, SANA, LoFTR): the kernels of attention between channels, or separate products.

Both have the product of two matrices over many tokens, then the product of its result with each token. See
:mod:`optdnn.kernels.attention.channels_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.attention import channels_kernel as channels
from optdnn.kernels.attention.channels import channel_offers, channel_parts, problem_refusal
from optdnn.kernels.attention.problem import HeadView
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.gemm.matmul import emit_matmul
from optdnn.kernels.pointwise.pointwise import emit_pointwise
from optdnn.kernels.tactic import Offer, ProblemTactic, Tactic
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.fused import plain_stages
from optdnn.ops.normalized_attention import NormalizedAttentionAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32, FP64, DType


class LinearAttentionKernel(ProblemTactic):
    """Normalized linear attention of 16-bit floats with mma.sync and fp32 accumulators: one launch, or two for many tokens."""

    name = "attention_linear"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := no_kernels(b.arch)) is not None:
            return why
        q, k, v = (b.graph.type(x) for x in op.inputs if x is not None)
        if q.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if not q.static_shape == k.static_shape == v.static_shape:
            return "its queries, keys and values have different shapes"
        if any(b.operand(x).strides[3] != 1 for x in op.inputs):
            return "the features of a token are not contiguous"
        if op.value in b.reserved and b.reserved[op.value].strides[3] != 1:
            return "its result is wanted in another order"
        return problem_refusal(self.problem(b, op), b.gpu)

    def offers(self, problem: channels.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return channel_offers(problem, gpu)

    def problem(self, b: Builder, op: Op) -> channels.Problem:
        """In the kernels' words, the values are queries and the queries are values."""
        q, k, v = (b.operand(x) for x in op.inputs)
        batch, heads, tokens, size = q.shape
        out, a = b.result(op.value, _token_major(q.shape)), op.attrs
        unit = int(np.gcd.reduce([8, *(x.offset for x in (q, k, v, out))]))
        return channels.Problem(
            batch, heads, size, tokens, _view(v), _view(k), _view(q), _view(out), None, map_dtype(op.outputs[0].type.dtype), unit,
            channels.Divided(a.epsilon, a.rectified),
        )  # fmt: skip

    def place(self, b: Builder, op: Op) -> None:
        """Place the result as [batch, token, head, feature]."""
        b.target(op.value, _token_major(op.outputs[0].type.static_shape))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        q, k, v = (b.operand(x) for x in op.inputs)
        problem, out, a = self.problem(b, op), b.operand(op.value), op.attrs
        factors = b.constant(np.full(problem.heads, a.scale, np.float32), f"{op.outputs[0].name}.factors")
        operands = {"q": v, "k": k, "v": q, "out": out, "factors": factors}
        attrs = {"epsilon": a.epsilon, "scale": a.scale, "rectified": a.rectified}
        if not config.depth:
            made = channels.launch(problem, config, b.gpu)
            b.emit(op, made, operands, op.kind, attrs, [q, k, v], [out])
            return
        first, second = channels.launches(problem, config, b.gpu)
        operands["sums"] = sums = channel_parts(b, op, problem, config)
        b.emit(op, first, operands, "LinearSums", {"span": config.span, "rectified": a.rectified}, [k, v], [sums])
        b.emit(op, second, operands, "LinearResults", attrs, [sums, q], [out])


class LinearAttentionSteps(Tactic):
    """Any normalized linear attention: a launch for each product, in fp32 (fp64 for fp64) but for the last result."""

    name = "linear_attention_steps"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result as [batch, token, head, feature], which most readers want."""
        b.target(op.value, _token_major(op.outputs[0].type.static_shape))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        q, k, v = (b.operand(x) for x in op.inputs)
        a: NormalizedAttentionAttrs = op.attrs
        name, wide = op.outputs[0].name, FP64 if q.dtype == FP64 else FP32
        (batch, heads, rows, size), tokens, width = q.shape, k.shape[2], v.shape[3]
        if a.rectified:
            q, k = (self._rectified(b, op, x, f"{name}.{part}") for x, part in ((q, "queries"), (k, "keys")))
        turned = k.permuted((0, 1, 3, 2))
        ones = b.constant(np.ones(1, v.dtype), "one").view((batch, heads, tokens, 1), (0, 0, 0, 0))
        matrix, total, divisor = (
            b.new(f"{name}.{part}", wide, (batch, heads, *shape))
            for part, shape in (("matrix", (size, width)), ("sums", (size, 1)), ("divisors", (rows, 1)))
        )
        self._product(b, op, turned, v, matrix)
        self._product(b, op, turned, ones, total)
        self._product(b, op, q, total, divisor, ("Add", self._number(b, wide, a.epsilon)))
        self._product(b, op, q, matrix, b.operand(op.value), ("Mul", self._number(b, wide, a.scale)), ("Div", divisor))

    @staticmethod
    def _number(b: Builder, wide: DType, x: float) -> TensorView:
        return b.constant(np.asarray(x, wide), "constant")

    @staticmethod
    def _rectified(b: Builder, op: Op, x: TensorView, name: str) -> TensorView:
        made = b.new(name, x.dtype, x.shape)
        emit_pointwise(b, op, [Stage("Relu", (~0,), Attrs())], [x], made)
        return made

    @staticmethod
    def _product(
        b: Builder, op: Op, left: TensorView, right: TensorView, out: TensorView, *then: tuple[str, TensorView]
    ) -> None:
        """A product, and operators with another operand on its result."""
        stages = [Stage(kind, (~i, 2 + i), Attrs()) for i, (kind, _) in enumerate(then)]
        extra = {2 + i: x for i, (_, x) in enumerate(then)}
        attrs = {"prologue": (), "epilogue": plain_stages(stages), "arity": 2}
        emit_matmul(b, op, left, right, out, stages, extra, 1.0, {}, "MatMul", attrs, [left, right, *extra.values()])


def _token_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the result as [batch, token, head, feature]."""
    _, heads, tokens, size = shape
    return (tokens * heads * size, size, heads * size, 1)


def _view(x: TensorView) -> HeadView:
    """The kernel's view. An axis of one element may have any stride."""
    return HeadView(*(s if n > 1 else 8 for n, s in zip(x.shape[:3], x.strides, strict=False)))
