"""Indices that a network converts to floats: arithmetic on them stays in fp32, because 16-bit floats do not hold large integers.

CenterNet (Zhou et al., 2019) takes the largest of 80 x 128 x 128 scores, and divides their indices by 128 x 128: the quotients are
classes. fp16 ends at 65504, and from 2048 on it skips integers (bf16 from 256 on). Rounded to fp16, the quotient 26.9999 is another
class. So the operators on such floats stay fp32, up to a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.passes.support.facts import is_pointwise, shape_of
from optdnn.passes.support.guards import Stage, StageId, moves, nodes
from optdnn.types import normalize_axis

EXACT = 256
"""bf16 holds all integers up to this one."""
FINDS = {"ArgMax": 0, "ArgMin": 0, "NonZero": 0, "TopK": 1}
"""Kinds that give indices -> the number of that result."""
KEEPS = frozenset(
    {
        "Abs",
        "Cast",
        "Ceil",
        "Floor",
        "Identity",
        "Max",
        "Min",
        "Narrow",
        "Neg",
        "ReduceMax",
        "ReduceMin",
        "Round",
        "Where",
    }
)
"""Kinds whose results are as large as their operands, besides ops that only move elements."""
SELECTS = frozenset({"Gather", "GatherElements", "GatherND"})
"""Kinds that take elements of operand 0, as large as they are."""


@dataclass(frozen=True)
class _Index:
    """A value that is an index, or was computed from indices. ``most``: the largest magnitude, as far as it comes from indices.
    ``real``: it is a float. ``large``: it is a float, and it, or a float from which it was computed, may exceed :data:`EXACT`."""

    most: float
    real: bool = False
    large: bool = False


def large_indices(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay fp32, for operators that write or read floats of large indices, or floats computed from these."""
    found: dict[int, str] = {}
    if FINDS.keys().isdisjoint(graph.kinds()):
        return found
    known = dict(_seeds(graph))
    for step, stage in nodes(graph):
        given = [known.get(a) if isinstance(a, tuple) else None for a in stage.args]
        indices = [g for g in given if g is not None]
        if not indices or step in known:
            continue
        ends = not is_pointwise(stage.op) and not moves(stage)  # a layer rounds its operands, if they are small
        large, most = any(g.large and (not ends or g.most > EXACT) for g in indices), _largest_result(stage, given)
        if most is not None:
            real = stage.kind == "Cast" or (stage.kind != "Narrow" and any(g.real for g in indices))
            large |= real and most > EXACT
            known[step] = _Index(most, real, real and large)
        if large:
            found.setdefault(stage.op.id, "it computes with indices, and 16-bit floats hold only small integers")
    return found


def _seeds(graph: Graph) -> Iterator[tuple[StageId, _Index]]:
    """The results that are indices."""
    for op in graph.order():
        if op.kind in STRUCTURAL or op.kind not in FINDS:
            continue
        yield (op.id, FINDS[op.kind]), _Index(_most(graph, op))


def _most(graph: Graph, op: Op) -> float:
    """The largest index that an op may find."""
    shape = shape_of(graph, op.inputs[0])
    if not shape:
        return math.inf
    sizes = shape if op.kind == "NonZero" else (shape[normalize_axis(op.attrs.axis, len(shape))],)
    return max((d if isinstance(d, int) else math.inf) for d in sizes) - 1


def _largest_result(stage: Stage, given: list[_Index | None]) -> float | None:
    """The largest result of a stage that reads indices; None if its result is no index."""
    most = [None if g is None else g.most for g in given]
    first, factor = most[0], _largest(stage.args[1]) if len(stage.args) > 1 else None
    if stage.kind in SELECTS:
        return first
    if stage.kind in KEEPS or moves(stage):
        return max(m for m in most if m is not None)
    if stage.kind in ("Add", "Sub"):
        return sum(m if m is not None else _largest(a) or 0.0 for m, a in zip(most, stage.args, strict=True))
    if first is None or factor is None:
        return None
    if stage.kind == "Mod":
        return min(first, factor)
    if stage.kind == "Div":
        return first / _least(stage.args[1])
    return first * factor if stage.kind == "Mul" else None


def _largest(a: object) -> float | None:
    """The largest magnitude of a constant; None if it is none."""
    return float(np.abs(a).max()) if isinstance(a, np.ndarray) and a.size else None


def _least(a: object) -> float:
    """The smallest magnitude of a constant, and no less than the smallest fp32 number."""
    return max(float(np.abs(a).min()), 1e-38) if isinstance(a, np.ndarray) and a.size else 1.0
