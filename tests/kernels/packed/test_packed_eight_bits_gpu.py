"""Products of packed weights with rows rounded to int8 on a GPU: launches of networks compared with their meanings, in many
configurations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.on_gpu import checked_program
from support.packed_cases import CASES, GATED, Case, network
from support.simulated import TOLERANCE, feeds_of, lowered

from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.packed import eight_bits
from optdnn.kernels.packed.eight_bits import PackedBytes
from optdnn.kernels.packed.product import UnpackedProblem
from optdnn.kernels.tactic import Offer
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.engine import Engine

pytestmark = pytest.mark.hopper

FORMS = {
    **{name: replace(case, rows=70, stages=()) for name, case in CASES.items() if case.zeros in ("", "uint8")},
    "odd rows, a residual": Case(133, 61, 333, zeros="uint8", stages=(("add",),)),
    "gated": Case(300, 1000, 768, block=64, stages=GATED, dtype="bfloat16", scale="bfloat16"),
    "deep": Case(65, 256, 14336, zeros="uint8", stages=(("relu",),)),
    "2048 rows": Case(2048, 1024, 1024, block=32),
}
LARGE = {
    "plain": Case(1000, 1032, 1100, zeros="uint8"),
    "residual": Case(515, 2048, 2048, stages=(("add",),), dtype="bfloat16", scale="bfloat16"),
    "gated": Case(2048, 1024, 512, stages=GATED),
}
CONFIGS = (
    "2x1m1n256s3o1b1", "2x1m1n256s3o1b1c1x2", "2x1m1n176s4o1b1", "1x1m2n96s5o1b1", "1x1m2n160s4o1b1a", "1x1m1n128s8o1b1a",
    "1x1m1n128s8o1b1ac1x2", "2x1m2n144s3o1b1c2x1", "1x2m1n64s4o2b1", "1x1m1n48s4o1b2", "1x1m1n64s6db1", "1x1m1n24s4db2",
)  # fmt: skip


def _checked(case: Case) -> None:
    precision = "bf16" if case.dtype == "bfloat16" else "fp16"
    graph = network(case, rounded=True)
    program, feeds = lowered(graph, precision, target="cuda:sm_90a"), feeds_of(graph)
    found = checked_program(program, feeds, TOLERANCE[precision], runs=3)
    assert {"RowBytes", "UnpackedBytes", "QuantizedMatMul"} <= {e.kind for e in found}
    assert not [e for e in found if e.kind in ("RowBytes", "UnpackedBytes") and e.error]
    assert all(np.isfinite(v.astype(np.float32)).all() for v in Engine(program).run(feeds).values())


@pytest.mark.parametrize("name", FORMS)
def test_networks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TACTICS, "PackedMatMul", (PackedBytes(),))
    monkeypatch.setattr(PackedBytes, "defer", lambda self, b, op: None)
    _checked(FORMS[name])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", LARGE)
def test_every_configuration(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = implicit_gemm.Config.read(config)
    assert chosen is not None

    def one(problem: UnpackedProblem, gpu: GpuFacts) -> tuple[Offer, ...]:
        assert implicit_gemm.refuse(problem.product, chosen) is None
        return (Offer(chosen, 1e-6, row_invariant=True),)

    monkeypatch.setitem(TACTICS, "PackedMatMul", (PackedBytes(),))
    monkeypatch.setattr(PackedBytes, "defer", lambda self, b, op: None)
    monkeypatch.setattr(eight_bits, "_offers", one)
    _checked(LARGE[name])
