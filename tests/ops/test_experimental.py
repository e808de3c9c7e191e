"""Operators that were experimental in ONNX up to opset 9, against ONNX Runtime; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onenode import onnxruntime_run
from onnx import TensorProto, helper

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate

X = np.random.default_rng(0).standard_normal((2, 3, 6, 7)).astype(np.float32) + np.arange(3, dtype="f").reshape(3, 1, 1)


def one(op: str, opset: int, shape: tuple[int, ...] = X.shape, **attrs: Any) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], name="n", **attrs)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


@pytest.mark.parametrize("opset", [7, 8])
@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("ImageScaler", {"scale": 0.5, "bias": [0.1, 0.2, 0.3]}),
        ("Scale", {"scale": 3.0}),
        ("Affine", {"alpha": 0.5, "beta": 0.2}),
        ("ScaledTanh", {"alpha": 0.5, "beta": 0.2}),
        ("ParametricSoftplus", {"alpha": 0.5, "beta": 0.2}),
        ("Crop", {"border": [1, 2, 1, 1]}),
        ("Crop", {"border": [1, 2, 0, 0]}),
        ("Crop", {"border": [1, 2, 1, 1], "scale": [3, 4]}),
        ("ThresholdedRelu", {"alpha": 0.3}),
        ("MeanVarianceNormalization", {}),
        ("MeanVarianceNormalization", {"across_channels": 1}),
        ("MeanVarianceNormalization", {"normalize_variance": 0}),
        ("MeanVarianceNormalization", {"across_channels": 1, "normalize_variance": 0}),
    ],
)
def test_as_onnxruntime(op: str, attrs: dict[str, Any], opset: int) -> None:
    model = one(op, opset, **attrs)
    (got,) = evaluate(import_model(model), {"x": X}).values()
    (want,) = onnxruntime_run(model, {"x": X})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "because"),
    [
        ("ImageScaler", (2, 3), {"bias": [1.0] * 3}, "ImageScaler input"),
        ("ImageScaler", X.shape, {}, "needs attribute 'bias'"),
        ("Crop", X.shape, {"border": [1, 2]}, "Crop border"),
        ("Crop", X.shape, {"border": [1, -2, 0, 0]}, "negative number"),
        ("Crop", X.shape, {"border": [1, 2, 1, 1], "scale": [3]}, "Crop scale"),
        ("Crop", (3, 6, 7), {"border": [1, 2, 1, 1]}, "Crop input"),
    ],
)
def test_what_does_not_fit(op: str, shape: tuple[int, ...], attrs: dict[str, Any], because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        import_model(one(op, 7, shape, **attrs))


def test_others_of_a_later_opset_are_still_refused() -> None:
    with pytest.raises(UnsupportedError, match="came with opset 9"):
        import_model(one("Erf", 8))
