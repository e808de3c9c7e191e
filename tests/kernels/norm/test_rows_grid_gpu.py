"""Few, long rows in parts on a GPU: every launch does what its step means, with the same bits from run to run."""

from __future__ import annotations

import pytest
from kernels.norm.test_rows_grid import in_parts  # type: ignore[import-not-found]
from support.on_gpu import checked_program
from support.rows_cases import CASES, LONG, case
from support.simulated import TOLERANCE, feeds_of, lowered

pytestmark = pytest.mark.hopper


def check(name: str, precision: str) -> None:
    graph = case(name)
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert any(t["tactic"] == "rows_grid" for t in program.meta["tactics"])
    checked_program(program, feeds_of(graph), TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, precision: str) -> None:
    check(name, precision)


@pytest.mark.parametrize("parts", [1, 5, 57])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_rows(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, parts)
    check(name, "fp16")
