"""Attention over few tokens: several items share a tile of a kernel, and attention over one key is its value.

Video networks attend along time at each pixel: thousands of batch items of 8 or 16 frames. A kernel's tile has 64 queries, and most
of it would be idle. So consecutive items become one, with a mask that separates them. With one key, every softmax is 1 and the
result is the value. ("Stable Video Diffusion", Blattmann et al., 2023, attends to one key: the picture that the video begins with.)
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import HEADS_FIRST, heads_sizes, integers, operand, reshaped
from optdnn.passes.support.views import transposed

TILE = 64
"""Queries of a tile, and keys of a tile."""
MOST_TOKENS = 16
"""Most tokens of an item: with more, less than three quarters of a tile would be idle."""
FEWEST_ITEMS = 2048
"""Fewest items times heads: with fewer, joined items would be too few blocks to keep all multiprocessors busy."""


@rule("one_key", {"Attention"})
def one_key(graph: Graph, op: Op) -> Match | Miss | None:
    """``attention(q, k, v)`` over one key is ``v``, repeated for each query."""
    shapes = heads_sizes(graph, op)
    if shapes is None or shapes[1][2] != 1 or not _is_plain(graph, op):
        return None
    (batch, heads, tokens, _), (_, shared, _, width) = shapes[0], shapes[2]
    if heads != shared:
        return Miss("its heads share values, which would have to be repeated")
    target = (batch, heads, tokens, width)
    return Match((op,), lambda patch: patch.add("Expand", [operand(op, 2), integers(patch, target, "shape")]))


@rule("packed_items", {"Attention"})
def packed_items(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Consecutive items of few tokens become one item. A mask lets each token attend only to its own item."""
    shapes = heads_sizes(graph, op)
    if shapes is None or not _is_plain(graph, op):
        return None
    (batch, heads, queries, _), (_, _, keys, _) = shapes[0], shapes[1]
    if max(queries, keys) > MOST_TOKENS or keys < 2:
        return None
    if context.row_invariant:
        return Miss("how many items fit together depends on the size of the batch, and with row_invariant no row may")
    if batch * heads < FEWEST_ITEMS:
        return Miss(f"{batch * heads} items of {queries} tokens are not enough for all multiprocessors")
    together = max(n for n in range(1, TILE // max(queries, keys) + 1) if batch % n == 0)
    if together < 2:
        return Miss(f"{batch} items cannot be put together in equal parts")
    apart = np.kron(np.eye(together), np.ones((queries, keys))) == 0
    mask = np.where(apart, -np.inf, 0.0).astype(graph.type(operand(op)).dtype)

    def build(patch: Patch) -> None:
        given = [_joined(patch, operand(op, i), shape, together) for i, shape in enumerate(shapes)]
        y = patch.add_op("Attention", [*given, patch.constant(mask[None, None], "items")], op.attrs).value
        y = transposed(patch, y, HEADS_FIRST)
        y = reshaped(patch, y, (batch, queries, heads, shapes[2][3]))
        patch.replace(op.value, transposed(patch, y, HEADS_FIRST))

    return Match((op,), build)


def _joined(patch: Patch, x: Value, shape: tuple[int, ...], together: int) -> Value:
    """Items [B, H, T, D] as [B / together, H, together * T, D]."""
    batch, heads, tokens, width = shape
    x = transposed(patch, x, HEADS_FIRST)
    x = reshaped(patch, x, (batch // together, together * tokens, heads, width))
    return transposed(patch, x, HEADS_FIRST)


def _is_plain(graph: Graph, op: Op) -> bool:
    """Whether an Attention has no mask, cache or window, and only its first result is read."""
    a = op.attrs
    alone = not any(graph.users(v) for v in op.values[1:])
    bounded = a.is_causal or a.left_window_size >= 0 or a.right_window_size >= 0
    return alone and not bounded and all(v is None for v in op.inputs[3:])


class ShortAttention(RulePass):
    name = "short_attention"
    rules = (one_key, packed_items)
