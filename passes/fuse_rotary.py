"""Rotary position embeddings that exporters write out become one op (Su et al., "RoFormer", 2021).

``x * cos + rotate_half(x) * sin``, where ``rotate_half`` puts the negated second half of each head before the first, and
cosines and sines hold the same numbers in both halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.facts import ints, reshape_target, scalar
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


class Rotary(Rule):
    """``Add(Mul(x, cos), Mul(Concat(Neg(second half), first half), sin))``, in any order of the operands."""

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
        caches = [_half(patch, graph, v) for v in (parts.cos, parts.sin)]
        patch.replace(match.ops[-1].value, patch.add("RotaryEmbedding", [parts.x, *caches], RotaryAttrs()))
        return patch


def _product(graph: Graph, value: Value | None) -> Op | None:
    op = None if value is None else graph.op(value)
    return op if op is not None and op.kind == "Mul" else None


def _turned(graph: Graph, plain: Op | None, turned: Op | None) -> tuple[Parts, tuple[Op, ...]] | None:
    """The parts, where one product is of x and the other of its halves in the other order."""
    if plain is None or turned is None:
        return None
    for rotated, sin in (turned.inputs, turned.inputs[::-1]):
        joined = None if rotated is None else graph.op(rotated)
        if joined is None or joined.kind != "Concat" or len(joined.inputs) != 2 or sin is None:
            continue
        negative, first = joined.inputs
        if negative is None or first is None:
            continue
        back = graph.op(negative)
        second = _negated(graph, back)
        x = None if second is None else _whole(graph, first, second)
        if x is None or second is None or not _last(graph, x, joined.attrs.axis):
            continue
        for data, cos in (plain.inputs, plain.inputs[::-1]):
            if data == x and cos is not None:
                halves = {o.id: o for o in (graph.op(first), graph.op(second))}
                return Parts(x, cos, sin), (*halves.values(), back, joined, plain, turned)
    return None


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


def _whole(graph: Graph, first: Value, second: Value) -> Value | None:
    """The tensor of which these are the first and the second half along the last axis."""
    a, b = graph.op(first), graph.op(second)
    x = a.input(0)
    if x is None or b.input(0) != x or graph.type(x).shape is None:
        return None
    size = graph.type(x).dims[-1]
    if not isinstance(size, int) or size % 2:
        return None
    if a.kind == "Split":
        halved = a.id == b.id and (first.port, second.port) == (0, 1) and len(a.outputs) == 2
        same = graph.type(first).shape == graph.type(second).shape
        return x if halved and same and _last(graph, x, a.attrs.axis) else None
    spans = [_span(graph, op, size) for op in (a, b)]
    return x if spans == [(0, size // 2), (size // 2, size)] else None


def _span(graph: Graph, op: Op, size: int) -> tuple[int, int] | None:
    """Begin and end of a slice of the last axis alone."""
    if op.kind != "Slice":
        return None
    starts, ends, axes = (ints(graph, op.input(i)) for i in (1, 2, 3))
    steps = (1,) if op.input(4) is None else ints(graph, op.input(4))
    if starts is None or ends is None or axes is None or len(starts) != 1 or steps != (1,):
        return None
    assert op.inputs[0] is not None
    if not _last(graph, op.inputs[0], axes[0]):
        return None
    begin, end, _ = slice(starts[0], ends[0]).indices(size)
    return begin, end


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
        if not doubled(graph, value):
            return f"the halves of {name} are not known to be equal"
    return None


def _cache_shape(shape: Shape) -> Shape:
    batch = shape[0] if len(shape) == 4 else 1
    return (batch, shape[-2], shape[-1])


def _half(patch: Patch, graph: Graph, value: Value) -> Value:
    """The first half of the angles, one row per position: (batch or 1, length, D / 2)."""
    shape = graph.type(value).dims
    size = shape[-1]
    assert isinstance(size, int)
    begin, end, axis = (patch.constant(np.array([n], np.int64), "half") for n in (0, size // 2, len(shape) - 1))
    half = patch.add("Slice", [value, begin, end, axis])
    now = patch.type(half).dims
    target = reshape_target(now, _cache_shape(now))
    assert target is not None
    return patch.add("Reshape", [half, patch.constant(np.array(target, np.int64), "shape")], ReshapeAttrs())


def doubled(graph: Graph, value: Value, depth: int = _DEPTH) -> bool:
    """True where both halves of the last axis hold the same numbers, as far as the ops behind the value prove it."""
    op = graph.op(value)
    if op.kind == "Constant":
        array = op.attrs.value
        size = array.shape[-1] if array.ndim else 1
        return size % 2 == 0 and bool(np.array_equal(array[..., : size // 2], array[..., size // 2 :]))
    rank = graph.type(value).rank
    behind = op.input(0)
    stages: tuple[object, ...] = getattr(op.attrs, "epilogue", ())
    if depth == 0 or rank is None or behind is None or stages:
        return False
    below = graph.type(behind)
    if op.kind == "Concat":
        return op.attrs.axis in (-1, rank - 1) and len(op.inputs) == 2 and op.inputs[0] == op.inputs[1]
    if op.kind in _POINTWISE:
        return doubled(graph, behind, depth - 1)
    if op.kind in _SCALED:
        for a, b in (op.inputs, op.inputs[::-1]):
            if scalar(graph, b) is not None and a is not None:
                return doubled(graph, a, depth - 1)
        return False
    kept = below.shape is not None and bool(below.shape) and below.shape[-1] == graph.type(value).dims[-1]
    if op.kind == "Unsqueeze":
        axes = ints(graph, op.input(1))
        return axes is not None and not {-1, rank - 1} & set(axes) and doubled(graph, behind, depth - 1)
    if op.kind in ("Expand", "Reshape", "Squeeze"):
        return kept and isinstance(below.dims[-1], int) and doubled(graph, behind, depth - 1)
    if op.kind == "Slice":
        axes = ints(graph, op.input(3))
        return axes is not None and not {-1, rank - 1} & set(axes) and doubled(graph, behind, depth - 1)
    if op.kind == "Gather":
        first = op.attrs.axis in (0, -(below.rank or 0)) and (below.rank or 0) >= 2
        return first and doubled(graph, behind, depth - 1)
    return False


class FuseRotary(RulePass):
    """Rotary embeddings as one op, for targets that have a kernel for it."""

    name = "fuse_rotary"
    rules = (Rotary(),)
