"""Reductions in parts on a GPU: every launch agrees with its meaning, with the same bits in all runs."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.reduce.test_parts import decisions, in_parts  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.reduce_cases import CASES, LARGE, case
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


def check(name: str, precision: str) -> None:
    program = check_graph(case(name), precision)
    assert "reduce_parts" in decisions(program)


def check_graph(graph: Graph, precision: str) -> Any:
    """Builds, runs and compares. Returns the program."""
    program = lowered(graph, precision, target="cuda:sm_90a")
    context: Any = Engine(program).context()
    feeds = feeds_of(graph)
    assert not [e for e in check_steps(context, feeds) if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
    first = context.run(feeds)
    for _ in range(5):
        again = context.run(feeds)
        assert all(first[k].tobytes() == again[k].tobytes() for k in first)
    return program


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", [n for n in LARGE if n != "large tensor"])
def test_large_reductions(name: str, precision: str) -> None:
    check(name, precision)


def test_a_large_tensor() -> None:
    check("large tensor", "fp32")


@pytest.mark.parametrize("name", CASES)
def test_parts_of_reductions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    check(name, "fp32")
