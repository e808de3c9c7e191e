"""Networks that ONNX Runtime's quantizer made: their scales are respected, on each target, as exactly as libraries do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest

from optdnn.compiler import Build, build_verbose
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.models import trained
from optdnn.types import Array

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
openvino = pytest.importorskip("openvino", reason="the cpu extra is not installed")
quantization = pytest.importorskip("onnxruntime.quantization", reason="the cpu extra is not installed")

PICTURES = 32
FORMS = {
    "qdq, uint8 and int8 per channel": ("QDQ", "QUInt8", True),
    "qdq, int8": ("QDQ", "QInt8", False),
    "QLinear operators": ("QOperator", "QUInt8", False),
    "dynamic": (None, "QUInt8", False),
}
ALSO = {"digits_mobile": ("qdq, uint8 and int8 per channel",), "digits_transformer": ("qdq, int8", "dynamic")}
CASES = [("digits_resnet", form) for form in FORMS] + [(name, form) for name, forms in ALSO.items() for form in forms]


class Reader:
    def __init__(self, x: Array):
        self.batches = iter([{"x": x[k : k + 16]} for k in range(0, 48, 16)])

    def get_next(self) -> Any:
        return next(self.batches, None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(network, form) -> the file that the quantizer wrote."""
    logging.disable(logging.WARNING)
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder, found = tmp_path_factory.mktemp("quantized"), {}
    kinds = quantization.QuantType
    for name, form in CASES:
        clean = folder / f"{name}.onnx"
        if not clean.exists():
            quant_pre_process(str(trained.load(name).path), str(clean), skip_symbolic_shape=True)
        written, (layout, activations, per_channel) = folder / f"{name}-{len(found)}.onnx", FORMS[form]
        if layout is None:
            quantization.quantize_dynamic(str(clean), str(written), weight_type=kinds.QInt8)
        else:
            quantization.quantize_static(
                str(clean),
                str(written),
                Reader(trained.calibration(name)),
                quant_format=getattr(quantization.QuantFormat, layout),
                activation_type=getattr(kinds, activations),
                weight_type=kinds.QInt8,
                per_channel=per_channel,
            )
        found[name, form] = written
    logging.disable(logging.NOTSET)
    return found


def session(model: Path, x: Array, level: str) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    result: Array = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    return result


def others(model: Path, x: Array, want: Array) -> float:
    """How far the libraries themselves are from ONNX Runtime without optimizations."""
    far = [np.abs(session(model, x, "ORT_ENABLE_ALL") - want).max()]
    try:
        compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        far.append(np.abs(compiled(x)[0] - want).max())
    except RuntimeError:
        pass  # it does not know ONNX Runtime's own operators
    return float(max(far))


def step(model: Path, want: Array) -> float:
    """One step of the last scale: of the quantization that the outputs went through, else of the range they have."""
    proto = onnx.load(model)
    makers = {o: n for n in proto.graph.node for o in n.output}
    last = makers[proto.graph.output[0].name]
    values = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    if last.op_type == "DequantizeLinear":
        return float(values[last.input[1]].max())
    return float(np.ptp(want)) / 255


def built(model: Path, x: Array, target: str, tactics: str) -> Build:
    threads = 1 if target == "cpu" else None
    return build_verbose(model, BuildOptions(target=target, tactics=tactics, threads=threads, shapes={"x": x.shape}))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_end_to_end_no_farther_than_the_libraries(models: dict[tuple[str, str], Path], name: str, form: str) -> None:
    model, x = models[name, form], trained.load(name).x[:PICTURES]
    want = session(model, x, "ORT_DISABLE_ALL")
    bound = others(model, x, want) + step(model, want)
    if form == "QLinear operators":  # OpenVINO does not read them; the same network as QDQ says how far it is
        bound += others(models[name, "qdq, int8"], x, session(models[name, "qdq, int8"], x, "ORT_DISABLE_ALL"))
    assert bound < 0.2 * np.ptp(want)
    for target, tactics in (("cpu", "openvino"), ("cpu", "onnxruntime"), ("reference", "auto"), ("simulate", "auto")):
        build = built(model, x, target, tactics)
        (got,) = build.engine.run({"x": x}).values()
        assert np.abs(got - want).max() <= bound, (target, tactics)
    if form != "dynamic" and name != "digits_transformer":  # of its products, some have no constant factor
        kinds = {s.params["op"]["kind"] for s in build.engine.program.steps}
        assert "QuantizedConv" in kinds  # and whatever zero points there are, nothing is multiplied in floats
        assert not kinds & {"Conv", "Gemm", "MatMul", "DequantizeLinear"}


