"""Attention, recurrent layers, group norms and normalized sums on a GPU: every launch agrees with its meaning."""

from __future__ import annotations

from typing import Any

import pytest
from support.needs import why_no_hopper
from support.sequence_cases import ATTENTION, GROUP_NORM, RECURRENT, RESIDUAL
from support.simulated import feeds_of, lowered

from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine

CASES = {**ATTENTION, **RECURRENT, **GROUP_NORM, **RESIDUAL}
TOLERANCE = {"fp32": 2e-5, "tf32": 5e-4, "fp16": 4e-3, "bf16": 3e-2}


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_every_launch_agrees_with_its_meaning(name: str, precision: str) -> None:
    graph = CASES[name][0]()
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    assert not [e for e in check_steps(context, feeds_of(graph)) if not e.error < TOLERANCE[precision]]


@pytest.mark.parametrize("name", ["long", "full mask", "lstm stacked", "gru both", "grid rnn both", "groups"])
def test_runs_repeat(name: str) -> None:
    graph = CASES[name][0]()
    context: Any = Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context()
    first, second = context.run(feeds_of(graph)), context.run(feeds_of(graph))
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
