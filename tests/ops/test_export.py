"""Every case of the pointwise, shape and indexing operators gives the same results after export, through ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import test_binary
import test_index
import test_shape
import test_unary
from onenode import Case, assert_close, import_case, normal, onnxruntime_run, run
from onnx import numpy_helper

from optdnn.dim import symbol
from optdnn.errors import UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.base import Tol
from optdnn.ops.index import BlockAttrs, SplitAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import FP32, tensor


def case(op: str, attrs: dict, opset: int, operands: list, outputs: int = 1) -> Case:
    given = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    fixed = tuple(i for i, x in enumerate(operands) if i and x is not None)
    return Case(op, operands, given, opset, outputs, () if op == "Concat" else fixed)


_ALL = [
    *(case(op, attrs, opset, [x]) for op, attrs, opset, x in test_unary.CASES),
    *(case(*c) for c in test_binary.CASES),
    *(case(*c) for c in test_shape.CASES),
    *(case(*c) for c in test_index.CASES),
]
# Opset 13 has no Relu of int32 and no Div of uint8.
CASES = [c for c in _ALL if (c.op, c.inputs[0].dtype) not in (("Relu", np.int32), ("Div", np.uint8))]


NOT_WRITTEN = frozenset({"CumProd", "BitCast"})
"""Operators that opset 21 does not have."""


@pytest.mark.parametrize("c", CASES, ids=[f"{c.op}-{i}" for i, c in enumerate(CASES)])
def test_round_trip(c: Case) -> None:
    graph = import_case(c)
    if c.op in NOT_WRITTEN:
        with pytest.raises(UnsupportedError, match="cannot be written in ONNX opset 21"):
            export_model(graph)
        return
    proto = export_model(graph).proto
    onnx.checker.check_model(proto, full_check=True)
    with np.errstate(all="ignore"):
        expected = evaluate(graph, c.fed)
    decomposed = {n.op_type for n in proto.graph.node} - {c.op, "Identity", "Cast", "ScatterElements"}
    tol = max((OPDEFS[n].tol for n in decomposed if n in OPDEFS), key=lambda t: t.rtol, default=Tol(0.0, 0.0))
    for name, y in evaluate(import_model(proto), c.fed).items():
        assert_close(y, expected[name], tol, name)
    if c.attrs.get("num_outputs") != 3:
        kinds = [op.kind for op in graph.ops() if op.kind in OPDEFS]
        tol = max([tol, *(OPDEFS[k].tol for k in kinds)], key=lambda t: t.rtol)
        for y, name in zip(onnxruntime_run(proto, c.fed), expected, strict=True):
            assert_close(y, expected[name], Tol(4 * tol.rtol, 4 * tol.atol), name)


def op_types(graph: Graph) -> list[str]:
    return [n.op_type for n in export_model(graph).proto.graph.node]


def one(kind: str, attrs: Any, *operands: Any, outputs: int = 1) -> Graph:
    graph = Graph()
    refs = [graph.add_constant(x) if isinstance(x, np.ndarray) else x and graph.add_input(f"x{i}", x)
            for i, x in enumerate(operands)]  # fmt: skip
    op = graph.add(kind, refs, attrs, outputs=outputs)
    for i in range(outputs):
        graph.add_output(op.value._replace(port=i), f"y{i}")
    return graph


def test_swish_is_decomposed() -> None:
    def written(**attrs: Any) -> list[str]:
        return op_types(import_case(Case("Swish", [normal(3)], attrs, 24)))

    assert written() == ["Sigmoid", "Mul"]
    assert written(alpha=2.0) == ["Mul", "Sigmoid", "Mul"]


def test_uneven_split() -> None:
    (node,) = export_model(one("Split", SplitAttrs(0, 3), tensor(FP32, 7), outputs=3)).proto.graph.node
    assert [a.name for a in node.attribute if a.name == "num_outputs"] == ["num_outputs"]


def test_space_to_depth_by_columns_first() -> None:
    x = normal(2, 3, 4, 6)
    graph = one("SpaceToDepth", BlockAttrs(2, "CRD"), tensor(FP32, *x.shape))
    assert op_types(graph) == ["SpaceToDepth", "Gather"]
    (expected,) = run(graph, {"x0": x})
    (y,) = onnxruntime_run(export_model(graph).proto, {"x0": x})
    assert np.array_equal(y, expected)
    symbolic = one("SpaceToDepth", BlockAttrs(2, "CRD"), tensor(FP32, 1, symbol("n", 1), 4, 4))
    with pytest.raises(UnsupportedError, match="SpaceToDepth of n channels in CRD mode"):
        export_model(symbolic)
