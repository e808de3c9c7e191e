"""Operators of TensorRT's domain, as NVIDIA ModelOpt writes them, are ONNX's own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnxtext import model

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate

FP8 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    "names", [("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"), ("QuantizeLinear", "DequantizeLinear")]
)
def test_values_are_rounded_to_fp8(names: tuple[str, str]) -> None:
    zero = "" if names[0].startswith("TRT") else ", z"
    graph = import_model(
        model(
            f"""g (float[64] x, float8e4m3fn[1] z) => (float[64] y) <float s = {{0.5}}> {{
            q = trt.{names[0]}(x, s{zero})  y = trt.{names[1]}(q, s) }}""",
            more_opsets=', "trt" : 1',
        )
    )
    assert graph.kinds()["QuantizeLinear"] == graph.kinds()["DequantizeLinear"] == 1
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    (y,) = evaluate(graph, {"x": x, "z": np.zeros(1, FP8)}).values()
    np.testing.assert_array_equal(y, (x / np.float32(0.5)).astype(FP8).astype(np.float32) * np.float32(0.5))
