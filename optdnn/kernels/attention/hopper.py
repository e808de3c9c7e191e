"""Tactics of attention: Hopper's fused kernel (that of other GPUs: :mod:`optdnn.kernels.attention.general`), and three launches
(product, softmax, product) that run anything.

Heads are axes of views: q, k and v may lie in the output of one joint projection in any order of axes, and the result is written
in the order that its reader wants, so that no transposition of heads is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.attention import hopper_kernel as attention
from optdnn.kernels.builder import Builder, TensorView, map_dtype, row_major, up
from optdnn.kernels.gemm.matmul import emit_matmul
from optdnn.kernels.layout.views import settle
from optdnn.kernels.norm.rows import Statistic, emit_rows
from optdnn.kernels.pointwise.pointwise import arithmetic, copied, copy, emit_pointwise
from optdnn.kernels.quantized.quantized_store import QuantizedStore, no_conversion
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, quantizer_of
from optdnn.kernels.reduce.reduce import limits
from optdnn.kernels.tactic import MANY, DryRunConfigs, Offer, OwnTactic, Region
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.base import Attrs, Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.reference.attention import visible
from optdnn.types import BF16, FP16, FP32, FP64, Array

Views = tuple[attention.HeadView, attention.HeadView, attention.HeadView, attention.HeadView]
"""Of queries, keys, values and the result."""
KEYS, VALUES, WEIGHTS = 1, 2, 3
"""Numbers of the results besides the first."""


@lru_cache(maxsize=1024)
def offers_of(plans: Any, problem: attention.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """Of the kernel that the module ``plans`` plans. The number of keys in a tile and the warps that share them decide in which order a
    row is summed, and nothing else of a configuration does."""
    many = plans.candidates(replace(problem, batch=MANY), gpu, limit=1)
    found = dict.fromkeys((*plans.candidates(problem, gpu), *many))
    orders = {plans.order_of_sums(c) for c in many}
    offers = [Offer(c, plans.estimate(problem, c, gpu), plans.order_of_sums(c) in orders) for c in found]
    return tuple(sorted(offers, key=lambda o: o.seconds or 0.0))


def _used(b: Builder, op: Op, port: int) -> bool:
    return port < len(op.outputs) and bool(b.graph.uses(Value(op.id, port)))


def _place_keys_and_values(b: Builder, op: Op) -> None:
    """Decide where the keys and values that are results lie: where they came from, if there are none of the past."""
    for port, slot in ((KEYS, 1), (VALUES, 2)):
        if not _used(b, op, port):
            continue
        if op.input(slot + 3) is None:
            settle(b, op, port, b.operand(op.inputs[slot]))  # type: ignore[arg-type]
        else:
            b.target(Value(op.id, port))


def _keys_and_values(b: Builder, op: Op) -> tuple[TensorView, TensorView, int]:
    """Where all keys and values lie, and how many of them are from the past, to which the others are appended."""
    found = []
    past = 0
    for port, slot in ((KEYS, 1), (VALUES, 2)):
        new = b.operand(op.inputs[slot])  # type: ignore[arg-type]
        before = op.input(slot + 3)
        if before is None:
            found.append(new)
            continue
        old = b.operand(before)
        past = old.shape[2]
        shape = (*new.shape[:2], past + new.shape[2], new.shape[3])
        name = (
            op.outputs[port].name if port < len(op.outputs) else f"{op.outputs[0].name}.{('keys', 'values')[port - 1]}"
        )
        whole = b.target(Value(op.id, port)) if _used(b, op, port) else b.new(name, new.dtype, shape)
        copy(b, op, old, whole.view(old.shape, whole.strides))
        copy(b, op, new, whole.view(new.shape, whole.strides, past * whole.strides[2]))
        found.append(whole)
    return found[0], found[1], past


def _four(x: TensorView) -> TensorView:
    """A mask with axes of 1 in front, up to four."""
    missing = 4 - len(x.shape)
    return x.view((*(1,) * missing, *x.shape), (*(0,) * missing, *x.strides))


class HopperAttention(DryRunConfigs):
    """Attention of 16-bit floats in one launch: wgmma and TMA, online softmax in fp32."""

    name = "attention_sm90"
    plans: ClassVar[Any] = attention
    """The module that plans its launches."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        return self._unsuitable(b, op, attention.Config(1, 16, 1))

    def _unsuitable(self, b: Builder, op: Op, least: Any) -> str | None:
        """Why the kernel does not compute the operator, on whatever architecture; ``least``: its smallest tile."""
        a: AttentionAttrs = op.attrs
        q, k, v = (b.graph.type(x) for x in op.inputs[:3] if x is not None)
        if q.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if a.softmax_precision is not None and a.softmax_precision == FP64:
            return "its softmax is fp32"
        if _used(b, op, WEIGHTS):
            return "its weights are a result, too"
        past = 0 if op.input(4) is None else b.graph.type(op.inputs[4]).static_shape[2]  # type: ignore[arg-type]
        if op.input(3) is not None:
            mask = b.graph.type(op.inputs[3])  # type: ignore[arg-type]
            if mask.static_shape[-1] != k.static_shape[2] + past and op.input(6) is not None:
                return "its mask lacks keys, and samples have lengths of their own"
        if any(0 in t.static_shape for t in (q, k, v)):
            return "it has nothing to do"
        views = _assumed(q.static_shape, v.static_shape)
        problem = self._problem(b, op, past, (q.static_shape, k.static_shape, v.static_shape), views)
        reason: str | None = self.plans.refuse(problem, least)
        if reason is None and not offers_of(self.plans, problem, b.gpu):
            reason = "no tile of the kernel fits it"
        return reason

    @staticmethod
    def _problem(
        b: Builder, op: Op, past: int, shapes: Sequence[tuple[int, ...]], views: Views,
        mask: tuple[int, int, int] | None = None, period: int = 0,
    ) -> attention.Problem:  # fmt: skip
        """``shapes``: those of queries, keys and values, without the past."""
        a: AttentionAttrs = op.attrs
        (batch, heads, rows, size), k, v = shapes
        keys = k[2] + past
        if op.input(3) is not None:
            mask = mask or (0, 0, 0)
            keys = min(keys, b.graph.type(op.inputs[3]).static_shape[-1])  # type: ignore[arg-type]
        # A query sees a number of keys behind its position; causal order is none of them.
        ahead = 0 if a.is_causal else a.right_window_size
        lengths = op.input(6) is not None
        return attention.Problem(
            batch, heads, rows, keys, size, size**-0.5 if a.scale is None else a.scale,
            q=views[0], k=views[1], v=views[2], out=views[3], dtype=map_dtype(op.outputs[0].type.dtype), key_heads=k[1],
            mask=mask, mask_period=period, causal=ahead >= 0, causal_offset=past + max(0, ahead), lengths=lengths, value_features=v[3],
            reach=a.left_window_size if a.left_window_size < 0 else a.left_window_size + max(0, ahead),
            from_end=lengths and op.input(4) is None and (ahead >= 0 or a.left_window_size >= 0), softcap=max(0.0, a.softcap),
        )  # fmt: skip

    def region(self, b: Builder, op: Op) -> Region:
        """The operator, and the quantization of its result."""
        to = self._quantizer(b, op)
        return Region(op) if to is None else Region(op, after=(to.op,))

    def place(self, b: Builder, op: Op) -> None:
        """The result in the order that its reader wants; keys and values as :func:`_place_keys_and_values` says."""
        _place_keys_and_values(b, op)
        to = self._quantizer(b, op)
        _target(b, op if to is None else to.op)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        q = _for_tma(b, op, b.operand(op.inputs[0]), "queries")  # type: ignore[arg-type]
        k, v, past = _keys_and_values(b, op)
        k, v = _for_tma(b, op, k, "keys"), _for_tma(b, op, v, "values")
        to = self._quantizer(b, op)
        target = _target(b, op if to is None else to.op)
        out = target if _fits_tma(target) else b.new(f"{op.outputs[0].name}.heads", target.dtype, target.shape)
        mask, lengths = self._mask(b, op, q), self._lengths(b, op)
        strides, period = None, 0
        if mask is not None:
            period = mask.shape[0] if 1 < mask.shape[0] < q.shape[0] else 0
            strides = tuple(0 if n == 1 else s for n, s in zip(mask.shape[:3], mask.strides[:3], strict=True))
        views = (_view(q), _view(k), _view(v), _view(out))
        new = [(*x.shape[:2], x.shape[2] - past, x.shape[3]) for x in (k, v)]
        problem = self._problem(b, op, past, (q.shape, *new), views, strides, period)  # type: ignore[arg-type]
        problem = replace(problem, narrow="" if to is None else to.to.dtype)
        offers = offers_of(self.plans, problem, b.gpu)
        b.offer(offers)
        config = config or offers[0].config
        operands = {"q": q, "k": k, "v": v, "out": out}
        operands |= {"mask": mask} if mask is not None else {}
        operands |= {"lengths": lengths} if lengths is not None else {}
        reads: list[TensorView | None] = [q, k, v, mask, None, None, lengths]
        if past:
            before = [x.view((*x.shape[:2], past, x.shape[3]), x.strides) for x in (k, v)]
            after = [
                x.view((*x.shape[:2], x.shape[2] - past, x.shape[3]), x.strides, past * x.strides[2]) for x in (k, v)
            ]
            reads[1:3], reads[4:6] = after, before
        kind, attrs = (
            "PeriodicAttention" if period else "Attention",
            attrs_dict(replace(op.attrs, softmax_precision=None)),
        )
        if to is not None:
            kind, attrs = "Quantized", meaning(op, to, False, attrs, kind)
        made = self.plans.launch(problem, config, b.gpu, None if to is None else QuantizedStore.of(to.to))
        covers = op if to is None else replace(op, src=op.src | to.op.src)
        b.emit(covers, made, operands, kind, attrs, reads, [out])
        if out is not target:
            copy(b, op, out, target)
        return str(config)

    @staticmethod
    def _quantizer(b: Builder, op: Op) -> Quantizer | None:
        """The quantization of the result, where nothing else reads it, TMA can store its rows, and the GPU rounds to its type."""
        size = op.outputs[0].type.static_shape[3]
        to = quantizer_of(b, op.value) if b.graph.sole_user(op.value) is not None and size % 16 == 0 else None
        return None if to is None or no_conversion(to.to.dtype, b.arch) is not None else to

    @staticmethod
    def _mask(b: Builder, op: Op, q: TensorView) -> TensorView | None:
        """The additive mask with rows that the kernel can read."""
        value = op.input(3)
        if value is None:
            return None
        array = b.graph.constant_value(value)
        if array is not None and array.ndim == 4:
            array = array[: _period(array)]
        mask = _four(b.operand(value) if array is None else b.constant(array, f"{op.outputs[0].name}.mask"))
        if mask.dtype == np.bool_:
            made = b.new(f"{op.outputs[0].name}.mask", q.dtype, mask.shape)
            ends = [b.constant(np.asarray(x, q.dtype), "end") for x in (0.0, -np.inf)]
            emit_pointwise(b, op, [Stage("Where", (0, 1, 2), Attrs())], [mask, *ends], made)
            return made
        if mask.offset % 2 or (mask.strides[3] != 1 and mask.shape[3] > 1):
            return copied(b, op, mask, "mask")
        return mask

    @staticmethod
    def _lengths(b: Builder, op: Op) -> TensorView | None:
        value = op.input(6)
        if value is None:
            return None
        return copied(b, op, b.operand(value), "lengths", dtype=np.dtype(np.int32))


