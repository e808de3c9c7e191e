"""Reductions that compute their own operands, on a GPU: every launch does what its step means."""

from __future__ import annotations

from typing import Any

import pytest
from support.needs import why_no_hopper
from support.simulated import feeds_of, lowered
from support.staged_cases import CASES, case

from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_staged_reductions(name: str, precision: str) -> None:
    graph = case(name)
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    assert not [e for e in check_steps(context, feeds) if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
