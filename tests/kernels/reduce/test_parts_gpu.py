"""Reductions in parts on a GPU: every launch does what its step means, with the same bits from run to run."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.reduce.test_parts import decisions, in_parts  # type: ignore[import-not-found]
from support.on_gpu import checked_program
from support.reduce_cases import CASES, LARGE, case
from support.simulated import TOLERANCE, feeds_of, lowered

from optdnn.ir.graph import Graph

pytestmark = pytest.mark.hopper


def check(name: str, precision: str) -> None:
    program = check_graph(case(name), precision)
    assert "reduce_parts" in decisions(program)


def check_graph(graph: Graph, precision: str) -> Any:
    """Builds, runs and compares; returns the program."""
    program = lowered(graph, precision, target="cuda:sm_90a")
    checked_program(program, feeds_of(graph), TOLERANCE[precision], runs=6)
    return program


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", [n for n in LARGE if n != "large tensor"])
def test_large_reductions(name: str, precision: str) -> None:
    check(name, precision)


def test_a_large_tensor() -> None:
    check("large tensor", "fp32")


@pytest.mark.parametrize("name", CASES)
def test_parts_of_reductions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    check(name, "fp32")
