"""Where an optimized network diverges from its model: value by value, in ONNX names.

Passes keep the names of the values that remain, so each of these can be compared. There are three evaluations:

- the model as imported, in NumPy and float64: the correct values;
- the optimized network, in NumPy and float64: the effect of the passes. They are exact, but folded constants are rounded once to
  the model's own precision;
- the optimized network on its target, with all its values exposed as outputs: the effect of the target's arithmetic. A library does
  not fuse over an exposed value, so a fault within its own fusion shows only in the outputs.

Two engines of one model (other targets, other precisions) are compared in the same way, for each value that both
still have: the two values are compared with each other, and each with the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from optdnn.ir.evaluate import groups, promote, promoted_feeds, values
from optdnn.ir.graph import STRUCTURAL, Graph, Value
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.accuracy import errors_between
from optdnn.runtime.program import Plain
from optdnn.types import Array, is_float

TOLERANCE = {
    "fp32": 1e-4,
    "tf32": 1e-2,
    "fp16": 1e-2,
    "bf16": 1e-1,
    "int8": 0.25,
    "fp8": 0.5,
    "w8": 1e-2,
    "w4": 0.25,
    "w4a8": 0.25,
}
"""Largest error of a value, relative to its largest magnitude, that its precision explains in a network of usual depth."""
DECADES = tuple(range(-8, 1))
"""Powers of ten that bound the bins for errors (relative to the largest magnitude): below the first, …, above the last."""
CHUNK_BYTES = 1 << 30
"""Values are exposed and kept in groups of about this size."""


@dataclass(frozen=True)
class Divergence:
    """The error of one value of the optimized network.

    ``position`` counts ops in topological order; ``node`` names the op's ONNX nodes. ``max_abs_err`` and
    ``max_rel_err`` (relative to the largest magnitude of the value) are the target's errors; ``passes_rel_err`` is the error of the
    optimized network in float64. Values with non-finite elements that should be finite, or the reverse, have infinite errors.
    ``histogram`` counts elements by their error relative to the largest magnitude, in the bins of :data:`DECADES`; values that
    are not finite are in the last one.

    If two engines are compared, the errors of the other one are ``other_rel_err``, and ``between_rel_err`` is the distance of
    the two; the histogram shows this distance.
    """

    position: int
    value: str
    operator: str
    node: str
    shape: tuple[int, ...]
    max_abs_err: float
    max_rel_err: float
    passes_rel_err: float
    histogram: tuple[int, ...] = ()
    other_rel_err: float | None = None
    between_rel_err: float | None = None

    @property
    def distance(self) -> float:
        """The error that ranks values: the distance of two engines, or of one engine from the model."""
        return self.max_rel_err if self.between_rel_err is None else self.between_rel_err

    def to_plain(self) -> dict[str, Plain]:
        plain: dict[str, Plain] = finite(asdict(self))
        return plain if self.between_rel_err is not None else {k: v for k, v in plain.items() if k not in BETWEEN}


BETWEEN = ("other_rel_err", "between_rel_err")
"""Fields of a divergence between two engines."""


@dataclass(frozen=True)
class Side:
    """One engine of a model: its name, the network after its exact passes, and a function that makes an engine of (a copy of)
    it."""

    name: str
    graph: Graph
    engine_of: Callable[[Graph], Engine]


@dataclass
class Findings:
    """All divergences in topological order. ``hidden`` counts the values that only the optimized network has; ``other`` names the
    engine that this one is compared with, if any."""

    divergences: list[Divergence]
    tolerance: float
    hidden: int = 0
    other: str | None = None

    @property
    def worst_first(self) -> list[Divergence]:
        return sorted(self.divergences, key=lambda d: (-d.distance, d.position))

    @property
    def first(self) -> Divergence | None:
        """The first value in topological order that is beyond the tolerance."""
        return next((d for d in self.divergences if not d.distance <= self.tolerance), None)

    def to_plain(self) -> dict[str, Plain]:
        first = self.first
        return {
            "layers": [d.to_plain() for d in self.worst_first],
            "bisect": {"tolerance": self.tolerance, "first": None if first is None else first.to_plain()},
            **({} if self.other is None else {"layers_against": self.other}),
        }


def find_divergences(
    original: Graph,
    optimized: Graph,
    engine_of: Callable[[Graph], Engine],
    feeds: Mapping[str, Array],
    precision: str = "fp32",
    tolerance: float | None = None,
    other: Side | None = None,
) -> Findings:
    """Compare every value that ``optimized`` shares with ``original``; with ``other``, also with that engine's values.

    ``engine_of`` makes an engine of a graph in the same way as the compared engine was made. ``feeds`` are in the model's own
    dtypes; an optimized network with other floating-point inputs (``--io-dtype``) gets them converted.
    """
    shared = _shared(original, optimized)
    if other is not None:
        both = {other.graph.output(v).name: v for v in _shared(original, other.graph)}
        shared = [v for v in shared if optimized.output(v).name in both]
    computing = [op for op in optimized.order() if op.kind not in STRUCTURAL]
    position = {op.id: k for k, op in enumerate(computing)}
    exact = promote(original)
    exact_optimized = promote(optimized)
    named, named_optimized = _by_name(exact), _by_name(exact_optimized)
    wide = promoted_feeds(feeds)
    found: list[Divergence] = []
    for group in groups(optimized, shared, feeds, CHUNK_BYTES, copies=2):
        names = [optimized.output(v).name for v in group]
        got = _on_target(optimized, group, engine_of, feeds)
        theirs = None if other is None else _on_target(other.graph, [both[n] for n in names], other.engine_of, feeds)
        want = values(exact, wide, [named[n] for n in names])
        passed = values(exact_optimized, wide, [named_optimized[n] for n in names])
        for v, name, w, p in zip(group, names, want, passed, strict=True):
            op = optimized.op(v)
            absolute, relative = errors_between([got[name]], [w])
            second = None if theirs is None else theirs[name]
            found.append(
                Divergence(
                    position[op.id],
                    name,
                    op.kind,
                    op.name,
                    tuple(w.shape),
                    absolute,
                    relative,
                    errors_between([p], [w])[1],
                    histogram(got[name], w if second is None else second),
                    None if second is None else errors_between([second], [w])[1],
                    None if second is None else errors_between([got[name]], [second])[1],
                )
            )
    total = sum(len(op.outputs) for op in computing)
    limit = tolerance_of(precision) if tolerance is None else tolerance
    return Findings(
        sorted(found, key=lambda d: d.position), limit, total - len(shared), None if other is None else other.name
    )


def tolerance_of(precision: str) -> float:
    """The tolerance of a precision; for several ("int8+bf16") the widest."""
    return widest(TOLERANCE, precision)


def widest(bounds: Mapping[str, float], precision: str) -> float:
    """The largest of the bounds of an engine's precisions ("int8+bf16"); that of fp32 if none of them has a bound."""
    return max((bounds[p] for p in precision.split("+") if p in bounds), default=bounds["fp32"])


