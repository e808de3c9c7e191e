"""Products that are divided by their own sums stay fp32 in an fp16 build: linear attention (EfficientViT, Performer, RetNet).

``(q @ (k^T @ v)) / (q @ (k^T @ 1) + eps)`` is a weighted mean, as small as the values ``v``. But its numerator and its denominator
are sums over all tokens without a bound, and often leave fp16's range. The quotient of two infinities is NaN. PyTorch's versions of
these networks convert to fp32 here, too. They may be fp16 only if a trial run (:mod:`optdnn.passes.support.overflows`) shows that
generated inputs stay far below the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.passes.support.guards import Argument, Stage, StageId, moves, nodes
from optdnn.passes.support.precision_report import FP16_LARGEST

SUMS = frozenset({"ReduceL1", "ReduceSum"})
CARRIES = SUMS | {"Abs", "Add", "Cast", "Clip", "Identity", "Max", "Mul", "Relu", "Where"}
"""Kinds that, with constants, keep a sum about as large as it is, besides ops that only move elements."""

MEANS = frozenset({"Sinkhorn", "Softmax"})
"""Kinds whose products are means, and not larger than the other factor."""

MARGIN = 64.0
"""In a trial run, fp16's largest number must be this many times as large as the sums: other inputs may give larger ones."""

Stages = Mapping[StageId, Stage]


@dataclass(frozen=True)
class Product:
    """A product of two computed matrices, as a MatMul or as the sum of a Mul. ``factors``: the stages that compute them, before
    ops that only move elements. ``ids``: the ops from the product to a reader of its result."""

    step: StageId
    factors: tuple[StageId, ...]
    ids: frozenset[int]


def own_sums(graph: Graph, largest: Mapping[Value, float] | None) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for products that are divided by sums of the same factors, and for the ops between.

    A factor may also be divided before the other product: ``(q / (q @ (k^T @ 1))) @ (k^T @ v)``.
    ``largest``: the largest magnitudes in a trial run; None if there was none."""
    found: dict[int, str] = {}
    if "MatMul" not in graph.kinds():
        return found
    stages = dict(nodes(graph, divided={"MatMul"}))
    for end in stages.values():
        for numerator, denominator, inverse in _quotients(stages, end):
            above, below = _product(stages, numerator), _product(stages, denominator)
            if below is None or not (_unmoved(stages, numerator) in below.factors or _alike(above, below)):
                continue
            whole = [p for p in (above, below) if p is not None]
            parts = [p for w in whole for f in w.factors if (p := _product(stages, f)) is not None]
            ids = frozenset({end.op.id, *inverse}).union(*(p.ids for p in (*whole, *parts)))
            # a trial does not measure a sum that the epilogue of its product inverts
            inverted = denominator[0] == below.step[0] and (denominator[0], denominator[1] + 1) in stages
            if largest is not None and not inverted and _are_small(graph, largest, ids - {end.op.id}):
                continue
            reason = f"{end.op.outputs[0].name} divides it by its own sum: both may exceed 65504, where fp16 ends"
            for i in sorted(ids):
                found.setdefault(i, reason)
    return found


def _are_small(graph: Graph, largest: Mapping[Value, float], ids: Collection[int]) -> bool:
    """Whether a trial run leaves the margin for all results of the ops ``ids``."""
    return all(largest.get(v, 0.0) * MARGIN < FP16_LARGEST for i in ids for v in graph.op(i).values)


def _quotients(stages: Stages, end: Stage) -> Iterator[tuple[StageId, StageId, set[int]]]:
    """The dividends and divisors of a stage, and the ids of the ops that compute and move an inverse.

    The stage is a division, or a multiplication by an inverse."""
    args = [a for a in end.args if isinstance(a, tuple)]
    if len(args) != 2:
        return
    if end.kind == "Div":
        yield args[0], args[1], set()
    for a, b in ((0, 1), (1, 0)) if end.kind == "Mul" else ():
        ids, inverse = set[int](), _at(stages, args[b])
        while inverse is not None and moves(inverse):
            ids.add(inverse.op.id)
            inverse = _at(stages, inverse.args[0])
        one = inverse is not None and (
            inverse.kind == "Reciprocal" or (inverse.kind == "Div" and isinstance(inverse.args[0], np.ndarray))
        )
        if inverse is not None and one and isinstance(inverse.args[-1], tuple):
            yield args[a], inverse.args[-1], ids | {inverse.op.id}


def _at(stages: Stages, step: Argument) -> Stage | None:
    """The stage of an argument, also where it is another result than the first one; None for constants and inputs."""
    return stages.get(step, stages.get((step[0], 0))) if isinstance(step, tuple) else None


def _unmoved(stages: Stages, step: StageId) -> StageId:
    """The argument before the ops that only move its elements."""
    while (stage := _at(stages, step)) is not None and moves(stage) and isinstance(stage.args[0], tuple):
        step = stage.args[0]
    return step


def _product(stages: Stages, step: Argument) -> Product | None:
    """The product of two computed matrices whose elements, or sums of them, the argument ``step`` has."""
    ids, summed = set[int](), False
    while isinstance(step, tuple) and (stage := _at(stages, step)) is not None:
        ids.add(stage.op.id)
        if stage.kind == "MatMul" or (stage.kind == "Mul" and summed):
            factors = tuple(_unmoved(stages, a) for a in stage.args[:2] if isinstance(a, tuple))
            if _is_product(stages, stage.kind, factors):
                return Product(step, factors, frozenset(ids))
        computed = [a for a in stage.args if isinstance(a, tuple)]
        if stage.op.kind == "MatMul":  # a stage of its epilogue, which may read other tensors, too
            computed = [a for a in computed if a[0] == stage.op.id]
        if not moves(stage) and (stage.kind not in CARRIES or len(computed) != 1):
            return None
        summed = summed or stage.kind in SUMS
        step = stage.args[0] if moves(stage) else computed[0]
    return None


def _is_product(stages: Stages, kind: str, factors: Sequence[StageId]) -> bool:
    """Whether both factors are computed, and neither has rows that sum to 1. A sum of squares is no product."""
    bounded = any(s.kind in MEANS for f in factors if (s := _at(stages, f)) is not None)
    return len(factors) == 2 and not bounded and (kind == "MatMul" or factors[0] != factors[1])


def _alike(above: Product | None, below: Product) -> bool:
    """Whether two products are one, or have a factor in common, or the first is a product of the second."""
    if above is None:
        return False
    return above.step == below.step or not {*above.factors}.isdisjoint((*below.factors, below.step))
