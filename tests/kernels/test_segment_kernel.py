"""SegmentSum: one launch gathers, computes and adds the rows of every segment, run on the processor unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.segment_cases import CASES, edges, graph_of, rows_of, scattered
from support.simulated import check_simulated, feeds_of, kinds, lowered, on_host, simulate, tactics
from support.sweep import every, in_turn

from optdnn.kernels.reduce import segment_sum
from optdnn.ops.index import ConcatAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of


@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp16", "fp32"))
def test_meanings(name: str, precision: str) -> None:
    program = check_simulated(graph_of(name), precision)
    assert set(tactics(program, "SegmentSum")) == {"segments"}
    assert not {"ScatterND", "ScatterElements"} & set(kinds(program))


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp32", "fp16", step=2))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    compare_graph(graph_of(name), precision, tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(3, CASES))
def test_it_compiles_without_spills(name: str) -> None:
    program = lowered(graph_of(name), "fp16", target="cuda:sm_90a")
    made = [k for k in program.kernels if k.function == "segment_sum"]
    assert made
    assert all(nvrtc.resources(recipe_of(k))["segment_sum"].spill_bytes == 0 for k in made)


@pytest.mark.parametrize(
    ("longest", "threads", "lanes"), [(4, 100, 1), (5, 100, 2), (1000, 100, 32), (1000, 1 << 17, 4)]
)
def test_long_segments_are_shared_by_lanes(longest: int, threads: int, lanes: int) -> None:
    assert segment_sum._lanes(longest, threads) == lanes


def test_operators_that_it_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(name: str) -> list[str]:
        program = lowered(graph_of(name), "fp32")
        return on_host(program, "SegmentSum")

    with monkeypatch.context() as patch:
        patch.delitem(segment_sum.EXPRESSIONS, "Sub")
        assert "there is no expression for Sub" in reasons("messages")[0]
    monkeypatch.setattr(segment_sum, "POINTS_LIMIT", 12)
    assert "more elements than a kernel can count" in reasons("plain")[0]


def test_rows_without_elements() -> None:
    n = Net()
    graph = n.done(scattered(n, n.input(90, 0), edges(1), 0))
    (y,) = simulate(lowered(graph), feeds_of(graph)).values()
    assert y.shape == (21, 0)


def test_parts_of_joined_rows_are_written_in_place() -> None:
    """The rows of both ends of an edge, gathered in any order, and sums of edges, concatenated with other rows (MeshGraphNets)."""
    n = Net()
    x, e = n.input(21, 16), n.input(90, 16, name="e")
    ends = [n.op("GatherND", x, n.const(edges(2)[:, None], np.int64)), rows_of(n, x, edges(1))]
    e = n.matmul(n.op("Concat", n.op("Tanh", e), *ends, attrs=ConcatAttrs(1)), 16)
    total = scattered(n, e, edges(1), 16)
    y = n.matmul(n.op("Concat", n.op("Tanh", x), total, attrs=ConcatAttrs(1)), 8)
    program = check_simulated(n.done(y))
    assert "Copy" not in kinds(program)
    assert kinds(program).count("SegmentSum") == 1


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert "SegmentSum" in {e.kind for e in found}
