"""SegmentSum: inference, its errors, cost, and export as gathers and a scatter."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_export
from support.net import call_of
from support.segment_cases import CASES, EDGES, graph_of

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Op
from optdnn.ops.base import Stage
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
