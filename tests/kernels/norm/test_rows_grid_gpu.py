"""Few, long rows in parts on a GPU: every launch agrees with its meaning, with the same bits in all runs."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.norm.test_rows_grid import in_parts  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.rows_cases import CASES, LONG, case
from support.simulated import feeds_of, lowered

from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


def check(name: str, precision: str) -> None:
    graph = case(name)
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert any(t["tactic"] == "rows_grid" for t in program.meta["tactics"])
    context: Any = Engine(program).context()
    feeds = feeds_of(graph)
    assert not [e for e in check_steps(context, feeds) if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, precision: str) -> None:
    check(name, precision)


@pytest.mark.parametrize("parts", [1, 5, 57])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_rows(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, parts)
    check(name, "fp16")
