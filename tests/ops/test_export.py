"""Every case of the pointwise, shape and indexing operators survives export: to old and new opsets, through ONNX Runtime."""

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
from optdnn.ops.create import TriluAttrs
from optdnn.ops.index import BlockAttrs, PadAttrs, SplitAttrs
from optdnn.ops.shape import ReshapeAttrs, ShapeAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import FP32, INT64, tensor

NEWEST = onnx.defs.onnx_opset_version()


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


def too_new(c: Case, opset: int) -> bool:
    """What an old opset cannot say at all."""
    since = {"BitwiseNot": 18, "BitwiseAnd": 18, "BitwiseOr": 18, "BitwiseXor": 18, "Trilu": 14, "CumProd": 26}
    reduction = {"add": 16, "mul": 16, "max": 18, "min": 18}
    if opset < since.get(c.op, 0) or opset < reduction.get(c.attrs.get("reduction", ""), 0):
        return True
    return opset < (14 if c.attrs.get("allowzero") else 19 if c.attrs.get("mode") == "wrap" else 0)


@pytest.mark.parametrize("opset", [13, 18, NEWEST])
@pytest.mark.parametrize("c", CASES, ids=[f"{c.op}-{i}" for i, c in enumerate(CASES)])
def test_round_trip(c: Case, opset: int) -> None:
    graph = import_case(c)
    if too_new(c, opset):
        with pytest.raises(UnsupportedError, match=f"cannot be written in ONNX opset {opset}"):
            export_model(graph, opset)
        return
    proto = export_model(graph, opset).proto
    onnx.checker.check_model(proto, full_check=True)
    with np.errstate(all="ignore"):
        expected = evaluate(graph, c.fed)
    decomposed = {n.op_type for n in proto.graph.node} - {c.op, "Identity", "Cast", "ScatterElements"}
    tol = max((OPDEFS[n].tol for n in decomposed if n in OPDEFS), key=lambda t: t.rtol, default=Tol(0.0, 0.0))
    for name, y in evaluate(import_model(proto), c.fed).items():
        assert_close(y, expected[name], tol, name)
    if opset < NEWEST and c.attrs.get("num_outputs") != 3:
        kinds = [op.kind for op in graph.ops() if op.kind in OPDEFS]
        tol = max([tol, *(OPDEFS[k].tol for k in kinds)], key=lambda t: t.rtol)
        for y, name in zip(onnxruntime_run(proto, c.fed), expected, strict=True):
            assert_close(y, expected[name], Tol(4 * tol.rtol, 4 * tol.atol), name)


def op_types(graph: Graph, opset: int) -> list[str]:
    return [n.op_type for n in export_model(graph, opset).proto.graph.node]


def one(kind: str, attrs: Any, *operands: Any, outputs: int = 1) -> Graph:
    graph = Graph()
    refs = [graph.add_constant(x) if isinstance(x, np.ndarray) else x and graph.add_input(f"x{i}", x)
            for i, x in enumerate(operands)]  # fmt: skip
    op = graph.add(kind, refs, attrs, outputs=outputs)
    for i in range(outputs):
        graph.add_output(op.value._replace(port=i), f"y{i}")
    return graph


def test_activations_are_decomposed_where_the_opset_lacks_them() -> None:
    def written(op: str, opset: int, **attrs: Any) -> list[str]:
        return op_types(import_case(Case(op, [normal(3)], attrs, 24)), opset)

    assert written("Swish", 23) == ["Sigmoid", "Mul"]
    assert written("Swish", 23, alpha=2.0) == ["Mul", "Sigmoid", "Mul"]
    assert written("Swish", 24) == ["Swish"]
    assert written("Mish", 17) == ["Softplus", "Tanh", "Mul"]
    assert written("Mish", 18) == ["Mish"]
    assert written("HardSwish", 13) == ["HardSigmoid", "Mul"]
    assert written("HardSwish", 14) == ["HardSwish"]
    assert written("Gelu", 19) == ["Mul", "Erf", "Add", "Mul", "Mul"]
    assert written("Gelu", 19, approximate="tanh").count("Tanh") == 1
    assert written("Gelu", 20, approximate="tanh") == ["Gelu"]


def test_shape_of_a_part() -> None:
    graph = one("Shape", ShapeAttrs(1, -1), tensor(FP32, 2, 3, 4))
    assert op_types(graph, 13) == ["Shape", "Slice"]
    assert op_types(graph, 15) == ["Shape"]


def test_uneven_split() -> None:
    graph = one("Split", SplitAttrs(0, 3), tensor(FP32, 7), outputs=3)
    (node,) = export_model(graph, 13).proto.graph.node
    assert len(node.input) == 2
    (node,) = export_model(one("Split", SplitAttrs(0, 3), tensor(FP32, 6), outputs=3), 13).proto.graph.node
    assert len(node.input) == 1
    (node,) = export_model(graph, 18).proto.graph.node
    assert [a.name for a in node.attribute if a.name == "num_outputs"] == ["num_outputs"]


def test_space_to_depth_by_columns_first() -> None:
    x = normal(2, 3, 4, 6)
    graph = one("SpaceToDepth", BlockAttrs(2, "CRD"), tensor(FP32, *x.shape))
    assert op_types(graph, 13) == ["SpaceToDepth", "Gather"]
    assert op_types(graph, 28) == ["SpaceToDepth"]
    (expected,) = run(graph, {"x0": x})
    (y,) = onnxruntime_run(export_model(graph, 17).proto, {"x0": x})
    assert np.array_equal(y, expected)


N = symbol("n", 1)
REFUSED = [
    (one("BitwiseAnd", None, tensor(INT64, 2), tensor(INT64, 2)), 17, "BitwiseAnd cannot be written in ONNX opset 17"),
    (one("Reshape", ReshapeAttrs(True), tensor(FP32, 2), np.array([2])), 13, "allowzero"),
    (one("Trilu", TriluAttrs(), tensor(FP32, 2, 2)), 13, "Trilu"),
    (one("Split", SplitAttrs(0, 3), tensor(FP32, N), outputs=3), 17, "uneven Split of n"),
    (one("Pad", PadAttrs("wrap"), tensor(FP32, 4), np.array([1, 1])), 18, "wrap mode"),
    (one("Pad", PadAttrs(), tensor(FP32, 4), tensor(INT64, 2), None, tensor(INT64, 1)), 17, "axes"),
    (one("SpaceToDepth", BlockAttrs(2, "CRD"), tensor(FP32, 1, N, 4, 4)), 27, "CRD mode"),
]


@pytest.mark.parametrize(("graph", "opset", "because"), REFUSED)
def test_refused(graph: Graph, opset: int, because: str) -> None:
    with pytest.raises(UnsupportedError, match=because):
        export_model(graph, opset)
