"""Rotary embeddings on a GPU: every launch agrees with its meaning and writes all results, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from support.needs import why_no_hopper
from support.rotary_cases import ROTARY
from support.simulated import feeds_of, lowered

from optdnn.kernels.gemm import turned
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", ROTARY)
def test_each_form(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned, "LEAST_ROWS", 1 << 30)  # no product rotates the heads
    graph = ROTARY[name]()
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "RotaryEmbedding"} <= {"rotary", "rotary_pair"}
    context: Any = Engine(program).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert {"RotaryEmbedding", "RotaryPair"} & {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
