"""SegmentSum: inference, its errors, cost, and export as gathers and a scatter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from support.check import check_export
from support.net import call_of
from support.segment_cases import CASES, EDGES, graph_of

from optdnn.errors import ShapeError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph, Op
from optdnn.ops.base import Stage
from optdnn.ops.segment_sum import NEUTRAL, SegmentSumAttrs
from optdnn.passes.segment_sums import SegmentSums
from optdnn.types import FP32, INT32, TensorType


def summed(name: str) -> tuple[Graph, Op]:
    """The last sum of a graph."""
    graph = graph_of(name)
    SegmentSums()(graph)
    return graph, graph.of_kind("SegmentSum")[-1]


@pytest.mark.parametrize("name", CASES)
def test_export(name: str) -> None:
    graph, _ = summed(name)
    check_export(graph, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["add", "max", "min"])
def test_export_with_computed_limits(reduction: str) -> None:
    """Segments may be in any order, overlap and leave rows out."""
    graph, limits = Graph(), np.array([2, 5, 5, 1, 4, 0], np.int32)
    x, given = graph.add_input("x", TensorType(FP32, (4, 3))), graph.add_input("limits", TensorType(INT32, (6,)))
    rows = graph.add_constant(np.array([3, 0, 1, 1, 2], np.int32))
    attrs = SegmentSumAttrs((), (0,), (0,), ((1,),), reduction=reduction)
    graph.add_output(graph.add("SegmentSum", [x, rows, given], attrs).value, "y")
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "limits": limits}
    join = {"add": np.sum, "max": np.max, "min": np.min}[reduction]
    taken = feeds["x"][[3, 0, 1, 1, 2]]
    parts = [taken[a:b] for a, b in pairwise(limits)]
    want = [join(p, 0) if len(p) else np.full(3, NEUTRAL[reduction]) for p in parts]
    np.testing.assert_array_equal(evaluate(graph, feeds)["y"], want)
    (found,) = ReferenceEvaluator(export_model(graph).proto).run(None, feeds)
    np.testing.assert_array_equal(found, want)


INDEX = len(("x", "norm"))


@pytest.mark.parametrize(
    ("types", "changes", "because"),
    [
        ({0: None}, {}, "needs operand 0"),
        ({}, {"views": ((7,), (-1,))}, "needs operand 0"),
        ({INDEX: TensorType(FP32, (EDGES,))}, {}, "indices are int32"),
        ({INDEX: TensorType(INT32, (EDGES, 1))}, {}, "indices are int32"),
        ({}, {"indices": (0, 1)}, "differ in length"),
        ({4: TensorType(FP32, (1,))}, {}, "is no factor of"),
        ({}, {"reduction": "mul"}, "of the reduction 'mul'"),
        ({}, {"reduction": "max"}, "of the reduction 'max', with 1 factors"),
        ({}, {"epilogue": (Stage("Less", (-1, 4)),)}, "must keep the type"),
    ],
)
def test_contradictions(types: dict[int, Any], changes: dict[str, Any], because: str) -> None:
    graph, total = summed("degrees")
    assert (total.attrs.indices, total.attrs.factors) == ((0, 0), ("Mul",))
    with pytest.raises(ShapeError, match=because):
        total.definition.infer(call_of(graph, total, types, **changes))


def test_cost_counts_every_row() -> None:
    graph, total = summed("degrees")
    call = call_of(graph, total)
    assert total.definition.cost is not None
    assert total.definition.cost(call, total.definition.infer(call)).flops == EDGES * 16 * 2
