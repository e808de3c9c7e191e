"""Which empty tensors (without elements) OpenVINO may get.

A symbolic size may be 0: an empty batch, or a cache that holds nothing yet. OpenVINO skips operators whose operands have no
elements. Some operators then keep the results of an earlier run (pooling, 2026.4) or return a wrong number (ReduceMax). Operators
that only move data or count sizes have never been seen to be wrong. A cache meets only such operators before something is
appended to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from optdnn.dim import Dim, evaluate
from optdnn.errors import ShapeError
from optdnn.ir.extract import Region
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.types import TensorType

_ELSE = 64
"""The other sizes while one symbol is assumed to be 0."""


def may_be_empty(graph: Graph, region: Region) -> list[str]:
    """The names of a region's inputs that may have no elements when OpenVINO runs it."""
    symbols = {s for v in region.inputs for s in symbol_names(graph.type(v))}
    risky = {s for s in symbols if any(_meets(graph, op, s) for op in region.ops if not _moves(op))}
    return [
        graph.output(v).name
        for v in region.inputs
        if (own := symbol_names(graph.type(v))) and not any(s in risky and _empty([graph.type(v)], s) for s in own)
    ]


def _moves(op: Op) -> bool:
    traits = op.definition.traits
    return traits.movement or traits.shape_only or traits.pointwise


def _meets(graph: Graph, op: Op, symbol: str) -> bool:
    """Whether an op reads or writes a tensor without elements if a symbol is 0."""
    types = [o.type for o in op.outputs] + [graph.type(v) for v in op.inputs if v is not None]
    return op.kind not in STRUCTURAL and _empty(types, symbol)


def _empty(types: Iterable[TensorType], symbol: str) -> bool:
    for t in types:
        for d in t.shape or ():
            if not isinstance(d, Dim):
                continue
            names = {s.name for s in d.symbols()}
            if symbol not in names:
                continue
            try:
                if evaluate(d, {n: 0 if n == symbol else _ELSE for n in names}) <= 0:
                    return True
            except ShapeError:  # a division by it
                return True
    return False


def symbol_names(t: TensorType) -> set[str]:
    """The names of the symbols in a shape; none if the rank is unknown."""
    return {s.name for d in t.shape or () if isinstance(d, Dim) for s in d.symbols()}
