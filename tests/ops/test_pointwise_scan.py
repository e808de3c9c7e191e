"""PointwiseScan: inference, its errors, cost, and export as single steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.check import check_export
from support.scan_cases import CASES, STEPS, graph_of

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Op
from optdnn.ops.base import Call
from optdnn.passes.roll_scans import RollScans


def rolled(name: str) -> tuple[Graph, Op]:
    graph = graph_of(name)
    RollScans()(graph)
    (scan,) = graph.of_kind("PointwiseScan")
    return graph, scan


def call_of(graph: Graph, op: Op, **changes: Any) -> Call:
    types = tuple(None if v is None else graph.type(v) for v in op.inputs)
    return Call(op.kind, replace(op.attrs, **changes), types, (None,) * len(types), len(op.outputs), graph.fresh_symbol)


@pytest.mark.parametrize("name", CASES)
def test_export(name: str) -> None:
    graph, _ = rolled(name)
    check_export(graph, rtol=0)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"starts": (0, 2)}, "reads positions 2 to 12"),
        ({"starts": (-1, 1)}, "reads positions -1 to"),
        ({"backward": True}, "reads positions 0 to -10"),
        ({"axes": (1, 5)}, "along axis 5"),
        ({"views": ((0, 2), (2, 0))}, "broadcast"),
        ({"following": (-8, 5)}, "begins as"),
        ({"result_kept": (True,)}, "more than one position along axis 1"),
    ],
)
def test_contradictions(changes: dict[str, Any], because: str) -> None:
    graph, scan = rolled("gated")
    assert scan.attrs.axes == (1, 1)
    with pytest.raises(ShapeError, match=because):
        scan.definition.infer(call_of(graph, scan, **changes))


def test_absent_operands() -> None:
    graph, scan = rolled("gated")
    call = call_of(graph, scan)
    with pytest.raises(ShapeError, match="needs operand 1"):
        scan.definition.infer(replace(call, types=(call.types[0], None, *call.types[2:])))


def test_cost_counts_every_step() -> None:
    graph, scan = rolled("only_last")
    call = call_of(graph, scan)
    assert scan.definition.cost is not None
    cost = scan.definition.cost(call, scan.definition.infer(call))
    assert cost.flops >= scan.attrs.steps * len(scan.attrs.stages) * 2 * 6
    assert scan.attrs.steps in (STEPS, STEPS - 1)