@pytest.mark.parametrize("form", [f for f in FORMS if f != "dynamic"])
def test_every_scale_is_the_models_own(models: dict[tuple[str, str], Path], form: str) -> None:
    """Every Q and DQ of the optimized graph has a scale that the model has, and all products are quantized."""
    model = models["digits_resnet", form]
    x = trained.load("digits_resnet").x[:PICTURES]
    build = built(model, x, "cpu", "onnxruntime")
    original = {
        float(s)
        for t in onnx.load(model).graph.initializer
        for s in np.ravel(onnx.numpy_helper.to_array(t))
        if "scale" in t.name
    }
    for op in build.graph.of_kind("QuantizeLinear", "DequantizeLinear"):
        scale = build.graph.constant_value(op.inputs[1])
        assert scale is not None
        stored = build.graph.type(op.inputs[0]).dtype  # type: ignore[arg-type]
        if op.kind == "QuantizeLinear" or stored != np.int32:  # of biases: the product of two
            assert {float(s) for s in scale.reshape(-1)} <= original
    kinds = build.graph.kinds()
    assert (kinds["Conv"], kinds["Gemm"]) == (10, 1)
    asked = {r.asked.precision for r in build.precisions if r.asked.kind in ("Conv", "Gemm")}
    assert asked == {"int8"}, "the model itself asks for integers"


def test_quantized_operators_alone_are_within_a_step() -> None:
    """Convolution and product between Q and DQ, as one node each, in every library and kernel."""
    rng = np.random.default_rng(0)
    helper = onnx.helper
    weights = {
        "w": rng.integers(-127, 128, (8, 4, 3, 3)).astype(np.int8),
        "ws": rng.uniform(0.001, 0.004, 8).astype(np.float32),
        "wz": np.zeros(8, np.int8),
        "b": rng.integers(-2000, 2000, 8).astype(np.int32),
        "s": np.float32(0.02),
        "z": np.uint8(0),
        "t": np.float32(0.03),
        "u": np.uint8(128),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "t", "u", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("DequantizeLinear", ["c", "t", "u"], ["y"]),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "one",
        [value("x", 1, [2, 4, 9, 9])],
        [value("y", 1, [2, 8, 9, 9])],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = rng.uniform(0, 5, (2, 4, 9, 9)).astype(np.float32)
    want = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    for target, tactics in (("cpu", "openvino"), ("cpu", "onnxruntime"), ("reference", "auto"), ("simulate", "auto")):
        found = build_verbose(model, BuildOptions(target=target, tactics=tactics))
        (got,) = found.engine.run({"x": x}).values()
        assert np.abs(got - want).max() <= 0.03 * 1.001, (target, tactics)
        assert (got != want).mean() < 0.05, (target, tactics)


def test_scale_and_zero_point_may_differ_in_rank() -> None:
    """ONNX Runtime's quantizer gives a bias the scale [1] and the zero point []."""
    helper = onnx.helper
    node = helper.make_node("DequantizeLinear", ["x", "s", "z"], ["y"])
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "one",
        [value("x", 6, [4])],
        [value("y", 1, [4])],
        [
            onnx.numpy_helper.from_array(np.array([0.5], np.float32), "s"),
            onnx.numpy_helper.from_array(np.array(0, np.int32), "z"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert import_model(model).kinds() == {"DequantizeLinear": 1}
