"""The tactic of attention on Hopper's fused kernel. Other GPUs: :mod:`optdnn.kernels.attention.general`. Three launches for any
attention: :mod:`optdnn.kernels.attention.steps`.

Heads are axes of views: q, k and v may be parts of one joint projection's output, in any order of axes. The result is written in
the order that its reader wants. Transpositions of heads are therefore never copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.attention import hopper_kernel as attention
from optdnn.kernels.attention.hopper_cost import MEMORY
from optdnn.kernels.attention.operands import (
    WEIGHTS,
    fits_tma,
    for_tma,
    is_used,
    keys_and_values,
    place_keys_and_values,
    result_of,
    several_types,
    sinks_of,
    target_of,
    with_four_axes,
)
from optdnn.kernels.attention.problem import HeadView, Problem, bhsd
from optdnn.kernels.builder import Builder, TensorView, has_tf32, map_dtype, rows_of_vectors, unmade, up
from optdnn.kernels.pointwise.pointwise import copied, copy, emit_pointwise, shared, shared_copy
from optdnn.kernels.quantized.quantized_store import QuantizedStore, no_conversion
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, quantizer_of
from optdnn.kernels.tactic import MANY, Offer, ProblemTactic, Region, TakesAfter, best_first, least_seconds
from optdnn.ops.attention import LENGTHS, MULTIPLIED, SINKS, AttentionAttrs
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TF32
from optdnn.types import BF16, FP16, FP64, Array, DType

Views = tuple[HeadView, HeadView, HeadView, HeadView]
"""The views of queries, keys, values and the result."""
Workspace = dict[str, TensorView]


@lru_cache(maxsize=1024)
def offers_of(plans: Any, problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations of the kernel of module ``plans``. Only the keys per tile and the number of warps that share them set the
    order in which a row is summed."""
    many = plans.candidates(replace(problem, batch=MANY), gpu, limit=1)
    found = dict.fromkeys((*plans.candidates(problem, gpu), *many))
    orders = {plans.order_of_sums(c) for c in many}
    offers = [Offer(c, plans.estimate(problem, c, gpu), plans.order_of_sums(c) in orders) for c in found]
    return best_first(offers)


@dataclass(frozen=True)
class Tensors:
    """Operands and result of a launch. ``past``: number of past keys. If ``out`` is not ``target``, a copy follows."""

    problem: Problem
    q: TensorView
    k: TensorView
    v: TensorView
    past: int
    mask: TensorView | None
    out: TensorView
    target: TensorView


