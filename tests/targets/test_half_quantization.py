"""QuantizeLinear of fp16 data: where the division is rounded to fp16, as the guide on quantization says."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import optdnn

SCALE = np.float16(0.0173)
X = (np.random.default_rng(0).standard_normal((64, 512)) * 3).astype(np.float16)


def model(opset: int, precision: int | None, block: int | None = None) -> bytes:
    sizes = () if block is None else (X.shape[0], X.shape[1] // block)
    weights = [numpy_helper.from_array(np.full(sizes, v), n) for n, v in (("s", SCALE), ("z", np.int8(0)))]
    attrs = {"precision": precision, "axis": None if block is None else 1, "block_size": block}
    node = helper.make_node(
        "QuantizeLinear", ["x", "s", "z"], ["y"], **{k: v for k, v in attrs.items() if v is not None}
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, X.shape)
    y = helper.make_tensor_value_info("y", TensorProto.INT8, X.shape)
    graph = helper.make_graph([node], "half", [x], [y], weights)
    opsets = [helper.make_opsetid("", opset)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return data


def quantized(dtype: type[np.floating]) -> np.ndarray:
    return np.clip(np.rint(X.astype(dtype) / dtype(SCALE)), -128, 127).astype(np.int8)


CASES = [(19, None), (21, None), (23, None), (23, TensorProto.FLOAT16), (23, TensorProto.FLOAT)]


def test_the_division_in_half_precision_makes_a_difference_of_one_step() -> None:
    half, single = quantized(np.float16).astype(int), quantized(np.float32).astype(int)
    assert 0.005 < (half != single).mean() < 0.02
    assert np.abs(half - single).max() == 1


@pytest.mark.parametrize(("opset", "precision"), CASES)
def test_where_the_division_is_rounded(opset: int, precision: int | None) -> None:
    data = model(opset, precision)
    dtype = np.float32 if precision == TensorProto.FLOAT else np.float16
    np.testing.assert_array_equal(optdnn.build(data, target="reference")(X), quantized(dtype))
    for asked in ("fp32", "fp16"):
        engine = optdnn.build(data, target="simulate", precision=asked)
        np.testing.assert_array_equal(engine(X), quantized(np.float32))


@pytest.mark.parametrize("precision", [None, TensorProto.FLOAT16, TensorProto.FLOAT])
def test_gpus_divide_in_the_type_of_a_scale_per_block(precision: int | None) -> None:
    dtype = np.float32 if precision == TensorProto.FLOAT else np.float16
    for asked in ("fp32", "fp16"):
        engine = optdnn.build(model(23, precision, block=32), target="simulate", precision=asked)
        np.testing.assert_array_equal(engine(X), quantized(dtype))


@pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("opset", "precision"), CASES)
def test_the_libraries_divide_in_fp32(library: str, opset: int, precision: int | None) -> None:
    pytest.importorskip(library)
    engine = optdnn.build(model(opset, precision), target="cpu", tactics=library, threads=1)
    np.testing.assert_array_equal(engine(X), quantized(np.float32))


@pytest.mark.parametrize(("opset", "dtype"), [(19, np.float32), (21, np.float32), (23, np.float16)])
def test_onnx_runtime_changed_with_opset_23(opset: int, dtype: type[np.floating]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(model(opset, None), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], quantized(dtype))


@pytest.mark.parametrize(("opset", "precision"), CASES[:3])
def test_onnx_divides_in_the_type_of_the_scale(opset: int, precision: int | None) -> None:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load_from_string(model(opset, precision)))
    np.testing.assert_array_equal(evaluator.run(None, {"x": X})[0], quantized(np.float16))
