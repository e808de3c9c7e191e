"""Reductions that compute their own operands: the networks that use the kernel, those that do not, and results on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, lowered, step_tactics
from support.staged_cases import CASES, REFUSED, case
from support.sweep import every, sweep

from optdnn.ops.norm import GroupNormAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of


@pytest.mark.parametrize("name", CASES)
def test_meanings(name: str) -> None:
    """One launch computes and reduces, and its meaning gives the graph's values."""
    found = step_tactics(check_simulated(case(name), "fp32", tolerance=2e-5))
    assert "reduce_staged" in found
    assert not {"reduce", "pointwise"}.intersection(found)


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    made, kind = REFUSED[reason]
    program = lowered(built(made), "fp32")
    (found,) = (t for t in program.meta["tactics"] if t["kind"] == kind)  # type: ignore[union-attr, index, call-overload]
    assert {r["tactic"]: r["reason"] for r in found["refused"]}["reduce_staged"] == reason  # type: ignore[union-attr, index, call-overload]


def test_operands_that_nothing_stores() -> None:
    """One launch normalizes and activates, so the activation's operand is never in memory (BiT pools such activations)."""
    n = Net()
    x = n.conv(n.input(2, 8, 10, 9), 32, 3)
    y = n.op("GroupNormalization", x, n.positive(32), n.random(32), attrs=GroupNormAttrs(4, 1e-3))
    graph = n.done(n.op("GlobalAveragePool", n.op("Relu", y)))
    program = check_simulated(graph, "fp16", tolerance=5e-3)
    (pool,) = (t for t in program.meta["tactics"] if t["kind"] == "GlobalAveragePool")  # type: ignore[union-attr, index, call-overload]
    reasons = {r["tactic"]: r["reason"] for r in pool["refused"]}  # type: ignore[union-attr, index, call-overload]
    assert reasons["reduce_staged"] == "another launch computes the pointwise operator, and its operands are not stored"


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision"),
    sweep([(name, precision) for name in CASES for precision in ("fp32", "fp16")], *((name, "fp16") for name in CASES)),
)
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    graph = case(name)
    program = lowered(graph, precision)
    assert compare_steps(program, feeds_of(graph), {"fp32": 3e-6, "fp16": 1.2e-3}[precision], tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(2, CASES))
def test_it_compiles_without_spills(name: str) -> None:
    program = lowered(case(name), "fp16", target="cuda:sm_90a")
    for kernel in (k for k in program.kernels if k.function == "reduce"):
        found = nvrtc.resources(recipe_of(kernel))["reduce"]
        assert found.spill_bytes == 0, (name, found)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    checked_launches(case(name), precision)
