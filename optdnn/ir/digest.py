"""A digest of a graph, which distinguishes engines, calibrations and caches of different networks."""

from __future__ import annotations

import hashlib
import re

import numpy as np

from optdnn.ir.graph import Graph

SMALL = 64
"""Constant integer tensors of up to this many elements affect how operators are run."""


def graph_digest(graph: Graph) -> str:
    """SHA-256 of the graph's constants and structure, which distinguishes engines of different models."""
    digest = hashlib.sha256()
    for op in graph.order():
        digest.update(f"{op.kind} {[o.name for o in op.outputs]} {op.inputs}".encode())
        if op.kind == "Constant":
            digest.update(np.ascontiguousarray(op.attrs.value).reshape(-1).view(np.uint8).data)
        else:
            digest.update(repr(op.attrs).encode())
    return digest.hexdigest()


_NUMBER = re.compile(r"\b(\w*zero=-?)\d+|-?\b\d+\.\d*(?:e[+-]?\d+)?")
"""A zero point, or a number that is not an integer, in the text of attributes."""


def structure_digest(graph: Graph, *, numbers: bool = True) -> str:
    """SHA-256 of kinds, attributes, types, layouts and edges, without names and weights. Of constants it covers the types, and
    the values of small integer ones, which hold sizes, axes or positions. Without ``numbers`` it leaves out everything that can
    follow from weights: these values, and scales and zero points in attributes."""
    digest = hashlib.sha256()
    number: dict[int, int] = {}
    for op in graph.order():
        number[op.id] = len(number)
        operands = [None if v is None else (number[v.op], v.port) for v in op.inputs]
        facts: list[object] = [op.kind, operands, [(str(o.type), o.type.layout) for o in op.outputs]]
        if op.kind != "Constant":
            facts.append(repr(op.attrs) if numbers else _NUMBER.sub(r"\1#", repr(op.attrs)))
        elif numbers and op.attrs.value.dtype.kind in "iub" and op.attrs.value.size <= SMALL:
            facts.append(op.attrs.value.tolist())
        digest.update(repr(facts).encode())
    return digest.hexdigest()
