"""Normalized linear attention that exporters write out becomes one op: ``q (k^T v) / (q (k^T 1) + epsilon)``.

Its products are small, and numerator and denominator often leave fp16's range (see :mod:`optdnn.passes.support.own_sums`). One
kernel keeps both in fp32. The rule matches these forms, each also with all matrices transposed:

- A column of ones is appended to the values, and the last column of the result is the denominator (EfficientViT, SANA).
- The denominator is a product of the queries with the sum or the mean of the keys (Katharopoulos et al., LoFTR, FLatten
  Transformer). It may be inverted and multiplied.

Constant factors on queries, keys and values become one. A Relu of queries and keys becomes part of the op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.normalized_attention import NormalizedAttentionAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.support.attention_scores import factor_of, has_stages, scaled_view
from optdnn.passes.support.crops import starts
from optdnn.passes.support.facts import RESHAPES, exchange_last, ints, operand, producer, scalar
from optdnn.passes.support.pattern_rule import used_outside
from optdnn.passes.support.views import View, trace
from optdnn.types import Array, Shape, normalize_axis
from optdnn.types import product as size_of

MOST_FEATURES = 128
"""Most features of a head that the kernel takes."""
FP32_LARGEST = float(np.finfo(np.float32).max)
WIDE = frozenset({"fp32", "fp64", "tf32"})
"""Precisions for which there is no kernel: separate products, with their stages, are faster there."""


@dataclass(frozen=True)
class _Factor:
    """A view times a constant ``scale``."""

    view: View
    scale: float = 1.0

    def swap_last(self) -> _Factor:
        return _Factor(self.view.swap_last(), self.scale)


@dataclass(frozen=True)
class _Product:
    """A MatMul ``op`` of two factors."""

    op: Op
    left: _Factor
    right: _Factor

    def turned(self) -> _Product:
        """The transposed product."""
        return _Product(self.op, self.right.swap_last(), self.left.swap_last())


@dataclass(frozen=True)
class _Quotient:
    """``above / (below + epsilon)``, and the ops that do it, the root first."""

    above: _Factor
    below: _Factor
    epsilon: float
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class _Parts:
    """Queries, keys and values [..., tokens, features], the op's attributes, and the matched ops without those of the quotient."""

    q: View
    k: View
    v: View
    attrs: NormalizedAttentionAttrs
    ops: tuple[Op, ...]


@rule("normalized_attention", {"Div", "Mul"})
def normalized_attention(graph: Graph, op: Op) -> Match | Miss | None:
    """A quotient of two products with the same queries, whose divisor sums up the same keys."""
    for quotient in _quotients(graph, op):
        for turned in (False, True):
            parts = _appended(graph, quotient, turned) or _summed(graph, quotient, turned)
            if parts is not None:
                return _match(graph, op, quotient, parts, turned)
    return None


def _match(graph: Graph, op: Op, quotient: _Quotient, parts: _Parts, turned: bool) -> Match | Miss:
    parts = _rectified(graph, parts)
    lead, (tokens, size) = parts.q.shape[:-2], parts.q.shape[-2:]
    if not parts.q.shape == parts.k.shape == parts.v.shape:
        shown = "; ".join(", ".join(map(str, x.shape)) for x in (parts.q, parts.k, parts.v))
        return Miss(f"its queries, keys and values have different shapes: [{shown}]")
    if not isinstance(size, int) or not 2 <= size <= MOST_FEATURES:
        return Miss(f"the kernel takes heads of 2 to {MOST_FEATURES} features, these have {size}")
    whole: Shape = ((1, 1, *lead) if len(lead) < 2 else (size_of(lead[:-1]), lead[-1]))[-2:]
    views = [x.reshape((*whole, tokens, size)) for x in (parts.q, parts.k, parts.v)]
    if not all(x.expressible for x in views):
        return Miss("no target can express how its heads are regrouped")
    ops = _with_moves(graph, op, (*quotient.ops, *parts.ops))
    miss = used_outside(graph, [o.id for o in ops], op.id)
    if miss is not None:
        return miss

    def build(patch: Patch) -> Value:
        y = patch.add("NormalizedLinearAttention", [x.add_to(patch) for x in views], parts.attrs)
        result = View(y, (*whole, tokens, size)).reshape((*lead, tokens, size))
        result = (result.swap_last() if turned else result).moved(quotient.above.view.moves)
        made = result.add_to(patch)
        assert made is not None, "transposes, and a Reshape of leading axes"
        return made

    return Match(ops, build)


