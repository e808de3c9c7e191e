"""Decomposed attention over inputs of equal sizes, for the tests of fuse_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.shape import TransposeAttrs
from support.net import Net

B, H, L, D = 2, 3, 5, 4


ONE = {"Attention": 1}


def net(
    *, mask: Callable[[Net, Value], Value] | None = None, shared: int = H, batch: Any = B, length: Any = L, extra: bool = False
) -> Graph:  # fmt: skip
    """softmax(mask(q k^T / 2)) v over inputs; ``shared`` key heads repeated by Expand."""
    n = Net(np.float64)
    q = n.input(batch, H, length, D, name="q")
    k, v = (n.input(batch, shared, length, D, name=name) for name in "kv")
    if shared != H:
        k, v = (repeated(n, x, H // shared) for x in (k, v))
    kt = n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))
    s = n.op("Mul", n.op("MatMul", q, kt), 0.5)
    p = n.op("Softmax", s if mask is None else mask(n, s))
    y = n.op("MatMul", p, v)
    return n.done(y, *([p] if extra else []))


def repeated(n: Net, x: Value, times: int) -> Value:
    b, g, s, d = n.dims(x)
    wide = n.op("Expand", n.op("Unsqueeze", x, n.ints(2)), n.ints(1, 1, times, 1, 1))
    return n.op("Reshape", wide, n.ints(b, g * times, s, d))  # type: ignore[arg-type, operator]


def attention(graph: Graph) -> Op:
    (op,) = graph.of_kind("Attention")
    return op


def added(array: Any) -> Callable[[Net, Value], Value]:
    return lambda n, s: n.op("Add", s, n.const(array))
