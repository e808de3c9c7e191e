"""The check of a library's results: wrong ones are refused, and a network that amplifies roundoff is not held against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.ops.base import Attrs
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
