"""Plans: the precisions that each operator may have, the predicted cost of a plan, and the descent from fast to accurate.

A plan's *time* is the sum of its operators' times and of the casts between them. Its *damage* is the sum of the noise powers
that each operator alone adds to the network's outputs (:mod:`optdnn.precision.sensitivity`). Independent rounding errors add up as
powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from optdnn.config import OF_PRODUCTS, PACKED_WEIGHTS, QUANTIZED
from optdnn.dim import evaluate
from optdnn.errors import ShapeError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.passes.support.precision import SHARES_SCALE, PrecisionPlan, key
from optdnn.passes.support.precision_choices import choices
from optdnn.passes.support.precision_report import PrecisionLog, outcome
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import OperatorTimes
from optdnn.precision.pins import pinned
from optdnn.precision.sensitivity import Sensitivities
from optdnn.precision.targets import assigned
from optdnn.target_name import TargetName
from optdnn.types import FP32

Assignment = Mapping[str, str]
"""Op key -> precision."""
Edge = tuple[str | None, str | None, int]
"""Producer, consumer and bytes of a value at fp32. None means the network's inputs and outputs, which are fp32."""

LEAST_GAIN = 1e-3
"""A change of a plan must save at least this fraction of the plan's time."""


@dataclass(frozen=True)
class Node:
    """One operator with a precision to choose: microseconds and damage at each precision that it may have."""

    key: str
    times: Mapping[str, float]
    damage: Mapping[str, float]

    @property
    def most_accurate(self) -> str:
        return min(self.times, key=lambda p: (self.damage[p], p != "fp32"))


class Problem:
    """The operators of a network and the values between them. ``cast``: microseconds between two precisions for a value's bytes."""

    def __init__(self, nodes: Sequence[Node], edges: Sequence[Edge], cast: Callable[[str, str, int], float]):
        self.nodes = {n.key: n for n in nodes}
        self.edges, self.cast = edges, cast
        self._around: dict[str, list[Edge]] = {k: [] for k in self.nodes}
        for edge in edges:
            for end in dict.fromkeys(edge[:2]):
                if end is not None:
                    self._around[end].append(edge)

    def time(self, plan: Assignment) -> float:
        """Predicted microseconds."""
        return sum(n.times[plan[k]] for k, n in self.nodes.items()) + sum(self.casts(plan))

    def casts(self, plan: Assignment) -> Iterator[float]:
        """Microseconds of each cast."""
        for a, b, size in self.edges:
            p, q = ("fp32" if end is None else plan[end] for end in (a, b))
            if p != q:
                yield self.cast(p, q, size)

    def damage(self, plan: Assignment) -> float:
        """Predicted noise power over signal power at the outputs."""
        return sum(n.damage[plan[k]] for k, n in self.nodes.items())

    def uniform(self, precision: str) -> dict[str, str]:
        """``precision`` for each node that may have it, otherwise the node's most accurate precision."""
        return {k: precision if precision in n.times else n.most_accurate for k, n in self.nodes.items()}

    def neighbors(self, key: str) -> set[str]:
        return {end for a, b, _ in self._around[key] for end in (a, b) if end is not None}

    def part(self, plan: Assignment, key: str, precision: str) -> float:
        """Microseconds of one node at a precision, and of the casts around it; all others as in ``plan``."""
        total = self.nodes[key].times[precision]
        for a, b, size in self._around[key]:
            p, q = ("fp32" if end is None else precision if end == key else plan[end] for end in (a, b))
            total += self.cast(p, q, size)
        return total


def descent(problem: Problem) -> list[dict[str, str]]:
    """Plans from the fastest to the most accurate, each slower and with less damage than the one before.

    It starts at the fastest plan. Each step raises one node to a more accurate precision: the pair of node and precision that
    removes the most damage per microsecond.
    """
    starts = [_settled(problem, problem.uniform(p)) for p in _precisions(problem)]
    plan = min(starts, key=lambda p: (problem.time(p), problem.damage(p)), default={})
    plans = [dict(plan)]
    steps = {k: _step(problem, plan, k) for k in problem.nodes}
    while best := max(filter(None, steps.values()), default=None):
        _, raised, precision = best
        plan[raised] = precision
        plans.append(dict(plan))
        steps |= {k: _step(problem, plan, k) for k in problem.neighbors(raised) | {raised}}
    plans += [problem.uniform(p) for p in _precisions(problem)]
    found: list[dict[str, str]] = []
    least = math.inf
    for one in sorted(plans, key=lambda p: (problem.time(p), problem.damage(p))):
        if problem.damage(one) < least:
            found.append(one)
            least = problem.damage(one)
    return found


