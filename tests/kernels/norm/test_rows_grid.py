"""Few, long rows in parts: the networks that use the kernel, those that do not, and results on the processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_program
from support.on_processor import compare_steps
from support.rows_cases import CASES, LONG, case
from support.simulated import TOLERANCE, check_simulated, feeds_of, lowered
from support.spills import check_spills
from support.sweep import sweep

from optdnn.kernels.norm import rows_grid
from optdnn.kernels.norm.rows_grid import Config, Problem
from optdnn.kernels.tactic import Offer
from optdnn.ops import softmax
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import NAMED, GpuFacts, of_arch

H200 = of_arch("sm_90a")
ONE = Problem(1, 131072, 2, 2)


def alone(problem: Problem) -> float:
    """Predicted seconds if each row has one block."""
    return rows_grid.whole_rows_seconds(problem.rows, problem.length, problem.statistics, H200)


def taken(build: Callable[[Net], Any], **options: Any) -> list[dict[str, Any]]:
    """The decisions about the last operators of a network."""
    program = lowered(built(build), **options)
    return [t for t in program.meta["tactics"] if t["kind"] in ("Softmax", "GroupNormalization")]


def test_one_long_row_is_spread_over_the_gpu() -> None:
    best = rows_grid.candidates(ONE, H200)[0]
    assert rows_grid.blocks(ONE, best, H200) > 64
    assert rows_grid.estimate(ONE, best, H200) < alone(ONE) / 20


@pytest.mark.parametrize(("rows", "length"), [(1, 600), (4096, 600), (100_000, 4096)])
def test_short_and_many_rows_are_not(rows: int, length: int) -> None:
    problem = Problem(rows, length, 2, 2)
    best = rows_grid.candidates(problem, H200)[0]
    assert alone(problem) < rows_grid.estimate(problem, best, H200)


@pytest.mark.parametrize("gpu", NAMED, ids=lambda gpu: gpu.name)
def test_a_plan_for_one_gpu_runs_on_others_of_its_architecture(gpu: GpuFacts) -> None:
    least = min(other.multiprocessors for other in NAMED if other.arch == gpu.arch)
    for rows in (1, 7, 300):
        problem = Problem(rows, 1 << 20, 2, 2)
        assert max(rows_grid.blocks(problem, c, gpu) for c in rows_grid.candidates(problem, gpu)) <= least


@pytest.mark.parametrize("length", [5, 97, 1000, 131072])
def test_no_part_is_empty(length: int) -> None:
    for c in rows_grid.candidates(Problem(1, length, 2, 2), H200):
        chunk = -(-length // c.parts)
        assert (c.parts - 1) * chunk < length


def test_refusals() -> None:
    (short,) = taken(lambda n: n.op("Softmax", n.input(4, 600, 3), attrs=softmax.SoftmaxAttrs(1)), precision="fp32")
    reasons = {r["tactic"]: r["reason"] for r in short["refused"]}
    assert reasons["rows_grid"] == "one block per row is predicted to be as fast"
    assert short["tactic"] == "rows"


@pytest.mark.parametrize("name", LONG)
def test_long_rows_take_it(name: str) -> None:
    program = lowered(built(LONG[name]), "fp16")
    assert any(t["tactic"] == "rows_grid" for t in program.meta["tactics"]), name
    (step,) = (s for s in program.steps if s.params.get("launch", {}).get("waits") == "grid")
    assert not step.params["launch"]["dependent"]


def test_a_row_that_must_not_depend_on_the_batch_keeps_its_block() -> None:
    program = lowered(built(LONG["long group norm"]), "fp16", row_invariant=True)
    assert all(t["tactic"] != "rows_grid" for t in program.meta["tactics"])
    assert max(us for us, *_ in program.meta["step_times"]["steps"]) > 300


def in_parts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Makes builds divide every row."""
    monkeypatch.setattr(rows_grid, "whole_rows_seconds", lambda *given: 1.0)
    monkeypatch.setattr(
        rows_grid.RowsGrid,
        "offers",
        lambda self, problem, gpu: [Offer(Config(rows_grid._fitting(problem, parts)), 1e-6)],
    )


@pytest.mark.parametrize("name", CASES)
def test_meanings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    program = check_simulated(case(name), "fp32", tolerance=2e-5)
    assert any(t["tactic"] == "rows_grid" for t in program.meta["tactics"])


def test_more_parts_than_accesses_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    monkeypatch.setattr(rows_grid.RowsGrid, "offers", lambda self, problem, gpu: [Offer(Config(1000), 1e-6)])
    program = lowered(case("log softmax"), "fp32", opt_level=1)
    (step,) = (s for s in program.steps if s.params.get("launch", {}).get("waits") == "grid")
    assert step.params["launch"]["grid"][0] == min(3 * 2 * 41, 114)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision", "parts"),
    sweep(
        [(name, *way) for k, name in enumerate(CASES) for way in (("fp32", 5 if k % 6 == 0 else 1), ("fp16", 5))],
        (next(iter(CASES)), "fp32", 5),
        ("group norm of a transposed image", "fp16", 5),
    ),
)
def test_parts_of_rows(name: str, precision: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, a block ends before the next begins. So the first run only stores the statistics of all blocks for the
    second."""
    in_parts(monkeypatch, parts)
    graph = case(name)
    program = lowered(graph, precision, opt_level=1)
    assert any(t["tactic"] == "rows_grid" for t in program.meta["tactics"])
    assert compare_steps(program, feeds_of(graph), {"fp32": 3e-6, "fp16": 1.2e-3}[precision], tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_it_compiles_without_spills(precision: str) -> None:
    for name in LONG:
        program = lowered(built(LONG[name]), precision, target="cuda:sm_90a")
        for kernel in (k for k in program.kernels if k.function == "rows_grid"):
            check_spills(recipe_of(kernel), "rows_grid", rows_grid.THREADS)


def check_on_a_gpu(name: str, precision: str) -> None:
    graph = case(name)
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert any(t["tactic"] == "rows_grid" for t in program.meta["tactics"])
    checked_program(program, feeds_of(graph), TOLERANCE[precision])


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", LONG)
def test_long_rows_on_a_gpu(name: str, precision: str) -> None:
    check_on_a_gpu(name, precision)


@pytest.mark.hopper
@pytest.mark.parametrize("parts", [1, 5, 57])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_rows_on_a_gpu(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, parts)
    check_on_a_gpu(name, "fp16")
