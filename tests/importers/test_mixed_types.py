"""Weights of another float type than a node's data. PyTorch's exporter leaves them if it folds a batch norm in bf16."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optdnn.errors import ShapeError
from optdnn.importers.onnx import MixedTypes, import_model
from optdnn.ir.evaluate import evaluate
from optdnn.types import BF16, FP32

X = np.random.default_rng(0).standard_normal((1, 3, 5, 5)).astype(BF16)
W = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)


def model(weights: Any, *, convolutions: int = 1, output: bool = False) -> onnx.ModelProto:
    """Convolutions of bf16 data with the same weights. ``output``: the weights are an output, too."""
    nodes = [helper.make_node("Conv", ["x", "w"], [f"y{i}"], f"conv{i}") for i in range(convolutions)]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.BFLOAT16, [1, 4, 3, 3]) for i in range(convolutions)]
    if output:
        nodes.append(helper.make_node("Identity", ["w"], ["same"], "same"))
        outputs.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, [4, 3, 3, 3]))
    given = [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, X.shape)]
    graph = helper.make_graph(nodes, "mixed", given, outputs, [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.mark.parametrize(
    ("convolutions", "others"), [(1, ""), (2, ", and so has 1 other node"), (4, ", and so have 3 other nodes")]
)
def test_weights_take_the_type_of_the_data(convolutions: int, others: str) -> None:
    text = rf"conv0 \(Conv\) has fp32 weights 'w' beside bf16 data{others}\. ONNX does not allow that; the weights are rounded"
    with pytest.warns(MixedTypes, match=text):
        graph = import_model(model(W, convolutions=convolutions))
    (constant,) = graph.of_kind("Constant")
    assert constant.attrs.value.dtype == BF16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        valid = import_model(model(W.astype(BF16), convolutions=convolutions))
    for name, want in evaluate(valid, {"x": X}).items():
        np.testing.assert_array_equal(evaluate(graph, {"x": X})[name], want)


def test_other_readers_keep_the_type_of_the_file() -> None:
    with pytest.warns(MixedTypes):
        found = evaluate(import_model(model(W, output=True)), {"x": X})
    assert found["same"].dtype == FP32
    np.testing.assert_array_equal(found["same"], W)


def test_data_of_two_types_are_refused() -> None:
    ports = [
        helper.make_tensor_value_info(n, t, [2]) for n, t in (("a", TensorProto.BFLOAT16), ("b", TensorProto.FLOAT))
    ]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["y"], "add")], "mixed", ports, [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    ])  # fmt: skip
    with pytest.raises(ShapeError, match="different types"):
        import_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)]))