def _precisions(problem: Problem) -> list[str]:
    return sorted({p for n in problem.nodes.values() for p in n.times})


def _settled(problem: Problem, plan: dict[str, str]) -> dict[str, str]:
    """``plan`` after changes of single nodes, until no change makes it faster."""
    changed = True
    while changed:
        changed = False
        for k, node in problem.nodes.items():
            best = min(node.times, key=lambda p, k=k, d=node.damage: (problem.part(plan, k, p), d[p]))  # type: ignore[misc]
            if problem.part(plan, k, best) < problem.part(plan, k, plan[k]) - 1e-9:
                plan[k], changed = best, True
    return plan


def _step(problem: Problem, plan: Assignment, key: str) -> tuple[float, str, str] | None:
    """The best step of one node to a more accurate precision: (damage removed per microsecond, key, precision)."""
    node, now = problem.nodes[key], plan[key]
    time = problem.part(plan, key, now)
    gains = {p: node.damage[now] - node.damage[p] for p in node.times}
    steps = [(d / max(problem.part(plan, key, p) - time, 1e-9), key, p) for p, d in gains.items() if d > 0]
    return max(steps, default=None)


def faster(problem: Problem, plan: Assignment) -> list[dict[str, str]]:
    """Plans near ``plan`` that are predicted to be faster: one node, or a node and its neighbors, at another precision.

    The plan that saves the most time per damage comes first.
    """
    time, damage = problem.time(plan), problem.damage(plan)
    found: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}
    for k, node in problem.nodes.items():
        for p in node.times:
            near = {n for n in problem.neighbors(k) if p in problem.nodes[n].times}
            for group in ({k}, {k, *near}):
                tried = {**plan, **dict.fromkeys(group, p)}
                won, harm = time - problem.time(tried), problem.damage(tried) - damage
                if won > LEAST_GAIN * time:
                    found.setdefault(tuple(tried.values()), (won / max(harm, 1e-30), tried))
    return [tried for _, tried in sorted(found.values(), key=lambda item: -item[0])]


