"""Rotary embeddings in many forms: sizes, angles, and places of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import INT64
from support.net import Net


def angles(n: Net, length: int, half: int, batch: int = 1) -> list[Any]:
    """Constant cosines and sines."""
    turn = n.rng.uniform(-3, 3, (batch, length, half))
    return [n.const(np.cos(turn)), n.const(np.sin(turn))]


def heads_first(
    shape: tuple[int, int, int, int] = (2, 3, 7, 64), turned: int = 0, *, interleaved: bool = False, given: int = 0,
    own: bool = False, parts: int = 1,
) -> Graph:  # fmt: skip
    """A rotary embedding of an input (batch, heads, length, size).

    ``given``: the batch of cosines and sines that are inputs; 0 for constants. ``own``: each feature has its own angle.
    """
    n = Net()
    batch, heads, length, size = shape
    half = (turned or size) // (1 if own else 2)
    x = n.op("Abs", n.input(batch, heads, length, size))
    pair = [n.input(given, length, half, name=name) for name in ("cos", "sin")] if given else angles(n, length, half)
    return n.done(n.op("RotaryEmbedding", x, *pair, attrs=RotaryAttrs(interleaved, turned, own, parts)))


def normed(
    kind: str = "RMSNormalization", *, tokens: bool = False, heads: int = 4, groups: int = 2, size: int = 64, turned: int = 0,
    interleaved: bool = False, length: int = 9, before: bool = True, given: int = 0, own: bool = False,
    parts: int = 1,
) -> Graph:  # fmt: skip
    """Queries and keys of one product. Norms of heads, or of all heads of a token (OLMo 2), precede their rotary embeddings.

    ``before``: norms are before the Transpose. ``given``: see :func:`heads_first`.
    """
    n = Net()
    rows = n.matmul(n.input(2, length, 64), (heads + 2 * groups) * size)
    columns = n.op("Split", rows, n.ints(heads * size, groups * size, groups * size), attrs=SplitAttrs(-1), outputs=3)
    half = (turned or size) // (1 if own else 2)
    turn = [n.input(given, length, half, name=name) for name in ("cos", "sin")] if given else angles(n, length, half)

    def norm(x: Any, width: int) -> Any:
        return n.op(kind, x, n.positive(width), *([n.random(width)] if kind == "LayerNormalization" else []))

    def prepared(x: Any, count: int, turns: bool) -> Any:
        x = norm(x, count * size) if turns and tokens else x
        x = n.op("Reshape", x, n.ints(2, length, count, size))
        x = norm(x, size) if turns and not tokens and before else x
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3)))
        x = norm(x, size) if turns and not tokens and not before else x
        return n.op("RotaryEmbedding", x, *turn, attrs=RotaryAttrs(interleaved, turned, own, parts)) if turns else x

    q, k, v = (prepared(x, c, t) for x, c, t in zip(columns, (heads, groups, groups), (True, True, False), strict=True))
    return n.done(n.op("Attention", q, k, v))


def position_ids(size: int = 64, batch: int = 2) -> Graph:
    """Angles that are rows of a table of 20 positions."""
    n = Net()
    x, at = n.op("Abs", n.input(batch, 3, 7, size)), n.input(batch, 7, name="at", dtype=INT64)
    pair = [n.op("Gather", n.op("Reshape", t, n.ints(20, size // 2)), at) for t in angles(n, 20, size // 2)]
    return n.done(n.op("RotaryEmbedding", x, *pair))


def of_a_product(
    heads: int = 3, groups: int = 3, size: int = 64, *, interleaved: bool = False, length: int = 9, still: int = 0,
    own: bool = False, parts: int = 1, images: int = 1,
) -> Graph:  # fmt: skip
    """Queries and keys in rows of one product, for attention. The first ``still`` positions are not rotated."""
    n = Net()
    rows = n.matmul(n.input(2, length, 64), (heads + 2 * groups) * size)
    columns = n.op("Split", rows, n.ints(heads * size, groups * size, groups * size), attrs=SplitAttrs(-1), outputs=3)
    turn = angles(n, length - still, size if own else size // 2)
    if images > 1:
        turn = [n.const(np.repeat(n.graph.op(v).attrs.value, images, 0)) for v in turn]
    q, k, v = (
        n.op("Transpose", n.op("Reshape", t, n.ints(2, length, count, size)), attrs=TransposeAttrs((0, 2, 1, 3)))
        for t, count in zip(columns, (heads, groups, groups), strict=True)
    )

    def turned(t: Any) -> Any:
        first, rest = (n.op("Slice", t, n.ints(a), n.ints(b), n.ints(2)) for a, b in ((0, still), (still, length)))
        found = n.op("RotaryEmbedding", rest if still else t, *turn, attrs=RotaryAttrs(interleaved, 0, own, parts))
        return n.op("Concat", first, found, attrs=ConcatAttrs(2)) if still else found

    return n.done(n.op("Attention", turned(q), turned(k), v))


def by_head(batch: int = 1) -> Graph:
    """Heads of queries and keys with different angles: heads and images are exchanged before and after the embeddings."""
    n, swap = Net(), TransposeAttrs((1, 0, 2, 3))
    q, k, v = (
        n.op("Transpose", n.op("Abs", n.input(batch, 9, 3, 64, name=name)), attrs=TransposeAttrs((0, 2, 1, 3)))
        for name in "qkv"
    )
    turn = angles(n, 9, 32, batch=3)
    q, k = (
        n.op("Transpose", n.op("RotaryEmbedding", n.op("Transpose", x, attrs=swap), *turn), attrs=swap) for x in (q, k)
    )
    return n.done(n.op("Attention", q, k, v))


def over_a_past(kind: str = "", *, joined_first: bool = False, axis: int = 2) -> Graph:
    """Queries and keys, with norms of ``kind`` ("": none). The keys follow those of the past; all keys are a result as well.

    ``joined_first``: queries depend on all keys. ``axis`` 1: the others are keys of other heads."""
    n = Net()
    rows = n.matmul(n.input(2, 3, 64), 3 * 4 * 32)
    turn = angles(n, 3, 16)
    columns = n.op("Split", rows, n.ints(128, 128, 128), attrs=SplitAttrs(-1), outputs=3)

    def heads(x: Any) -> Any:
        return n.op("Transpose", n.op("Reshape", x, n.ints(2, 3, 4, 32)), attrs=TransposeAttrs((0, 2, 1, 3)))

    def turned(x: Any) -> Any:
        return n.op("RotaryEmbedding", n.op(kind, x, n.positive(32)) if kind else x, *turn)

    def joined(x: Any, name: str) -> Any:
        past = n.input(2, 4, 5 if axis == 2 else 3, 32, name=name)
        return n.op("Concat", past, x, attrs=ConcatAttrs(axis))

    keys = joined(turned(heads(columns[1])), "past keys")
    q = heads(columns[0])
    if joined_first:
        q = n.op("Add", q, n.op("ReduceMax", keys, n.ints(2), attrs=ReduceAttrs()))
    q, values = turned(q), joined(heads(columns[2]), "past values")
    q = n.op("Concat", q, q, attrs=ConcatAttrs(1)) if axis == 1 else q
    return n.done(n.op("Attention", q, keys, values), keys)


def normalized_after(kind: str = "RMSNormalization", *, first: bool = False) -> Graph:
    """Rotated queries and keys are normalized (Hunyuan). ``first``: keys are normalized before queries are rotated."""
    n = Net()
    columns = n.op(
        "Split", n.matmul(n.input(2, 3, 64), 3 * 4 * 32), n.ints(128, 128, 128), attrs=SplitAttrs(-1), outputs=3
    )
    turn = angles(n, 3, 16)

    def heads(x: Any) -> Any:
        return n.op("Transpose", n.op("Reshape", x, n.ints(2, 3, 4, 32)), attrs=TransposeAttrs((0, 2, 1, 3)))

    keys = n.op(kind, n.op("RotaryEmbedding", heads(columns[1]), *turn), n.positive(32))
    q = heads(columns[0])
    for one in ("Softmax", "RMSNormalization") if first else ():
        q = n.op(one, q, *([] if one == "Softmax" else [n.positive(32)]))
    q = n.op(kind, n.op("RotaryEmbedding", q, *turn), n.positive(32))
    return n.done(n.op("Attention", q, keys, heads(columns[2])))


def part_of_a_concatenation() -> Graph:
    """The result follows other keys, in rows of a cache."""
    n = Net()
    x, past = n.op("Abs", n.input(2, 3, 5, 32)), n.op("Abs", n.input(2, 3, 11, 32, name="past"))
    return n.done(n.op("Concat", past, n.op("RotaryEmbedding", x, *angles(n, 5, 16)), attrs=ConcatAttrs(2)))


def every_second_angle() -> Graph:
    """Cosines and sines with a stride of two."""
    n = Net()
    x = n.op("Abs", n.input(2, 3, 7, 32))
    pair = [
        n.op("Slice", n.input(1, 7, 32, name=name), n.ints(0), n.ints(32), n.ints(2), n.ints(2))
        for name in ("cos", "sin")
    ]
    return n.done(n.op("RotaryEmbedding", x, *pair, attrs=RotaryAttrs(True)))


ROTARY: dict[str, Callable[[], Graph]] = {
    "halves": heads_first,
    "neighbors": lambda: heads_first(interleaved=True),
    "a part": lambda: heads_first((2, 3, 7, 80), 32),
    "a part, neighbors": lambda: heads_first((2, 3, 7, 80), 64, interleaved=True),
    "narrow vectors": lambda: heads_first((2, 3, 7, 20), 12),
    "narrow vectors, neighbors": lambda: heads_first((2, 3, 7, 20), interleaved=True),
    "one row": lambda: heads_first((1, 1, 1, 128)),
    "one pair in a vector": lambda: heads_first((3, 2, 5, 4)),
    "many rows": lambda: heads_first((4, 12, 197, 64)),
    "angles of inputs": lambda: heads_first(given=1),
    "angles of each sample": lambda: heads_first(given=2, interleaved=True),
    "position ids": position_ids,
    "every second angle": every_second_angle,
    "own angles": lambda: heads_first(own=True),
    "two parts": lambda: heads_first(parts=2),
    "three parts of a part": lambda: heads_first((2, 3, 7, 64), 48, parts=3, given=2),
    "own angles of parts": lambda: heads_first((2, 3, 7, 32), own=True, parts=2),
    "by head": by_head,
    "by head, images": lambda: by_head(2),
    "own angles of neighbors": lambda: heads_first((2, 3, 7, 64), 60, interleaved=True, own=True),
    "own angles of a part": lambda: heads_first((2, 3, 7, 80), 64, own=True, given=2),
    "own angles of a product": lambda: of_a_product(interleaved=True, own=True),
    "of a product": of_a_product,
    "of a product, neighbors": lambda: of_a_product(interleaved=True),
    "of a product, grouped": lambda: of_a_product(4, 2, 32, length=17),
    "of a product, parts": lambda: of_a_product(parts=2),
    "class token": lambda: of_a_product(still=1, interleaved=True),
    "registers": lambda: of_a_product(4, 2, still=5, length=21),
    "part of a concatenation": part_of_a_concatenation,
}

NORMED: dict[str, Callable[[], Graph]] = {
    "RMS norms of heads": normed,
    "layer norms of heads": lambda: normed("LayerNormalization", before=False),
    "a part turns": lambda: normed("LayerNormalization", turned=32),
    "a quarter turns": lambda: normed(turned=16, heads=3, groups=3),
    "wide heads": lambda: normed(size=256, heads=2, groups=1),
    "neighbors": lambda: normed(interleaved=True),
    "parts": lambda: normed(parts=2),
    "tokens of parts": lambda: normed("LayerNormalization", tokens=True, heads=8, groups=8, turned=32, parts=2),
    "tokens": lambda: normed(tokens=True, heads=8, groups=8),
    "tokens, grouped": lambda: normed("LayerNormalization", tokens=True, heads=16, groups=8, interleaved=True),
    "angles of inputs": lambda: normed(given=2),
    "tokens, angles of inputs": lambda: normed(tokens=True, heads=8, groups=8, given=1, turned=32),
}
"""Queries and keys that are normalized and rotated in one launch."""
