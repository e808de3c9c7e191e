"""Rotary position embeddings that exporters write out become one op (Su et al., "RoFormer", 2021).

The formula is ``x * cos + rotate(x) * sin``, in two forms. In GPT-NeoX and Llama, ``rotate`` puts the negated second half of each
head before the first half, and cosines and sines are equal in both halves. In RoFormer, GPT-J and Flux, it exchanges neighbors
and negates the second of each pair, and cosines and sines repeat each number. Halves that rotate the other way (nanochat) have the
first half negated, and rotate by the negated sines. If only the first features of each head are rotated (GPT-NeoX, Phi) and the
rest is concatenated after them, the op absorbs the Concat as well. Rows before the rotated ones (class tokens of EVA-02, DINOv3)
and behind them (SAM 2) rotate by an angle of zero. Parts of a head that rotate by different coordinates become one op. If the two
features of a pair have different angles (V-JEPA 2), the op has an angle for each feature.

The op expects heads before positions. If a model has positions first (GPT-J, Gemma 3n), the op stands between two Transposes, which
usually merge with those of the attention. The same holds if each head has its own angles (RoPE-Mixed: Heo et al., 2024): the op's
angles may differ by image, so heads and images are exchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass
from optdnn.passes.rules.rotary_parts import rotary_parts
from optdnn.passes.rules.rotary_products import rotary_products
from optdnn.passes.rules.rotated_norms import norm_before_rotary
from optdnn.passes.rules.shape import transpose_chain
from optdnn.passes.support.facts import (
    RESHAPES,
    in_shape,
    integers,
    ints,
    operand,
    reshape_target,
    scalar,
    shape_of,
)
from optdnn.passes.support.parts import is_axis, pair, span, whole
from optdnn.passes.support.paths import reshapes_before, value_before
from optdnn.passes.support.pattern import AnyOf, Pattern, Scalar, Var, any_of, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.rotary import ORDERS, PLAIN, cache_shape, order_of, rotated
from optdnn.types import Shape

_DEPTH = 12
"""Most operators that a proof goes back."""
_POINTWISE = frozenset({"Cos", "Sin", "Cast", "Neg", "Exp", "Sqrt", "Identity"})
_SCALED = frozenset({"Mul", "Div", "Add", "Sub"})

X, COS, SIN, FIRST, SECOND = map(Var, ("x", "cos", "sin", "first", "second"))


def _negated(half: Var) -> AnyOf:
    return any_of(node("Neg", half), node("Mul", half, Scalar(-1.0)))


_NEGATED = _negated(SECOND)
_HALVES = node("Concat", _NEGATED, FIRST, name="joined")
_HALVES_BACK = node("Concat", SECOND, _negated(FIRST), name="back")
_NEIGHBORS = node(
    RESHAPES,
    any_of(
        *(
            node("Concat", left, right, name="joined")
            for left in (node(RESHAPES, _NEGATED), _NEGATED)
            for right in (node(RESHAPES, FIRST), FIRST)
        )
    ),
    name="merged",
)


@pattern_rule(
    "rotary_embedding",
    node("Add", node("Mul", X, COS), node("Mul", any_of(_HALVES, _HALVES_BACK, _NEIGHBORS), SIN)),
)
def rotary_embedding(graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
    """``x * cos + turned * sin``, where ``turned`` is Concat(-second half, first half), or neighbors stacked in this way.

    Concat(second half, -first half) rotates the other way: by the negated sines."""
    x: Value = found["x"]
    interleaved = "merged" in found
    if not (_are_neighbors if interleaved else _are_halves)(graph, found):
        return None
    heads = _with_batch(graph.type(x).shape or ())
    order = _order(graph, found, heads)
    if isinstance(order, str):
        return Miss(order)
    own = not all(doubled(graph, found[name], interleaved=interleaved) for name in ("cos", "sin"))

    def build(patch: Patch) -> Value:
        cos, sin = (_angles(patch, graph, found[name], order, None if own else interleaved) for name in ("cos", "sin"))
        if "back" in found:
            sin = patch.add("Neg", [sin])
        attrs = RotaryAttrs(interleaved, own_angles=own)
        if heads == graph.type(x).dims:
            return rotated(patch, x, [cos, sin], attrs, order)
        y = rotated(patch, in_shape(patch, x, heads), [cos, sin], attrs, order)
        return in_shape(patch, y, graph.type(x).dims)

    parts = {op.id for name in ("first", "second") for op in reshapes_before(graph, found[name])}
    return Match(tuple(graph.op(i) for i in sorted(ops | parts)), build, root.value)


def _rotated_part(part: Pattern) -> Pattern:
    """A RotaryEmbedding of ``part``, perhaps between Transposes."""
    turned = node("RotaryEmbedding", node("Transpose", part, name="there"), name="turned")
    return any_of(node("RotaryEmbedding", part, name="turned"), node("Transpose", turned, name="back"))


_PART = _rotated_part(FIRST)
_PART_OR_VIEW = any_of(_PART, node(RESHAPES, node(RESHAPES, _PART, name="pairs"), name="merged"))


@pattern_rule("partial_rotary_embedding", node("Concat", _PART_OR_VIEW, SECOND))
def partial_rotary(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``Concat(RotaryEmbedding(first features of x), the rest of x)`` along the last axis; the op may be between Transposes.

    Its result may be viewed as pairs, and back (GLM)."""
    first, rest, inner = found["first"], found["second"], found["turned"]
    swaps, order = _transposes(found)
    views = [found[name] for name in ("merged", "pairs") if name in found]
    if order is None or (views and shape_of(graph, views[0].value) != shape_of(graph, operand(views[1]))):
        return None
    x = whole(graph, first, rest)
    if x is None or inner.attrs.rotary_embedding_dim or len(root.inputs) != 2 or not _last(graph, x, root.attrs.axis):
        return None
    if any(len(graph.uses(op.value)) > 1 for op in (inner, *swaps[1:], *views)):
        return Miss(f"its rotated part is used elsewhere: {inner.name}")
    attrs = replace(inner.attrs, rotary_embedding_dim=graph.type(first).dims[-1])
    covered = {op.id: op for op in (root, graph.op(first), graph.op(rest), inner, *swaps, *views)}

    def build(patch: Patch) -> Value:
        return rotated(patch, x, inner.inputs[1:], attrs, order)

    return Match(tuple(covered.values()), build)