class Space:
    """The choices of one graph on one target (``graph``: exact passes done, precisions not assigned), with the user's pins.
    ``beside``: the float precision of activations beside packed weights.

    Raises UsageError for a pin to a precision that its op does not have.
    """

    def __init__(self, graph: Graph, target: str, level: int, pins: Mapping[str, str], beside: str = "fp32"):
        self.graph, self.target, self.level, self.beside = graph, target, level, beside
        self.kept = ConstantCache().of(graph)
        """Constants that are rounded once and shared by all plans."""
        self.choices = {c.key: c for c in choices(graph, str(TargetName.parse(target).machine))}
        self.pins = pinned(pins, self.choices.values())
        self.by_key = {key(op): op for op in graph.order() if op.kind not in STRUCTURAL}
        self.variables = {
            k: op for k, op in self.by_key.items() if op.outputs[0].type.dtype == FP32 and not self._follows(op)
        }
        """The ops with a choice of precision: their results are floats, and they do more than move elements."""

    def single(self, text: str) -> PrecisionPlan:
        """The plan of a single precision, with the pins."""
        return PrecisionPlan.of_option(text, {k: p for k, (p, _) in self.pins.items()})

    def allowed(self, k: str, offered: Collection[str]) -> tuple[str, ...]:
        """The precisions of ``offered`` that an op may have: only the pinned one, if there is a pin."""
        if k in self.pins:
            return (self.pins[k][0],)
        return tuple(p for p in self.choices[k].precisions if p in offered)

    def runs(self, plan: PrecisionPlan, k: str) -> str:
        """The precision that a plan gives an op: the requested one, if the op can have it."""
        asked = plan.of(self.by_key[k])
        return asked if asked in self.choices[k].precisions else plan.base

    def _follows(self, op: Op) -> bool:
        return op.kind in SHARES_SCALE and key(op) not in self.pins

    def _source(self, value: Value) -> str | None:
        """The op that computes a value, through ops that only move its elements; None for an input."""
        op = self.graph.op(value)
        while op.kind not in STRUCTURAL and self._follows(op):
            first = next((v for v in op.inputs if v is not None and self.graph.type(v).dtype == FP32), None)
            if first is None:
                return None
            op = self.graph.op(first)
        return None if op.kind in STRUCTURAL else key(op)

    def problem(self, times: OperatorTimes, sensitivities: Sensitivities) -> Problem:
        """The descent's view of the graph, with the times of one library."""
        nodes = []
        for k in self.variables:
            if k in self.pins:
                damage = {self.pins[k][0]: 0.0}
            else:
                found = {p: sensitivities.table.get((k, p)) for p in self.allowed(k, times.precisions)}
                damage = {p: s.noise for p, s in found.items() if s is not None and math.isfinite(s.noise)}
                damage["fp32"] = 0.0
            # An op that a library's counters do not list was fused into another op, at no cost of its own.
            us = {p: times.table[k][p].us if p in times.table.get(k, {}) else 0.0 for p in damage}
            nodes.append(Node(k, us, damage))
        return Problem(nodes, list(self._edges()), times.cast)

    def _edges(self) -> Iterator[Edge]:
        sizes = typical_sizes(self.graph)
        for k, op in self.variables.items():
            for v in dict.fromkeys(op.inputs):
                if v is None or self.graph.type(v).dtype != FP32 or self.graph.constant_value(v) is not None:
                    continue
                source = self._source(v)
                if source is None or source in self.variables:
                    yield source, k, self._bytes(v, sizes)
        for i in self.graph.outputs:
            v = self.graph.op(i).inputs[0]
            if v is not None and (source := self._source(v)) in self.variables:
                yield source, None, self._bytes(v, sizes)

    def _bytes(self, value: Value, sizes: Mapping[str, int]) -> int:
        """Bytes of a value at fp32, with symbols replaced by ``sizes`` (default 1)."""
        n = 4
        for d in self.graph.type(value).shape or ():
            try:
                n *= d if isinstance(d, int) else evaluate(d, {**{s.name: 1 for s in d.symbols()}, **sizes})
            except ShapeError:
                continue
        return n

    def plan(self, assignment: Assignment) -> PrecisionPlan:
        """Every variable by name. An op that only moves elements takes its input's float precision (the pass handles integers)."""
        nodes = dict(assignment)
        for k, op in self.by_key.items():
            if k not in nodes and op.outputs[0].type.dtype == FP32:
                source = self._source(op.value)
                precision = "fp32" if source is None else assignment.get(source, "fp32")
                precision = self.beside if precision in PACKED_WEIGHTS else precision
                if precision not in (*QUANTIZED, "fp32", "tf32"):
                    nodes[k] = precision
        packed = not PACKED_WEIGHTS.isdisjoint(nodes.values())
        return PrecisionPlan("fp32", nodes, self.beside if packed else "fp32")

    def realizable(self, assignment: Assignment, problem: Problem, calibration: Calibration | None) -> dict[str, str]:
        """The assignment that the pass really makes.

        Some ops cannot be int8 (an Add with an operand that stays float) or packed (another product reads their weights as floats).
        They get the fastest float precision of their neighbors."""
        found = dict(assignment)
        for _ in range(2):
            plan, asked = self.plan(found), PrecisionLog()
            graph, _ = assigned(self.graph, plan, self.target, calibration, self.level, asked, kept=self.kept)
            rows = [r.asked.key for r in outcome(graph, asked, hint=plan.library_precision) if r.differs]
            off = [k for k in rows if found.get(k) in OF_PRODUCTS and k not in self.pins]
            if not off:
                break
            for k in off:
                around = {found[e] for e in problem.neighbors(k) - {k}} - {"fp32"}
                floats = [p for p in problem.nodes[k].times if p not in OF_PRODUCTS]
                near = [p for p in floats if p in around]
                found[k] = min(near or floats, key=problem.nodes[k].times.__getitem__)
        return found
