"""Linear attention becomes products of matrices, for which GPUs have kernels.

A few tokens are computed one after the other: a decode step has one. Longer sequences are computed in chunks of 64 tokens (Yang et
al., "Parallelizing linear transformers with the delta rule over sequence length", 2024). With the state S before a chunk, its
queries Q, keys K and values V, rates b on a diagonal, and ``D[i, j] = exp(g[j + 1] + ... + g[i])`` for ``j <= i``, 0 above:

    U = T b V,  W = T b exp(G) K,  T = (I + lower(b K K^T * D))^-1      (without the delta rule: U = V, W = 0)
    new = U - W S
    output = exp(G) Q S + (Q K^T * D) new
    S = exp(G[last]) S + (exp(G[last] - G) K)^T new

G are the sums of g from the chunk's first token on. Only the last three lines are computed chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, CumulativeAttrs, PadAttrs
from optdnn.ops.linear_attention import BETA, DECAY, PAST
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import HEADS_FIRST, exchange_last, integers, operand, reshaped, sliced
from optdnn.passes.support.triangular import chosen, inverse_of_rest, times
from optdnn.passes.support.views import transposed
from optdnn.types import FP32, Array, DType

CHUNK = 64
"""Most tokens of a chunk. Within a chunk, the work per token grows with its length; each chunk needs launches of its own."""
FEW = 3
"""Most tokens that are computed one after the other: with more, a chunk has fewer launches."""
MOST_STEPS = 32
"""The same for decays of each feature, for which the factors of a chunk may overflow."""
MOST_CHUNKS = 256


@dataclass(frozen=True)
class _Sizes:
    batch: int
    heads: int
    tokens: int
    keys: int
    values: int
    dtype: DType
    """The type in which everything is computed."""


@dataclass(frozen=True)
class _Operands:
    """Queries and keys (B, H, T, K), values (B, H, T, V), decays (B, H, T, 1) or (B, H, T, K), rates (B, H, T, 1)."""

    q: Value
    k: Value
    v: Value
    decay: Value | None
    rate: Value | None
    past: Value | None


@rule("linear_attention", {"LinearAttention"})
def linear_attention(graph: Graph, op: Op) -> Match | Miss | None:
    """Linear attention over a known number of tokens."""
    if not all(graph.type(v).is_static for v in op.inputs if v is not None):
        return None
    batch, tokens, _ = graph.type(operand(op)).static_shape
    state, decay = op.outputs[1].type.static_shape, op.input(DECAY)
    a, given = op.attrs, op.outputs[0].type.dtype
    wide = FP32 if given.itemsize < 4 else given
    sizes = _Sizes(batch, a.kv_num_heads, tokens, state[2], state[3], wide)
    per_feature = decay is not None and graph.type(decay).static_shape[2] not in (a.kv_num_heads, 1)
    if a.q_num_heads > a.kv_num_heads:
        return Miss(f"{a.q_num_heads} query heads share {a.kv_num_heads} states")
    if min(op.outputs[0].type.static_shape + state) == 0:
        return Miss("a size is 0")
    if per_feature and tokens > MOST_STEPS:
        return Miss(
            f"each feature has its own decay, and there are {tokens} tokens; at most {MOST_STEPS} are computed one by one"
        )
    if tokens > CHUNK * MOST_CHUNKS:
        return Miss(f"there are {tokens} tokens, more than {CHUNK * MOST_CHUNKS}")

    def build(patch: Patch) -> None:
        given_operands = _operands(patch, op, sizes)
        by_token = tokens <= (MOST_STEPS if per_feature else FEW)
        made, last = (_steps if by_token else _chunks)(patch, given_operands, sizes)
        flat = transposed(patch, made, HEADS_FIRST)
        results = _reshaped(patch, flat, batch, tokens, sizes.heads * sizes.values), last
        for port, result in enumerate(results):
            patch.replace(Value(op.id, port), _as_type(patch, result, op.outputs[port].type.dtype))

    return Match((op,), build)


# ---------------------------------------------------------------- operands


def _operands(patch: Patch, op: Op, s: _Sizes) -> _Operands:
    a = op.attrs
    scale = patch.constant(np.asarray(a.scale, s.dtype), "scale")
    q = patch.add("Mul", [_heads(patch, op.inputs[0], s, s.keys), scale])
    k, v = _heads(patch, op.inputs[1], s, s.keys), _heads(patch, op.inputs[2], s, s.values)
    decay, rate, past = op.input(DECAY), op.input(BETA), op.input(PAST)
    if decay is not None:
        decay = _heads(patch, decay, s, patch.type(decay).static_shape[2] // s.heads)
    if rate is not None:
        rate = _heads(patch, rate, s, 1)
    return _Operands(q, k, v, decay, rate, None if past is None else _as_type(patch, past, s.dtype))


def _heads(patch: Patch, x: Value | None, s: _Sizes, size: int) -> Value:
    """(B, T, heads * size) as (B, H, T, size). Fewer heads than H are repeated."""
    assert x is not None
    found = patch.type(x).static_shape[2] // size
    y = _reshaped(patch, _as_type(patch, x, s.dtype), s.batch, s.tokens, found, size)
    y = transposed(patch, y, HEADS_FIRST)
    if found == s.heads:
        return y
    apart = _reshaped(patch, y, s.batch, found, 1, s.tokens, size)
    shape = integers(patch, [s.batch, found, s.heads // found, s.tokens, size], "shape")
    return _reshaped(patch, patch.add("Expand", [apart, shape]), s.batch, s.heads, s.tokens, size)


def _as_type(patch: Patch, x: Value, dtype: DType) -> Value:
    return x if patch.type(x).dtype == dtype else patch.add("Cast", [x], CastAttrs(dtype))


def _reshaped(patch: Patch, x: Value, *shape: int) -> Value:
    return x if patch.type(x).shape == shape else reshaped(patch, x, shape)


def _part(patch: Patch, x: Value, axis: int, start: int, end: int) -> Value:
    """A Slice, unless it is everything."""
    if (start, end) == (0, patch.type(x).static_shape[axis]):
        return x
    return sliced(patch, x, start, end, axis)


def _swapped(patch: Patch, x: Value) -> Value:
    """The last two axes swapped."""
    return patch.add("Transpose", [x], TransposeAttrs(exchange_last(len(patch.type(x).dims))))


def _joined(patch: Patch, parts: Sequence[Value]) -> Value:
    """Along the tokens."""
    return parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(2))


# ---------------------------------------------------------------- token after token


def _steps(patch: Patch, given: _Operands, s: _Sizes) -> tuple[Value, Value]:
    """The outputs (B, H, T, V) and the last state."""
    state, made = given.past, list[Value]()
    for t in range(s.tokens):
        q, k, v, decay, rate = (
            None if x is None else _part(patch, x, 2, t, t + 1)
            for x in (given.q, given.k, given.v, given.decay, given.rate)
        )
        assert q is not None
        assert k is not None
        assert v is not None
        new = v
        if state is not None and decay is not None:
            state = patch.add("Mul", [state, _swapped(patch, patch.add("Exp", [decay]))])
        if rate is not None:
            new = new if state is None else patch.add("Sub", [new, times(patch, k, state)])
            new = patch.add("Mul", [new, rate])
        added = patch.add("Mul", [_swapped(patch, k), new])
        state = added if state is None else patch.add("Add", [state, added])
        made.append(times(patch, q, state))
    assert state is not None
    return _joined(patch, made), state


# ---------------------------------------------------------------- chunks


@dataclass(frozen=True)
class _Chunked:
    """What a chunk reads: (B, H, chunks, tokens, ·). ``whole``: exp(G[last]), (B, H, chunks, 1, 1)."""

    new: Value
    known: Value | None
    q: Value
    scores: Value
    k: Value
    whole: Value | None


def _chunks(patch: Patch, given: _Operands, s: _Sizes) -> tuple[Value, Value]:
    """The outputs (B, H, T, V) and the last state."""
    long = min(CHUNK, s.tokens)
    count = -(-s.tokens // long)
    ready = _prepared(patch, given, s, count, long)
    state, made = given.past, list[Value]()

    def of(x: Value, n: int) -> Value:
        size = patch.type(x).static_shape[3:]
        return _reshaped(patch, _part(patch, x, 2, n, n + 1), s.batch, s.heads, *size)

    for n in range(count):
        new, scores, added = of(ready.new, n), of(ready.scores, n), _swapped(patch, of(ready.k, n))
        if state is not None and ready.known is not None:
            new = patch.add("Sub", [new, times(patch, of(ready.known, n), state)])
        output = times(patch, scores, new)
        if state is not None:
            output = patch.add("Add", [output, times(patch, of(ready.q, n), state)])
        made.append(output)
        if state is not None and ready.whole is not None:
            state = patch.add("Mul", [state, of(ready.whole, n)])
        change = times(patch, added, new)
        state = change if state is None else patch.add("Add", [change, state])
    assert state is not None
    return _part(patch, _joined(patch, made), 2, 0, s.tokens), state


def _prepared(patch: Patch, given: _Operands, s: _Sizes, count: int, long: int) -> _Chunked:
    """Everything that does not depend on the state, for all chunks at once."""

    def cut(x: Value) -> Value:
        rest = count * long - s.tokens
        if rest:  # tokens whose key is 0 change nothing
            x = patch.add("Pad", [x, integers(patch, [0, 0, 0, 0, 0, 0, rest, 0], "pads"), None, None], PadAttrs())
        return _reshaped(patch, x, s.batch, s.heads, count, long, patch.type(x).static_shape[3])

    q, k, v = cut(given.q), cut(given.k), cut(given.v)
    rows, columns = np.indices((long, long))
    zero = patch.constant(np.asarray(0, s.dtype), "zero")
    keys = _swapped(patch, k)
    since = before = after = whole = None
    if given.decay is not None:
        sums = patch.add("CumSum", [cut(given.decay), patch.constant(np.array(3, np.int64), "axis")], CumulativeAttrs())
        last = _part(patch, sums, 3, long - 1, long)
        apart = patch.add("Sub", [sums, _swapped(patch, sums)])
        since = patch.add("Exp", [chosen(patch, rows >= columns, apart, zero)])
        before, whole = patch.add("Exp", [sums]), patch.add("Exp", [last])
        after = patch.add("Exp", [patch.add("Sub", [last, sums])])

    def scores(left: Value, seen: Array, sign: bool = False) -> Value:
        found = times(patch, left, keys)
        found = found if since is None else patch.add("Mul", [found, since])
        return chosen(patch, seen, patch.add("Neg", [found]) if sign else found, zero)

    def scaled(x: Value, factor: Value | None) -> Value:
        return x if factor is None else patch.add("Mul", [x, factor])

    new, known = v, None
    if given.rate is not None:
        rate = cut(given.rate)
        rated = patch.add("Mul", [k, rate])
        inverse = inverse_of_rest(patch, scores(rated, rows > columns, sign=True), long, s.dtype)
        new = times(patch, inverse, patch.add("Mul", [v, rate]))
        known = times(patch, inverse, scaled(rated, before))
    return _Chunked(new, known, scaled(q, before), scores(q, rows >= columns), scaled(k, after), whole)


class LinearAttentions(RulePass):
    """For GPUs: CPU libraries have kernels of their own, or run the operator token by token."""

    name = "linear_attentions"
    rules = (linear_attention,)
