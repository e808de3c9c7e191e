"""The tactic of attention between channels (XCiT, EdgeNeXt, DaViT): few channels, contiguous in memory, attend to one another over many
tokens.

The launch also computes normalizations of queries and keys over the tokens, and multiplies the scores by a factor for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.attention import channels_kernel as channels
from optdnn.kernels.attention.operands import WEIGHTS, is_used, several_types
from optdnn.kernels.attention.problem import HeadView
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.tactic import MANY, Offer, ProblemTactic, Region
from optdnn.ops.attention import SINKS, AttentionAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32, FP64, Array, normalize_axis


@lru_cache(maxsize=1024)
def channel_offers(problem: channels.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The offers. The number of warps and the tokens that each accumulates set the order in which tokens are summed."""
    many = channels.candidates(replace(problem, batch=MANY), gpu)[:1]
    found = channels.candidates(problem, gpu)
    return tuple(
        Offer(c, channels.estimate(problem, c, gpu), any((c.warps, c.depth) == (m.warps, m.depth) for m in many))
        for c in found
    )


def problem_refusal(problem: channels.Problem, gpu: GpuFacts) -> str | None:
    """Why the kernels cannot run the problem on the GPU, or None."""
    reason = channels.refuse(problem)
    if reason is None and not channel_offers(problem, gpu):
        reason = "no configuration fits shared memory"
    return reason


def channel_parts(b: Builder, op: Op, problem: channels.Problem, config: channels.Config) -> TensorView:
    """Space for the partial sums between two launches."""
    parts = (problem.batch, problem.heads, channels.parts(problem, config))
    whole = b.new(f"{op.outputs[0].name}.sums", FP32, (*parts, 2 + problem.filled, problem.filled))
    return whole.view((*parts, 2 + problem.channels, problem.channels), whole.strides)


@dataclass(frozen=True)
class _Source:
    """Source of queries or keys: the value that the launch reads, the ops from there to the attention, the least norm (None: not
    normalized), and the factor of each head."""

    value: Value
    ops: tuple[Op, ...] = ()
    least: float | None = None
    factors: Array | None = None


def _normalized(graph: Graph, value: Value) -> _Source:
    """The source of ``value`` through a normalization over the tokens that has no other reader, if there is one."""
    op = graph.op(value)
    if op.kind != "LpNormalization" or graph.sole_user(value) is None or op.attrs.p != 2:
        return _Source(value)
    if normalize_axis(op.attrs.axis, 4) != 3 or op.inputs[0] is None:
        return _Source(value)
    return _Source(op.inputs[0], (op,), op.attrs.epsilon)


def _scaled(graph: Graph, value: Value) -> _Source:
    """As :func:`_normalized`, with a constant factor for each head (a temperature)."""
    op = graph.op(value)
    if op.kind != "Mul" or graph.sole_user(value) is None:
        return _normalized(graph, value)
    heads = graph.type(value).static_shape[1]
    for x, other in (op.inputs, op.inputs[::-1]):
        known = None if other is None else graph.constant_value(other)
        if x is None or known is None or known.ndim > 4 or graph.type(x).shape != graph.type(value).shape:
            continue
        shape = (1,) * (4 - known.ndim) + known.shape
        if shape[0] == shape[2] == shape[3] == 1:
            inner = _normalized(graph, x)
            factors = np.broadcast_to(known.astype(np.float32).reshape(-1), (heads,))
            return _Source(inner.value, (*inner.ops, op), inner.least, factors)
    return _normalized(graph, value)


