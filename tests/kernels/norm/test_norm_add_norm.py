"""norm_add_norm: an addition with a norm before and after it, in one launch. test_sequence.py checks its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.net import Net
from support.sequence_cases import normalized_residual, sandwich
from support.simulated import kinds, lowered, refusals
from support.spills import check_spills

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program

GPU = of_arch("sm_90a")
FIRST = rows.FirstNorm("rms_norm", scale=True, bias=False, epsilon=1e-6)
PROBLEM = rows.Problem("rms_norm", 128, 1536, add=True, sum=True, bias=False, first=FIRST)


def reasons(program: Program) -> list[str]:
    """The reasons for which the tactic refuses the additions of a network."""
    return refusals(program, "norm_add_norm", kind="Add")


def test_one_launch_normalizes_adds_and_normalizes() -> None:
    program = lowered(sandwich())
    found = [s for s in program.steps if s.params["op"]["kind"] == "NormAddNorm"]
    assert len(found) == 2
    assert [sorted(name.split("_")[0] for name in s.src) for s in found] == [
        ["Add", "RMSNormalization", "RMSNormalization"]
    ] * 2
    assert not {"RMSNormalization", "AddNorm"} & set(kinds(program))


def test_a_sum_that_nothing_normalizes_is_refused() -> None:
    assert any("no normalization reads the sum" in r for r in reasons(lowered(normalized_residual())))


def test_a_norm_of_a_sum_belongs_to_that_sum() -> None:
    n = Net()
    x, width = n.matmul(n.input(2, 6, 32), 48), 48
    total = n.op("Add", n.op("Softmax", x), n.op("Softmax", n.input(2, 6, width, name="y")))
    again = n.op("Add", total, n.op("RMSNormalization", total, n.positive(width)))
    graph = n.done(n.matmul(n.op("RMSNormalization", again, n.positive(width)), 16))
    assert any("belongs to the launch of Add" in r for r in reasons(lowered(graph)))


def kept() -> Graph:
    """The first norm's result is also an output."""
    n = Net()
    norm = n.op("RMSNormalization", n.matmul(n.input(2, 6, 32), 48), n.positive(48))
    total = n.op("Add", n.op("Softmax", n.input(2, 6, 48, name="y")), norm)
    return n.done(n.matmul(n.op("RMSNormalization", total, n.positive(48)), 16), norm)


def test_a_norm_with_other_readers_is_refused() -> None:
    assert any("only reader of a normalization of rows" in r for r in reasons(lowered(kept())))


@pytest.mark.parametrize(
    "changes", [{"sum": False, "add": False}, {"operation": "softmax", "add": False, "sum": False}], ids=str
)
def test_the_kernel_refuses_a_first_norm_without_a_sum(changes: dict[str, object]) -> None:
    config = rows.Config(192, 1, 8, 192)
    assert rows.refuse(PROBLEM, config) is None
    assert "a norm before the addition" in (rows.refuse(replace(PROBLEM, **changes), config) or "")  # type: ignore[arg-type]


@pytest.mark.nvrtc
@pytest.mark.parametrize("length", [96, 1536, 4096])
def test_candidates_compile_without_spills(length: int) -> None:
    first = replace(FIRST, operation="layer_norm", bias=True)
    problem = replace(PROBLEM, operation="layer_norm", bias=True, length=length, first=first)
    for config in rows.candidates(problem, GPU, 3):
        check_spills(rows.recipe(problem, config), "rows")
