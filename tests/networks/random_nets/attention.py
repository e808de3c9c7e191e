"""Transformers: self and cross attention in the forms that exporters write, masks, rotary embeddings, shared keys, norms."""

from __future__ import annotations

import math

import numpy as np

from random_nets.blocks import (
    activation,
    arithmetic,
    breadth,
    combined,
    cut,
    fits,
    linear,
    reduce,
    reshape,
    row_norm,
    softmax,
    split,
)
from random_nets.draw import BOOL, I64, Draw, Value

HEAD_SIZES = (2, 3, 4, 5, 6, 8, 8, 12, 16, 16, 20, 32)


def _heads(d: Draw, x: Value, heads: int) -> Value:
    """[batch, length, heads * size] to [batch, heads, length, size]."""
    width = x.dims[-1]
    assert isinstance(width, int)
    y = reshape(d, x, (*x.dims[:2], heads, width // heads))
    return d.op("Transpose", y, perm=[0, 2, 1, 3])


def _projected(d: Draw, x: Value, memory: Value, heads: int, shared: int, size: int) -> tuple[Value, Value, Value]:
    """Queries, keys and values [batch, heads, length, size]: from one product and a Split if all have one source."""
    if memory is x and shared == heads and d.random.chance(0.5):
        y = linear(d, x, 3 * heads * size)
        if d.random.chance(0.5):
            return tuple(_heads(d, part, heads) for part in split(d, y, -1, [heads * size] * 3))  # type: ignore[return-value]
        y = reshape(d, y, (*x.dims[:2], 3, heads, size))
        y = d.op("Transpose", y, perm=[2, 0, 3, 1, 4])
        return tuple(d.op("Gather", y, d.scalar(i, np.int64), axis=0) for i in range(3))  # type: ignore[return-value]
    q = _heads(d, linear(d, x, heads * size), heads)
    k = _heads(d, linear(d, memory, shared * size), shared)
    v = _heads(d, linear(d, memory, shared * size), shared)
    return q, k, v


def _rotary(d: Draw, x: Value, cos: Value, sin: Value) -> Value:
    """Rotary embedding with the halves exchanged, as transformers exports it."""
    size = x.dims[-1]
    assert isinstance(size, int)
    half = size // 2
    if d.opset >= 23 and x.static and d.random.chance(0.4):
        at = d.random.array(np.float32, (x.shape[0], x.shape[2], half), -1, 1)
        return d.op("RotaryEmbedding", x, d.const(np.cos(at)), d.const(np.sin(at)))
    if d.random.chance(0.5):
        low, high = cut(d, x, -1, 0, half), cut(d, x, -1, half, 2**31 - 1)
    else:
        low, high = split(d, x, -1, [half, half])
    turned = d.op("Concat", d.op("Neg", high), low, axis=-1)
    return d.op("Add", d.op("Mul", x, cos), d.op("Mul", turned, sin))


def _angles(d: Draw, length: int, size: int) -> tuple[Value, Value]:
    at = np.arange(length)[:, None] / 10 ** (4 * np.arange(size // 2) / size)
    at = np.concatenate([at, at], -1).astype(np.float32)
    shape = (1, 1, length, size) if d.random.chance(0.5) else (length, size)
    return d.const(np.cos(at).reshape(shape), np.float32), d.const(np.sin(at).reshape(shape), np.float32)


def _repeated(d: Draw, x: Value, times: int) -> Value:
    """Repeats keys or values of few heads for each head that shares them."""
    b, heads, length, size = x.dims
    assert isinstance(heads, int)
    y = d.op("Unsqueeze", x, d.ints(2))
    if isinstance(b, int) and isinstance(length, int) and d.random.chance(0.6):
        y = d.op("Expand", y, d.ints(b, heads, times, length, size if isinstance(size, int) else 1))
    else:
        y = d.op("Tile", y, d.ints(1, 1, times, 1, 1))
    return reshape(d, d.known_as(y, (b, heads, times, length, size)), (b, heads * times, length, size))


def _masked(d: Draw, scores: Value) -> Value:
    """Scores with a mask: causal or given, added or selected by Where."""
    b, _, rows, columns = scores.dims
    form = d.random.below(5)
    if form == 0 and isinstance(rows, int) and isinstance(columns, int):
        causal = np.tril(np.ones((rows, columns), bool), max(0, columns - rows))
        if d.random.chance(0.5):
            return d.op("Add", scores, d.const(np.where(causal, 0, -1e4)[None, None], np.float32))
        low = d.random.choice([-1e9, -3.4028234e38, -1e4])
        return d.op("Where", d.const(causal), scores, d.scalar(low))
    if form == 1:
        mask = d.input((b, columns), I64, 0, 1)
        m = d.op("Cast", d.op("Unsqueeze", mask, d.ints(1, 2)), to=1)
        return d.op("Add", scores, d.op("Mul", d.op("Sub", d.scalar(1), m), d.scalar(-1e4)))
    if form == 2:
        mask = d.input((b, 1, rows, columns) if d.random.chance(0.5) else (b, 1, 1, columns), BOOL)
        return d.op("Where", mask, scores, d.scalar(d.random.choice([-1e4, -50.0])))
    if form == 3 and isinstance(rows, int) and isinstance(columns, int):
        bias = d.weights(*d.random.choice([(1, 1, rows, columns), (rows, columns), (1, 1, 1, columns)]), fan_in=2)
        return d.op("Add", scores, bias)
    return scores


def attention(d: Draw, x: Value, memory: Value | None = None) -> Value:
    """softmax(q k' * scale + mask) v with its projections."""
    r = d.random
    memory = memory or x
    size, heads = r.choice(HEAD_SIZES), r.choice([1, 2, 2, 3, 4])
    shared = r.choice([n for n in (1, 2, heads) if heads % n == 0]) if r.chance(0.3) else heads
    q, k, v = _projected(d, x, memory, heads, shared, size)
    length = q.dims[2]
    if size % 2 == 0 and memory is x and isinstance(length, int) and r.chance(0.25):
        cos, sin = _angles(d, length, size)
        q, k = _rotary(d, q, cos, sin), _rotary(d, k, cos, sin)
    if d.opset >= 23 and r.chance(0.4):
        causal = {"is_causal": 1} if r.chance(0.3) and q.dims[2] == k.dims[2] else {}
        y = d.op("Attention", q, k, v, **causal)
    else:
        if shared != heads:
            k, v = _repeated(d, k, heads // shared), _repeated(d, v, heads // shared)
        y = _weighted(d, q, k, v, size)
    y = d.op("Transpose", y, perm=[0, 2, 1, 3])
    y = reshape(d, d.known_as(y, (*x.dims[:2], heads, size)), (*x.dims[:2], heads * size))
    width = x.dims[-1]
    assert isinstance(width, int)
    return linear(d, y, width)


def _weighted(d: Draw, q: Value, k: Value, v: Value, size: int) -> Value:
    r, scale = d.random, 1 / math.sqrt(size)
    form = r.below(5)
    if form == 0:
        q = d.op("Mul", q, d.scalar(scale))
    if form == 1:
        q, k = d.op("Mul", q, d.scalar(math.sqrt(scale))), d.op("Mul", k, d.scalar(math.sqrt(scale)))
    if r.chance(0.15):
        scores = d.op("Einsum", q, k, equation="bhqd,bhkd->bhqk")
    else:
        scores = d.op("MatMul", q, d.op("Transpose", k, perm=[0, 1, 3, 2]))
    if form == 2:
        scores = d.op("Div", scores, d.scalar(1 / scale))
    elif form == 3:
        scores = d.op("Mul", scores, d.scalar(scale))
    scores = d.known_as(scores, (q.dims[0], q.dims[1], q.dims[2], k.dims[2]))
    if r.chance(0.6):
        scores = _masked(d, scores)
    weights = softmax(d, scores)
    if r.chance(0.1):
        weights = d.op("Where", d.op("IsNaN", weights), d.scalar(0), weights)
    return d.op("MatMul", weights, v)


def feed_forward(d: Draw, x: Value) -> Value:
    """Two products with an activation between them, sometimes gated."""
    width = x.dims[-1]
    assert isinstance(width, int)
    units = breadth(d, [width, 2 * width, 4 * width, 24, 17])
    y = activation(d, linear(d, x, units))
    if d.random.chance(0.3):
        y = d.op("Mul", y, d.op("Tanh", linear(d, x, units)))
    return linear(d, y, width)


def layer(d: Draw, x: Value) -> Value:
    """One encoder or decoder layer, with the norm before or after each part."""
    before = d.random.chance(0.5)
    memory = d.pick(lambda v: v.rank == 3 and v.is_float and v.dims[0] == x.dims[0] and isinstance(v.dims[2], int))
    for step in ("attention", "feed"):
        a = row_norm(d, x) if before else x
        if step == "attention":
            other = memory if memory is not None and memory.known and d.random.chance(0.3) else None
            y = attention(d, a, other)
        else:
            y = feed_forward(d, a)
        x = d.op("Add", *d.random.shuffled([x, y]))
        x = x if before else row_norm(d, x)
    return x


def _embedded(d: Draw, dims: tuple[int | str, int | str], width: int) -> Value:
    """Tokens from a table, with positions if the length is known."""
    words = d.random.choice([5, 11, 30])
    ids = d.input(dims, d.random.choice([I64, np.dtype("int32")]), 0, words - 1)
    x = d.op("Gather", d.weights(words, width), ids)
    if isinstance(dims[1], int) and d.random.chance(0.6):
        x = d.op("Add", x, d.weights(dims[1], width, fan_in=4))
    return x


def _ended(d: Draw, x: Value) -> Value:
    form = d.random.below(4)
    if form == 0:
        return d.op("Gather", x, d.scalar(0, np.int64), axis=1)
    if form == 1:
        return reduce(d, "ReduceMean", x, [1], False)
    if form == 2:
        return softmax(d, linear(d, x, d.random.choice([3, 7, 11])))
    return d.op("ArgMax", linear(d, x, 9), axis=-1, keepdims=d.random.below(2))


def draw(d: Draw, batch: int | str | None = None, length: int | str | None = None) -> None:
    """A small transformer; ``batch`` and ``length`` may be symbols."""
    r = d.random
    batch = batch or r.choice([1, 1, 2, 3])
    length = length or r.choice([1, 2, 3, 5, 7, 8, 12, 16, 17, 24])
    width = breadth(d, [4, 6, 8, 12, 16, 17, 20, 24, 32])
    x = _embedded(d, (batch, length), width) if r.chance(0.4) else d.input((batch, length, width))
    d.keep(x)
    if r.chance(0.3):
        d.keep(d.input((batch, r.choice([1, 3, 6, 9, 16]), r.choice([width, 8, 12]))))
    for _ in range(r.between(1, 3)):
        fit = d.pick(lambda v: v.rank == 3 and fits(v) and v.dims[:2] == (batch, length) and isinstance(v.dims[2], int))
        x = fit or x
        step = r.below(8)
        if step < 4:
            d.keep(layer(d, x))
        elif step < 5:
            d.keep(attention(d, x))
        elif step < 6:
            d.keep(feed_forward(d, row_norm(d, x)))
        else:
            d.keep(arithmetic(d, x) if r.chance(0.5) else combined(d, x))
    if r.chance(0.5):
        last = d.values[-1]
        if last.rank == 3 and last.dims[1] != 0 and isinstance(last.dims[2], int):
            d.keep(_ended(d, last))
