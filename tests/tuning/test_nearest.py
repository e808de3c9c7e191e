"""Choices of a plan for other sizes: which of them a later plan keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.net import Net
from support.rotary_cases import over_a_past
from support.simulated import kinds, passed

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.lowering.choose import Selection
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program
from optdnn.tuning.nearest import Nearest


def planned(graph: Graph, rows: Sequence[Mapping[str, Any]], measured: bool = False) -> Program:
    """The program of an optimized graph, in which the decisions ``rows`` are those of the nearest plan."""
    nearest = Nearest.of([rows], Selection(), measured)
    options = BuildOptions(target="simulate", precision="fp16", no_cubins=True)
    prepared = Prepared(choices=nearest.choices)
    return lower_cuda(graph, options, of_arch("sm_90a"), {}, prepared=prepared, visit=nearest)


def test_an_operator_in_the_launches_of_another_one_has_no_choice() -> None:
    graph, program = passed(over_a_past(), "fp16")
    assert kinds(program).count("RotaryPair") == 1
    rows = program.meta["tactics"]
    assert [r["tactic"] for r in rows if r["kind"] == "RotaryEmbedding"] == ["rotary", "rotary_pair"]
    again = planned(
        graph, rows
    )  # both rotations have one signature: a choice for the first one would be the second one's, too
    assert kinds(again).count("RotaryPair") == 1
    assert "RotaryEmbedding" not in kinds(again)


def product(rows: int) -> Graph:
    n = Net()
    return passed(n.done(n.matmul(n.input(rows, 24), 5)), "fp16")[0]


def choice(graph: Graph, rows: Sequence[Mapping[str, Any]] = (), measured: bool = False) -> dict[str, Any]:
    """The decision for the product of ``graph``, in which ``rows`` are the decisions of the nearest plan."""
    (row,) = [r for r in planned(graph, rows, measured).meta["tactics"] if r["kind"] == "MatMul"]
    return dict(row)


def test_a_tactic_gives_way_to_one_that_is_predicted_to_be_faster() -> None:
    of_64 = choice(product(64))
    assert of_64["tactic"] == "gemm_sm90"
    one = choice(product(1))
    assert one["tactic"] == "gemv"
    tile = choice(product(2))["config"]  # the best one for a row, too
    for measured in (False, True):
        kept = choice(product(1), [{**of_64, "config": tile}], measured)
        assert (kept["tactic"], kept["config"]) == ("gemv", one["config"])
        assert choice(product(3), [{**of_64, "config": tile}], measured)["config"] == tile


def test_only_a_measured_choice_without_a_prediction_is_kept() -> None:
    plain = {**choice(product(2)), "tactic": "matmul_tiled"}
    del plain["config"]
    assert choice(product(3), [plain], measured=True)["tactic"] == "matmul_tiled"
    assert choice(product(3), [plain])["tactic"] == "gemm_sm90"
