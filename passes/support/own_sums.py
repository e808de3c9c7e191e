"""Products that are divided by their own sums stay fp32 in an fp16 build: linear attention (EfficientViT, Performer, Sana).

``(q @ (k^T @ v)) / (q @ (k^T @ 1) + eps)`` is a weighted mean, as small as the values ``v``. But its numerator and its denominator
are sums over all tokens without a bound, and often leave fp16's range. The quotient of two infinities is NaN. PyTorch's versions of
these networks convert to fp32 here, too. They may be fp16 only if a trial run (:mod:`optdnn.passes.support.overflows`) shows that
generated inputs stay far below the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.guards import Stage, StageId, moves, nodes
from optdnn.passes.support.overflows import is_unbounded_product
from optdnn.passes.support.precision_report import FP16_LARGEST

CARRIES = frozenset({"Add", "Cast", "Clip", "Identity", "Max", "ReduceSum"})
"""Kinds that keep a sum as large as it is, besides ops that only move elements."""

MARGIN = 64.0
"""In a trial run, fp16's largest number must be this many times as large as the sums: other inputs may give larger ones."""

Stages = Mapping[StageId, Stage]
Path = tuple[Op, set[int]]
"""A matrix product, and the ids of the ops from there to a reader of its result."""


def own_sums(graph: Graph, largest: Mapping[Value, float] | None) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for products that are divided by sums of the same factors, and for the ops between.

    ``largest``: the largest magnitudes in a trial run; None if there was none."""
    found: dict[int, str] = {}
    if "MatMul" not in graph.kinds():
        return found
    stages = dict(nodes(graph))
    for end in stages.values():
        for numerator, denominator in _quotients(stages, end):
            above, below = _product(graph, stages, numerator), _product(graph, stages, denominator)
            if above is None or below is None or not _alike(above[0], below[0]):
                continue
            ids = {end.op.id, *above[1], *below[1]}
            ids |= {i for product in (above[0], below[0]) for i in _factors(graph, stages, product)}
            values = [v for i in ids if i != end.op.id for v in graph.op(i).values]
            if largest is not None and all(largest.get(v, 0.0) * MARGIN < FP16_LARGEST for v in values):
                continue
            reason = f"{end.op.outputs[0].name} divides it by its own sum: both may exceed 65504, where fp16 ends"
            for i in sorted(ids):
                found.setdefault(i, reason)
    return found


def _quotients(stages: Stages, end: Stage) -> Iterator[tuple[StageId, StageId]]:
    """The dividends and divisors of a stage: of a division, or of a multiplication by an inverse."""
    args = [a for a in end.args if isinstance(a, tuple)]
    if len(args) != 2:
        return
    if end.kind == "Div":
        yield args[0], args[1]
    for a, b in ((0, 1), (1, 0)) if end.kind == "Mul" else ():
        inverse = _at(stages, args[b])
        while inverse is not None and moves(inverse):
            inverse = _at(stages, inverse.args[0])
        one = inverse is not None and (
            inverse.kind == "Reciprocal" or (inverse.kind == "Div" and isinstance(inverse.args[0], np.ndarray))
        )
        if inverse is not None and one and isinstance(inverse.args[-1], tuple):
            yield args[a], inverse.args[-1]


def _at(stages: Stages, step: object) -> Stage | None:
    """The stage of an argument, also where it is another result than the first one; None for constants and inputs."""
    return stages.get(step, stages.get((step[0], 0))) if isinstance(step, tuple) else None


def _product(graph: Graph, stages: Stages, step: object) -> Path | None:
    """The product of two computed matrices whose elements, or sums of them, the argument ``step`` has."""
    ids = set[int]()
    while (stage := _at(stages, step)) is not None:
        ids.add(stage.op.id)
        if stage.kind == "MatMul":
            return (stage.op, ids) if is_unbounded_product(graph, stage.op) else None
        computed = [a for a in stage.args if isinstance(a, tuple)]
        if not moves(stage) and (stage.kind not in CARRIES or len(computed) != 1):
            return None
        step = stage.args[0] if moves(stage) else computed[0]
    return None


def _alike(a: Op, b: Op) -> bool:
    """Whether two products are one, or have a factor in common."""
    return a.id == b.id or not {*a.inputs}.isdisjoint(b.inputs)


def _factors(graph: Graph, stages: Stages, product: Op) -> set[int]:
    """The ops that compute a factor which is itself such a product."""
    ids = set[int]()
    for v in product.inputs:
        if v is not None and (path := _product(graph, stages, (v.op, v.port))) is not None:
            ids |= path[1]
    return ids
