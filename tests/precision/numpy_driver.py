"""A target for automatic precision that runs in NumPy, with made-up times; data and another network for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from precision.nets import CLASSES, WIDTH, data, perceptron

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.lowering.steps import lower_reference
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.precision import search
from optdnn.precision.latency import OperatorTimes, Timed
from optdnn.precision.search_report import SearchReport
from optdnn.runtime.engine import Engine
from optdnn.tuning.timing_cache import TimingCache

DATA = data()
TIMES: dict[str, dict[str, float]] = {
    "first.out": {"fp32": 10.0, "bf16": 6.0, "int8": 3.0},
    "second.out": {"fp32": 10.0, "bf16": 6.0, "int8": 3.0},
    "head.out": {"fp32": 10.0, "bf16": 6.0, "int8": 14.0},
}
CAST = 0.5


@dataclass
class Numpy:
    """A target of NumPy engines. An engine's time is the sum of the times of its plan and of casts."""

    offers: tuple[str, ...] = ("fp32", "bf16", "int8")
    notes: dict[str, str] = field(default_factory=dict)
    plans: dict[int, PrecisionPlan] = field(default_factory=dict)
    times: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: TIMES)

    def operator_times(self, graph: Graph, calibration: Any, say: Any) -> list[OperatorTimes]:
        table = {k: {p: Timed(us, "numpy") for p, us in row.items()} for k, row in self.times.items()}
        precisions = tuple(dict.fromkeys(p for row in self.times.values() for p in row))
        return [OperatorTimes("numpy", "given times", precisions, table, cast_us=CAST, bandwidth=1e12)]

    def quick(self, graph: Graph, plan: PrecisionPlan, library: str) -> Engine:
        engine = Engine(lower_reference(graph, {}))
        self.plans[id(engine)] = plan
        return engine

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Any) -> Engine:
        engine = self.quick(graph, plan, "")
        engine.program.meta["tactic"] = {"name": "numpy/1t"}
        return engine

    def tuned(self, graph: Graph, shares: int, say: Any) -> Engine | None:
        return None

    def race(self, engines: Mapping[str, Engine], say: Any) -> dict[str, float]:
        return {n: self.milliseconds(self.plans[id(e)]) for n, e in engines.items()}

    def predicted(self, engine: Engine) -> float | None:
        return None

    def milliseconds(self, plan: PrecisionPlan) -> float:
        asked = ["fp32", *(plan.nodes.get(k, plan.default) for k in self.times), "fp32"]
        casts = sum(a != b for a, b in itertools.pairwise(asked))
        return (sum(row[p] for row, p in zip(self.times.values(), asked[1:-1], strict=True)) + CAST * casts) / 1e3


def find(graph: Graph, driver: Numpy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> search.SearchResult:
    monkeypatch.setattr(search, "target_of", lambda *a, **k: driver)
    given = {"target": "cpu", "precision": "auto", "calib": DATA, "budget": 30.0, **options}
    return search.search_precisions(graph, BuildOptions(**given), "cpu", TimingCache())


def another_network() -> Graph:
    """Another network with the same inputs and outputs, like the result of a faulty kernel."""
    graph = perceptron()
    wrong = Graph("wrong")
    x = wrong.add_input("x", graph.op(graph.inputs[0]).outputs[0].type)
    two = wrong.add_constant(np.full((WIDTH, CLASSES), 2.0, np.float32), "two")
    wrong.add_output(wrong.add("MatMul", [x, two], MatMulAttrs()).value, "y")
    return wrong


def node(report: SearchReport, key: str) -> Any:
    return next(n for n in report.nodes if n.key == key)
