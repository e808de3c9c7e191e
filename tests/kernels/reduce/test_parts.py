"""Reductions in parts: the networks that use the kernel, those that do not, and results on the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_program
from support.on_processor import compare_steps
from support.reduce_cases import CASES, LARGE, case
from support.simulated import TOLERANCE, check_simulated, feeds_of, lowered
from support.sweep import sweep

from optdnn.ir.graph import Graph
from optdnn.kernels.reduce import parts
from optdnn.kernels.reduce.grid import Grid
from optdnn.ops.reduce import ReduceAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch

H200 = of_arch("sm_90a")
KEPT = ReduceAttrs(True, True)
ONE = Grid(1, 4_000_000, 1024, 1, 1024, False)


def decisions(program: Any) -> set[str]:
    """The tactics of the reductions."""
    return {t["tactic"] for t in program.meta["tactics"] if t["tactic"].startswith("reduce")}


def test_one_output_of_many_terms_is_spread_over_the_gpu() -> None:
    best = parts.candidates(ONE, H200)[0]
    assert best.parts >= H200.multiprocessors
    assert parts.estimate(ONE, best.parts, H200) < parts.estimate(ONE, 1, H200) / 20


@pytest.mark.parametrize("count", [1, 3000, 100_001])
def test_no_part_is_empty(count: int) -> None:
    for c in parts.candidates(Grid(1, count, 1024, 1, 1024, False), H200):
        assert (c.parts - 1) * -(-count // c.parts) < count


@pytest.mark.parametrize(
    ("inputs", "axes", "reason"),
    [
        ((4, 700), (1,), "one block per output is predicted to be as fast"),
        ((4000, 7000), (1,), "one block per output is predicted to be as fast"),
        ((4, 70), (), "it reduces nothing"),
    ],
)
def test_refusals(inputs: tuple[int, ...], axes: tuple[int, ...], reason: str) -> None:
    n = Net()
    program = lowered(n.done(n.op("ReduceSum", n.input(*inputs), n.ints(*axes), attrs=KEPT)), "fp32", opt_level=0)
    (found,) = (t for t in program.meta["tactics"] if t["kind"] == "ReduceSum")
    assert {r["tactic"]: r["reason"] for r in found["refused"]}["reduce_parts"] == reason


@pytest.mark.parametrize("name", LARGE)
def test_large_ones_take_it(name: str) -> None:
    program = lowered(case(name), "fp16")
    assert decisions(program) == {"reduce_parts"}
    assert len(program.retained) == 1


def test_a_row_that_must_not_depend_on_the_batch_keeps_its_block() -> None:
    assert decisions(lowered(case("large pool"), "fp16", row_invariant=True)) == {"reduce"}


def in_parts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes builds divide every reduction."""

    def candidates(grid: Grid, gpu: Any) -> list[parts.Config]:
        each = -(-grid.count // min(grid.count, count))
        return [parts.Config(-(-grid.count // each))]

    monkeypatch.setattr(parts, "candidates", candidates)
    monkeypatch.setattr(parts, "estimate", lambda grid, parts, gpu: 1.0 / parts)
    monkeypatch.setattr(parts, "WORTH_S", -1.0)


@pytest.mark.parametrize("name", CASES)
def test_meanings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    assert "reduce_parts" in decisions(check_simulated(case(name), "fp32", tolerance=2e-5))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision"),
    sweep([(name, precision) for name in CASES for precision in ("fp32", "fp16")], *((name, "fp32") for name in CASES)),
)
def test_parts_of_reductions(name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    graph = case(name)
    program = lowered(graph, precision, opt_level=1)
    assert "reduce_parts" in decisions(program)
    assert compare_steps(program, feeds_of(graph), {"fp32": 3e-6, "fp16": 1.2e-3}[precision], tmp_path)


@pytest.mark.nvrtc
def test_it_compiles_without_spills() -> None:
    for name in LARGE:
        program = lowered(case(name), "fp16", target="cuda:sm_90a")
        for kernel in (k for k in program.kernels if k.function == "reduce"):
            found = nvrtc.resources(recipe_of(kernel))["reduce"]
            assert found.spill_bytes == 0, (name, found)


def check_on_a_gpu(name: str, precision: str) -> None:
    program = check_graph(case(name), precision)
    assert "reduce_parts" in decisions(program)


def check_graph(graph: Graph, precision: str) -> Any:
    """Builds, runs and compares; returns the program."""
    program = lowered(graph, precision, target="cuda:sm_90a")
    checked_program(program, feeds_of(graph), TOLERANCE[precision], runs=6)
    return program


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", [n for n in LARGE if n != "large tensor"])
def test_large_reductions_on_a_gpu(name: str, precision: str) -> None:
    check_on_a_gpu(name, precision)


@pytest.mark.hopper
def test_a_large_tensor_on_a_gpu() -> None:
    check_on_a_gpu("large tensor", "fp32")


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_parts_of_reductions_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    check_on_a_gpu(name, "fp32")