class ChannelAttention(ProblemTactic):
    """Attention between channels of 16-bit floats with mma.sync and fp32 accumulators: one launch, or two for many tokens."""

    name = "attention_channels"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a: AttentionAttrs = op.attrs
        if (why := no_kernels(b.arch)) is not None:
            return why
        q, k, v = (b.graph.type(x) for x in op.inputs[:3] if x is not None)
        if q.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if (why := several_types(b, op)) is not None:
            return why
        if any(op.input(slot) is not None for slot in range(3, 7)) or a.is_causal or a.softcap:
            return "its scores have a mask or a softcap, or its keys have a past"
        if op.input(SINKS) is not None:
            return "its softmax has sinks"
        if a.left_window_size >= 0 or a.right_window_size >= 0:
            return "its scores have a window"
        if a.softmax_precision is not None and a.softmax_precision == FP64:
            return "its softmax is fp32"
        if is_used(b, op, WEIGHTS) or is_used(b, op, 1) or is_used(b, op, 2):
            return "its keys, values or weights are also an output"
        if not q.static_shape == k.static_shape == v.static_shape:
            return "its queries, keys and values have different shapes"
        if any(b.operand(x).strides[2] != 1 and q.static_shape[2] > 1 for x in self._read(b, op)):
            return "the channels of a token are not contiguous"
        if op.value in b.reserved and b.reserved[op.value].strides[2] != 1:
            return "its result is wanted in another order"
        return problem_refusal(self.problem(b, op), b.gpu)

    def _sources(self, graph: Graph, op: Op) -> tuple[_Source, _Source]:
        """The sources of queries and keys: both normalized, or neither."""
        q, k = op.inputs[:2]
        assert q is not None
        assert k is not None
        sources = _scaled(graph, q), _normalized(graph, k)
        if (sources[0].least is None) != (sources[1].least is None):
            return _Source(q), _Source(k)
        return sources

    def _read(self, b: Builder, op: Op) -> tuple[Value, Value, Value]:
        q, k = self._sources(b.graph, op)
        assert op.inputs[2] is not None
        return q.value, k.value, op.inputs[2]

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The normalizations and the scale before it."""
        return [x for source in self._sources(graph, op) for x in source.ops]

    def region(self, b: Builder, op: Op) -> Region:
        """The attention, and the normalizations and the scale before it."""
        own = {x.id for x in self.neighbors(b.graph, op)}
        return Region(op, before=tuple(x for x in b.graph.order() if x.id in own))

    def offers(self, problem: channels.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return channel_offers(problem, gpu)

    def _place_of(self, b: Builder, op: Op) -> TensorView:
        """The result in its reserved place, or as [batch, token, head, channel]."""
        _, heads, size, tokens = op.outputs[0].type.static_shape
        return b.result(op.value, (tokens * heads * size, size, 1, heads * size))

    def problem(self, b: Builder, op: Op) -> channels.Problem:
        q, k, v = (b.operand(x) for x in self._read(b, op))
        of_q, of_k = self._sources(b.graph, op)
        batch, heads, size, tokens = q.shape
        out = self._place_of(b, op)
        least = None if of_q.least is None or of_k.least is None else (of_q.least, of_k.least)
        unit = int(np.gcd.reduce([8, *(x.offset for x in (q, k, v, out))]))
        return channels.Problem(
            batch, heads, size, tokens, _view(q), _view(k), _view(v), _view(out), least, map_dtype(op.outputs[0].type.dtype), unit
        )  # fmt: skip

    def place(self, b: Builder, op: Op) -> None:
        """Place the result as [batch, token, head, channel]."""
        _, heads, size, tokens = op.outputs[0].type.static_shape
        b.target(op.value, (tokens * heads * size, size, 1, heads * size))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        q, k, v = (b.operand(x) for x in self._read(b, op))
        of_q, of_k = self._sources(b.graph, op)
        problem, out = self.problem(b, op), b.operand(op.value)
        scale = problem.tokens**-0.5 if op.attrs.scale is None else op.attrs.scale
        known = np.ones(problem.heads, np.float32) if of_q.factors is None else of_q.factors
        factors = b.constant((known * scale).astype(np.float32), f"{op.outputs[0].name}.factors")
        covers = replace(op, src=op.src.union(*(x.src for x in (*of_q.ops, *of_k.ops))))
        attrs = {"least": problem.least or ()}
        operands = {"q": q, "k": k, "v": v, "out": out, "factors": factors}
        if not config.depth:
            made = channels.launch(problem, config, b.gpu)
            b.emit(covers, made, operands, "ChannelAttention", attrs, [q, k, v, factors], [out])
            return
        first, second = channels.launches(problem, config, b.gpu)
        operands["sums"] = sums = channel_parts(b, op, problem, config)
        b.emit(covers, first, operands, "ChannelSums", {"span": config.span}, [q, k], [sums])
        b.emit(covers, second, operands, "ChannelResults", attrs, [sums, v, factors], [out])


def _view(x: TensorView) -> HeadView:
    """The kernel's view. ``offset`` stays with the operand; an axis of one element may have any stride."""
    batch, head, token = (s if n > 1 else 8 for n, s in ((x.shape[i], x.strides[i]) for i in (0, 1, 3)))
    return HeadView(batch, head, token)
