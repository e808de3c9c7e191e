"""The backend for ONNX's own runner. ONNX's cases run in ``tests/test_backend_suite.py``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.onnx_cases import cases

from optdnn.errors import InputError, ModelError, UsageError
from optdnn.integrations import onnx_backend


def load(name: str) -> onnx.ModelProto:
    return cases()[name].model


def test_onnx_own_runner_takes_the_backend(monkeypatch):
    from onnx.backend.test.runner import Runner as OnnxRunner

    made = lambda kind: [case for case in cases().values() if case.kind == kind]  # noqa: E731 - or it makes them all again
    monkeypatch.setattr("onnx.backend.test.runner.load_model_tests", made)
    found = OnnxRunner(onnx_backend.OptdnnBackend, __name__).include("^test_(add|softmax_axis_0)_cpu$").test_cases
    ran = []
    for name in ("test_add_cpu", "test_softmax_axis_0_cpu"):
        getattr(found["OnnxBackendNodeModelTest"](name), name)()
        ran.append(name)
    assert len(ran) == 2


def test_devices():
    known = ("CPU", "CPU:0", "REFERENCE", "SIMULATE", "TPU", "CPU:1")
    assert [d for d in known if onnx_backend.supports_device(d)] == [
        "CPU",
        "CPU:0",
        "REFERENCE",
        "SIMULATE",
    ]
    with pytest.raises(UsageError, match="there is no device 'TPU'"):
        onnx_backend.prepare(load("test_add"), "TPU")


def test_engines_for_gpus_follow_sizes(monkeypatch):
    monkeypatch.setattr(onnx_backend, "ENGINES", 2)
    model = onnx.ModelProto()
    model.CopyFrom(load("test_add"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    prepared = onnx_backend.prepare(model, "SIMULATE")
    for n in (1, 2, 1, 3):
        x = np.ones((n, 4, 5), np.float32)
        assert prepared.run([x, x])[0].shape == (n, 4, 5)
    assert len(prepared._run.engines) == 2


def test_run_model_takes_names_sequences_and_arrays():
    model = load("test_add")
    x = np.ones((3, 4, 5), np.float32)
    outputs = onnx_backend.run_model(model, {"x": x, "y": x}, "REFERENCE")
    assert np.array_equal(outputs["sum"], x + x)
    assert np.array_equal(outputs.sum, outputs[0])
    assert np.array_equal(onnx_backend.run_model(model, [x, x], "REFERENCE")[0], x + x)
    assert np.array_equal(onnx_backend.run_model(load("test_abs"), -x, "REFERENCE")[0], x)
    with pytest.raises(InputError, match="1 inputs are given, the model has 2"):
        onnx_backend.run_model(model, [x], "REFERENCE")


def test_run_node():
    x = np.array([[1, -2, 3]], np.float32)
    node = onnx.helper.make_node("Clip", ["x", "", "top"], ["y"])
    (y,) = onnx_backend.run_node(node, [x, np.array(2, np.float32)], "REFERENCE")
    assert y.tolist() == [[1, -2, 2]]
    old = onnx.helper.make_node("Clip", ["x"], ["y"], max=2.0)
    assert onnx_backend.run_node(old, x, "REFERENCE", opset_version=9)[0].tolist() == [[1, -2, 2]]
    with pytest.raises(ModelError, match="unknown attribute 'max'"):
        onnx_backend.run_node(old, x, "REFERENCE")
    with pytest.raises(InputError, match="2 inputs are given, the node reads 1"):
        onnx_backend.run_node(old, [x, x], "REFERENCE", opset_version=9)


def test_compatibility():
    assert onnx_backend.is_compatible(load("test_add"), "REFERENCE")
    assert not onnx_backend.is_compatible(load("test_add"), "TPU")
    unsupported = onnx.helper.make_node("Multinomial", ["x"], ["y"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [unsupported],
            "g",
            [onnx.helper.make_tensor_value_info("x", 1, [1, 2])],
            [onnx.helper.make_tensor_value_info("y", 6, [1, 1])],
        )
    )
    assert not onnx_backend.is_compatible(model, "REFERENCE")
