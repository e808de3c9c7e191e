"""A few rows times a large matrix: the tactic that reads the matrix once."""

from __future__ import annotations

import pytest
from support.net import Net
from support.simulated import check_simulated
from support.spills import check_spills

from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.runtime.cuda.gpu_facts import of_arch


def net(rows: int, depth: int, columns: int, kind: str = "gemm") -> Net:
    n = Net()
    x = n.input(rows, depth)
    y = n.gemm(x, columns) if kind == "gemm" else n.op("Add", n.matmul(x, columns), n.input(rows, columns, name="r"))
    n.done(n.op("Relu", y))
    return n


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "kind"),
    [(1, 1024, 520, "gemm"), (4, 1032, 514, "gemm"), (3, 1024, 520, "matmul with a residual"), (1, 2048, 1000, "gemm")],
)
def test_it_runs_suitable_products(rows: int, depth: int, columns: int, kind: str) -> None:
    program = check_simulated(net(rows, depth, columns, kind).graph)
    assert [t["tactic"] for t in program.meta["tactics"] if t["kind"] in ("Gemm", "MatMul")] == ["gemv"]


@pytest.mark.parametrize("columns", [1, 6, 14])
def test_it_stores_few_columns_of_a_policy(columns: int) -> None:
    """One fp32 row, without a copy and without a conversion; kernels on tensor cores run products of 8 columns."""
    n = Net()
    program = check_simulated(n.done(n.gemm(n.op("Tanh", n.input(1, 64)), columns)))
    assert [s.params["tactic"].split()[0] for s in program.steps] == ["pointwise", "gemv"]
    n = Net()
    program = check_simulated(n.done(n.gemm(n.op("Tanh", n.input(1, 64)), 8)))
    assert [s.params["tactic"].split()[0] for s in program.steps] == ["pointwise", "gemm_sm90"]


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "reason"),
    [
        (5, 1024, 520, "up to 4 rows, not 5"),
        (1, 64, 64, "its matrix is small"),
        (2, 64, 13, "its matrix is small"),
        (1, 1030, 520, "rows of a multiple of 8"),
    ],
)
def test_refusals(rows: int, depth: int, columns: int, reason: str) -> None:
    program = check_simulated(net(rows, depth, columns).graph)
    (found,) = [t for t in program.meta["tactics"] if t["kind"] == "Gemm"]
    assert any(r["tactic"] == "gemv" and reason in r["reason"] for r in found["refused"])


def test_configurations_keep_enough_loads_in_flight() -> None:
    problem = gemv.Problem(1, 4096, 25088)
    best = gemv.candidates(problem, of_arch("sm_90a"))[0]
    assert gemv.refuse(problem, best) is None
    assert 45e-6 < gemv.estimate(problem, best, of_arch("sm_90a")) < 65e-6
    assert gemv.refuse(gemv.Problem(5, 8, 8), best) == "it is for up to 4 rows, not 5"
    assert "tile" in str(gemv.refuse(problem, gemv.Config(8, 4, 8)))
    assert "multiple of 8, not 12" in str(gemv.refuse(gemv.Problem(1, 8, 12), best))
    assert "16-bit floats, not float32" in str(gemv.refuse(gemv.Problem(1, 8, 8, dtype="float32"), best))


def test_deep_columns_come_two_to_a_block() -> None:
    for depth, columns in ((4096, 4), (25088, 2)):
        assert gemv.candidates(gemv.Problem(1, 4096, depth), of_arch("sm_90a"))[0].columns == columns


@pytest.mark.nvrtc
def test_kernels_do_not_spill() -> None:
    for rows in (1, 4):
        problem = gemv.Problem(rows, 1000, 4096, (("bias",), ("add",), ("relu",)), "bfloat16")
        for arch in ("sm_80", "sm_90a"):
            for config in gemv.candidates(problem, of_arch("sm_90a"))[:2]:
                check_spills(gemv.recipe(problem, config, arch))
