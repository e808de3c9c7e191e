"""Support vector machines on a GPU: a warp for each row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder
from optdnn.kernels.index import votes
from optdnn.ops.classic import SVMDecisionAttrs
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.types import FP32, Array

CASES = [(2, False), (2, True), (3, True), (5, False), (5, True)]
"""Classes, and whether their probabilities are coupled."""


def machine(classes: int, coupled: bool, rows: int = 7) -> Graph:
    n = Net()
    per_class = tuple(3 + 20 * (k % 3) for k in range(classes))
    total, pairs = sum(per_class), classes * (classes - 1) // 2
    k = n.op("Sigmoid", n.input(rows, total))
    given = [n.random(classes - 1, total, scale=0.3), n.random(pairs, scale=0.2)]
    if coupled:
        given += [n.random(pairs, scale=0.3, offset=-1.5), n.random(pairs, scale=0.1)]
    return n.done(*n.op("SVMDecision", k, *given, attrs=SVMDecisionAttrs(per_class), outputs=3))


@pytest.mark.parametrize(("classes", "coupled"), CASES)
def test_machines_have_a_kernel(classes: int, coupled: bool) -> None:
    program = check_simulated(machine(classes, coupled), "fp32")
    assert {s.executor for s in program.steps} == {"cuda"}


@needs_compiler
@pytest.mark.parametrize(("classes", "coupled"), CASES)
def test_the_kernel_on_the_processor(classes: int, coupled: bool, tmp_path: Path) -> None:
    graph = machine(classes, coupled)
    feeds: dict[str, Array] = feeds_of(graph)
    feeds["x"][0] = np.abs(feeds["x"][0])
    assert compare_steps(lowered(graph, "fp32"), feeds, 1e-6, tmp_path) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize(("classes", "coupled"), CASES)
def test_machines_on_a_gpu(classes: int, coupled: bool) -> None:
    assert "SVMDecision" in {e.kind for e in checked_launches(machine(classes, coupled), "fp32")}


def test_probabilities_of_many_classes_run_on_the_cpu() -> None:
    graph = machine(votes.MOST_CLASSES + 1, True)
    (op,) = graph.of_kind("SVMDecision")
    assert "the pairs of at most 12 classes, not of 13" in str(votes.TACTIC.refuse(Builder(graph, named("h200")), op))
    assert "not of 13" in lowered(graph, "fp32").meta["host"]["operators"][0]["why"]


def test_the_predicted_time_grows_with_vectors_and_classes() -> None:
    def seconds(classes: int, coupled: bool) -> float:
        graph = machine(classes, coupled)
        found = votes.TACTIC.seconds(Builder(graph, named("h200")), graph.of_kind("SVMDecision")[0])
        assert found is not None
        return found

    assert seconds(2, False) < seconds(5, False) < seconds(5, True)


def test_votes_are_not_rounded_in_fp16() -> None:
    """A pair's value that is rounded may vote for the other class."""
    program = lowered(machine(4, True), "fp16")
    step = next(s for s in program.steps if s.params["op"]["kind"] == "SVMDecision")
    assert program.buffers[step.inputs[0]].dtype == FP32
