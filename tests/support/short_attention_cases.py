"""Attention along time: graphs for tests of attention over few tokens."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.shape import TransposeAttrs
from support.net import Net


def heads(n: Net, x: Value, batch: Any, tokens: int, count: int, width: int) -> Value:
    y = n.op(
        "Reshape", n.matmul(x, count * width), n.ints(-1 if not isinstance(batch, int) else batch, tokens, count, width)
    )
    return n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3)))  # type: ignore[no-any-return]


def frames(
    batch: Any = 12, queries: int = 8, keys: int = 8, count: int = 2, shared: int = 2, mask: bool = False, **attrs: Any
) -> Graph:
    """Attention along time over features that products compute."""
    n = Net()
    x = n.input(batch, queries, 16)
    z = x if keys == queries else n.input(batch, keys, 16, name="z")
    given = [heads(n, x, batch, queries, count, 8), *(heads(n, z, batch, keys, shared, 8) for _ in range(2))]
    given += [n.random(queries, keys)] if mask else []
    y = n.op("Attention", *given, attrs=AttentionAttrs(**attrs))
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(-1, queries, count * 8))
    return n.done(n.matmul(y, 16))