def _with_moves(graph: Graph, root: Op, ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops, and the views and constant factors between them."""
    found = {op.id: op for op in ops}
    waiting = [op for op in ops if op.id != root.id]
    while waiting:
        for user in graph.users(waiting.pop().value):
            moves = user.kind in RESHAPES or user.kind == "Transpose" or factor_of(graph, user) is not None
            if moves and user.id not in found:
                found[user.id] = user
                waiting.append(user)
    return tuple(found.values())


# ---------------------------------------------------------------- the quotient


def _quotients(graph: Graph, op: Op) -> Sequence[_Quotient]:
    """The quotients that ``op`` computes, whose dividend and divisor are transposed in the same way."""
    found = []
    for above, below in ((0, 1),) if op.kind == "Div" else ((0, 1), (1, 0)):
        dividend, divisor = _factor(graph, op.inputs[above]), trace(graph, operand(op, below))
        if dividend is None or divisor is None:
            continue
        ops = [op]
        if op.kind == "Mul":
            inverse = producer(graph, divisor.base, {"Reciprocal"})
            inner = None if inverse is None else trace(graph, operand(inverse))
            if inverse is None or inner is None:
                continue
            divisor = inner.moved(divisor.moves)
            ops.append(inverse)
        epsilon = 0.0
        if (added := producer(graph, divisor.base, {"Add"})) is not None:
            at = next((i for i in (0, 1) if scalar(graph, added.inputs[i]) is not None), None)
            inner = None if at is None else trace(graph, operand(added, 1 - at))
            if at is None or inner is None or inner.shape != divisor.before:
                continue
            epsilon = scalar(graph, added.inputs[at]) or 0.0
            divisor = inner.moved(divisor.moves)
            ops.append(added)
        whole, scale = scaled_view(graph, divisor)
        perms = _perms(dividend.view)
        if scale > 0 and epsilon >= 0 and perms is not None and _is_permuted(whole, perms):
            found.append(_Quotient(dividend, _Factor(whole, scale), epsilon, tuple(ops)))
    return found


def _factor(graph: Graph, value: Value | None) -> _Factor | None:
    """The view of a value without the constant factors before it. None if its rank is unknown, or below 2."""
    view = None if value is None else trace(graph, value)
    return None if view is None or len(view.shape) < 2 else _Factor(*scaled_view(graph, view))


def _perms(view: View) -> tuple[tuple[int, ...], ...] | None:
    """The permutations of a view; None if it has a Reshape."""
    perms = tuple(move.perm for move in view.moves if move.perm is not None)
    return perms if len(perms) == len(view.moves) else None


def _is_permuted(view: View, perms: Sequence[tuple[int, ...]]) -> bool:
    """Whether a view has its base's elements in the order of these permutations."""
    sizes = _known(view.before)
    if sizes is None or any(len(p) != len(sizes) for p in perms):
        return False
    wanted = np.arange(math.prod(sizes)).reshape(sizes)
    shown = _shown(view, wanted)
    for perm in perms:
        wanted = wanted.transpose(perm)
    return shown is not None and np.array_equal(shown, wanted)


def _known(shape: Shape) -> tuple[int, ...] | None:
    """The sizes, if all of them are known."""
    known = tuple(n for n in shape if isinstance(n, int))
    return known if len(known) == len(shape) else None


def _shown(view: View, base: Array) -> Array | None:
    """The elements of a view of ``base``, which has the size of its base; None if sizes are not known."""
    shown = base
    for shape, perm in ((view.before, None), *((move.shape, move.perm) for move in view.moves)):
        sizes = _known(shape)
        if sizes is None:
            return None
        shown = shown.reshape(sizes) if perm is None else shown.transpose(perm)
    return shown


def _product(graph: Graph, value: Value, turned: bool) -> _Product | None:
    """The product whose result is ``value`` (``turned``: the product whose transposed result it is)."""
    op = producer(graph, value, {"MatMul"})
    if op is None or has_stages(op):
        return None
    left, right = (_factor(graph, x) for x in op.inputs[:2])
    if left is None or right is None or left.view.shape[:-2] != right.view.shape[:-2]:
        return None
    found = _Product(op, left, right)
    return found.turned() if turned else found


def _seen_product(graph: Graph, view: View) -> _Product | None:
    """The product that a view shows as it is, or transposed."""
    perms, rank = _perms(view), len(view.shape)
    return None if perms not in ((), (exchange_last(rank),)) else _product(graph, view.base, bool(perms))


# ---------------------------------------------------------------- the two forms


def _appended(graph: Graph, quotient: _Quotient, turned: bool) -> _Parts | None:
    """The dividend is all columns of a product but the last one, which is the divisor. Ones are the last column of the values."""
    slices = [graph.op(x.view.base) for x in (quotient.above, quotient.below)]
    if any(x.kind != "Slice" for x in slices) or slices[0].inputs[0] != slices[1].inputs[0]:
        return None
    outer = _product(graph, operand(slices[0]), turned)
    inner = None if outer is None else _seen_product(graph, outer.right.view)
    if outer is None or inner is None:
        return None
    rank = len(outer.left.view.shape)
    axis, width = rank - (2 if turned else 1), inner.right.view.shape[-1]
    ones = _before_ones(graph, inner.right.view)
    if ones is None or [_kept(graph, s) for s in slices] != [(axis, 0, width - 1), (axis, width - 1, 1)]:
        return None
    shared = outer.left.scale * outer.right.scale * inner.left.scale * inner.right.scale
    attrs = _attrs(quotient, quotient.above.scale * ones[0].scale, quotient.below.scale, shared)
    ops = (*slices, outer.op, inner.op, ones[1])
    return None if attrs is None else _Parts(outer.left.view, inner.left.swap_last().view, ones[0].view, attrs, ops)


def _kept(graph: Graph, op: Op) -> tuple[int, int, int] | None:
    """(axis, first element, number of elements) of a Slice that shortens one axis, in steps of 1."""
    before, after, begin = graph.type(operand(op)).dims, op.outputs[0].type.dims, starts(graph, op)
    changed = [i for i, (m, n) in enumerate(zip(before, after, strict=True)) if m != n]
    if begin is None or len(changed) != 1:
        return None
    (axis,) = changed
    count = after[axis]
    return (axis, begin[axis], count) if isinstance(count, int) else None


def _before_ones(graph: Graph, view: View) -> tuple[_Factor, Op] | None:
    """The values [..., tokens, features] before a column of ones is appended, and the Pad or Concat that appends it."""
    perms, rank, op = _perms(view), len(view.shape), graph.op(view.base)
    if perms not in ((), (exchange_last(rank),)) or op.kind not in ("Concat", "Pad"):
        return None
    axis = rank - (2 if perms else 1)
    if op.kind == "Pad":
        pads, axes = ints(graph, op.input(1)), ints(graph, op.input(3))
        given = [0] * 2 * rank
        given[rank + axis] = 1
        one = op.attrs.mode == "constant" and scalar(graph, op.input(2)) == 1.0
        appends = one and axes is None and pads == tuple(given)
    else:
        ones = graph.constant_value(op.inputs[1]) if len(op.inputs) == 2 else None
        along = normalize_axis(op.attrs.axis, rank) == axis
        appends = along and ones is not None and ones.shape[axis] == 1 and bool((ones == 1).all())
    whole = _factor(graph, op.inputs[0]) if appends else None
    if whole is None:
        return None
    return (whole.swap_last() if perms else whole), op


def _summed(graph: Graph, quotient: _Quotient, turned: bool) -> _Parts | None:
    """The divisor is a product of the queries with the sum, or the mean, of the keys over the tokens."""
    above, below = (_product(graph, x.view.base, turned) for x in (quotient.above, quotient.below))
    if above is None or below is None or above.left.view != below.left.view:
        return None
    inner = _seen_product(graph, above.right.view)
    if inner is None:
        return None
    total = _key_sum(graph, below.right.view, inner.left.view)
    if total is None:
        return None
    over = above.left.scale * above.right.scale * inner.left.scale * inner.right.scale * quotient.above.scale
    under = below.left.scale * below.right.scale * total[0] * quotient.below.scale
    attrs = _attrs(quotient, over, under, 1.0)
    ops = (above.op, below.op, inner.op, total[1])
    if attrs is None:
        return None
    return _Parts(above.left.view, inner.left.swap_last().view, inner.right.view, attrs, ops)


def _key_sum(graph: Graph, column: View, turned_keys: View) -> tuple[float, Op] | None:
    """The factor and the op of a sum over the tokens of ``turned_keys`` [..., features, tokens], if ``column`` shows this sum."""
    op = producer(graph, column.base, {"ReduceMean", "ReduceSum"})
    keys = None if op is None else _factor(graph, op.inputs[0])
    axes = None if op is None else ints(graph, op.input(1))
    if op is None or keys is None or axes is None or len(axes) != 1:
        return None
    axis = normalize_axis(axes[0], len(keys.view.shape))
    moves, common = turned_keys.moves, len(keys.view.moves)
    rest = moves[common:]
    if keys.view.base != turned_keys.base or keys.view.moves != moves[:common] or len(rest) > 1:
        return None
    sizes = _known(keys.view.shape)
    perm = rest[0].perm if rest else tuple(range(len(keys.view.shape)))
    if sizes is None or perm is None or perm[-1] != axis:
        return None
    kept = [1 if i == axis else n for i, n in enumerate(sizes)]
    each = np.arange(math.prod(kept))
    shown = _shown(column, each)
    if shown is None or not np.array_equal(shown, each.reshape(kept).transpose(perm)):
        return None
    return keys.scale * (1.0 / sizes[axis] if op.kind == "ReduceMean" else 1.0), op


def _attrs(quotient: _Quotient, over: float, under: float, shared: float) -> NormalizedAttentionAttrs | None:
    """The attributes for constant factors above and below the line, and ``shared`` ones. None if the divisor changes its sign, or
    if the factors differ so much that fp32 cannot hold an attribute."""
    if under * shared <= 0:
        return None
    attrs = NormalizedAttentionAttrs(quotient.epsilon / (under * shared), over / under)
    return attrs if max(attrs.epsilon, abs(attrs.scale)) <= FP32_LARGEST else None


def _rectified(graph: Graph, parts: _Parts) -> _Parts:
    """The parts before a Relu of both queries and keys, if there is one."""
    relus = [producer(graph, x.base, {"Relu"}) for x in (parts.q, parts.k)]
    before = [None if r is None else trace(graph, operand(r)) for r in relus]
    if before[0] is None or before[1] is None:
        return parts
    q, k = (b.moved(x.moves) for b, x in zip(before, (parts.q, parts.k), strict=True) if b is not None)
    attrs = NormalizedAttentionAttrs(parts.attrs.epsilon, parts.attrs.scale, rectified=True)
    return _Parts(q, k, parts.v, attrs, parts.ops)


class FuseLinearAttention(RulePass):
    name = "fuse_linear_attention"
    rules = (normalized_attention,)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """The kernel is for 16-bit floats."""
        narrow = any(graph.type(op.value).dtype.itemsize == 2 for op in graph.of_kind("MatMul"))
        return self.rules if narrow or context.only_precision not in WIDE else ()
