"""Minimum cuts, by networkx: passes use them to choose between two forms for many ops at once, at the least total cost."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov


def minimum_cut(
    arcs: Iterable[tuple[Hashable, Hashable, float]], source: Hashable, sink: Hashable
) -> tuple[int, set[Hashable]]:
    """The least total capacity of arcs that separate ``sink`` from ``source``, and the nodes on the sink's side.

    Capacities are integers or infinite; the capacities of parallel arcs add up. If there are several minimum cuts, the one with the
    smallest sink side is returned.
    """
    g = nx.DiGraph()
    g.add_nodes_from((source, sink))
    for a, b, capacity in arcs:
        if a == b or not capacity:
            continue
        if math.isinf(capacity):
            g.add_edge(a, b)
            g[a][b].pop("capacity", None)  # networkx: no capacity is unbounded capacity
        elif not g.has_edge(a, b):
            g.add_edge(a, b, capacity=int(capacity))
        elif "capacity" in g[a][b]:
            g[a][b]["capacity"] += int(capacity)
    value, (_, far) = nx.minimum_cut(g, source, sink, flow_func=boykov_kolmogorov)
    return int(value), set(far)
