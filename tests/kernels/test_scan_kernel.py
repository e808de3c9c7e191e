"""PointwiseScan: one launch for all steps of a recurrence, run on the processor unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.scan_cases import CASES, STEPS, graph_of, stacked, taken
from support.simulated import check_simulated, feeds_of, kinds, lowered, on_host, simulate, tactics
from support.sweep import in_turn

from optdnn.ir.graph import Graph
from optdnn.kernels.recurrent import pointwise_scan
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of


@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp16", "fp32"))
def test_meanings(name: str, precision: str) -> None:
    program = check_simulated(graph_of(name), precision)
    assert kinds(program).count("PointwiseScan") == 1
    assert tactics(program, "PointwiseScan") == ["pointwise_scan"]


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp32", "fp16", step=2))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    compare_graph(graph_of(name), precision, tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["weighted", "gated_backward_other", "outer"])
def test_it_compiles_without_spills(name: str) -> None:
    program = lowered(graph_of(name), "fp16", target="cuda:sm_90a")
    (kernel,) = (k for k in program.kernels if k.function == "pointwise_scan")
    assert nvrtc.resources(recipe_of(kernel))["pointwise_scan"].spill_bytes == 0


def host_reasons(graph: Graph) -> list[str]:
    """The reasons for which operators run on the host."""
    program = lowered(graph, "fp32")
    return on_host(program, "PointwiseScan")


def test_operators_that_it_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(pointwise_scan.EXPRESSIONS, "GreaterOrEqual")
        (reason,) = host_reasons(graph_of("spiking"))
        assert "there is no expression for GreaterOrEqual" in reason
    monkeypatch.setattr(pointwise_scan, "POINTS_LIMIT", 12)
    (reason,) = host_reasons(graph_of("gated"))
    assert "more elements than a kernel can count" in reason


def test_tensors_without_elements() -> None:
    n = Net()
    x, rows, state = n.input(0, STEPS, 4), [], None
    for t in range(STEPS):
        now = taken(n, x, 1, t)
        state = now if state is None else n.op("Tanh", n.op("Add", state, now))
        rows.append(state)
    graph = n.done(stacked(n, rows, 1))
    (y,) = simulate(lowered(graph), feeds_of(graph)).values()
    assert y.shape == (0, STEPS, 4)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert "PointwiseScan" in {e.kind for e in found}