def _transposes(found: dict[str, Any]) -> tuple[list[Op], tuple[int, ...] | None]:
    """The Transposes around a RotaryEmbedding of :func:`_rotated_part`, and their permutation; None if they do not fit together."""
    around = [found[name] for name in ("there", "back") if name in found]
    orders = {op.attrs.perm for op in around} or {PLAIN}
    return around, next((order for order in ORDERS if orders == {order}), None)


@pattern_rule("rotary_rows", node("Concat", FIRST, _rotated_part(SECOND)), node("Concat", _PART, SECOND))
def rotary_rows(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``Concat(first rows of x, RotaryEmbedding(the rest of x))`` along the positions: the first rows get cosine 1 and sine 0.

    The rotated rows may come first (the pointers to objects behind the memory of SAM 2)."""
    first, rest, inner = found["first"], found["second"], found["turned"]
    around, order = _transposes(found)
    if order is None:
        return None
    axis = order[-2] - len(order)
    x = whole(graph, first, rest, axis=axis)
    if x is None or len(root.inputs) != 2 or not is_axis(graph, x, root.attrs.axis, axis):
        return None
    if any(len(graph.uses(op.value)) > 1 for op in (inner, *around[1:])):
        return Miss(f"its rotated rows are used elsewhere: {inner.name}")
    still_first = operand(root) == first
    rows = graph.type(first if still_first else rest).dims[axis]
    assert isinstance(rows, int)
    caches = [operand(inner, 1), operand(inner, 2)]
    for value in caches:
        if not all(isinstance(d, int) for d in graph.type(value).dims):
            return Miss(f"the size of {graph.output(value).name} {graph.type(value)} is not known")
    covered = {op.id: op for op in (root, graph.op(first), graph.op(rest), inner, *around)}

    def build(patch: Patch) -> Value:
        longer = []
        for value, number in zip(caches, (1, 0), strict=True):
            t = graph.type(value)
            batch, _, half = t.static_shape
            added = patch.constant(np.full((batch, rows, half), number, t.dtype), "still")
            both = [added, value] if still_first else [value, added]
            longer.append(patch.add("Concat", both, ConcatAttrs(1)))
        return rotated(patch, x, longer, inner.attrs, order)

    return Match(tuple(covered.values()), build)


def _are_halves(graph: Graph, found: dict[str, Any]) -> bool:
    """Whether "first" and "second" are the halves of x along the last axis, which "joined" (or "back") joins again.

    They are parts of x, or the two rows of x reshaped to (…, 2, size / 2) (CogView4, Cosmos, Stable Audio)."""
    joined = found["back"] if "back" in found else found["joined"]
    x, first, second = (found[name] for name in ("x", "first", "second"))
    if len(joined.inputs) != 2 or not _last(graph, x, joined.attrs.axis):
        return False
    return whole(graph, first, second, even=True) == x or _are_pairs(graph, found, axis=-2)


def _are_pairs(graph: Graph, found: dict[str, Any], axis: int) -> bool:
    """Whether "first" and "second" are the two parts of x along a new axis of size 2, which divides x's last axis."""
    x, first, second = (found[name] for name in ("x", "first", "second"))
    pairs = pair(graph, value_before(graph, first, RESHAPES), value_before(graph, second, RESHAPES), axis=axis)
    shape = shape_of(graph, x)
    if pairs is None or not shape or not isinstance(shape[-1], int):
        return False
    half = shape[-1] // 2
    if shape_of(graph, pairs) != (*shape[:-1], *((2, half) if axis == -2 else (half, 2))):
        return False
    return value_before(graph, pairs, RESHAPES) == value_before(graph, x, RESHAPES)


def _are_neighbors(graph: Graph, found: dict[str, Any]) -> bool:
    """Whether "first" and "second" are the even and odd numbers of x, stacked along a new last axis that is then merged.

    They are slices of x, or the two parts of x reshaped to pairs."""
    x, joined, first, second = (found[name] for name in ("x", "joined", "first", "second"))
    shape = graph.type(x).shape
    if len(joined.inputs) != 2 or not _last(graph, joined.value, joined.attrs.axis) or not shape:
        return False
    size = shape[-1]
    if found["merged"].outputs[0].type.shape != shape or not isinstance(size, int) or size % 2:
        return False
    stacked = (*shape[:-1], size // 2, 1)
    if any(shape_of(graph, v) != stacked for v in joined.inputs):
        return False
    parts = [graph.op(first), graph.op(second)]
    if all(op.kind == "Slice" and op.input(0) == x for op in parts):
        return [span(graph, op, size) for op in parts] == [(0, size, 2), (1, size, 2)]
    return _are_pairs(graph, found, axis=-1)


def _last(graph: Graph, x: Value, axis: int) -> bool:
    return is_axis(graph, x, axis, -1)


def _with_batch(heads: Shape) -> Shape:
    """The shape of heads with a batch axis: of one image (Qwen's vision transformers) they may have none."""
    return (1, *heads) if len(heads) == 3 else heads


def _order(graph: Graph, found: dict[str, Any], heads: Shape) -> tuple[int, ...] | str:
    """The permutation of the axes of "x", in the shape of ``heads``, that fits "cos" and "sin"; or the reason why there is none."""
    x, shapes = graph.type(found["x"]), [graph.type(found[name]).shape or () for name in ("cos", "sin")]
    if len(heads) != 4 or reshape_target(x.dims, heads) is None:
        return f"{graph.output(found['x']).name} {x} does not have four axes"
    order = order_of(heads, shapes)
    for value, shape in zip((found["cos"], found["sin"]), shapes, strict=True):
        t, name = graph.type(value), graph.output(value).name
        if t.dtype != x.dtype:
            return f"{name} is {t.dtype}, its operand {x.dtype}"
        if order_of(heads, [shape]) is None:
            return f"{name} {t} is not one angle per position of {x}"
        if order is not None and reshape_target(t.dims, cache_shape(t.dims, order)) is None:
            return f"the size of {name} {t} cannot be written"
    return "its cosines and sines differ by other axes" if order is None else order


def _angles(patch: Patch, graph: Graph, value: Value, order: tuple[int, ...], interleaved: bool | None) -> Value:
    """The first half of the angles (or every second), one row per position in this order of axes: (batch or 1, length, D / 2).

    ``interleaved`` None: all of them, (batch or 1, length, D).
    """
    if interleaved is None:
        return in_shape(patch, value, cache_shape(graph.type(value).dims, order))
    shape = graph.type(value).dims
    size = shape[-1]
    assert isinstance(size, int)
    limits = (0, size, len(shape) - 1, 2) if interleaved else (0, size // 2, len(shape) - 1)
    half = patch.add("Slice", [value, *(integers(patch, [n], "half") for n in limits)])
    return in_shape(patch, half, cache_shape(patch.type(half).dims, order))


def doubled(graph: Graph, value: Value, depth: int = _DEPTH, *, interleaved: bool = False) -> bool:
    """Whether the producers of a value prove that both halves of its last axis are equal (``interleaved``: that neighbors are)."""
    op = graph.op(value)
    if op.kind == "Constant":
        array = op.attrs.value
        size = array.shape[-1] if array.ndim else 1
        if size % 2:
            return False
        first, second = np.split(array, 2, -1) if not interleaved else (array[..., ::2], array[..., 1::2])
        return bool(np.array_equal(first, second))
    rank = graph.type(value).rank
    before = op.input(0)
    stages: tuple[object, ...] = getattr(op.attrs, "epilogue", ())
    if depth == 0 or rank is None or before is None or stages:
        return False
    below = graph.type(before)
    if op.kind == "Concat":
        return _joined(graph, op, depth - 1, interleaved)
    if op.kind in _POINTWISE:
        return doubled(graph, before, depth - 1, interleaved=interleaved)
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
        if op.kind == "Reshape" and interleaved and _repeated(graph, before, graph.type(value).dims[-1]):
            return True
        passes = kept and isinstance(below.dims[-1], int)
    else:
        passes = op.kind == "Gather" and op.attrs.axis in (0, -(below.rank or 0)) and (below.rank or 0) >= 2
    return passes and doubled(graph, before, depth - 1, interleaved=interleaved)


def _joined(graph: Graph, concat: Op, depth: int, interleaved: bool) -> bool:
    """Whether a Concat repeats a value along the last axis, or all its parts are doubled. If the parts are joined along the last
    axis (one part per coordinate of an image, Flux), they must be doubled as neighbors, and have even sizes."""
    if _last(graph, concat.value, concat.attrs.axis):
        if not interleaved:
            return _doubles(graph, concat)
        sizes = [graph.type(operand(concat, i)).dims[-1] for i in range(len(concat.inputs))]
        if not all(isinstance(size, int) and size % 2 == 0 for size in sizes):
            return False
    return all(doubled(graph, operand(concat, i), depth, interleaved=interleaved) for i in range(len(concat.inputs)))


def _repeated(graph: Graph, value: Value, size: DimLike) -> bool:
    """Whether the last axis holds two equal elements; a Reshape merges it with the axis before it into one of ``size``."""
    op, shape = graph.op(value), shape_of(graph, value)
    if shape is None or len(shape) < 2 or shape[-1] != 2 or shape[-2] * 2 != size:
        return False
    if op.kind == "Concat":
        return _doubles(graph, op)
    return op.kind in ("Expand", "Tile") and graph.type(operand(op)).dims[-1:] == (1,)


def _doubles(graph: Graph, concat: Op) -> bool:
    """Whether a Concat repeats a value along the last axis."""
    twice = len(concat.inputs) == 2 and concat.inputs[0] == concat.inputs[1]
    return twice and _last(graph, concat.value, concat.attrs.axis)


class FuseRotary(RulePass):
    """Rotary embeddings as one op, for targets that have a kernel for it."""

    name = "fuse_rotary"
    rules = (
        rotary_embedding,
        rotary_products,
        partial_rotary,
        rotary_parts,
        rotary_rows,
        norm_before_rotary,  # when the embedding has its last form
        transpose_chain,
    )
