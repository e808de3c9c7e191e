"""Nodes are sorted as networkx sorts them."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from optdnn.errors import InternalError
from optdnn.ir.multigraph import topological_order


def drawn(seed: int) -> nx.MultiDiGraph:
    """Random edges, several between some nodes; the nodes come in any order."""
    rng = np.random.default_rng(seed)
    graph = nx.MultiDiGraph()
    ranks = rng.permutation(30)
    graph.add_nodes_from((int(i), {"op": int(i)}) for i in rng.permutation(30))
    for slot in range(60):
        a, b = (int(i) for i in rng.choice(30, 2, replace=False))
        first, second = (a, b) if ranks[a] < ranks[b] else (b, a)
        graph.add_edge(first, second, key=slot, port=slot % 3)
        if slot % 5 == 0:
            graph.add_edge(first, second, key=100 + slot, port=0)
    return graph


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_networkx(seed: int) -> None:
    graph = drawn(seed)
    assert topological_order(graph) == list(nx.topological_sort(graph))


def test_a_cycle_is_an_error() -> None:
    graph = nx.MultiDiGraph([(0, 1), (1, 2), (2, 1)])
    with pytest.raises(InternalError, match="cycle"):
        topological_order(graph)
