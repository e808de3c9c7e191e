"""Norms of queries and keys, and their rotary embeddings, in one launch (``rotary_norm.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView, unmade
from optdnn.kernels.index.rotary import Turn, aligned, part_constants, partner, refuse_early_reader, turn_of
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.layout.row_places import VIEWS
from optdnn.kernels.layout.views import seen_by
from optdnn.kernels.norm.add_norm import NORMS
from optdnn.kernels.tactic import Region, Tactic
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP32, normalize_axis

THREADS, MOST_THREADS = 128, 1024
_MOST_VIEWS = 3


@dataclass(frozen=True)
class Normed:
    """A rotary embedding, the norm before it, and the views between them in order."""

    rotary: Op
    norm: Op
    views: tuple[Op, ...]

    def seen(self, x: TensorView) -> TensorView | None:
        """The norm's operand or result ``x`` in the rotary embedding's shape (batch, heads, length, size); None if that is not a view."""
        view: TensorView | None = x
        for op in self.views:
            view = view and seen_by(op, view)
        return view

    def tokens(self) -> bool | None:
        """True for a norm over all heads of a token, False for a norm over each head, None for any other."""
        t = self.norm.outputs[0].type
        seen = self.seen(unmade(t.dtype, t.static_shape))
        if seen is None or normalize_axis(self.norm.attrs.axis, len(t.static_shape)) != len(t.static_shape) - 1:
            return None
        (_, heads, _, size), length = seen.shape, t.static_shape[-1]
        steps = [s for n, s in zip(seen.shape, seen.strides, strict=True) if n > 1][:-1]
        if seen.strides[3] != 1 or any(s % size for s in steps):
            return None
        if length == size:
            return False
        return True if length == heads * size and (heads == 1 or seen.strides[1] == size) else None


def normed(graph: Graph, rotary: Op) -> Normed | None:
    """A rotary embedding with the norm before it, if the norm has no other reader; else None."""
    views: list[Op] = []
    value = rotary.inputs[0]
    for _ in range(_MOST_VIEWS + 1):
        op = None if value is None else graph.op(value)
        if op is None or value is None or graph.sole_user(value) is None:
            return None
        if op.kind in NORMS:
            return Normed(rotary, op, tuple(reversed(views)))
        if op.kind not in VIEWS:
            return None
        views.append(op)
        value = op.inputs[0]
    return None


@dataclass(frozen=True)
class Heads:
    """One tensor of a launch: its rotation, and scale and bias (None: no bias) of its norm."""

    turn: Turn
    scale: TensorView
    bias: TensorView | None


@dataclass(frozen=True)
class Norm:
    """The norms of a launch. ``tokens``: over all heads of a token, else over each head. ``centered``: layer norms, else RMS norms."""

    tokens: bool
    centered: bool
    epsilon: float


def share(turn: Turn) -> int:
    """Threads that share a head's row."""
    return 1 << (sum(turn.vectors) - 1).bit_length()


def threads(turns: Sequence[Turn], norm: Norm) -> int:
    """Threads of a block."""
    return max(t.x.shape[1] for t in turns) * share(turns[0]) if norm.tokens else THREADS


def refuse(turns: Sequence[Turn], norm: Norm) -> str | None:
    """Why there is no launch, or None."""
    if (why := next((why for t in turns if (why := t.refuse()) is not None), None)) is not None:
        return why
    if len({(t.lanes, t.x.shape[0], *t.x.shape[2:], t.x.dtype) for t in turns}) > 1:
        return "queries and keys have vectors of different sizes"
    if share(turns[0]) > 32:
        return "a head has more vectors than a warp has lanes"
    if norm.tokens and (threads(turns, norm) % 32 or threads(turns, norm) > MOST_THREADS):
        return f"{threads(turns, norm)} threads for a token are not a valid block"
    return None


def recipe(turns: Sequence[Turn], norm: Norm, early: bool, biased: bool, arch: str) -> Recipe:
    """The kernel's recipe. ``early``: the angles are constant. ``biased``: norms add a bias."""
    turn = turns[0]
    turning, copying = turn.vectors
    defines = {
        "LANES": turn.lanes, "WIDE": turn.x.dtype == FP32, "BFLOAT": turn.x.dtype == BF16, "TURNING": turning, "COPYING": copying,
        "INTERLEAVED": turn.interleaved, "EARLY": early, "COSINE_VECTORS": aligned(turn.cos, turn.lanes),
        "SINE_VECTORS": aligned(turn.sin, turn.lanes), "SHARE": share(turn), "THREADS": threads(turns, norm), "TOKENS": norm.tokens,
        "CENTERED": norm.centered, "BIASED": biased, **part_constants(turn),
    }  # fmt: skip
    text = render.constants({name: int(value) for name, value in defines.items()})
    return Recipe("rotary_norm.cu", arch, {"generated.cuh": f"{text}\n"}, GENERAL)


