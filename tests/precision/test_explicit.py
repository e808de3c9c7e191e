"""Networks of ONNX Runtime's quantizer: every target uses their scales, as exactly as the libraries do."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import pytest
from support.needs import needs_exact_bytes
from support.sweep import sweep

from optdnn.build_result import Build
from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.models import trained
from optdnn.types import Array

pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
openvino = pytest.importorskip("openvino", reason="the cpu extra is not installed")
quantization = pytest.importorskip("onnxruntime.quantization", reason="the cpu extra is not installed")
quantizer = pytest.importorskip("support.quantizer")

PICTURES = 32
FORMS = {
    "qdq, uint8 and int8 per channel": ("QDQ", "QUInt8 QInt8", True),
    "qdq, int8": ("QDQ", "QInt8 QInt8", False),
    "QLinear operators": ("QOperator", "QUInt8 QInt8", False),
    "dynamic": (None, "QUInt8 QInt8", False),
}
ALSO = {"digits_mobile": ("qdq, uint8 and int8 per channel",), "digits_transformer": ("qdq, int8", "dynamic")}
CASES = [("digits_resnet", form) for form in FORMS] + [(name, form) for name, forms in ALSO.items() for form in forms]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(network, form) -> the file of the quantizer."""
    logging.disable(logging.WARNING)
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder, found = tmp_path_factory.mktemp("quantized"), {}
    kinds = quantization.QuantType
    for name, form in CASES:
        clean = folder / f"{name}.onnx"
        if not clean.exists():
            quant_pre_process(str(trained.load(name).path), str(clean), skip_symbolic_shape=True)
        written, (layout, types, per_channel) = folder / f"{name}-{len(found)}.onnx", FORMS[form]
        if layout is None:
            quantization.quantize_dynamic(str(clean), str(written), weight_type=kinds.QInt8)
        else:
            x = trained.calibration(name)
            feeds = [{"x": x[k : k + 16]} for k in range(0, 48, 16)]
            quantizer.quantize(clean, written, feeds, layout, types, per_channel=per_channel)
        found[name, form] = written
    logging.disable(logging.NOTSET)
    return found


def run(model: Path, x: Array, level: str = "ORT_DISABLE_ALL") -> Array:
    result: Array = quantizer.session(model, level).run(None, {"x": x})[0]
    return result


def others(model: Path, x: Array, want: Array) -> float:
    """The errors of the libraries themselves, compared with ONNX Runtime without optimizations."""
    far = [np.abs(run(model, x, "ORT_ENABLE_ALL") - want).max()]
    try:
        compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        far.append(np.abs(compiled(x)[0] - want).max())
    except RuntimeError:
        pass  # it does not support ONNX Runtime's own operators
    return float(max(far))


def step(model: Path, want: Array) -> float:
    """One step of the last scale: of the outputs' quantization, or else of their range."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    sweep(CASES, ("digits_resnet", "qdq, int8"), ("digits_resnet", "QLinear operators")),
)
def test_end_to_end_no_farther_than_the_libraries(models: dict[tuple[str, str], Path], name: str, form: str) -> None:
    needs_exact_bytes()
    model, x = models[name, form], trained.load(name).x[:PICTURES]
    want = run(model, x)
    bound = others(model, x, want) + step(model, want)
    if form == "QLinear operators":  # OpenVINO does not support them; the same network as QDQ shows its error
        bound += others(models[name, "qdq, int8"], x, run(models[name, "qdq, int8"], x))
    assert bound < 0.2 * np.ptp(want)
    for target, tactics in (("cpu", "openvino"), ("cpu", "onnxruntime"), ("reference", "auto"), ("simulate", "auto")):
        build = built(model, x, target, tactics)
        (got,) = build.engine.run({"x": x}).values()
        assert np.abs(got - want).max() <= bound, (target, tactics)
    if form != "dynamic" and name != "digits_transformer":  # some of its products have no constant factor
        kinds = {s.params["op"]["kind"] for s in build.engine.program.steps}
        assert "QuantizedConv" in kinds  # with any zero points, no product is computed in floats
        assert not kinds & {"Conv", "Gemm", "MatMul", "DequantizeLinear"}


@pytest.mark.parametrize("form", [f for f in FORMS if f != "dynamic"])
def test_every_scale_is_the_models_own(models: dict[tuple[str, str], Path], form: str) -> None:
    """Every Q and DQ of the optimized graph has a scale of the model, and all products are quantized."""
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
        if op.kind == "QuantizeLinear" or stored != np.int32:  # scales of biases: products of two scales
            assert {float(s) for s in scale.reshape(-1)} <= original
    kinds = build.graph.kinds()
    assert (kinds["Conv"], kinds["Gemm"]) == (10, 1)
    asked = {r.asked.precision for r in build.precisions if r.asked.kind in ("Conv", "Gemm")}
    assert asked == {"int8"}, "the model itself asks for integers"


def test_scale_and_zero_point_may_differ_in_rank() -> None:
    """ONNX Runtime's quantizer gives a bias a scale of shape [1] and a zero point of shape []."""
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
