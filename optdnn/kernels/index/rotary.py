"""Rotary position embeddings in vectors (``rotary.cu``): a thread rotates as many pairs as an access of 16 bytes holds features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import POINTS_LIMIT
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, FP32

THREADS = 128
VECTOR_BYTES = 16
_VIEWS = frozenset({"Transpose", "Reshape"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
"""Kinds that may be between an embedding and the attention (Hunyuan normalizes rotated heads)."""


@dataclass(frozen=True)
class Turn:
    """A rotation of ``x`` to ``out``, both (batch, heads, length, size), by ``cos`` and ``sin`` (batch or 1, length, angles).

    The first ``turned`` features of a head form pairs; the others are copied. A pair consists of features i and i + ``turned / 2``, or
    with ``interleaved`` of two neighbors. Each of ``parts`` equal parts of these features forms its own pairs.
    """

    x: TensorView
    cos: TensorView
    sin: TensorView
    out: TensorView
    turned: int
    interleaved: bool = False
    own_angles: bool = False
    """Whether ``cos`` and ``sin`` hold an angle for each feature, not for each pair."""
    parts: int = 1

    @property
    def lanes(self) -> int:
        """Features of an access to ``x`` and ``out``; 1 if they are not aligned vectors."""
        lanes = VECTOR_BYTES // self.x.dtype.itemsize
        sizes = (self.turned // 2 // self.parts, self.x.shape[-1] - self.turned)
        while lanes > 1 and (any(n % lanes for n in sizes) or not all(aligned(t, lanes) for t in (self.x, self.out))):
            lanes //= 2
        return lanes

    @property
    def vectors(self) -> tuple[int, int]:
        """Threads of a head's row: the number that rotate a vector of pairs, and the number that copy a vector."""
        return self.turned // 2 // self.lanes, (self.x.shape[-1] - self.turned) // self.lanes

    @property
    def count(self) -> int:
        """Threads of all rows."""
        return math.prod(self.x.shape[:-1]) * sum(self.vectors)

    def refuse(self) -> str | None:
        """Why there is no launch for it, or None."""
        if self.x.dtype not in (FP16, BF16, FP32):
            return "it is for 16-bit floats and fp32"
        if self.out.dtype != self.x.dtype:  # the result of a norm before it has the type of the norm's scale
            return "its operand and its result have different types"
        if self.lanes == 1:
            return "its features are not aligned vectors"
        return "it has more vectors than a kernel can count" if self.count >= POINTS_LIMIT else None


def aligned(t: TensorView, lanes: int) -> bool:
    """Whether each row of the last axis consists of aligned vectors of ``lanes`` elements."""
    rows = (s for n, s in zip(t.shape[:-1], t.strides[:-1], strict=True) if n > 1)
    return t.strides[-1] == 1 and t.offset % lanes == 0 and all(s % lanes == 0 for s in rows)


def recipe(turns: Sequence[Turn], rank: int, early: bool, arch: str) -> Recipe:
    """The recipe for rows with ``rank`` axes. ``early``: the angles are constant. Sizes of rows and strides are parameters."""
    turn = turns[0]
    turning, copying = turn.vectors
    defines = {
        "TENSORS": len(turns), "LANES": turn.lanes, "WIDE": turn.x.dtype == FP32, "BFLOAT": turn.x.dtype == BF16, "RANK": rank,
        "TURNING": turning, "COPYING": copying, "INTERLEAVED": turn.interleaved, "EARLY": early,
        "COSINE_VECTORS": aligned(turn.cos, turn.lanes), "SINE_VECTORS": aligned(turn.sin, turn.lanes),
        **({"OWN_ANGLES": 1} if turn.own_angles else {}), **part_constants(turn),
    }  # fmt: skip
    text = render.constants({name: int(value) for name, value in defines.items()})
    return Recipe("rotary.cu", arch, {"generated.cuh": f"{text}\n"}, GENERAL)


def part_constants(turn: Turn) -> dict[str, int]:
    """The constant of the kernels for heads in several parts."""
    return {"PARTS": turn.parts} if turn.parts > 1 else {}


