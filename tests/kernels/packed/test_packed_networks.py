"""Networks with packed weights: the choices of their plans, and results in simulate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.packed_cases import CASES, Case, drawn, network
from support.simulated import check_simulated, kinds, lowered

from optdnn.kernels.builder import Builder
from optdnn.kernels.packed.gemm import PackedGemm
from optdnn.kernels.packed.product import refusal
from optdnn.kernels.packed.tactics import PackedResident
from optdnn.lowering.table import TACTICS
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program


def tactics_of(program: Program) -> list[str]:
    return [t["tactic"] for t in program.meta["tactics"] if t["kind"] == "PackedMatMul"]


@pytest.mark.parametrize("name", ["4 bits", "gated", "an odd depth", "by channel", "8 bits, bf16", "8-bit floats"])
def test_the_kernels_agree_with_their_meaning(name: str) -> None:
    case = CASES[name]
    program = check_simulated(network(case), "bf16" if case.dtype == "bfloat16" else "fp16")
    tactic = "packed_gemv" if case.code == "fp8_e4m3" else "packed_digits"
    assert tactics_of(program) == [tactic]
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "TiledPackedMatMul"]
    assert tactic in step.params["tactic"]


@pytest.mark.parametrize(
    ("name", "rows", "arch", "tactic"),
    [
        ("gated", 16, "sm_90a", "packed_sm90"),
        ("gated", 17, "sm_90a", "packed_sm90"),
        ("gated", 32, "sm_90a", "packed_sm90"),
        ("gated", 32, "sm_86", "packed_mma"),
        ("an odd depth", 9, "sm_86", "packed_mma"),
        ("gated", 200, "sm_90a", "packed_sm90"),
        ("8 bits, bf16", 265, "sm_90a", "packed_sm90"),
        ("8 bits, bf16", 265, "sm_86", "packed_gemm"),
    ],
)
def test_many_rows(name: str, rows: int, arch: str, tactic: str) -> None:
    case = CASES[name].of_rows(rows)
    program = check_simulated(network(case), "bf16" if case.dtype == "bfloat16" else "fp16", target=f"cuda:{arch}")
    assert tactics_of(program) == [tactic]
    assert kinds(program).count("UnpackedTiles") == (tactic == "packed_gemm")


def test_rows_stay_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken even if it is predicted to be slower."""
    monkeypatch.setattr(PackedResident, "defer", lambda *given: None)
    monkeypatch.setitem(TACTICS, "PackedMatMul", (PackedResident(),))
    program = check_simulated(network(CASES["gated"].of_rows(16)), target="cuda:sm_90a")
    assert tactics_of(program) == ["packed_resident"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_86"])
@pytest.mark.parametrize(("name", "rows"), [("gated", 33), ("an odd depth", 9)])
def test_unpacked(name: str, rows: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TACTICS, "PackedMatMul", (PackedGemm(),))
    program = check_simulated(network(CASES[name].of_rows(rows)), target=f"cuda:{arch}")
    assert "UnpackedTiles" in kinds(program)


def test_weights_stay_packed() -> None:
    program = lowered(network(Case(1, 256, 1024)))
    assert sum(b.nbytes for b in program.blobs) < 0.32 * 2 * 256 * 1024


def why(n: Net, rows: int, *operands: Any) -> str | None:
    """The reason for which no kernel runs a product with these weights, scales and zero points."""
    x = n.input(rows, 256, dtype=np.float16)
    y = n.op("PackedMatMul", x, *operands, attrs=PackedMatMulAttrs("uint4", 256, 128))
    graph = n.done(y)
    return refusal(Builder(graph, of_arch("sm_90a")), graph.op(y.op))


def test_refusals() -> None:
    tactics = lowered(network(Case(257, depth=256)), target="cuda:sm_80").meta["tactics"]
    (found,) = [t for t in tactics if t["kind"] == "PackedMatMul"]
    assert {r["tactic"]: r["reason"] for r in found["refused"]} == {
        "packed_digits_rows": "it is for up to 8 rows, not 257",
        "packed_digits": "it is for up to 8 rows, not 257",
        "packed_gemv": "it is for up to 8 rows, not 257",
        "packed_mma": "it is for up to 256 rows, not 257",
        "packed_resident_pair": "its result is not multiplied by another product of the same rows without other readers",
        "packed_resident": "it needs Hopper's bulk copies (sm_90a), not sm_80",
        "packed_8bit": "its rows must not be rounded to 8 bits (w4a8 lets them)",
        "packed_sm90": "it needs Hopper's wgmma and TMA (sm_90a), not sm_80",
    }
    n, weights = Net(), np.zeros((64, 128), np.uint8)
    assert why(n, 1, n.input(64, 128, name="w", dtype=np.uint8), n.random(64, 2)) == "its weights are not constant"
    n = Net()
    assert why(n, 1, weights, n.random(64, 2), np.full((64, 2), 15, np.uint8)) is None
    n = Net()
    assert "its zero points exceed the range of uint4" in str(
        why(n, 1, weights, n.random(64, 2), np.full((64, 2), 16, np.uint8))
    )


def test_weights_are_unpacked_when_they_are_needed() -> None:
    case, n = Case(400, 512, 512), Net()
    o, y = drawn(case), n.input(400, 512)
    for k in range(4):
        constants = [n.graph.add_constant(a) for a in (np.roll(o.packed, k, 0), o.scales)]
        y = n.op("PackedMatMul", y, *constants, attrs=PackedMatMulAttrs(case.code, 512, 128))
    found = [k for k in kinds(lowered(n.done(y), target="cuda:sm_80")) if k in ("UnpackedTiles", "Conv")]
    assert found == ["UnpackedTiles", "Conv"] * 4
