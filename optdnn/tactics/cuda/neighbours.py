"""Operators that a launch of another one may take along: the pool behind a convolution."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op


def max_pool_behind(graph: Graph, op: Op) -> Op | None:
    """The max pool that is all that reads the result."""
    user = graph.sole_user(op.value)
    return user if user is not None and user.kind == "MaxPool" else None
