"""Networks whose results change by ONNX Runtime's optimizers: our sessions keep the results, and the integer kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.lowering.cpu.library import LIBRARIES
from optdnn.runtime.cpu import onnxruntime as library
from optdnn.types import Array

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

SCALES = "float s = {0.0248}, uint8 z = {124}, float s2 = {0.0152}, uint8 z2 = {0}"
ROWS = "float s = {0.02}, uint8 z = {128}, float s2 = {0.05}, uint8 z2 = {120}"


def parsed(inputs: str, outputs: str, constants: str, nodes: str, **weights: Array) -> onnx.ModelProto:
    head = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) <{constants}>'
    model = onnx.parser.parse_model(f"{head} {{ {nodes} }}")
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return model


def softmax(middle: str) -> onnx.ModelProto:
    return parsed(
        "uint8[64, 8] x",
        "uint8[64, 8] y",
        SCALES,
        f"d = DequantizeLinear(x, s, z) {middle} y = QuantizeLinear(e, s2, z2)",
    )


def convolution(bias: str, weight: str, constants: str = "", **weights: Array) -> onnx.ModelProto:
    return parsed(
        "uint8[1, 4, 8, 8] x", "uint8[1, 3, 6, 6] y", f"{ROWS}{constants}",
        f"d = DequantizeLinear(x, s, z) {weight} {bias} c = Conv(d, w, b) y = QuantizeLinear(c, s2, z2)", **weights,
    )  # fmt: skip


def drawn(model: onnx.ModelProto) -> dict[str, Array]:
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)}


def exact(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), plain, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def optimized(model: bytes, path: Path, disabled: list[str]) -> list[str]:
    """The operators of the network after ONNX Runtime's optimizers."""
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(path / "optimized.onnx")
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
    return [n.op_type for n in onnx.load(path / "optimized.onnx").graph.node]


@pytest.mark.parametrize(
    "middle",
    [
        "e = Softmax(d)",
        "t = Transpose<perm = [1, 0]>(d) u = Softmax<axis = 0>(t) e = Transpose<perm = [1, 0]>(u)",
    ],
)
def test_a_softmax_between_quantized_tensors_is_not_fused(middle: str, tmp_path: Path) -> None:
    model = softmax(middle)
    feeds = drawn(model)
    engine = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics="onnxruntime")).engine
    np.testing.assert_array_equal(engine.run(feeds)["y"], exact(model, feeds))
    written = LIBRARIES["onnxruntime"].export(import_model(model)).to_bytes()
    assert "QLinearSoftmax" in optimized(model.SerializeToString(), tmp_path, [])
    assert "QLinearSoftmax" not in optimized(written, tmp_path, [])


def test_a_softmax_of_floats_is_written_as_it_is() -> None:
    model = parsed("float[4, 8] x", "float[4, 8] y", "float k = {2}", "y = Softmax(x)")
    proto = LIBRARIES["onnxruntime"].export(import_model(model)).proto
    assert [n.op_type for n in proto.graph.node] == ["Softmax"]


def test_a_softmax_in_a_branch_is_not_fused() -> None:
    model = parsed(
        "uint8[64, 8] x, bool m", "uint8[64, 8] y", SCALES,
        "y = If (m) <then_branch = a () => (uint8[64, 8] p) "
        "{ f = DequantizeLinear(x, s, z) e = Softmax(f) p = QuantizeLinear(e, s2, z2) }, "
        "else_branch = b () => (uint8[64, 8] r) { r = Identity(x) }>",
    )  # fmt: skip
    feeds = {**drawn(model), "m": np.array(True)}
    engine = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics="onnxruntime")).engine
    np.testing.assert_array_equal(engine.run(feeds)["y"], exact(model, feeds))


def random(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("quantized", [True, False])
def test_float_weights_and_biases_stay(quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if quantized:
        integers = (random(3, 4, 3, 3) * 40).astype(np.int8)
        model = convolution("", "w = DequantizeLinear(v, sw)", ", float sw = {0.01}", v=integers, b=random(3))
    else:
        model = convolution("", "", w=random(3, 4, 3, 3) / 9, b=random(3))
    written = LIBRARIES["onnxruntime"].export(import_model(model)).to_bytes()
    feeds = drawn(model)

    def floats() -> Any:
        """The value that is quantized last, as a float."""
        return library._session(ort, written, ort.SessionOptions()).run(None, feeds)[0]

    np.testing.assert_array_equal(floats(), exact(model, feeds))
    monkeypatch.setattr(library, "_DISABLED", ())
    if not quantized:
        assert (floats() != exact(model, feeds)).any()


def test_convolutions_with_integer_biases_keep_their_integer_kernels(tmp_path: Path) -> None:
    integers = (random(3, 4, 3, 3) * 40).astype(np.int8)
    model = convolution(
        "b = DequantizeLinear(i, sb)", "w = DequantizeLinear(v, sw)", ", float sw = {0.01}, float sb = {0.0002}",
        v=integers, i=np.array([100, -20, 3000], np.int32),
    )  # fmt: skip
    written = LIBRARIES["onnxruntime"].export(import_model(model)).to_bytes()
    assert optimized(written, tmp_path, list(library._DISABLED)).count("QLinearConv") == 1


@pytest.mark.parametrize("weights", [64, 1 << 18])
def test_int8_after_a_reshape_runs(weights: int) -> None:
    """ONNX Runtime's own optimizers make an invalid network of this one. Large weights are not stored in the model."""
    model = parsed(
        "int8[2, 3, 8] x", f"float[2, 3, {weights // 8}] y", "float s = {0.02}, int8 z = {4}",
        "d = DequantizeLinear(x, s, z) m = MatMul(d, w) y = Add(m, c)", w=random(8, weights // 8), c=random(weights // 8),
    )  # fmt: skip
    feeds = {"x": drawn(model)["x"].view(np.int8)}
    written = LIBRARIES["onnxruntime"].export(import_model(model)).to_bytes()
    if weights == 64:
        with pytest.raises(Exception, match=library._MISTYPED):
            ort.InferenceSession(written, disabled_optimizers=list(library._DISABLED))
    engine = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics="onnxruntime")).engine
    np.testing.assert_allclose(engine.run(feeds)["y"], exact(model, feeds), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4"])
def test_floats_that_meet_quantized_weights_stay_floats(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would round the floats to 8 bits."""
    model = parsed(
        "float[4, 32] x", "float[4, 16] y", "float s = {0.02}", "d = DequantizeLinear(w, s) y = MatMul(x, d)"
    )
    numbers = np.random.default_rng(1).integers(0, 8, (32, 16)).astype(np.float64)
    kind = onnx.TensorProto.DataType.Value(dtype.upper())
    model.graph.initializer.append(onnx.helper.make_tensor("w", kind, [32, 16], numbers.astype(int).ravel().tolist()))
    feeds = {"x": random(4, 32)}
    engine = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics="onnxruntime")).engine
    np.testing.assert_allclose(engine.run(feeds)["y"], feeds["x"] @ (numbers * 0.02), rtol=1e-5, atol=1e-5)
    written = LIBRARIES["onnxruntime"].export(import_model(model)).to_bytes()
    monkeypatch.setattr(library, "_FLOAT_PRODUCTS", ("session.qdq_matmulnbits_accuracy_level", "4"))
    rounded = library._session(ort, written, ort.SessionOptions()).run(None, feeds)[0]
    assert np.abs(rounded - feeds["x"] @ (numbers * 0.02)).max() > 1e-3
