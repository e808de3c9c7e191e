"""The range of data that are quantized in the run: plans, and the kernel on the processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_program
from support.on_processor import compare_steps
from support.simulated import feeds_of, kinds, lowered
from support.sweep import sweep

from optdnn.ir.graph import Graph
from optdnn.kernels.quantized import dynamic_range
from optdnn.kernels.quantized.dynamic_range import Config, Problem
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch

H200 = of_arch("sm_90a")


def of(*shape: int, dtype: type = np.float32, turned: bool = False, relu: bool = False) -> Graph:
    """The range of a tensor. ``turned``: it is read in another order than that of memory. ``relu``: of numbers above 0."""
    n = Net(dtype)
    x = n.input(*shape)
    if relu:
        x = n.op("Relu", x)
    if turned:
        x = n.op("Transpose", n.op("Sigmoid", x), attrs=TransposeAttrs((1, 0)))
    return n.done(*n.op("DynamicRange", x, outputs=2))


CASES = {
    "few": of(3, 5),
    "rows": of(40, 96),
    "odd": of(7, 333),
    "above zero": of(16, 64, relu=True),
    "turned": of(24, 40, turned=True),
    "halves": of(33, 64, dtype=np.float16),
    "one": of(1),
}


def in_parts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Makes builds divide every tensor."""

    def candidates(problem: Problem, gpu: object) -> list[Config]:
        each = -(-problem.accesses // min(problem.accesses, parts))
        return [Config(-(-problem.accesses // each))]

    monkeypatch.setattr(dynamic_range, "candidates", candidates)


@needs_compiler
@pytest.mark.parametrize(("name", "parts"), sweep([(n, p) for n in CASES for p in (1, 5)], ("odd", 5), ("rows", 1)))
def test_ranges(name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, parts)
    program = lowered(CASES[name], "fp32", opt_level=0)
    assert kinds(program).count("DynamicRange") == 1
    assert len(program.retained) == (parts > 1 and name != "one")
    assert compare_steps(program, feeds_of(CASES[name]), 1e-7, tmp_path)


def test_parts_of_a_large_tensor() -> None:
    """One block for all activations of a transformer would take longer than its products."""
    large, small = Problem(2048 * 768 // 8, 16), Problem(64, 16)
    best = dynamic_range.candidates(large, H200)[0]
    assert best.parts > H200.multiprocessors // 2
    assert dynamic_range.estimate(large, best, H200) < dynamic_range.estimate(large, Config(1), H200) / 10
    assert dynamic_range.candidates(small, H200)[0] == Config(1)


@pytest.mark.parametrize("accesses", [1, 3000, 100_001])
def test_no_part_is_empty(accesses: int) -> None:
    for c in dynamic_range.candidates(Problem(accesses, 16), H200):
        assert (c.parts - 1) * -(-accesses // c.parts) < accesses


def test_rounding_a_large_tensor_by_its_range_takes_one_launch_more() -> None:
    n = Net()
    graph = n.done(*n.op("DynamicQuantizeLinear", n.input(2048, 768), outputs=3))
    assert kinds(lowered(graph, "fp32")) == ["DynamicRange", "Pointwise"]
    assert kinds(lowered(graph, "fp32", opt_level=1)) == ["DynamicRange", "QuantizeLinear"]


def why_on_the_host(graph: Graph) -> str:
    program = lowered(graph, "fp32", opt_level=0)
    (row,) = program.meta["host"]["operators"]  # type: ignore[index, call-overload]
    return str(row["why"])


def test_it_is_the_same_for_any_number_of_parts() -> None:
    assert "DynamicRange" in kinds(lowered(CASES["rows"], "fp32", opt_level=0, row_invariant=True))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it has no elements" in why_on_the_host(of(0, 3))
    monkeypatch.setattr(dynamic_range, "MOST_ELEMENTS", 100)
    assert "it reads more elements than a kernel counts" in why_on_the_host(of(40, 96))


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["rows", "turned", "halves"])
def test_it_compiles_without_spills(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 5)
    program = lowered(CASES[name], "fp32", target=f"cuda:{arch}", opt_level=0)
    (kernel,) = (k for k in program.kernels if k.function == "dynamic_range")
    found = nvrtc.resources(recipe_of(kernel))["dynamic_range"]
    assert found.spill_bytes == 0, found


@pytest.mark.hopper
@pytest.mark.parametrize("parts", [1, 5, 100])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu_agree_with_their_meaning(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, parts)
    checked_program(lowered(CASES[name], "fp32", target="cuda:sm_90a", opt_level=0), feeds_of(CASES[name]), 1e-6)