def histogram(got: Array, want: Array) -> tuple[int, ...]:
    """Number of elements by |got - want| over the largest magnitude of ``want``: one bin below, between and above
    :data:`DECADES`."""
    if got.shape != want.shape or not got.size:
        return ()
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), want.astype(np.float64)
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0)) or 1.0
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / scale)
    error = np.where(np.isnan(error), np.inf, error).reshape(-1)
    bins = np.searchsorted([10.0**k for k in DECADES], error, side="right")
    return tuple(int(n) for n in np.bincount(bins, minlength=len(DECADES) + 1))


def _shared(original: Graph, optimized: Graph) -> list[Value]:
    """Computed values of ``optimized`` that ``original`` also computes, under the same name and type, in topological order."""
    before = {o.name: o.type for op in original.order() if op.kind not in STRUCTURAL for o in op.outputs}
    found = []
    for op in optimized.order():
        if op.kind in STRUCTURAL:
            continue
        for port, out in enumerate(op.outputs):
            t = before.get(out.name)
            if t is not None and t.dtype == out.type.dtype and optimized.uses(Value(op.id, port)):
                found.append(Value(op.id, port))
    return found


def _by_name(graph: Graph) -> dict[str, Value]:
    return {graph.output(v).name: v for op in graph.order() if op.kind != "Output" for v in op.values}


def _on_target(
    graph: Graph, wanted: Sequence[Value], engine_of: Callable[[Graph], Engine], feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """The values as an engine computes them if all of them are its outputs."""
    exposed = graph.copy()
    there = {exposed.op(i).outputs[0].name: exposed.op(i).inputs[0] for i in exposed.outputs}
    renamed: dict[str, str] = {}
    for v in wanted:
        name = exposed.output(v).name
        if there.get(name) != v:
            label = name if name not in there else exposed.fresh_name(name)
            exposed.add_output(v, label)
            there[label] = v
            renamed[label] = name
    engine = engine_of(exposed)
    given = {
        s.name: feeds[s.name].astype(s.dtype) if is_float(s.dtype) and is_float(feeds[s.name].dtype) else feeds[s.name]
        for s in engine.inputs
    }
    return {renamed.get(n, n): a for n, a in engine.run(given).items()}


def finite(value: Any) -> Any:
    """``value`` with every float that is not finite replaced by None, as strict JSON requires."""
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
