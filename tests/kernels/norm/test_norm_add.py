"""norm_add: additions of normalized rows in the norm's launch. test_sequence.py checks its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.net import Net
from support.sequence_cases import normalized_residual
from support.simulated import kinds, lowered, refusals
from support.spills import check_spills

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program

GPU = of_arch("sm_90a")
PROBLEM = rows.Problem("layer_norm", 50176, 96, add=True, last=True)


def reasons(program: Program) -> list[str]:
    """The reasons for which the tactic refuses the additions of a network."""
    return refusals(program, "norm_add", kind="Add")


def test_the_normalized_rows_are_not_stored() -> None:
    program = lowered(normalized_residual())
    step = next(s for s in program.steps if s.params["op"]["kind"] == "ActivatedNorm")
    assert {name.split("_")[0] for name in step.src} == {"Add", "LayerNormalization"}
    assert "LayerNormalization" not in kinds(program)


def test_a_norm_of_a_sum_belongs_to_that_sum() -> None:
    assert any("belongs to the launch of Add" in r for r in reasons(lowered(normalized_residual(before=True))))


def broadcast() -> Graph:
    """Normalized rows plus one row."""
    n = Net()
    y = n.op("LayerNormalization", n.matmul(n.input(2, 6, 32), 48), n.positive(48), n.random(48))
    return n.done(n.op("Add", y, n.op("Softmax", n.input(1, 1, 48, name="r"))))


def test_a_broadcast_addend_is_refused() -> None:
    assert any("only reader of a normalization of rows" in r for r in reasons(lowered(broadcast())))


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(PROBLEM, sum=True), rows.Config(4, 3, 8, 128), "its sum must be the only result"),
        (replace(PROBLEM, add=False), rows.Config(4, 3, 8, 128), "its sum must be the only result"),
        (replace(PROBLEM, length=24000), rows.Config(1024, 3, 8, 1024), "row and addend exceed"),
    ],
)
def test_the_kernel_refuses(problem: rows.Problem, config: rows.Config, reason: str) -> None:
    assert rows.refuse(PROBLEM, rows.Config(4, 3, 8, 128)) is None
    assert reason in (rows.refuse(problem, config) or "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("length", [96, 768, 4096])
def test_candidates_compile_without_spills(length: int) -> None:
    problem = replace(PROBLEM, length=length)
    for config in rows.candidates(problem, GPU, 3):
        check_spills(rows.recipe(problem, config), "rows")
