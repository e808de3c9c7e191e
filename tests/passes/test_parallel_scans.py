"""parallel_scans: Scans whose iterations do not depend on each other; refused where one reads what another computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.fallback import F, body, model, node

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.parallel_scans import ParallelScans
from optdnn.passes.support import iterations

GPU = PassContext(target="cuda:sm_90a")


def scan(nodes: list[onnx.NodeProto], out: list[int], length: Any = 5, **attrs: Any) -> Graph:
    """A state ``s`` of (4, 3), rows ``x`` of 3 and matrices ``z`` of (3, 2), along their last axis; ``w`` is captured."""
    inner = body(nodes, [("s", F, [4, 3]), ("x", F, [3]), ("z", F, [3, 2])], [("t", F, [4, 3]), ("y", F, out)])
    given = {"num_scan_inputs": 2, "scan_input_axes": [0, -1], **attrs}
    scanned = node("Scan", "s0 xs zs", "last ys", body=inner, **given)
    inputs = [("s0", F, [4, 3]), ("xs", F, [length, 3]), ("zs", F, [3, 2, length]), ("w", F, [4, 3])]
    return import_model(model([scanned], inputs, [("last", F, [4, 3]), ("ys", F, None)], last_axis=np.array([-1])))


KEPT = node("Identity", "s", "t")
DISTANCES = [KEPT, node("Sub", "s x", "d"), node("ReduceSumSquare", "d last_axis", "y", keepdims=0)]
ARITHMETIC = [
    KEPT, node("Mul", "w x", "a"), node("MatMul", "a z", "b"), node("Transpose", "b", "c"), node("Exp", "w", "e"),
    node("MatMul", "c e", "f"), node("ReduceMax", "f", "y", keepdims=1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "out", "attrs"),
    [
        (DISTANCES, [4], {}),
        (DISTANCES, [4], {"scan_output_axes": [1]}),
        (ARITHMETIC, [1, 1], {}),
        ([KEPT, node("Neg", "s", "y")], [4, 3], {}),
        ([KEPT, node("Identity", "z", "y")], [3, 2], {"scan_output_axes": [-1]}),
    ],
)
def test_iterations_are_computed_together(nodes: list[onnx.NodeProto], out: list[int], attrs: dict[str, Any]) -> None:
    changed, _ = check_pass(ParallelScans(), scan(nodes, out, **attrs), changes=1, context=GPU)
    assert not list(changed.of_kind("Scan"))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (scan([node("Add", "s x", "t"), node("Neg", "s", "y")], [4, 3]), "an iteration reads what the one before it computed"),
        (scan(DISTANCES, [4], scan_input_directions=[0, 1]), "it goes backwards"),
        (scan(DISTANCES, [4], scan_output_directions=[1]), "it goes backwards"),
        (scan(DISTANCES, [4], length="n"), "its number of iterations is not known"),
        (scan([KEPT, node("LpNormalization", "z", "y", axis=0)], [3, 2]), "its LpNormalization cannot have one more axis"),
        (scan([KEPT, node("MatMul", "s x", "y")], [4]), "its MatMul cannot have one more axis"),
    ],
)  # fmt: skip
def test_refusals(graph: Graph, because: str) -> None:
    check_refused(ParallelScans(), graph, because=because, context=GPU)


def test_results_of_all_iterations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "MOST_BYTES", 5 * 4 * 3 * 4 - 1)
    check_refused(ParallelScans(), scan(DISTANCES, [4]), because="would take too much memory", context=GPU)


def test_other_targets_keep_the_scan() -> None:
    check_untouched(ParallelScans(), scan(DISTANCES, [4]))
