"""Rotary position embeddings that exporters write out become one op (Su et al., "RoFormer", 2021).

``x * cos + rotate(x) * sin``: ``rotate`` puts the negated second half of each head before the first, and cosines and sines hold
the same numbers in both halves (GPT-NeoX, Llama); or it exchanges neighbours, the second of which it negates, and cosines and
sines repeat each number (RoFormer, GPT-J). Where the first numbers of each head alone are turned (GPT-NeoX, Phi), the rest
being concatenated behind them, that becomes part of the op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.rules.shape import RESHAPES
from optdnn.passes.support.facts import ints, reshape_target, scalar
from optdnn.types import Shape

_DEPTH = 12
"""How far back a proof looks."""
_POINTWISE = frozenset({"Cos", "Sin", "Cast", "Neg", "Exp", "Sqrt", "Identity"})
_SCALED = frozenset({"Mul", "Div", "Add", "Sub"})


@dataclass(frozen=True)
class Parts:
    """What is turned, the cosines and the sines."""

    x: Value
    cos: Value
    sin: Value
    interleaved: bool = False


class Rotary(Rule):
    """``Add(Mul(x, cos), Mul(Concat(Neg(second half), first half), sin))``, in any order of the operands; or the neighbours
    stacked in the place of the halves."""

    name = "rotary_embedding"
    kinds = frozenset({"Add"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        products = [_product(graph, v) for v in op.inputs]
        for plain, turned in (products, reversed(products)):
            found = _turned(graph, plain, turned)
            if found is None:
                continue
            parts, ops = found
            reason = _refuse(graph, parts)
            if reason is not None:
                return Miss(reason)
            return Match((*ops, op), parts)
        return None

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        parts: Parts = match.data
        patch = Patch(graph, match.ops)
        caches = [_half(patch, graph, v, parts.interleaved) for v in (parts.cos, parts.sin)]
        attrs = RotaryAttrs(interleaved=parts.interleaved)
        patch.replace(match.ops[-1].value, patch.add("RotaryEmbedding", [parts.x, *caches], attrs))
        return patch


class PartialRotary(Rule):
    """``Concat(RotaryEmbedding(first numbers of x), the rest of x)`` along the last axis."""

    name = "partial_rotary_embedding"
    kinds = frozenset({"Concat"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        turned, rest = op.inputs if len(op.inputs) == 2 else (None, None)
        inner = None if turned is None else graph.op(turned)
        if inner is None or rest is None or inner.kind != "RotaryEmbedding" or inner.attrs.rotary_embedding_dim:
            return None
        first = inner.inputs[0]
        x = None if first is None else _whole(graph, first, rest)
        if x is None or first is None or not _last(graph, x, op.attrs.axis):
            return None
        if len(graph.uses(inner.value)) > 1:
            return Miss(f"what is turned is used elsewhere: {inner.name}")
        parts = {o.id: o for o in (graph.op(first), graph.op(rest))}
        return Match((*parts.values(), inner, op), (x, graph.type(first).dims[-1]))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        (x, size), (*_, inner, op) = match.data, match.ops
        patch = Patch(graph, match.ops)
        attrs = replace(inner.attrs, rotary_embedding_dim=size)
        patch.replace(op.value, patch.add("RotaryEmbedding", [x, *inner.inputs[1:]], attrs))
        return patch


def _product(graph: Graph, value: Value | None) -> Op | None:
    op = None if value is None else graph.op(value)
    return op if op is not None and op.kind == "Mul" else None


def _turned(graph: Graph, plain: Op | None, turned: Op | None) -> tuple[Parts, tuple[Op, ...]] | None:
    """The parts, where one product is of x and the other of its halves in the other order."""
    if plain is None or turned is None:
        return None
    for rotated, sin in (turned.inputs, turned.inputs[::-1]):
        found = None if rotated is None else _halves(graph, rotated) or _neighbours(graph, rotated)
        if found is None or sin is None:
            continue
        x, interleaved, ops = found
        for data, cos in (plain.inputs, plain.inputs[::-1]):
            if data == x and cos is not None:
                return Parts(x, cos, sin, interleaved), (*ops, plain, turned)
    return None


def _halves(graph: Graph, value: Value) -> tuple[Value, bool, tuple[Op, ...]] | None:
    """``Concat(Neg(second half of x), first half of x)``: x, and the ops of it."""
    joined = graph.op(value)
    if joined.kind != "Concat" or len(joined.inputs) != 2:
        return None
    negative, first = joined.inputs
    if negative is None or first is None:
        return None
    back = graph.op(negative)
    second = _negated(graph, back)
    x = None if second is None else _whole(graph, first, second, even=True)
    if x is None or second is None or not _last(graph, x, joined.attrs.axis):
        return None
    halves = {o.id: o for o in (graph.op(first), graph.op(second))}
    return x, False, (*halves.values(), back, joined)


def _neighbours(graph: Graph, value: Value) -> tuple[Value, bool, tuple[Op, ...]] | None:
    """The negated odd numbers of x and its even ones, stacked along a new last axis that is then merged: x, and the ops of it."""
    merged = graph.op(value)
    joined = None if merged.kind not in RESHAPES or merged.inputs[0] is None else graph.op(merged.inputs[0])
    if (
        joined is None
        or joined.kind != "Concat"
        or len(joined.inputs) != 2
        or not _last(graph, joined.value, joined.attrs.axis)
    ):
        return None
    stacked = [None if v is None else graph.op(v) for v in joined.inputs]
    inner = [None if op is None or op.kind not in RESHAPES else op.inputs[0] for op in stacked]
    if None in inner:
        return None
    negative, first = (v for v in inner if v is not None)
    back = graph.op(negative)
    second = _negated(graph, back)
    if second is None:
        return None
    a, b = graph.op(first), graph.op(second)
    x = a.input(0)
    if x is None or b.input(0) != x or graph.type(x).shape is None or graph.type(value).shape != graph.type(x).shape:
        return None
    *_, size = graph.type(x).dims
    if (
        not isinstance(size, int)
        or size % 2
        or [_span(graph, op, size) for op in (a, b)] != [(0, size, 2), (1, size, 2)]
    ):
        return None
    if any(op is None or graph.type(op.value).shape != (*graph.type(first).dims, 1) for op in stacked):
        return None
    return x, True, (a, b, back, *(op for op in stacked if op is not None), joined, merged)


def _negated(graph: Graph, op: Op) -> Value | None:
    if op.kind == "Neg":
        return op.inputs[0]
    if op.kind == "Mul":
        for a, b in (op.inputs, op.inputs[::-1]):
            if scalar(graph, a) == -1.0:
                return b
    return None


def _last(graph: Graph, x: Value, axis: int) -> bool:
    rank = graph.type(x).rank
    return rank is not None and axis in (-1, rank - 1)


def _whole(graph: Graph, first: Value, second: Value, even: bool = False) -> Value | None:
    """The tensor of which these are the first and the second part along the last axis, equally long where ``even``."""
    a, b = graph.op(first), graph.op(second)
    x = a.input(0)
    if x is None or b.input(0) != x or graph.type(x).shape is None or graph.type(first).shape is None:
        return None
    size, cut = graph.type(x).dims[-1], graph.type(first).dims[-1]
    if not isinstance(size, int) or not isinstance(cut, int) or (even and 2 * cut != size):
        return None
    if a.kind == "Split":
        both = a.id == b.id and (first.port, second.port) == (0, 1) and len(a.outputs) == 2
        return x if both and _last(graph, x, a.attrs.axis) else None
    spans = [_span(graph, op, size) for op in (a, b)]
    return x if spans == [(0, cut, 1), (cut, size, 1)] else None


def _span(graph: Graph, op: Op, size: int) -> tuple[int, int, int] | None:
    """Begin, end and step of a slice of the last axis alone."""
    if op.kind != "Slice":
        return None
    starts, ends, axes = (ints(graph, op.input(i)) for i in (1, 2, 3))
    steps = (1,) if op.input(4) is None else ints(graph, op.input(4))
    if starts is None or ends is None or axes is None or steps is None or len(starts) != 1:
        return None
    assert op.inputs[0] is not None
    if not _last(graph, op.inputs[0], axes[0]):
        return None
    return slice(starts[0], ends[0], steps[0]).indices(size)


def _refuse(graph: Graph, parts: Parts) -> str | None:
    x = graph.type(parts.x)
    if x.rank != 4:
        return f"{graph.output(parts.x).name} {x} does not have four axes"
    for value in (parts.cos, parts.sin):
        t, name = graph.type(value), graph.output(value).name
        shape = t.shape or ()
        if t.dtype != x.dtype:
            return f"{name} is {t.dtype}, what it turns {x.dtype}"
        fits = len(shape) >= 2 and shape[-2:] == x.dims[-2:] and all(d == 1 for d in shape[-3:-2])
        if not fits or (len(shape) == 4 and shape[0] not in (1, x.dims[0])) or len(shape) > 4:
            return f"{name} {t} is not one angle per position of {x}"
        if reshape_target(shape, _cache_shape(shape)) is None:
            return f"the size of {name} {t} cannot be written"
        if not doubled(graph, value, interleaved=parts.interleaved):
            return f"the {'neighbours' if parts.interleaved else 'halves'} of {name} are not known to be equal"
    return None


def _cache_shape(shape: Shape) -> Shape:
    batch = shape[0] if len(shape) == 4 else 1
    return (batch, shape[-2], shape[-1])


def _half(patch: Patch, graph: Graph, value: Value, interleaved: bool) -> Value:
    """The first half of the angles (or every second), one row per position: (batch or 1, length, D / 2)."""
    shape = graph.type(value).dims
    size = shape[-1]
    assert isinstance(size, int)
    span = (0, size, len(shape) - 1, 2) if interleaved else (0, size // 2, len(shape) - 1)
    half = patch.add("Slice", [value, *(patch.constant(np.array([n], np.int64), "half") for n in span)])
    now = patch.type(half).dims
    target = reshape_target(now, _cache_shape(now))
    assert target is not None
    return patch.add("Reshape", [half, patch.constant(np.array(target, np.int64), "shape")], ReshapeAttrs())


def doubled(graph: Graph, value: Value, depth: int = _DEPTH, *, interleaved: bool = False) -> bool:
    """True where both halves of the last axis (or neighbours along it, where ``interleaved``) hold the same numbers, as far as
    the ops behind the value prove it."""
    op = graph.op(value)
    if op.kind == "Constant":
        array = op.attrs.value
        size = array.shape[-1] if array.ndim else 1
        if size % 2:
            return False
        first, second = np.split(array, 2, -1) if not interleaved else (array[..., ::2], array[..., 1::2])
        return bool(np.array_equal(first, second))
    rank = graph.type(value).rank
    behind = op.input(0)
    stages: tuple[object, ...] = getattr(op.attrs, "epilogue", ())
    if depth == 0 or rank is None or behind is None or stages:
        return False
    below = graph.type(behind)
    if op.kind == "Concat":
        return (
            not interleaved and op.attrs.axis in (-1, rank - 1) and len(op.inputs) == 2 and op.inputs[0] == op.inputs[1]
        )
    if op.kind in _POINTWISE:
        return doubled(graph, behind, depth - 1, interleaved=interleaved)
    if op.kind in _SCALED:
        for a, b in (op.inputs, op.inputs[::-1]):
            if scalar(graph, b) is not None and a is not None:
                return doubled(graph, a, depth - 1, interleaved=interleaved)
        return False
    kept = below.shape is not None and bool(below.shape) and below.shape[-1] == graph.type(value).dims[-1]
    if op.kind in ("Unsqueeze", "Slice"):
        axes = ints(graph, op.input(1 if op.kind == "Unsqueeze" else 3))
        passes = axes is not None and not {-1, rank - 1} & set(axes)
    elif op.kind in ("Expand", "Reshape", "Squeeze"):
        if op.kind == "Reshape" and interleaved and _repeated(graph, behind, graph.type(value).dims[-1]):
            return True
        passes = kept and isinstance(below.dims[-1], int)
    else:
        passes = op.kind == "Gather" and op.attrs.axis in (0, -(below.rank or 0)) and (below.rank or 0) >= 2
    return passes and doubled(graph, behind, depth - 1, interleaved=interleaved)


def _repeated(graph: Graph, value: Value, size: DimLike) -> bool:
    """Whether the last axis is of two equal numbers, which a Reshape merges with the axis before to one of ``size``."""
    op, shape = graph.op(value), graph.type(value).shape
    if shape is None or len(shape) < 2 or shape[-1] != 2 or shape[-2] * 2 != size:
        return False
    if op.kind == "Concat":
        return _last(graph, value, op.attrs.axis) and len(op.inputs) == 2 and op.inputs[0] == op.inputs[1]
    source = op.input(0)
    return op.kind in ("Expand", "Tile") and source is not None and graph.type(source).dims[-1:] == (1,)


class FuseRotary(RulePass):
    """Rotary embeddings as one op, for targets that have a kernel for it."""

    name = "fuse_rotary"
    rules = (Rotary(), PartialRotary())