def launch(turns: Sequence[Turn], early: bool, gpu: GpuFacts) -> Launch:
    """The launch of one or two rotations by the same angles. Operands: ``cosines``, ``sines``, and ``x0``, ``output0``, ``x1``,
    ``output1``."""
    cos, sin = turns[0].cos, turns[0].sin
    rows = [(t.strides[0] if t.shape[0] > 1 else 0, 0, t.strides[1]) for t in (cos, sin)]
    merged = [merge(t.x.shape[:-1], [t.out.strides[:-1], t.x.strides[:-1], *rows]) for t in turns]
    rank = max(len(sizes) for sizes, _ in merged)
    parameters = Parameters().pointer("cosines", "sines").i64(cos.strides[-1], sin.strides[-1])
    for k, (turn, (sizes, strides)) in enumerate(zip(turns, merged, strict=True)):
        missing = rank - len(sizes)
        of_output, *of_operands = ([*[0] * missing, *each] for each in strides)
        parameters.pointer(f"x{k}", f"output{k}").u32(turn.count, *[1] * missing, *sizes)
        for each in (*of_operands, of_output):
            parameters.i64(*each)
    grid = -(-sum(t.count for t in turns) // THREADS)
    return parameters.launch(recipe(turns, rank, early, gpu.arch), "rotary", grid, THREADS)


class Rotary(Tactic):
    """RotaryEmbedding of heads with features in aligned vectors, with any strides between heads."""

    name = "rotary"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return turn_of(op, [b.source(v) for v in op.inputs], b.result(op.value)).refuse()

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        emit_turns(b, op, [op], op.kind)


class RotaryPair(Tactic):
    """The two RotaryEmbeddings of an attention's queries and keys, by the same angles, in one launch."""

    name = "rotary_pair"

    def refuse(self, b: Builder, op: Op) -> str | None:
        other = partner(b.graph, op)
        if other is None:
            return "the next attention has no other heads that are rotated by the same angles"
        if (why := refuse_early_reader(b, other)) is not None:
            return why
        turns = [turn_of(x, [b.source(v) for v in x.inputs], b.result(x.value)) for x in (other, op)]
        if (why := next((why for t in turns if (why := t.refuse()) is not None), None)) is not None:
            return why
        if len({(t.lanes, t.x.shape[-1], t.x.dtype) for t in turns}) > 1:
            return "queries and keys have vectors of different sizes"
        return "it has more vectors than a kernel can count" if sum(t.count for t in turns) >= POINTS_LIMIT else None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The other heads' embedding."""
        other = partner(graph, op)
        return [] if other is None else [other]

    def region(self, b: Builder, op: Op) -> Region:
        """Both embeddings."""
        other = partner(b.graph, op)
        assert other is not None
        return Region(op, before=(other,))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        other = partner(b.graph, op)
        assert other is not None
        emit_turns(b, replace(op, src=op.src | other.src), [other, op], "RotaryPair")


def partner(graph: Graph, op: Op) -> Op | None:
    """The other RotaryEmbedding, by the same angles, of the attention that reads the result; or None. There may be views between the
    embeddings and the attention, and norms, and new keys may be joined to those of the past. Only the attention reads the other result."""
    reader = _attention(graph, op.value)
    for value in () if reader is None else reader.inputs[:2]:
        other = None if value is None else _only_for(graph, value)
        if other is None or other.id == op.id or other.kind != "RotaryEmbedding":
            continue
        if other.inputs[1:] == op.inputs[1:] and other.attrs == op.attrs and other.value not in op.inputs:
            return other
    return None


def _attention(graph: Graph, value: Value) -> Op | None:
    """The attention that reads a value, or the keys of past positions and this value, through views; None if there is none. Others may
    read the value, too (a cache that is an output)."""
    for user in graph.users(value):
        reader = _after_views(graph, user)
        if reader is not None and reader.kind == "Attention":
            return reader
        if reader is not None and _joins_positions(graph, reader):
            found = (_after_views(graph, u) for u in graph.users(reader.value))
            return next((x for x in found if x is not None and x.kind == "Attention"), None)
    return None


def _after_views(graph: Graph, op: Op | None) -> Op | None:
    """The operator, or the one that is the only reader of a view or a norm through views and norms."""
    while op is not None and op.kind in _VIEWS | _NORMS:
        op = graph.sole_user(op.value)
    return op


def _joins_positions(graph: Graph, op: Op) -> bool:
    """Whether it is a Concat of heads (batch, heads, length, size) along the positions."""
    return op.kind == "Concat" and graph.type(op.value).rank == 4 and op.attrs.axis in (2, -2)


def _only_for(graph: Graph, value: Value) -> Op | None:
    """The producer of a value through views, if neither the value nor the views have other readers; else None. Of keys that are joined
    to those of the past, it is the producer of the new ones; others may read the joined keys."""
    op = graph.op(value)
    if _joins_positions(graph, op) and op.inputs[-1] is not None:
        value = op.inputs[-1]
    while graph.sole_user(value) is not None:
        op = graph.op(value)
        if op.kind not in _VIEWS | _NORMS or op.inputs[0] is None:
            return op
        value = op.inputs[0]
    return None


def refuse_early_reader(b: Builder, other: Op) -> str | None:
    """Why an embedding cannot be computed later, with its partner; or None."""
    if other.value not in b.place:
        return "the other heads are rotated after it"
    if any(
        user.value in b.place for user in b.graph.users(other.value) if user.kind == "Concat" or user.kind in _NORMS
    ):
        return "the other heads are joined to others, or normalized, before it"
    return None


def emit_turns(b: Builder, covers: Op, ops: Sequence[Op], kind: str) -> None:
    """Emits the launch of RotaryEmbeddings by the same angles. ``covers``: the operator with the nodes that it computes. ``kind``: kind
    of its meaning."""
    turns = [turn_of(op, [b.operand(v) for v in op.inputs], b.target(op.value)) for op in ops]
    if not any(t.count for t in turns):
        return
    operands = {"cosines": turns[0].cos, "sines": turns[0].sin}
    for k, turn in enumerate(turns):
        operands |= {f"x{k}": turn.x, f"output{k}": turn.out}
    early = all(b.graph.constant_value(v) is not None for v in covers.inputs[1:])
    reads = [turns[0].x, turns[0].cos, turns[0].sin, *(t.x for t in turns[1:])]
    attrs = plain_attrs(ops[0].definition, ops[0].attrs)
    b.emit(covers, launch(turns, early, b.gpu), operands, kind, attrs, reads, [t.out for t in turns])


def turn_of(op: Op, reads: Sequence[TensorView], out: TensorView) -> Turn:
    """The rotation of a RotaryEmbedding."""
    x, cos, sin = reads
    a = op.attrs
    return Turn(x, cos, sin, out, a.rotary_embedding_dim or x.shape[-1], a.interleaved, a.own_angles, a.parts)