class HopperAttention(TakesAfter, ProblemTactic):
    """Attention of 16-bit floats in one launch: wgmma and TMA, online softmax in fp32."""

    name = "attention_sm90"
    plans: ClassVar[Any] = attention
    """The module with the plans of its launches."""
    dtypes: ClassVar[tuple[DType, ...]] = (FP16, BF16)
    takes: ClassVar[str] = "16-bit floats"
    """The element types of its operands, and their name."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        return self._unsuitable(b, op, attention.Config(1, 16, 1))

    def _unsuitable(self, b: Builder, op: Op, least: Any) -> str | None:
        """Why the kernel cannot compute the operator on any architecture, or None. ``least``: its smallest tile."""
        a: AttentionAttrs = op.attrs
        q, k, v = (b.graph.type(x) for x in op.inputs[:3] if x is not None)
        if q.dtype not in self.dtypes:
            return f"it is for {self.takes}"
        if (why := several_types(b, op)) is not None:
            return why
        if a.softmax_precision is not None and a.softmax_precision == FP64:
            return "its softmax is fp32"
        if is_used(b, op, WEIGHTS):
            return "its weights are also an output"
        past = 0 if op.input(4) is None else b.graph.type(op.inputs[4]).static_shape[2]  # type: ignore[arg-type]
        if op.input(3) is not None:
            mask = b.graph.type(op.inputs[3])  # type: ignore[arg-type]
            if mask.static_shape[-1] != k.static_shape[2] + past and op.input(6) is not None:
                return "its mask has fewer columns than there are keys, and samples have their own lengths"
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
        mask: tuple[int, int, int] | None = None, period: int = 0, aligned: bool = False,
    ) -> Problem:  # fmt: skip
        """The kernel's problem. ``shapes``: shapes of queries, keys and values, without the past."""
        a: AttentionAttrs = op.attrs
        (batch, heads, rows, size), k, v = shapes
        keys = most = k[2] + past
        if op.input(3) is not None:
            mask = mask or (0, 0, 0)
            keys = min(keys, b.graph.type(op.inputs[3]).static_shape[-1])  # type: ignore[arg-type]
        # Number of keys after its own position that a query sees: 0 in causal order. A window that reaches further than there are
        # queries and keys hides nothing more, and a kernel's positions must not overflow.
        ahead = 0 if a.is_causal else min(a.right_window_size, rows + most)
        behind = min(a.left_window_size, rows + most)
        lengths = op.input(6) is not None
        return Problem(
            batch, heads, rows, keys, size, size**-0.5 if a.scale is None else a.scale,
            q=views[0], k=views[1], v=views[2], out=views[3], dtype=map_dtype(op.outputs[0].type.dtype), key_heads=k[1],
            mask=mask, mask_period=period, mask_aligned=aligned, causal=ahead >= 0, causal_offset=past + max(0, ahead), lengths=lengths, value_features=v[3],
            reach=behind if behind < 0 else behind + max(0, ahead),
            from_end=lengths and op.input(4) is None and (ahead >= 0 or behind >= 0), softcap=max(0.0, a.softcap),
            sinks=op.input(SINKS) is not None, rounded=has_tf32(op),
        )  # fmt: skip

    def problem(self, b: Builder, op: Op) -> Problem:
        return self._tensors(b, op).problem

    def _tensors(self, b: Builder, op: Op) -> Tensors:
        """Operands and result of the launch: placed, or still to be made."""
        q = for_tma(b, op, b.source(op.inputs[0]), "queries")
        k, v, past = keys_and_values(b, op)
        k, v = for_tma(b, op, k, "keys"), for_tma(b, op, v, "values")
        to, mask = self._quantizer(b, op), self._mask(b, op, q)
        target = result_of(b, op if to is None else to.op)
        out = target
        if not fits_tma(target):
            out = b.later(f"{op.outputs[0].name}.heads", target.dtype, target.shape)
        strides, period = mask_strides(mask, q.shape[0])
        views = (head_view(q), head_view(k), head_view(v), head_view(out))
        new = [(*x.shape[:2], x.shape[2] - past, x.shape[3]) for x in (k, v)]
        aligned = mask is not None and fits_tma(mask)
        problem = self._problem(b, op, past, (q.shape, *new), views, strides, period, aligned)
        if mask is not None and problem.mask and problem.mask[2] and not aligned:
            in_rows = rows_of_vectors(mask.shape)
            other = replace(problem, mask=_of_axes(mask.shape, in_rows), mask_aligned=True)
            if self._first(other, b.gpu) + _copy_seconds(mask) < self._first(problem, b.gpu):
                problem, mask = other, shared_copy(b, op, mask, "mask", in_rows)
        problem = replace(problem, narrow="" if to is None else to.to.dtype)
        return Tensors(problem, q, k, v, past, mask, out, target)

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return offers_of(self.plans, problem, gpu)

    def _first(self, problem: Problem, gpu: GpuFacts) -> float:
        """Predicted seconds of the best configuration."""
        return least_seconds(self.offers(problem, gpu))

    def region(self, b: Builder, op: Op) -> Region:
        """The operator, and the quantization of its result."""
        to = self._quantizer(b, op)
        return Region(op) if to is None else Region(op, after=(to.op,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in the order that its reader wants, and keys and values by :func:`place_keys_and_values`."""
        place_keys_and_values(b, op)
        to = self._quantizer(b, op)
        target_of(b, op if to is None else to.op)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        t, to = self._tensors(b, op), self._quantizer(b, op)
        problem, past, q, k, v = t.problem, t.past, b.made(t.q), b.made(t.k), b.made(t.v)
        out, mask = b.made(t.out), None if t.mask is None else b.made(t.mask)
        lengths, sinks = self._lengths(b, op), sinks_of(b, op)
        operands = {"q": q, "k": k, "v": v, "out": out}
        operands |= {"mask": mask} if mask is not None else {}
        operands |= {"lengths": lengths} if lengths is not None else {}
        operands |= {"sinks": sinks} if sinks is not None else {}
        scratch, kept = self._workspace(b, op, problem, config)
        operands |= scratch | kept
        reads: list[TensorView | None] = [q, k, v, mask, None, None, lengths, *([] if sinks is None else [sinks])]
        if past:
            before = [x.view((*x.shape[:2], past, x.shape[3]), x.strides) for x in (k, v)]
            after = [
                x.view((*x.shape[:2], x.shape[2] - past, x.shape[3]), x.strides, past * x.strides[2]) for x in (k, v)
            ]
            reads[1:3], reads[4:6] = after, before
        kind, attrs = (
            "PeriodicAttention" if problem.mask_period else "Attention",
            plain_attrs(op.definition, replace(op.attrs, softmax_precision=None)),
        )
        attrs |= {TF32: MULTIPLIED} if problem.rounded else {}
        if to is not None:
            kind, attrs = "Quantized", meaning(op, to, False, attrs, kind)
        made = self.plans.launch(problem, config, b.gpu, None if to is None else QuantizedStore.of(to.to))
        covers = op if to is None else replace(op, src=op.src | to.op.src)
        b.emit(
            covers, made, operands, kind, attrs, reads, [out], scratch=list(scratch.values()), kept=list(kept.values())
        )
        if t.out is not t.target:
            copy(b, op, out, t.target)

    def _workspace(self, b: Builder, op: Op, problem: Problem, config: Any) -> tuple[Workspace, Workspace]:
        """Further operands of the launch, by name: scratch memory, and memory that keeps its contents between runs."""
        return {}, {}

    @staticmethod
    def _quantizer(b: Builder, op: Op) -> Quantizer | None:
        """The quantization of the result, or None. It must be the only reader, TMA must be able to store its rows, and the GPU must
        convert to its type."""
        size = op.outputs[0].type.static_shape[3]
        to = quantizer_of(b, op.value) if b.graph.sole_user(op.value) is not None and size % 16 == 0 else None
        return None if to is None or no_conversion(to.to.dtype, b.arch) is not None else to

    @staticmethod
    def _mask(b: Builder, op: Op, q: TensorView) -> TensorView | None:
        """The additive mask in rows that the kernel can read (placed, or still to be made); None without a mask."""
        value, name = op.input(3), f"{op.outputs[0].name}.mask"
        if value is None:
            return None
        array = b.graph.constant_value(value)
        if array is None:
            mask = with_four_axes(b.source(value))
        else:
            known = array[: _period(array)] if array.ndim == 4 else array
            rows = np.pad(known, [(0, 0)] * (known.ndim - 1) + [(0, up(known.shape[-1], 8) - known.shape[-1])])
            mask = with_four_axes(
                unmade(known.dtype, known.shape, rows_of_vectors(known.shape), lambda: b.constant(rows, name).buffer)
            )
        in_rows = rows_of_vectors(mask.shape)
        if mask.dtype == np.bool_:

            def added(given: TensorView) -> TensorView:
                made = b.new(name, q.dtype, given.shape, in_rows)
                ends = [b.constant(np.asarray(x, q.dtype), "end") for x in (0.0, -np.inf)]
                emit_pointwise(b, op, [Stage("Where", (0, 1, 2), Attrs())], [given, *ends], made)
                return made

            return shared(b, mask, q.dtype, in_rows, added)
        if mask.offset % 2 or (mask.strides[3] != 1 and mask.shape[3] > 1):
            return shared_copy(b, op, mask, "mask", in_rows)
        return mask

    @staticmethod
    def _lengths(b: Builder, op: Op) -> TensorView | None:
        value = op.input(LENGTHS)
        if value is None:
            return None
        return copied(b, op, b.operand(value), "lengths", dtype=np.dtype(np.int32))


def mask_strides(mask: TensorView | None, batch: int) -> tuple[tuple[int, int, int] | None, int]:
    """The strides of a mask along (batch, head, query), 0 along axes of one element, and the number of its masks if they repeat."""
    if mask is None:
        return None, 0
    return _of_axes(mask.shape, mask.strides), mask.shape[0] if 1 < mask.shape[0] < batch else 0


def _of_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """The strides of a mask along (batch, head, query), 0 along axes of one element."""
    first, second, third = (0 if n == 1 else s for n, s in zip(shape[:3], strides[:3], strict=True))
    return first, second, third


def _copy_seconds(mask: TensorView) -> float:
    """Predicted seconds of a launch that copies a mask."""
    return 2e-6 + 2 * math.prod(mask.shape) * mask.dtype.itemsize / MEMORY


def _period(mask: Array) -> int:
    """The smallest period of the masks along the batch."""
    batch = len(mask)
    return next(
        n
        for n in range(1, batch + 1)
        if batch % n == 0 and np.array_equal(mask[n:], mask[:-n] if n < batch else mask[:0])
    )


def _assumed(q: tuple[int, ...], v: tuple[int, ...]) -> Views:
    """Views that TMA can read, assumed before the operands are placed. Operands with other views are copied."""
    keys, values = (bhsd(q[2], q[1], up(shape[3], 8)) for shape in (q, v))
    return (keys, keys, values, values)


def head_view(x: TensorView) -> HeadView:
    """The kernel's view. ``offset`` stays with the operand; an axis of one element may have any stride."""
    step = up(x.shape[3], 16 // x.dtype.itemsize)
    batch, head, position = (s if n > 1 else step for n, s in zip(x.shape[:3], x.strides[:3], strict=True))
    return HeadView(batch, head, position)
