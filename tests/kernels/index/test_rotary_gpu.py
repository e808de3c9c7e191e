"""Rotary embeddings on a GPU: every launch does what its step means; nothing is left out or written outside."""

from __future__ import annotations

import pytest
from support.on_gpu import checked_program
from support.rotary_cases import ROTARY
from support.simulated import TOLERANCE, feeds_of, lowered

from optdnn.kernels.gemm import turned

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ROTARY)
def test_each_form(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned, "LEAST_ROWS", 1 << 30)  # no product turns heads
    graph = ROTARY[name]()
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "RotaryEmbedding"} <= {"rotary", "rotary_pair"}
    found = checked_program(program, feeds_of(graph), TOLERANCE[precision])
    assert {"RotaryEmbedding", "RotaryPair"} & {e.kind for e in found}
