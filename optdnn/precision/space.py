"""What automatic precision may choose: the ops with a precision of their own, what each may have, and plans made of choices."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from optdnn.config import QUANTIZED
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.lowering.cpu.library import typical_sizes
from optdnn.passes.support.precision import SHARES_SCALE, PrecisionPlan, choices, key
from optdnn.passes.support.precision_report import PrecisionLog, outcome
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import elements
from optdnn.precision.pins import pinned
from optdnn.precision.search import Node, Problem
from optdnn.precision.sensitivity import Sensitivities
from optdnn.precision.targets import Way, assigned, base_of, machine_of
from optdnn.types import FP32


class Space:
    """The choices of one graph on one target (``graph``: exact passes done, precisions not assigned), with the user's pins.

    Raises UsageError for a pin to a precision that its op does not have.
    """

    def __init__(self, graph: Graph, target: str, level: int, pins: Mapping[str, str]):
        self.graph, self.target, self.level = graph, target, level
        self.choices = {c.key: c for c in choices(graph, machine_of(target))}
        self.pins = pinned(pins, self.choices.values())
        self.by_key = {key(op): op for op in graph.order() if op.kind not in STRUCTURAL}

    def variables(self) -> list[Op]:
        """The ops that have a precision to choose: float results, and more than moving elements."""
        return [op for op in self.by_key.values() if op.outputs[0].type.dtype == FP32 and not self._follows(op)]

    def _follows(self, op: Op) -> bool:
        return op.kind in SHARES_SCALE and key(op) not in self.pins

    def allowed(self, op: Op, offered: Collection[str]) -> tuple[str, ...]:
        """The precisions of ``offered`` that an op may have: its pin alone, where there is one."""
        if key(op) in self.pins:
            return (self.pins[key(op)][0],)
        return tuple(p for p in self.choices[key(op)].precisions if p in offered)

    def runs(self, plan: PrecisionPlan, k: str) -> str:
        """The precision that a plan gives an op: asked for, where it has that."""
        asked = plan.of(self.by_key[k])
        return asked if asked in self.choices[k].precisions else plan.base

    def source(self, value: Value) -> str | None:
        """The op that computes a value, through those that only move its elements; None for an input."""
        op = self.graph.op(value)
        while op.kind not in STRUCTURAL and self._follows(op):
            first = next((v for v in op.inputs if v is not None and self.graph.type(v).dtype == FP32), None)
            if first is None:
                return None
            op = self.graph.op(first)
        return None if op.kind in STRUCTURAL else key(op)

    # ------------------------------------------------------------------ the search's view

    def problem(self, way: Way, sensitivities: Sensitivities) -> Problem:
        """Nodes with their times and damage, and the values between them, as the search takes them."""
        sizes, times = typical_sizes(self.graph), way.latency.times()
        nodes = []
        for op in self.variables():
            k = key(op)
            damage = {"fp32": 0.0}
            for p in self.allowed(op, way.precisions):
                found = sensitivities.table.get((k, p))
                if found is not None and (math.isfinite(found.noise) or k in self.pins):
                    damage[p] = found.noise
            if k in self.pins:
                damage = {self.pins[k][0]: damage.get(self.pins[k][0], 0.0)}
            # An op that a library's counters do not know was fused into another, at no cost of its own.
            at = {p: times.get(k, {})[p].us if p in times.get(k, {}) else 0.0 for p in damage}
            nodes.append(Node(k, op.kind, tuple(sorted(op.src)), at, damage))
        known = {n.key for n in nodes}
        edges: list[tuple[str | None, str | None, int]] = []
        for op in self.variables():
            for v in dict.fromkeys(op.inputs):
                if v is None or self.graph.type(v).dtype != FP32 or self.graph.constant_value(v) is not None:
                    continue
                source = self.source(v)
                if source is None or source in known:
                    edges.append((source, key(op), 4 * elements(self.graph, v, sizes)))
        for i in self.graph.outputs:
            v = self.graph.op(i).inputs[0]
            if v is not None and (source := self.source(v)) in known:
                edges.append((source, None, 4 * elements(self.graph, v, sizes)))
        return Problem(nodes, edges, way.latency.cast)

    # ------------------------------------------------------------------ plans

    def plan(self, assignment: Mapping[str, str]) -> PrecisionPlan:
        """Every variable by name; what only moves elements goes with what it reads (into int8 the pass draws it by itself)."""
        nodes = dict(assignment)
        for op in self.by_key.values():
            k = key(op)
            if k in nodes or op.outputs[0].type.dtype != FP32:
                continue
            source = self.source(op.value)
            precision = "fp32" if source is None else assignment.get(source, "fp32")
            if precision not in (*QUANTIZED, "fp32", "tf32"):
                nodes[k] = precision
        return PrecisionPlan("fp32", nodes, "fp32")

    def realizable(
        self, assignment: Mapping[str, str], problem: Problem, calibration: Calibration | None
    ) -> dict[str, str]:
        """What the pass makes of an assignment: an op that it cannot give int8 where it stands (an Add one of whose operands stays
        float) gets the float precision around it."""
        found = dict(assignment)
        for _ in range(2):
            plan, asked = self.plan(found), PrecisionLog()
            graph, _ = assigned(self.graph, plan, self.target, calibration, self.level, asked)
            off = [r.asked.key for r in outcome(graph, asked, hint=base_of(plan)) if r.differs and r.asked.key in found]
            off = [k for k in off if found[k] in QUANTIZED and k not in self.pins]
            if not off:
                break
            for k in off:
                around = {
                    found[e] for a, b, _ in problem.edges if k in (a, b) for e in (a, b) if e is not None and e != k
                }
                floats = [p for p in problem.node(k).precisions if p not in QUANTIZED]
                near = [p for p in floats if p in around and p != "fp32"]
                found[k] = min(near or floats, key=lambda p: problem.node(k).times[p])
        return found
