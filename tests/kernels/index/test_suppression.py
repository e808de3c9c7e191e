"""Many boxes are compared by a kernel, also in a body: the programs that have it, and results on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.fallback import NETWORKS
from support.suppression_cases import detector, feeds

import optdnn
from optdnn.importers.onnx import import_model
from optdnn.kernels.index import suppression
from optdnn.lowering.host import host_us
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.suppression import TEMPLATE


@pytest.mark.parametrize("body", [False, True])
def test_programs_that_suppress_boxes_have_the_kernel(body: bool) -> None:
    program = optdnn.build(detector(300, 3, body=body), target="simulate", tactics="heuristic").program
    assert [k.template for k in program.kernels].count(TEMPLATE) == 1
    assert ("If" if body else "NonMaxSuppression") in {s.params.get("kind") for s in program.steps}


def test_other_programs_do_not_have_it() -> None:
    program = optdnn.build(NETWORKS["three"](), target="simulate", tactics="heuristic").program
    assert TEMPLATE not in [k.template for k in program.kernels]


def test_few_kept_boxes_cost_less_on_the_host() -> None:
    def cost(limit: int) -> float:
        graph = import_model(detector(20_000, 1, limit=limit))
        return host_us(graph, graph.of_kind("NonMaxSuppression")[0])

    assert cost(10) < cost(100) < cost(100_000) == cost(20_000)


def test_engines_keep_the_kernel(tmp_path: Path) -> None:
    engine, given = optdnn.build(detector(300, 3), target="simulate", tactics="heuristic"), feeds(300, 3)
    engine.save(tmp_path / "a.engine")
    again = optdnn.load(tmp_path / "a.engine")
    assert again.program.kernels == engine.program.kernels
    np.testing.assert_array_equal(again.run(given)["y"], engine.run(given)["y"])


@pytest.mark.nvrtc
def test_it_compiles_without_spills() -> None:
    for arch in ("sm_80", "sm_90a", "sm_120"):
        assert nvrtc.resources(suppression.launch(arch).recipe)["suppress"].spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("boxes", "classes", "limit", "spread"),
    [
        (100, 1, 1000, 20.0),
        (5000, 1, 10**6, 200.0),
        (1500, 30, 7, 60.0),
        (1024, 2, 1000, 1e6),
        (30000, 1, 300, 300.0),
        (4100, 1, 10**6, 4.0),
    ],
)
def test_results_on_a_gpu(boxes: int, classes: int, limit: int, spread: float) -> None:
    made = detector(boxes, classes, limit=limit, body=boxes == 5000)
    engine, numpy = optdnn.build(made, target="cuda"), optdnn.build(made, target="reference")
    context = engine.context()
    for seed in (0, 1):
        given = feeds(boxes, classes, spread=spread, seed=seed)
        np.testing.assert_array_equal(context.run(given)["y"], numpy.run(given)["y"])