def launch(heads: Sequence[Heads], norm: Norm, early: bool, gpu: GpuFacts) -> Launch:
    """The launch of the norms of two tensors and their rotations by the same angles. Operands: ``cosines``, ``sines``, and for tensor k
    ``xk``, ``outputk``, ``scalek``, ``biask``."""
    turns, biased = [h.turn for h in heads], heads[0].bias is not None
    cos, sin = turns[0].cos, turns[0].sin
    parameters = Parameters().pointer("cosines", "sines").i64(cos.strides[-1], sin.strides[-1]).f32(norm.epsilon)
    blocks = 0
    for k, turn in enumerate(turns):
        batch, count, length, _ = turn.x.shape
        rows = batch * length * (1 if norm.tokens else count)
        blocks += rows
        parameters.pointer(f"x{k}", f"output{k}", f"scale{k}", f"bias{k}" if biased else f"scale{k}")
        parameters.u32(rows, length, count).i64(*turn.x.strides[:3], *turn.out.strides[:3])
        for t in (cos, sin):
            parameters.i64(t.strides[0] if t.shape[0] > 1 else 0, t.strides[1])
    grid = blocks if norm.tokens else -(-blocks // (THREADS // share(turns[0])))
    made = recipe(turns, norm, early, biased, gpu.arch)
    return parameters.launch(made, "rotary_norm", grid, threads(turns, norm))


class RotaryNormPair(Tactic):
    """The rotary embeddings of the queries and keys of one attention by the same angles, and the norms before both."""

    name = "rotary_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = self._pair(b.graph, op)
        if found is None:
            return "the next attention has no other heads that are rotated by the same angles, or not both have a norm before them"
        first, second = found
        if op.attrs.own_angles:
            return "each feature of its heads has its own angle"
        if (why := refuse_early_reader(b, first.rotary)) is not None:
            return why
        a, c = first.norm, second.norm
        if (a.kind, a.attrs.epsilon, len(a.inputs)) != (c.kind, c.attrs.epsilon, len(c.inputs)):
            return "the norms of queries and keys differ"
        kinds = {n.tokens() for n in found}
        if None in kinds or len(kinds) > 1:
            return "its norms are neither of heads nor of tokens"
        if any(b.graph.constant_value(v) is None for n in found for v in n.norm.inputs[1:]):
            return "the scale and bias of its norms are not constant"
        if any(b.graph.type(n.norm.inputs[1]).static_shape != n.norm.outputs[0].type.static_shape[-1:] for n in found):  # type: ignore[arg-type]
            return "the scale of its norms is not a single row"
        turns = [self._turn(b, n, b.source(n.norm.inputs[0]), b.result(n.rotary.value)) for n in found]
        known = [t for t in turns if t is not None]
        if len(known) < len(turns):
            return "its heads would be copied before the norm"
        return refuse(known, self._norm(first))

    @staticmethod
    def _pair(graph: Graph, op: Op) -> tuple[Normed, Normed] | None:
        """The embeddings of the other heads and of these, with their norms; or None."""
        other = partner(graph, op)
        found = [] if other is None else [normed(graph, other), normed(graph, op)]
        return (found[0], found[1]) if found and found[0] is not None and found[1] is not None else None

    @staticmethod
    def _norm(of: Normed) -> Norm:
        return Norm(bool(of.tokens()), of.norm.kind == "LayerNormalization", of.norm.attrs.epsilon)

    @staticmethod
    def _turn(b: Builder, of: Normed, x: TensorView, out: TensorView) -> Turn | None:
        """The rotation of ``x``, the operand of the norm; None if that is not a view of it."""
        seen = of.seen(x)
        return None if seen is None else turn_of(of.rotary, [seen, *(b.source(v) for v in of.rotary.inputs[1:])], out)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The other embedding, and both norms."""
        found = self._pair(graph, op)
        return [] if found is None else [found[0].rotary, found[0].norm, found[1].norm]

    def region(self, b: Builder, op: Op) -> Region:
        """Both norms and both embeddings."""
        found = self._pair(b.graph, op)
        assert found is not None
        return Region(op, before=(found[0].norm, found[0].rotary, found[1].norm))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found = self._pair(b.graph, op)
        assert found is not None
        norm, heads = self._norm(found[0]), list[Heads]()
        angles = [b.operand(v) for v in op.inputs[1:]]
        operands = {"cosines": angles[0], "sines": angles[1]}
        reads: list[TensorView | None] = list(angles)
        for k, of in enumerate(found):
            seen = of.seen(b.operand(of.norm.inputs[0]))
            assert seen is not None
            given = [self._row(b, of.norm, v) for v in of.norm.inputs[1:]]
            turn = turn_of(of.rotary, [seen, *angles], b.target(of.rotary.value))
            heads.append(Heads(turn, given[0], given[1] if len(given) > 1 else None))
            operands |= {f"x{k}": turn.x, f"output{k}": turn.out, f"scale{k}": given[0]}
            operands |= {f"bias{k}": given[1]} if len(given) > 1 else {}
            reads += [turn.x, given[0], given[1] if len(given) > 1 else None]
        early = all(b.graph.constant_value(v) is not None for v in op.inputs[1:])
        covers = replace(op, src=op.src.union(*(n.rotary.src | n.norm.src for n in found)))
        attrs = {
            "norm": found[0].norm.kind,
            "epsilon": norm.epsilon,
            "tokens": norm.tokens,
            "interleaved": op.attrs.interleaved,
            "rotary_embedding_dim": op.attrs.rotary_embedding_dim,
            "parts": op.attrs.parts,
        }
        made = launch(heads, norm, early, b.gpu)
        b.emit(covers, made, operands, "RotaryNormPair", attrs, reads, [h.turn.out for h in heads])

    @staticmethod
    def _row(b: Builder, norm: Op, value: Value | None) -> TensorView:
        array = b.graph.constant_value(value)
        assert array is not None
        return b.constant(array.astype(np.float32), f"{norm.outputs[0].name}.row")
