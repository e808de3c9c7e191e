"""A digest of a graph, to tell engines, calibrations and caches of different networks apart."""

from __future__ import annotations

import hashlib

import numpy as np

from optdnn.ir.graph import Graph


def graph_digest(graph: Graph) -> str:
    """SHA-256 of the graph's constants and structure, to tell engines of different models apart."""
    digest = hashlib.sha256()
    for op in graph.order():
        digest.update(f"{op.kind} {[o.name for o in op.outputs]} {op.inputs}".encode())
        if op.kind == "Constant":
            digest.update(np.ascontiguousarray(op.attrs.value).reshape(-1).view(np.uint8).data)
        else:
            digest.update(repr(op.attrs).encode())
    return digest.hexdigest()
