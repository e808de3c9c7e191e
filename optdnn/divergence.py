"""Where an optimized network and the model it came from part: value by value, in ONNX names.

Passes keep the names of the values that remain, so each of these can be compared. Three evaluations are held against one
another: the model as imported, in NumPy and float64 (what is right); the optimized network likewise (what the passes
changed: they are exact, but folded constants are rounded once to the model's own precision); and the optimized network on
its target, with all its values exposed as outputs (what the target's arithmetic changed). Exposing a value keeps a library
from fusing over it, so a fault within a library's own fusion does not show here but in the outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.dim import Dim
from optdnn.dim import evaluate as evaluate_dim
from optdnn.errors import ShapeError
from optdnn.ir.evaluate import promote, values
from optdnn.ir.graph import STRUCTURAL, Graph, Value
from optdnn.runtime.accuracy import errors_between
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Plain
from optdnn.types import Array, TensorType, is_float

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-1}
"""Largest error of a value, over its largest magnitude, that its precision explains in a network of usual depth."""
CHUNK_BYTES = 1 << 30
"""Values are exposed and kept in groups of about this size."""


@dataclass(frozen=True)
class Divergence:
    """The error of one value of the optimized network.

    ``position`` counts ops in topological order; ``node`` names the ONNX nodes that the op does. ``max_abs_err`` and
    ``max_rel_err`` (of the largest magnitude of the value) are the target's; ``passes_rel_err`` is that of the optimized network
    in float64. Values that hold other non-finite elements than they should have infinite errors.
    """

    position: int
    value: str
    operator: str
    node: str
    shape: tuple[int, ...]
    max_abs_err: float
    max_rel_err: float
    passes_rel_err: float

    def to_plain(self) -> dict[str, Plain]:
        return {
            "position": self.position,
            "value": self.value,
            "operator": self.operator,
            "node": self.node,
            "shape": list(self.shape),
            "max_abs_err": self.max_abs_err,
            "max_rel_err": self.max_rel_err,
            "passes_rel_err": self.passes_rel_err,
        }


@dataclass
class Findings:
    """All divergences in topological order. ``hidden`` counts the values that the optimized network alone has."""

    divergences: list[Divergence]
    tolerance: float
    hidden: int = 0

    @property
    def worst_first(self) -> list[Divergence]:
        return sorted(self.divergences, key=lambda d: (-d.max_rel_err, d.position))

    @property
    def first(self) -> Divergence | None:
        """The first value in topological order that is beyond the tolerance."""
        return next((d for d in self.divergences if not d.max_rel_err <= self.tolerance), None)

    def to_plain(self) -> dict[str, Plain]:
        first = self.first
        return {
            "layers": [d.to_plain() for d in self.worst_first],
            "bisect": {"tolerance": self.tolerance, "first": None if first is None else first.to_plain()},
        }


def find(
    original: Graph,
    optimized: Graph,
    engine_of: Callable[[Graph], Engine],
    feeds: Mapping[str, Array],
    precision: str = "fp32",
    tolerance: float | None = None,
) -> Findings:
    """Compare every value that ``optimized`` shares with ``original``.

    ``engine_of`` makes an engine of a graph in the way the engine in question was made. ``feeds`` are in the model's own
    dtypes; an optimized network with other floating-point inputs (``--io-dtype``) gets them converted.
    """
    shared = _shared(original, optimized)
    computing = [op for op in optimized.order() if op.kind not in STRUCTURAL]
    position = {op.id: k for k, op in enumerate(computing)}
    exact = promote(original)
    exact_optimized = promote(optimized)
    named, named_optimized = _by_name(exact), _by_name(exact_optimized)
    wide = {n: a.astype(np.float64) if is_float(a.dtype) else a for n, a in feeds.items()}
    found: list[Divergence] = []
    for group in _groups(optimized, shared, feeds):
        names = [optimized.output(v).name for v in group]
        got = _on_target(optimized, group, engine_of, feeds)
        want = values(exact, wide, [named[n] for n in names])
        passed = values(exact_optimized, wide, [named_optimized[n] for n in names])
        for v, name, w, p in zip(group, names, want, passed, strict=True):
            op = optimized.op(v)
            absolute, relative = errors_between([got[name]], [w])
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
                )
            )
    total = sum(len(op.outputs) for op in computing)
    limit = TOLERANCE[precision] if tolerance is None else tolerance
    return Findings(sorted(found, key=lambda d: d.position), limit, total - len(shared))


def _shared(original: Graph, optimized: Graph) -> list[Value]:
    """Computed values of ``optimized`` that ``original`` computes too, under the same name and type, in topological order."""
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
    return {
        o.name: Value(op.id, port) for op in graph.order() if op.kind != "Output" for port, o in enumerate(op.outputs)
    }


def _groups(graph: Graph, wanted: Sequence[Value], feeds: Mapping[str, Array]) -> Iterator[list[Value]]:
    """The values in consecutive groups of about CHUNK_BYTES (float64 copies included)."""
    sizes: dict[str, int] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        for d, n in zip(out.type.shape or (), feeds[out.name].shape, strict=False):
            if isinstance(d, Dim):
                sizes[str(d)] = n
    group: list[Value] = []
    total = 0
    for v in wanted:
        size = _bytes(graph.type(v), sizes)
        if group and total + size > CHUNK_BYTES:
            yield group
            group, total = [], 0
        group.append(v)
        total += size
    if group:
        yield group


def _bytes(t: TensorType, sizes: Mapping[str, int]) -> int:
    """Bytes of one value and its two float64 copies; 0 where its size depends on data."""
    try:
        dims = [d if isinstance(d, int) else evaluate_dim(d, sizes) for d in t.shape or ()]
    except ShapeError:
        return 0
    return int(np.prod(dims, dtype=np.int64)) * (t.dtype.itemsize + 16)


def _on_target(
    graph: Graph, wanted: Sequence[Value], engine_of: Callable[[Graph], Engine], feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """The values as an engine computes them when all of them are outputs of it."""
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
