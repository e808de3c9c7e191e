"""Models for NVIDIA's Triton server. Their code runs against a stand-in for Triton's module."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from support.scripts import module_of

import optdnn
from optdnn.cli.main import run

TEXTS = {
    "rows": "(float[N, 2] x) => (float[N] y) { y = ReduceSum<keepdims=0, axes=[1]>(x) }",
    "whole": "(float[2] x, int64 k) => (float[2] y) { f = Cast<to=1>(k) y = Mul(x, f) }",
    "looked_up": "(int64[N] at) => (float[N] y) <float[3] table = {1.0, 2.0, 3.0}> { y = Gather(table, at) }",
}


class Tensor:
    def __init__(self, name: str, array: Any):
        self.name, self._array = name, np.asarray(array)

    def as_numpy(self) -> Any:
        return self._array


def stand_in() -> ModuleType:
    """A stand-in for triton_python_backend_utils, as far as a model uses it."""
    module = ModuleType("triton_python_backend_utils")
    names = {
        "Tensor": Tensor,
        "TritonError": str,
        "InferenceResponse": lambda output_tensors, error=None: SimpleNamespace(outputs=output_tensors, error=error),
        "get_input_tensor_by_name": lambda request, name: next(t for t in request if t.name == name),
    }
    vars(module).update(names)
    return module


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Any, str]:
    """The model's code, initialized, and its configuration."""
    name: str = request.param
    opset = '<ir_version: 8, opset_import: ["" : 11]>'
    model = onnx.parser.parse_model(f"{opset} {name} {TEXTS[name]}")
    optdnn.build(model, target="reference").save(tmp_path / f"{name}.engine")
    assert run(["export-triton", str(tmp_path / f"{name}.engine"), str(tmp_path / "models")]) == 0
    folder = tmp_path / "models" / name
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
    made = module_of(folder / "1" / "model.py").TritonPythonModel()
    made.initialize({"model_repository": str(folder), "model_version": "1"})
    return made, (folder / "config.pbtxt").read_text()


@pytest.mark.parametrize("exported", ["rows"], indirect=True)
def test_requests_run_as_one_batch(exported: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = exported
    assert "max_batch_size: 32" in text
    assert 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]' in text
    assert 'output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]' in text
    assert "dynamic_batching" in text
    seen = []
    run_one = model.engine.run
    monkeypatch.setattr(model.engine, "run", lambda feeds: seen.append(feeds["x"].shape) or run_one(feeds))
    arrays = [np.full((n, 2), n, np.float32) for n in (1, 3, 30)]
    answers = model.execute([[Tensor("x", a)] for a in arrays])
    for a, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(answer.outputs[0].as_numpy(), a.sum(axis=1))
    assert seen == [(4, 2), (30, 2)]


@pytest.mark.parametrize("exported", ["whole"], indirect=True)
def test_a_model_without_a_batch(exported: tuple[Any, str]) -> None:
    model, text = exported
    assert "max_batch_size: 0" in text
    assert 'input [ { name: "k" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } } ]' in text
    request = [Tensor("x", np.ones(2, np.float32)), Tensor("k", np.int64(3))]
    for answer in model.execute([request, request]):
        assert answer.outputs[0].as_numpy().tolist() == [3, 3]


@pytest.mark.parametrize("exported", ["looked_up"], indirect=True)
def test_an_error_fails_only_its_own_request(exported: tuple[Any, str]) -> None:
    model, _ = exported
    right, wrong = model.execute([[Tensor("at", np.array([2]))], [Tensor("at", np.array([7]))]])
    assert right.outputs[0].as_numpy().tolist() == [3]
    assert "out of bounds" in wrong.error


def test_exports_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opset = '<ir_version: 8, opset_import: ["" : 13]>'
    for kind, name, said in (
        ("float", "a b", "not a name for a model"),
        ("bfloat16", "narrow", "not support bf16"),
        ("complex64", "wide", "has no name for"),
    ):
        model = onnx.parser.parse_model(f"{opset} m ({kind}[2] x) => ({kind}[2] y) {{ y = Identity(x) }}")
        engine = tmp_path / f"{name}.engine"
        optdnn.build(model, target="reference").save(engine)
        assert run(["export-triton", str(engine), str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    model = onnx.parser.parse_model(f"{opset} m (float[2] x) => (float[2] y) {{ y = Identity(x) }}")
    optdnn.build(model, target="reference").save(tmp_path / "twice.engine")
    codes = [run(["export-triton", str(tmp_path / "twice.engine"), str(tmp_path / "out")]) for _ in range(2)]
    assert codes == [0, 9]
    assert "exists already\n  hint: remove it" in capsys.readouterr().err


def test_an_export_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> m (float[2] x) => (float[2] y) { y = Identity(x) }'
    )
    optdnn.build(model, target="reference").save(tmp_path / "e.engine")

    def full(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("optdnn.serving.triton.shutil.copyfile", full)
        assert run(["export-triton", str(tmp_path / "e.engine"), str(tmp_path / "out")]) == 9
    assert not (tmp_path / "out" / "e").exists()
    assert run(["export-triton", str(tmp_path / "e.engine"), str(tmp_path / "out")]) == 0
