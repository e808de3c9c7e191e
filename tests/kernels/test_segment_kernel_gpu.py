"""SegmentSum on a GPU: every launch does what its step means, twice the same, and writes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from support.needs import why_no_hopper
from support.segment_cases import CASES, graph_of
from support.simulated import feeds_of, lowered

from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_each_form(name: str, precision: str) -> None:
    graph = graph_of(name)
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = [e for e in check_steps(context, feeds) if e.kind == "SegmentSum"]
    assert found
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
