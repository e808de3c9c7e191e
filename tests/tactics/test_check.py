"""The check of a library's results: wrong ones are refused, and a network that amplifies roundoff is not held against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Attrs
from optdnn.ops.table import OPDEFS
from optdnn.tactics.base import Measured
from optdnn.tactics.cpu_check import check
from optdnn.types import FP32, Array, tensor


class Fake:
    """An engine that computes ``graph`` of inputs that are off by ``error``."""

    def __init__(self, graph: Graph, error: float):
        self.graph, self.error = graph, error

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return evaluate(self.graph, {k: (v * (1 + self.error)).astype(FP32) for k, v in feeds.items()})


def network(steep: bool) -> Graph:
    """The sine of x, or of a million times x."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 2, 50))
    if steep:
        x = graph.add("Mul", [x, graph.add_constant(np.array(1e6, np.float32))], Attrs()).value
    graph.add_output(graph.add("Sin", [x]).value, "y")
    return graph


def judge(steep: bool, error: float) -> tuple[Any, Any]:
    graph = network(steep)
    return check(graph, {"fake/1t": Fake(graph, error)}, random_feeds(graph, seed=1), "fp32")  # type: ignore[dict-item]


def test_right_results_pass_without_a_word() -> None:
    assert judge(steep=False, error=1e-6) == ({}, {})


def test_wrong_results_are_refused() -> None:
    wrong, doubts = judge(steep=False, error=0.1)
    assert doubts == {}
    assert "differs from the reference" in wrong["fake/1t"]


def test_what_the_network_does_to_any_roundoff_is_noted() -> None:
    wrong, doubts = judge(steep=True, error=1e-6)
    assert wrong == {}
    assert "no made-up input can judge it" in doubts["fake/1t"]
    assert "note" in Measured("fake/1t", {}, 1.0, note=doubts["fake/1t"]).to_json()
    assert "note" not in Measured("fake/1t", {}, 1.0).to_json()


def ranking(tilt: float) -> Graph:
    """Rows of a table, chosen by scores that saturate to the same number, but for ``tilt`` from one to the next."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 50))

    def constant(array: Any) -> Value:
        return graph.add_constant(np.asarray(array, np.float32))

    large = graph.add("Add", [x, constant(100)])
    scores = graph.add("Mul", [graph.add("Sigmoid", [large.value]).value, constant(1 + tilt * np.arange(50))])
    k = graph.add_constant(np.array([5]))
    best = graph.add("TopK", [scores.value, k], OPDEFS["TopK"].attrs(), outputs=2)
    table = graph.add_constant(np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32))
    graph.add_output(graph.add("Gather", [table, Value(best.id, 1)], OPDEFS["Gather"].attrs()).value, "y")
    return graph


def judge_ranking(spoil: float = 1.0) -> tuple[Any, Any]:
    class Other(Fake):
        def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
            return {name: y * np.float32(spoil) for name, y in super().run(feeds).items()}

    graph = ranking(tilt=0.0)
    engines = {"fake/1t": Other(ranking(tilt=2.0**-23), 0.0)}
    return check(graph, engines, random_feeds(graph, seed=1), "fp32")  # type: ignore[arg-type]


def test_equal_scores_in_another_order_are_noted() -> None:
    wrong, doubts = judge_ranking()
    assert wrong == {}
    assert "or what it ranks" in doubts["fake/1t"]


def test_a_ranking_does_not_excuse_every_result() -> None:
    wrong, doubts = judge_ranking(spoil=1e3)
    assert doubts == {}
    assert "differs from the reference" in wrong["fake/1t"]
