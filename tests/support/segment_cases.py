"""Sums scattered to constant positions, as in graph networks: graphs for tests of SegmentSum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs, ScatterElementsAttrs, ScatterNDAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.unary import AlphaAttrs
from support.net import Net, built

NODES, EDGES = 21, 90


def edges(seed: int, *, least: int = 0) -> Any:
    """One end of every edge. Node 3 has none, node 5 has many."""
    rng = np.random.default_rng(seed)
    found = rng.integers(least, NODES, EDGES)
    found[found == 3] = 4
    found[::3] = 5
    return found


def scattered(n: Net, rows: Value, target: Any, *shape: int, start: Any = 0.0, reduction: str = "add") -> Value:
    data = n.const(np.full((NODES, *shape), start, np.float32)) if isinstance(start, float) else start
    index = n.const(np.reshape(target, (-1, 1)), np.int64)
    return n.op("ScatterND", data, index, rows, attrs=ScatterNDAttrs(reduction))  # type: ignore[no-any-return]


def rows_of(n: Net, x: Value, places: Any, axis: int = 0) -> Value:
    return n.op("Gather", x, n.const(places, np.int64), attrs=GatherAttrs(axis))  # type: ignore[no-any-return]


def plain(n: Net, width: int = 16) -> list[Value]:
    """Rows of one tensor, gathered and summed."""
    return [scattered(n, n.input(EDGES, width), edges(1), width)]


def negative(n: Net) -> list[Value]:
    """Rows counted from the end, and added to a tensor."""
    x = n.input(EDGES, 16)
    return [scattered(n, x, edges(1) - NODES, 16, start=n.input(NODES, 16, name="start"))]


def messages(n: Net) -> list[Value]:
    """Differences of nodes, weighted by a number per edge (EdgeConv, GCN)."""
    x = n.input(NODES, 24)
    change = n.op("Sub", rows_of(n, x, edges(2)), rows_of(n, x, edges(1) - NODES))
    weight = n.const(np.random.default_rng(4).uniform(0.5, 2, (EDGES, 1)))
    return [scattered(n, n.op("Mul", n.op("Relu", change), weight), edges(1), 24)]


def attention(n: Net, *, heads: int = 1) -> list[Value]:
    """GAT as PyTorch exports it: the batch first, and a softmax over the edges of a node."""
    x, source, target = n.input(heads, NODES, 16), edges(2), edges(1)
    scores = [n.op("MatMul", x, n.random(16, scale=0.3)) for _ in range(2)]

    def ends(value: Value, places: Any, *shape: int) -> Value:
        first = n.op("Transpose", value, attrs=TransposeAttrs((1, 0, *range(2, len(n.dims(value))))))
        taken = n.op("GatherND", first, n.const(places[:, None], np.int64), attrs=GatherNDAttrs())
        return n.op("Transpose", taken, attrs=TransposeAttrs((1, 0, *range(2, len(n.dims(value))))))  # type: ignore[no-any-return]

    heat = n.op("Add", ends(scores[0], source), ends(scores[1], target))
    weight = n.op("Exp", n.op("Tanh", heat))
    whole = scattered(n, n.op("Transpose", weight, attrs=TransposeAttrs((1, 0))), target, heads)
    whole = n.op("Transpose", whole, attrs=TransposeAttrs((1, 0)))
    share = n.op("Unsqueeze", n.op("Div", weight, ends(whole, target)), n.ints(2))
    sent = n.op("Mul", ends(x, source), share)
    total = scattered(n, n.op("Transpose", sent, attrs=TransposeAttrs((1, 0, 2))), target, heads, 16)
    return [n.op("Transpose", total, attrs=TransposeAttrs((1, 0, 2)))]


def degrees(n: Net) -> list[Value]:
    """The features of a node's neighbors, times a number of the node before and after the sum (GCN's norm)."""
    x, norm = n.input(NODES, 16), n.op("Sigmoid", n.input(NODES, 1, name="norm"))
    source, target = edges(2), edges(1)
    sent = n.op("Mul", rows_of(n, x, source), n.op("Mul", rows_of(n, norm, source), rows_of(n, norm, target)))
    return [scattered(n, sent, target, 16)]


def own_rows(n: Net) -> list[Value]:
    """Every row is a row of the result, so the sums have only factors."""
    x, target = n.input(NODES, 16), edges(1)
    return [scattered(n, n.op("Mul", rows_of(n, x, target), rows_of(n, x, target)), target, 16)]


def narrow(n: Net) -> list[Value]:
    """The row of a node is a factor of its sum of a number per edge, which has no width, and of a constant."""
    x, target = n.input(NODES, 16), edges(1)
    return [
        scattered(n, n.op("Mul", rows_of(n, x, target), n.input(EDGES, 1, name="weight")), target, 16),
        scattered(n, n.op("Mul", rows_of(n, x, target), n.random(16)), target, 16),
    ]


def pooled(n: Net) -> list[Value]:
    """Sums over three parts of many rows. ScatterElements repeats their positions for every feature."""
    rows = 3000
    place = np.sort(np.random.default_rng(3).integers(0, 3, rows))
    x = n.op("Tanh", n.input(rows, 8))
    data, index = n.const(np.zeros((4, 8), np.float32)), n.const(np.repeat(place[:, None], 8, 1), np.int64)
    return [n.op("ScatterElements", data, index, x, attrs=ScatterElementsAttrs(0, "add"))]


def activated(n: Net, width: int = 16) -> list[Value]:
    """A bias and activations after the sum, for nodes with and without edges, and a factor of each node."""
    x, scale, target = n.input(NODES, width), n.op("Exp", n.input(NODES, 1, name="scale")), edges(1)
    total = scattered(n, n.op("Mul", rows_of(n, x, edges(2)), rows_of(n, scale, target)), target, width)
    y = n.op("Clip", n.op("Elu", n.op("Add", n.random(width), total), attrs=AlphaAttrs(0.5)), -0.3, 20.0)
    return [n.op("Mul", y, n.random(NODES, 1))]


def numbers(n: Net) -> list[Value]:
    """One number for each edge."""
    x = n.input(NODES, 1)
    heat = n.op("Sub", rows_of(n, x, edges(2)), n.op("Mul", rows_of(n, x, edges(1)), 0.5))
    return [scattered(n, n.op("Sigmoid", heat), edges(1), 1)]


def largest(n: Net, width: int = 16) -> list[Value]:
    """The largest message of each node, and 0 (GraphSAGE's pool)."""
    x = n.input(NODES, width)
    message = n.op("Tanh", n.op("Sub", rows_of(n, x, edges(2)), rows_of(n, x, edges(1))))
    return [scattered(n, message, edges(1), width, reduction="max")]


def smallest(n: Net) -> list[Value]:
    """The smallest of the rows of each node and a row of ``start``."""
    rows, start = n.input(EDGES, 16), n.input(NODES, 16, name="start")
    return [scattered(n, rows, edges(1), 16, start=start, reduction="min")]


def stable_softmax(n: Net) -> list[Value]:
    """GATv2's softmax over the edges of a node. Every node has edges, so no number exceeds the subtracted maximum."""
    target = np.concatenate([np.arange(NODES), edges(1)[NODES:]])
    x = n.input(EDGES, 4)
    most = scattered(n, x, target, 4, start=float("-inf"), reduction="max")
    weight = n.op("Exp", n.op("Sub", x, rows_of(n, most, target)))
    return [scattered(n, weight, target, 4)]


CASES: dict[str, Callable[[Net], list[Value]]] = {
    "plain": plain,
    "odd": lambda n: plain(n, 5),
    "negative": negative,
    "messages": messages,
    "attention": attention,
    "attention_heads": lambda n: attention(n, heads=2),
    "degrees": degrees,
    "own_rows": own_rows,
    "narrow": narrow,
    "pooled": pooled,
    "activated": activated,
    "activated_odd": lambda n: activated(n, 5),
    "numbers": numbers,
    "largest": largest,
    "largest_odd": lambda n: largest(n, 5),
    "smallest": smallest,
    "stable_softmax": stable_softmax,
}


def graph_of(name: str) -> Graph:
    return built(CASES[name])