def _period(mask: Array) -> int:
    """The least number of masks that repeat along the batch."""
    batch = len(mask)
    return next(
        n
        for n in range(1, batch + 1)
        if batch % n == 0 and np.array_equal(mask[n:], mask[:-n] if n < batch else mask[:0])
    )


def _assumed(q: tuple[int, ...], v: tuple[int, ...]) -> Views:
    """Views as TMA can read them, before it is known where the operands lie: copies are made where they do not."""
    keys, values = (attention.bhsd(q[2], q[1], up(shape[3], 8)) for shape in (q, v))
    return (keys, keys, values, values)


def _fits_tma(x: TensorView) -> bool:
    """Whether features are contiguous and all else lies at multiples of 16 bytes."""
    outer = [s for n, s in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1]
    unit = 16 // x.dtype.itemsize
    return x.strides[3] == 1 and x.offset % unit == 0 and all(s > 0 and s % unit == 0 for s in outer)


def _for_tma(b: Builder, op: Op, x: TensorView, name: str) -> TensorView:
    return x if _fits_tma(x) else copied(b, op, x, name)


def _view(x: TensorView) -> attention.HeadView:
    """The kernel's view. What lies in ``offset`` stays with the operand; an axis of one element may have any stride."""
    step = up(x.shape[3], 16 // x.dtype.itemsize)
    batch, head, position = (s if n > 1 else step for n, s in zip(x.shape[:3], x.strides[:3], strict=True))
    return attention.HeadView(batch, head, position)


def _target(b: Builder, op: Op) -> TensorView:
    """Where the result goes: dense in the order of axes that the Transpose behind it makes."""
    value = op.value
    if value not in b.reserved and value not in b.place:
        user, t = b.graph.sole_user(value), op.outputs[0].type
        shape = t.static_shape
        perm = user.attrs.perm if user is not None and user.kind == "Transpose" else None
        if perm is not None:
            dense = row_major([shape[p] for p in perm])
            strides = [0] * len(shape)
            for p, s in zip(perm, dense, strict=True):
                strides[p] = s
            if strides[3] == 1:
                b.place[value] = b.new(op.outputs[0].name, t.dtype, shape, strides)
    return b.target(value)


# ---------------------------------------------------------------- three launches


class AttentionSteps(OwnTactic):
    """Attention of anything: scores with their masks, softmax, weighted sum; scores in fp32 (fp64 for fp64)."""

    name = "attention_steps"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return None

    def place(self, b: Builder, op: Op) -> None:
        """As :meth:`HopperAttention.place`, and the weights where they are a result."""
        _place_keys_and_values(b, op)
        _target(b, op)
        if _used(b, op, WEIGHTS):
            b.target(Value(op.id, WEIGHTS))

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        q = b.operand(op.inputs[0])  # type: ignore[arg-type]
        k, v, past = _keys_and_values(b, op)
        target = _target(b, op)
        wide = FP64 if q.dtype == FP64 else FP32
        batch, heads, rows, _ = q.shape
        shared, keys = k.shape[1:3]
        if keys == 0:  # weights of nothing: as of rows whose keys are all masked
            zero = b.constant(np.zeros(1, target.dtype), "zero")
            copy(b, op, zero.view(target.shape, (0, 0, 0, 0)), target)
            return ""
        shape = (batch, shared, heads // shared, rows, keys)
        stages, extra, marks = self._stages(b, op, past, shape, q)
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

        scores = b.new(f"{op.outputs[0].name}.scores", wide, shape)
        product(scores, len(stages))
        weights = b.new(f"{op.outputs[0].name}.weights", wide, shape)
        top = Statistic("{LOW}", "v", "max_nan(a, b)")
        total = Statistic("{T}(0)", "(t0 == {LOW} ? {T}(0) : {T}(exp(v - t0)))")
        result = f"(t0 == {limits(arithmetic(wide))[0]} ? {{T}}(0) : {{T}}(exp(v - t0) / t1))"
        emit_rows(
            b, op, scores, (4,), weights, [top, total], result, kind="MaskedSoftmax", attrs={},
            reads=[scores], writes=weights,
        )  # fmt: skip
        if _used(b, op, WEIGHTS):
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
        return ""

    @staticmethod
    def _stages(
        b: Builder, op: Op, past: int, shape: tuple[int, ...], q: TensorView
    ) -> tuple[list[Stage], dict[int, TensorView], tuple[int, int]]:
        """What happens to the scores, its operands, and how many stages come before softcap and before masks."""
        a: AttentionAttrs = op.attrs
        batch, shared, repeats, rows, keys = shape
        wide = FP64 if q.dtype == FP64 else FP32
        stages: list[Stage] = []
        extra: dict[int, TensorView] = {}

        def operand(x: TensorView) -> int:
            slot = 2 + len(extra)
            extra[slot] = x
            return slot

        def constant(x: object, dtype: object = wide) -> int:
            return operand(b.constant(np.asarray(x, dtype), "constant"))  # type: ignore[call-overload]

        def stage(kind: str, *args: int) -> int:
            stages.append(Stage(kind, args, Attrs()))
            return ~len(stages)

        at = ~0
        low = -1
        scale = q.shape[3] ** -0.5 if a.scale is None else a.scale
        if scale != 1.0:
            at = stage("Mul", at, constant(scale))
        plain = len(stages)
        if a.softcap:
            cap = constant(a.softcap)
            at = stage("Mul", stage("Tanh", stage("Div", at, cap)), cap)
        capped = len(stages)

        def hide(condition: int) -> None:
            nonlocal at, low
            low = constant(-np.inf) if low < 0 else low
            at = stage("Where", condition, at, low)

        lengths = op.input(6)
        if lengths is None:
            seen = visible(rows, keys, np.full(1, past), a.is_causal, a.left_window_size, a.right_window_size)
            if not seen.all():
                hide(constant(seen[0, 0], np.bool_))
        else:
            placed = b.operand(lengths)
            count = operand(placed.view((batch, 1, 1, 1, 1), (placed.strides[0], 0, 0, 0, 0)))
            behind = (
                np.arange(rows)[:, None] - np.arange(keys) - rows
            )  # plus the length: keys behind the query's own position
            hide(stage("Less", constant(np.arange(keys), placed.dtype), count))
            if a.is_causal:
                hide(stage("LessOrEqual", constant(-behind, placed.dtype), count))
            if a.left_window_size >= 0:
                hide(stage("LessOrEqual", count, constant(a.left_window_size - behind, placed.dtype)))
            if a.right_window_size >= 0:
                hide(stage("LessOrEqual", constant(-behind - a.right_window_size, placed.dtype), count))
        if op.input(3) is not None:
            mask = _four(b.operand(op.inputs[3]))  # type: ignore[arg-type]
            if mask.shape[3] < keys:
                known = mask.shape[3]
                hide(constant(np.arange(keys) < known, np.bool_))
                padded = b.new(f"{op.outputs[0].name}.mask", mask.dtype, (*mask.shape[:3], keys))
                zeros = b.constant(np.zeros((1, 1, 1, keys - known), mask.dtype), "zeros")
                copy(b, op, mask, padded.view(mask.shape, padded.strides))
                rest = (*mask.shape[:3], keys - known)
                copy(b, op, zeros.view(rest, (0, 0, 0, 1)), padded.view(rest, padded.strides, known))
                mask = padded
            heads = (shared, repeats) if mask.shape[1] > 1 else (1, 1)
            step = mask.strides[1]
            five = mask.view(
                (mask.shape[0], *heads, *mask.shape[2:]), (mask.strides[0], step * repeats, step, *mask.strides[2:])
            )
            if mask.dtype == np.bool_:
                hide(operand(five))
            else:
                at = stage("Add", at, operand(five))
        return stages, extra, (plain, capped)


def _split_heads(x: TensorView, shared: int) -> TensorView:
    """(B, H, …) as (B, G, H / G, …)."""
    each = x.shape[1] // shared
    strides = (x.strides[0], x.strides[1] * each, *x.strides[1:])
    return x.view((x.shape[0], shared, each, *x.shape[2:]), strides)


def _broadcast_heads(x: TensorView) -> TensorView:
    """(B, G, S, D) as (B, G, 1, S, D)."""
    return x.view((*x.shape[:2], 1, *x.shape[2:]), (*x.strides[:2], 0, *x.strides[2:]))
