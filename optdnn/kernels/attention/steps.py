"""Any attention in three launches: product, softmax, product."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.attention.operands import (
    WEIGHTS,
    is_used,
    keys_and_values,
    place_keys_and_values,
    target_of,
    with_four_axes,
)
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.gemm.matmul import emit_matmul
from optdnn.kernels.norm.rows import Statistic, emit_rows
from optdnn.kernels.pointwise.expressions import arithmetic
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.reduce.reduce import limits
from optdnn.kernels.tactic import Tactic
from optdnn.ops.attention import SINKS, AttentionAttrs
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.fused import plain_stages
from optdnn.runtime.reference.attention import visible
from optdnn.types import FP32, FP64, DType


class AttentionSteps(Tactic):
    """Any attention: scores with their masks, softmax, weighted sum. Scores are fp32 (fp64 for fp64)."""

    name = "attention_steps"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return None

    def place(self, b: Builder, op: Op) -> None:
        """Like :meth:`HopperAttention.place`; also places the weights if they are a result."""
        place_keys_and_values(b, op)
        target_of(b, op)
        if is_used(b, op, WEIGHTS):
            b.target(Value(op.id, WEIGHTS))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        q = b.operand(op.inputs[0])
        k, v, past = keys_and_values(b, op)
        k, v = b.made(k), b.made(v)
        target = target_of(b, op)
        wide = FP64 if q.dtype == FP64 else FP32
        batch, heads, rows, _ = q.shape
        shared, keys = k.shape[1:3]
        if keys == 0:  # no keys: zeros, as for rows whose keys are all masked
            zero = b.constant(np.zeros(1, target.dtype), "zero")
            copy(b, op, zero.view(target.shape, (0, 0, 0, 0)), target)
            return
        shape = (batch, shared, heads // shared, rows, keys)
        scores_of = _Scores(b, op, past, shape, q)
        stages, extra, marks = scores_of.stages, scores_of.extra, scores_of.marks
        left = _split_heads(q, shared)
        right = _broadcast_heads(k)
        right = right.view(
            (*right.shape[:3], right.shape[4], right.shape[3]), (*right.strides[:3], right.strides[4], right.strides[3])
        )

        def product(out: TensorView, count: int) -> None:
            used = [Stage(s.kind, s.args, s.attrs) for s in stages[:count]]
            attrs = {"prologue": (), "epilogue": plain_stages(used), "arity": 2}
            needed = {a for s in used for a in s.args if a is not None and a >= 0}
            given = {i: p for i, p in extra.items() if i in needed}
            reads: list[TensorView | None] = [left, right, *(given.get(i) for i in range(2, max(given, default=1) + 1))]
            emit_matmul(b, op, left, right, out, used, given, 1.0, {}, "MatMul", attrs, reads)

        logits, scores = _with_sinks(b, op, wide, shape)
        product(scores, len(stages))
        whole = b.new(f"{op.outputs[0].name}.weights", wide, logits.shape)
        weights = whole.view(shape, whole.strides)
        top = Statistic("{LOW}", "v", "max_nan(a, b)")
        total = Statistic("{T}(0)", "(t0 == {LOW} ? {T}(0) : {T}(exp(v - t0)))")
        result = f"(t0 == {limits(arithmetic(wide))[0]} ? {{T}}(0) : {{T}}(exp(v - t0) / t1))"
        emit_rows(
            b, op, logits, (4,), whole, [top, total], result, kind="MaskedSoftmax", attrs={},
            reads=[logits], writes=whole,
        )  # fmt: skip
        if is_used(b, op, WEIGHTS):
            shown = _split_heads(b.target(Value(op.id, WEIGHTS)), shared)
            mode = op.attrs.qk_matmul_output_mode
            if mode == 3:
                copy(b, op, weights, shown)
            else:
                product(shown, (marks[0], marks[1], len(stages))[mode])
        values = _broadcast_heads(v)
        out = _split_heads(target, shared)
        attrs = {"prologue": (), "epilogue": (), "arity": 2}
        emit_matmul(b, op, weights, values, out, [], {}, 1.0, {}, "MatMul", attrs, [weights, values])


def _with_sinks(b: Builder, op: Op, wide: DType, shape: tuple[int, ...]) -> tuple[TensorView, TensorView]:
    """Space for the logits of the softmax, and the part of it that the scores (batch, shared, repeats, rows, keys) fill. The sinks, if
    there are any, are in a further column."""
    sinks, name = op.input(SINKS), f"{op.outputs[0].name}.scores"
    if sinks is None:
        scores = b.new(name, wide, shape)
        return scores, scores
    *lead, keys = shape
    logits, given = b.new(name, wide, (*lead, keys + 1)), b.operand(sinks)
    step = given.strides[0]
    of_rows = given.view((*lead, 1), (0, lead[2] * step, step, 0, 0))
    copy(b, op, of_rows, logits.view((*lead, 1), logits.strides, keys))
    return logits, logits.view(shape, logits.strides)


class _Scores:
    """The stages that the scores (batch, shared, repeats, rows, keys) go through, and the stages' operands by slot."""

    def __init__(self, b: Builder, op: Op, past: int, shape: tuple[int, ...], q: TensorView):
        self.b, self.op, self.past, self.shape = b, op, past, shape
        self.wide = FP64 if q.dtype == FP64 else FP32
        self.stages: list[Stage] = []
        self.extra: dict[int, TensorView] = {}
        self._at, self._low = ~0, -1
        a: AttentionAttrs = op.attrs
        scale = q.shape[3] ** -0.5 if a.scale is None else a.scale
        if scale != 1.0:
            self._at = self._stage("Mul", self._at, self._constant(scale))
        plain = len(self.stages)
        if a.softcap:
            cap = self._constant(a.softcap)
            self._at = self._stage("Mul", self._stage("Tanh", self._stage("Div", self._at, cap)), cap)
        self.marks = plain, len(self.stages)
        """Number of stages before the softcap, and before the masks."""
        self._hide_by_place()
        if op.input(3) is not None:
            self._mask()

    def _operand(self, x: TensorView) -> int:
        slot = 2 + len(self.extra)
        self.extra[slot] = x
        return slot

    def _constant(self, x: object, dtype: object = None) -> int:
        array = np.asarray(x, self.wide if dtype is None else dtype)  # type: ignore[call-overload]
        return self._operand(self.b.constant(array, "constant"))

    def _stage(self, kind: str, *args: int) -> int:
        self.stages.append(Stage(kind, args, Attrs()))
        return ~len(self.stages)

    def _hide(self, condition: int) -> None:
        self._low = self._constant(-np.inf) if self._low < 0 else self._low
        self._at = self._stage("Where", condition, self._at, self._low)

    def _hide_by_place(self) -> None:
        """Masks keys after the end of a sequence, after the query, or outside of the query's window."""
        batch, _, _, rows, keys = self.shape
        a: AttentionAttrs = self.op.attrs
        lengths = self.op.input(6)
        if lengths is None:
            seen = visible(rows, keys, np.full(1, self.past), a.is_causal, a.left_window_size, a.right_window_size)
            if not seen.all():
                self._hide(self._constant(seen[0, 0], np.bool_))
            return
        placed = self.b.operand(lengths)
        count = self._operand(placed.view((batch, 1, 1, 1, 1), (placed.strides[0], 0, 0, 0, 0)))
        # Positions from a key up to the query: this plus the length.
        before = np.arange(rows)[:, None] - np.arange(keys) - rows
        self._hide(self._stage("Less", self._constant(np.arange(keys), placed.dtype), count))
        if a.is_causal:
            self._hide(self._stage("LessOrEqual", self._constant(-before, placed.dtype), count))
        if a.left_window_size >= 0:
            self._hide(self._stage("LessOrEqual", count, self._constant(a.left_window_size - before, placed.dtype)))
        if a.right_window_size >= 0:
            self._hide(self._stage("LessOrEqual", self._constant(-before - a.right_window_size, placed.dtype), count))

    def _mask(self) -> None:
        """Applies the operator's own mask."""
        b, (_, shared, repeats, _, keys) = self.b, self.shape
        mask = with_four_axes(b.operand(self.op.inputs[3]))
        if mask.shape[3] < keys:
            known = mask.shape[3]
            self._hide(self._constant(np.arange(keys) < known, np.bool_))
            padded = b.new(f"{self.op.outputs[0].name}.mask", mask.dtype, (*mask.shape[:3], keys))
            zeros = b.constant(np.zeros((1, 1, 1, keys - known), mask.dtype), "zeros")
            copy(b, self.op, mask, padded.view(mask.shape, padded.strides))
            rest = (*mask.shape[:3], keys - known)
            copy(b, self.op, zeros.view(rest, (0, 0, 0, 1)), padded.view(rest, padded.strides, known))
            mask = padded
        heads = (shared, repeats) if mask.shape[1] > 1 else (1, 1)
        step = mask.strides[1]
        five = mask.view(
            (mask.shape[0], *heads, *mask.shape[2:]), (mask.strides[0], step * repeats, step, *mask.strides[2:])
        )
        if mask.dtype == np.bool_:
            self._hide(self._operand(five))
        else:
            self._at = self._stage("Add", self._at, self._operand(five))


def _split_heads(x: TensorView, shared: int) -> TensorView:
    """(B, H, …) as (B, G, H / G, …)."""
    each = x.shape[1] // shared
    strides = (x.strides[0], x.strides[1] * each, *x.strides[1:])
    return x.view((x.shape[0], shared, each, *x.shape[2:]), strides)


def _broadcast_heads(x: TensorView) -> TensorView:
    """(B, G, S, D) as (B, G, 1, S, D)."""
    return x.view((*x.shape[:2], 1, *x.shape[2:]), (*x.strides[:2], 0, *x.strides[2:]))
