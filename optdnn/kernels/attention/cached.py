"""Attention of one new position over a cache of fixed capacity, in one launch with the rotary embeddings before it and the write into
the cache: the step of a language model for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.attention import cached_kernel as cached
from optdnn.kernels.attention.operands import (
    KEYS,
    VALUES,
    WEIGHTS,
    fits_tma,
    is_used,
    order_wanted,
    several_types,
    sinks_of,
)
from optdnn.kernels.attention.problem import HeadView
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.pointwise.pointwise import copied, copy
from optdnn.kernels.tactic import Offer, ProblemTactic, Region, kernel_offers
from optdnn.ops.attention import LENGTHS, SINKS, AttentionAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32, FP64, INT32, INT64, normalize_axis


@dataclass(frozen=True)
class Step:
    """The operators of one position: attention, the writes of its keys and values into the cache, and the rotary embeddings
    ``turns`` of the queries and the new key (both or none)."""

    attention: Op
    keys: Op
    values: Op
    turns: tuple[Op, ...] = ()

    @property
    def before(self) -> tuple[Op, ...]:
        """All operators except the attention."""
        return (*self.turns, self.keys, self.values)

    @property
    def new(self) -> tuple[Value | None, ...]:
        """Queries, the new key and the new value, before the rotary embeddings."""
        q, k = (t.inputs[0] for t in self.turns) if self.turns else (self.attention.inputs[0], self.keys.inputs[1])
        return q, k, self.values.inputs[1]

    @property
    def angles(self) -> Sequence[Value | None]:
        """Cosines and sines."""
        return self.turns[0].inputs[1:3] if self.turns else (None, None)


def step_of(graph: Graph, op: Op) -> Step | str:
    """The operators around an Attention that reads a cache, or why there are none."""
    if op.input(LENGTHS) is None:
        return "the number of filled keys of a cache is unknown"
    if op.input(3) is not None or op.input(4) is not None:
        return "it has a mask, or keys of the past in addition to the cache"
    writes = []
    for slot in (1, 2):
        write = graph.op(op.inputs[slot])  # type: ignore[arg-type]
        if write.kind != "TensorScatter" or write.attrs.mode != "linear" or normalize_axis(write.attrs.axis, 4) != 2:
            return f"{write.kind} {write.name} writes no positions of a cache"
        if any(u.kind != "Output" and u.id != op.id for u in graph.users(write.value)):
            return f"the cache that {write.name} writes has other readers"
        writes.append(write)
    keys, values = writes
    if keys.input(2) != values.input(2):
        return "keys and values are written at other positions"
    turns = tuple(
        turn
        for value, user in ((op.inputs[0], op), (keys.inputs[1], keys))
        if value is not None
        and (turn := graph.op(value)).kind == "RotaryEmbedding"
        and graph.sole_user(turn.value) is user
        and not turn.attrs.own_angles
        and turn.attrs.parts == 1
    )
    if len(turns) == 2 and (turns[0].inputs[1:], turns[0].attrs) == (turns[1].inputs[1:], turns[1].attrs):
        return Step(op, keys, values, turns)
    return Step(op, keys, values)


class CachedAttention(ProblemTactic):
    """Attention of one position of 16-bit floats over a cache, with the TensorScatters that write the cache and rotary embeddings."""

    name = "attention_cached"
    row_invariant = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := no_kernels(b.arch)) is not None:
            return why
        step = step_of(b.graph, op)
        if isinstance(step, str):
            return step
        if (why := self._unsuitable(b, op, step)) is not None:
            return why
        return cached.refuse(self._problem(b, step), cached.Config(4, 1))

    @staticmethod
    def _unsuitable(b: Builder, op: Op, step: Step) -> str | None:
        """Why the kernel cannot take the operands' types, sizes or values, or None."""
        q, _, v = (b.graph.type(x).static_shape for x in op.inputs[:3] if x is not None)
        if op.outputs[0].type.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if (why := several_types(b, op)) is not None:
            return why
        if any(is_used(b, op, port) for port in (KEYS, VALUES, WEIGHTS)):
            return "its keys, values or weights are also outputs"
        if q[2] != 1 or b.graph.type(step.values.inputs[1]).static_shape[2] != 1:  # type: ignore[arg-type]
            return f"it is for one new position, not {q[2]}"
        if v[3] != q[3]:
            return f"values of {v[3]} features with queries of {q[3]}"
        if op.attrs.softmax_precision is not None and op.attrs.softmax_precision == FP64:
            return "its softmax is fp32"
        whole = (op.inputs[LENGTHS], step.keys.input(2))
        if any(b.graph.type(x).dtype not in (INT32, INT64) for x in whole if x is not None):
            return "its positions are not 32-bit or 64-bit integers"
        if any(b.graph.constant_value(x) is not None for x in step.new):
            return "its new rows are constant"
        return None

    @staticmethod
    def _problem(b: Builder, step: Step) -> cached.Problem:
        op, a = step.attention, step.attention.attrs
        assert isinstance(a, AttentionAttrs)
        (batch, heads, _, size), k = (b.graph.type(x).static_shape for x in op.inputs[:2] if x is not None)
        turn = step.turns[0].attrs if step.turns else None
        turned = 0 if turn is None else turn.rotary_embedding_dim or size
        return cached.Problem(
            batch, heads, k[1], k[2], size, size**-0.5 if a.scale is None else a.scale, map_dtype(op.outputs[0].type.dtype),
            turned, turn is not None and turn.interleaved, a.left_window_size, max(0.0, a.softcap),
            sinks=op.input(SINKS) is not None,
        )  # fmt: skip

    def problem(self, b: Builder, op: Op) -> cached.Problem:
        return self._problem(b, _step(b, op))

    def offers(self, problem: cached.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        """The configurations. The number of blocks that share keys sets the order of their sums; the batch size does not."""
        return kernel_offers(cached, problem, gpu)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The writes into the cache and the rotary embeddings."""
        step = step_of(graph, op)
        return () if isinstance(step, str) else step.before

    def region(self, b: Builder, op: Op) -> Region:
        """All operators of the position."""
        return Region(op, before=_step(b, op).before)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in the order that its reader wants."""
        b.target(op.value, order_wanted(b, op))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        step, problem = _step(b, op), self.problem(b, op)
        q, new_k, new_v = (_dense(b, op, b.operand(x), "row") for x in step.new)
        lengths = b.operand(op.inputs[LENGTHS])
        start = step.keys.input(2)
        starts = None if start is None else b.operand(start)
        angles = [None if x is None else _dense(b, op, b.operand(x), "angles", 2) for x in step.angles]
        caches = []
        for write in (step.keys, step.values):
            cache = b.target(write.value)
            copy(b, write, b.operand(write.inputs[0]), cache)  # no copy if a cache is bound as its own successor
            caches.append(cache)
        target = b.target(op.value)
        k, v = (_dense(b, op, x, "cache") for x in caches)
        out = target if fits_tma(target) else b.new(f"{op.outputs[0].name}.heads", target.dtype, target.shape)
        operands = {"q": q, "new_k": new_k, "new_v": new_v, "lengths": lengths, "k": k, "v": v, "out": out}
        operands |= {n: x for n, x in zip(("cosines", "sines"), angles, strict=True) if x is not None}
        operands |= {"starts": starts} if starts is not None else {}
        sinks = sinks_of(b, op)
        operands |= {"sinks": sinks} if sinks is not None else {}
        scratch, kept = workspace_of(b, op, problem, config)
        operands |= scratch | kept
        views = [_view(x) for x in (q, new_k, new_v, k, v, out)]
        places = cached.Places(*views, *[_distance(x) for x in (*angles, starts, lengths)])  # type: ignore[arg-type]
        made = cached.launch(problem, config, b.gpu, places, starts=starts is not None)
        attrs = {
            "scale": op.attrs.scale, "softcap": problem.softcap, "left_window_size": problem.reach, "interleaved": problem.interleaved,
            "rotary_embedding_dim": problem.turned,
        }  # fmt: skip
        covers = replace(op, src=op.src.union(*(x.src for x in step.before)))
        reads = [q, new_k, new_v, *angles, starts, lengths, k, v, *([] if sinks is None else [sinks])]
        b.emit(
            covers,
            made,
            operands,
            "CachedAttention",
            attrs,
            reads,
            [out, k, v],
            scratch=list(scratch.values()),
            kept=list(kept.values()),
        )
        for cache, used in zip(caches, (k, v), strict=True):
            if used is not cache:
                copy(b, op, used, cache)
        if out is not target:
            copy(b, op, out, target)


def workspace_of(
    b: Builder, op: Op, problem: cached.Problem, config: cached.Config
) -> tuple[dict[str, TensorView], dict[str, TensorView]]:
    """New operands ``partial`` and ``arrived`` of a launch; both empty if it needs none."""
    partial, arrived = cached.workspace(problem, config)
    if not partial:
        return {}, {}
    name = op.outputs[0].name
    made = b.new(f"{name}.partial", FP32, (partial // 4,)), b.new(f"{name}.arrived", INT32, (arrived // 4,))
    return {"partial": made[0]}, {"arrived": made[1]}


def _step(b: Builder, op: Op) -> Step:
    step = step_of(b.graph, op)
    assert isinstance(step, Step)
    return step


def _dense(b: Builder, op: Op, x: TensorView, name: str, unit: int = 8) -> TensorView:
    """``x``, or a copy of it, with contiguous rows that begin at multiples of ``unit`` elements."""
    outer = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    fits = x.strides[-1] == 1 and x.offset % unit == 0 and all(s % unit == 0 for s in outer)
    return x if fits else copied(b, op, x, name)


def _view(x: TensorView) -> HeadView:
    """The kernel's view: ``offset`` stays with the operand; an axis of one element has stride 0."""
    return HeadView(*(s if n > 1 else 0 for n, s in zip(x.shape[:3], x.strides[:3], strict=True)))


def _distance(x: TensorView | None) -> int:
    """Bytes from a sample to the next (0: all samples share one, or None was given)."""
    return 0 if x is None or x.shape[0] == 1 else x.strides[0] * x.dtype.itemsize
