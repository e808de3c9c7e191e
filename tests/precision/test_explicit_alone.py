"""Each operator of ONNX Runtime's quantizer, alone and on every target, is within one step of its last scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from support.needs import needs_exact_bytes, needs_libraries
from support.sweep import sweep

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.types import Array, is_float

needs_libraries()
quantizer = pytest.importorskip("support.quantizer")

FORMS = {
    "QDQ, uint8 and int8 per channel": ("QDQ", "QUInt8 QInt8", {}),
    "QDQ, symmetric int8": ("QDQ", "QInt8 QInt8", {"ActivationSymmetric": True}),
    "QDQ, uint8, weights with zero points": ("QDQ", "QUInt8 QUInt8", {}),
    "QLinear operators": ("QOperator", "QUInt8 QInt8", {}),
}
TARGETS = (("cpu", "openvino"), ("cpu", "onnxruntime"), ("reference", "auto"), ("simulate", "auto"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder = tmp_path_factory.mktemp("quantizer")
    onnx.save(quantizer.many_operators(), folder / "float.onnx")
    quant_pre_process(str(folder / "float.onnx"), str(folder / "clean.onnx"), skip_symbolic_shape=True)
    return folder / "clean.onnx"


def steps(got: Array, want: Array) -> float:
    """The largest difference: for integers in steps, for floats in steps of 1/255 of their range."""
    step = np.ptp(want.astype(np.float64)) / 255 if is_float(want.dtype) else 1.0
    return float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max() / step)


@pytest.mark.slow
@pytest.mark.parametrize("form", sweep(FORMS, "QDQ, symmetric int8", "QLinear operators"))
def test_each_operator_is_within_a_step(form: str, clean: Path) -> None:
    if form == "QLinear operators":
        needs_exact_bytes()
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    layout, types, extra = FORMS[form]
    written = clean.with_name("quantized.onnx")
    quantizer.quantize(clean, written, feeds, layout, types, per_channel=types.endswith(" QInt8"), **extra)
    model = onnx.load(written)
    parts, given, want = quantizer.side_by_side(model, quantizer.values_of(model, feeds[0]))
    assert len(want) >= 17
    for target, tactics in TARGETS:
        options = BuildOptions(target=target, tactics=tactics, threads=1 if target == "cpu" else None)
        got = build_verbose(parts, options).engine.run(given)
        far = {n: steps(got[n], want[n]) for n in want}
        assert {n: s for n, s in far.items() if s > 1.0001} == {}, (target, tactics)
        assert [got[n].dtype for n in want] == [want[n].dtype for n in want], (target, tactics)


def test_a_result_two_steps_away_is_seen() -> None:
    want = np.array([1, 2, 3], np.int8)
    assert steps(want + np.int8(2), want) == 2.0
    assert steps(want * np.float32(1.01), want.astype(np.float32)) > 1


# ---------------------------------------------------------------- as other tools write it


def fake_quantized(form: str) -> onnx.ModelProto:
    """Two convolutions and a residual with their *float* weights through Q and DQ, as PyTorch's and TensorFlow's quantization-aware
    training and ModelOpt write them; ``form`` "modelopt" leaves zero points out, "tensorflow" has channels last around it."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    constants: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def const(array: Array) -> str:
        constants.append(onnx.numpy_helper.from_array(np.asarray(array), f"c{len(constants)}"))
        return constants[-1].name

    def op(kind: str, *inputs: str, **attrs: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"t{len(nodes)}"], name=f"{kind}_{len(nodes)}", **attrs))
        return nodes[-1].output[0]

    def fake(x: str, scale: Array, axis: int = 1) -> str:
        s, zero = const(scale.astype(np.float32)), const(np.zeros(scale.shape, np.int8))
        q = op("QuantizeLinear", x, s, zero, axis=axis)
        return op("DequantizeLinear", q, s, *([] if form == "modelopt" else [zero]), axis=axis)

    def conv(x: str, *shape: int) -> str:
        w = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        scale = np.abs(w).reshape(len(w), -1).max(axis=1) / 127
        b = const(rng.standard_normal(shape[0]).astype(np.float32) / 8)
        return op("Conv", x, fake(const(w), scale, 0), b, pads=[shape[2] // 2] * 4)

    x = op("Transpose", "x", perm=[0, 3, 1, 2]) if form == "tensorflow" else "x"
    first = fake(op("Relu", conv(fake(x, np.array(0.03)), 16, 16, 3, 3)), np.array(0.02))
    second = fake(conv(first, 16, 16, 1, 1), np.array(STEP))
    nodes.append(helper.make_node("Identity", [fake(op("Relu", op("Add", second, first)), np.array(STEP))], ["y"]))
    value = helper.make_tensor_value_info
    shape = [1, 6, 6, 16] if form == "tensorflow" else [1, 16, 6, 6]
    graph = helper.make_graph(nodes, form, [value("x", 1, shape)], [value("y", 1, [1, 16, 6, 6])], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


STEP = 0.025


@pytest.mark.parametrize("form", ["pytorch", "modelopt", "tensorflow"])
def test_float_weights_through_q_and_dq_run_in_integers(form: str) -> None:
    model = fake_quantized(form)
    sizes = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(sizes).astype(np.float32)
    (want,) = quantizer.session(model).run(None, {"x": x})
    for target, tactics in TARGETS:
        options = BuildOptions(target=target, tactics=tactics, threads=1 if target == "cpu" else None)
        build = build_verbose(model, options)
        assert np.abs(build.engine.run({"x": x})["y"] - want).max() <= STEP * 1.0001, (target, tactics)
        if target == "simulate":
            assert build.graph.kinds()["QuantizedConv"] == 2
        elif target == "cpu":
            stored = [build.graph.constant_value(op.inputs[0]) for op in build.graph.of_kind("DequantizeLinear")]
            assert {a.dtype.name for a in stored if a is not None and a.ndim == 4} == {"int8"}
