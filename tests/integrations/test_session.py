"""InferenceSession: the calls of programs written for onnxruntime, compared with onnxruntime if it is installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnxnet import convnet, save_convnet

import optdnn
from optdnn.errors import InputError, UsageError
from optdnn.integrations import onnxruntime as session
from optdnn.integrations.onnxruntime import InferenceSession, SessionOptions

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def options() -> SessionOptions:
    return SessionOptions(intra_op_num_threads=1)


def test_the_public_names() -> None:
    assert optdnn.InferenceSession is InferenceSession
    assert optdnn.SessionOptions is SessionOptions
    assert "CPUExecutionProvider" in optdnn.get_available_providers()


def test_it_behaves_like_onnxruntime(tmp_path: Path, options: SessionOptions) -> None:
    ort = pytest.importorskip("onnxruntime")
    path = str(save_convnet(tmp_path / "m.onnx", batch="n"))
    ours = InferenceSession(path, options, providers=["CPUExecutionProvider"])
    theirs = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for a, b in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
        assert [(x.name, x.type, x.shape) for x in a] == [(x.name, x.type, x.shape) for x in b]
    assert ours.get_providers() == theirs.get_providers()
    assert ours.get_modelmeta().graph_name == theirs.get_modelmeta().graph_name
    assert ours.get_overridable_initializers() == theirs.get_overridable_initializers()
    for names in (None, [], ["y"]):
        got, want = ours.run(names, {"x": X}), theirs.run(names, {"x": X})
        assert len(got) == len(want) == 1
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    value = ort.OrtValue.ortvalue_from_numpy(X)
    np.testing.assert_array_equal(ours.run(None, {"x": value})[0], ours.run(None, {"x": X})[0])


def test_its_smaller_methods(tmp_path: Path, options: SessionOptions) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = convnet()
    model.producer_name, model.doc_string, model.domain, model.model_version = "a tool", "a net", "org.example", 7
    model.graph.doc_string = "a graph"
    entry = model.metadata_props.add()
    entry.key, entry.value = "names", "{0: 'cat'}"
    path = str(tmp_path / "m.onnx")
    Path(path).write_bytes(model.SerializeToString())
    ours = InferenceSession(path, options, providers=["CPUExecutionProvider"])
    theirs = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    ours.engine.save(tmp_path / "m.engine")
    loaded = InferenceSession(str(tmp_path / "m.engine"))
    for name in vars(ours.get_modelmeta()):
        for one in (ours, loaded):
            assert getattr(one.get_modelmeta(), name) == getattr(theirs.get_modelmeta(), name), name
    assert ours.get_provider_options() == theirs.get_provider_options()
    ours.disable_fallback()
    ours.enable_fallback()
    feeds = {"x": ort.OrtValue.ortvalue_from_numpy(X[:1])}
    got, want = (s.run_with_ort_values(["y"], feeds) for s in (ours, theirs))
    assert [type(v) for v in got] == [type(v) for v in want]
    np.testing.assert_allclose(got[0].numpy(), want[0].numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"input 'x' is ndarray, not an OrtValue\n  hint: session\.run takes arrays"):
        ours.run_with_ort_values(["y"], {"x": X[:1]})


def test_an_unknown_provider_before_a_known_one_is_passed_over(options: SessionOptions) -> None:
    said = "CPUExecutionProvider is used; not available here: AzureExecutionProvider: optdnn has nothing like it"
    with pytest.warns(UserWarning, match=said):
        found = InferenceSession(
            convnet().SerializeToString(), options, ["AzureExecutionProvider", "CPUExecutionProvider"]
        )
    assert found.get_providers() == ["CPUExecutionProvider"]


def test_onnxruntimes_own_options_are_taken(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    own = ort.SessionOptions()
    own.intra_op_num_threads = 1
    own.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    s = InferenceSession(convnet().SerializeToString(), own)
    made = s.engine.meta["options"]
    assert (made["threads"], made["opt_level"]) == (1, 1)
    assert s.get_session_options() is own


def test_free_dimensions_and_build_options(options: SessionOptions, tmp_path: Path) -> None:
    options.add_free_dimension_override_by_name("n", 2)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = convnet(batch="n").SerializeToString()
    s = InferenceSession(model, options, providers=[("OpenVINOExecutionProvider", {"device_type": "CPU"})])
    assert s.get_inputs()[0].shape == [2, 3, 8, 8]
    assert s.engine.meta["tactic"]["library"] == "openvino"
    assert (tmp_path / "optimized.onnx").exists()
    with pytest.raises(UsageError, match=r"no input has a dimension 'm'.*\n.*there are n"):
        InferenceSession(model, SessionOptions(free_dimensions={"m": 2}))
    ranged = InferenceSession(model, SessionOptions(intra_op_num_threads=1), shapes={"x": "1..2..4x3x8x8"})
    with pytest.raises(InputError, match="n is 5"):
        ranged.run(None, {"x": np.zeros((5, 3, 8, 8), np.float32)})


def test_an_engine_file_is_loaded(tmp_path: Path) -> None:
    optdnn.build(convnet(), target="reference").save(tmp_path / "e.engine")
    s = InferenceSession(str(tmp_path / "e.engine"))
    assert s.run(["y"], {"x": X[:1]})[0].shape == (1, 5)
    with pytest.raises(UsageError, match="is built already; precision"):
        InferenceSession(str(tmp_path / "e.engine"), precision="bf16")
    with pytest.raises(UsageError, match=r"sess_options must be optdnn\.SessionOptions or ONNX Runtime's, not dict"):
        InferenceSession(tmp_path / "e", {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="from its file, not from bytes"):
        InferenceSession((tmp_path / "e.engine").read_bytes())


def test_metadata_of_an_engine_that_no_build_wrote() -> None:
    held = session._metadata_held(
        {"name": 3, "description": {"version": "7", "domain": 5, "custom_metadata_map": {"a": 1}}}
    )
    assert held == session.ModelMetadata("3", "", custom_metadata_map={"a": "1"})
    for wrong in (None, 3, {"description": []}, {"description": {"custom_metadata_map": 3}}):
        assert session._metadata_held(wrong) == session.ModelMetadata("", "")


def test_skipped_providers_are_reported(monkeypatch: pytest.MonkeyPatch, options: SessionOptions) -> None:
    monkeypatch.setattr(session, "_why_not", lambda means: "no GPU" if means["target"] == "cuda" else None)
    model = convnet().SerializeToString()
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    with pytest.warns(
        UserWarning, match="CPUExecutionProvider is used; not available here: CUDAExecutionProvider: no GPU"
    ):
        assert InferenceSession(model, options, both).get_providers() == ["CPUExecutionProvider"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InferenceSession(model, options, ["CPUExecutionProvider"])
    with pytest.raises(UsageError, match="none of the providers is available here: CUDAExecutionProvider: no GPU"):
        InferenceSession(model, options, ["CUDAExecutionProvider"])


def test_a_provider_without_its_library_is_not_available(
    monkeypatch: pytest.MonkeyPatch, options: SessionOptions
) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None if name == "openvino" else name)
    assert optdnn.get_available_providers()[-1] == "CPUExecutionProvider"
    assert "OpenVINOExecutionProvider" not in optdnn.get_available_providers()
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    assert "CPUExecutionProvider" not in optdnn.get_available_providers()
    said = r"none of the providers .*: CPUExecutionProvider: openvino or onnxruntime not installed: pip install"
    with pytest.raises(UsageError, match=said):
        InferenceSession(convnet().SerializeToString(), options, ["CPUExecutionProvider"])


def test_provider_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_why_not", lambda means: None)
    found = session._choose([("TensorrtExecutionProvider", {"trt_fp16_enable": True, "device_id": 0})])
    assert found == ("TensorrtExecutionProvider", {"target": "cuda", "precision": "fp16"})
    assert session._choose([("TensorrtExecutionProvider", {"trt_fp16_enable": False})])[1] == {"target": "cuda"}


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        ({"providers": ["QNNExecutionProvider"]}, "nothing like the provider 'QNNExecutionProvider'"),
        ({"providers": [("CPUExecutionProvider", {"magic": 1})]}, "does not know the option magic=1"),
        ({"providers": [("CPUExecutionProvider", {"device_id": 1})]}, "option device_id=1"),
        ({"providers": ["CPUExecutionProvider"], "provider_options": [{}, {}]}, "2 provider_options are given for 1"),
        ({"sess_options": SessionOptions(enable_profiling=True)}, "writes no profile"),
        ({"sess_options": SessionOptions(graph_optimization_level=7)}, "is not one of onnxruntime's"),
    ],
)
def test_refusals(arguments: dict[str, Any], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        InferenceSession(convnet().SerializeToString(), **arguments)


def test_wrong_names(options: SessionOptions) -> None:
    with pytest.raises(AttributeError, match="intra_op_nun_threads"):
        options.intra_op_nun_threads = 2  # type: ignore[attr-defined]
    s = InferenceSession(convnet().SerializeToString(), options)
    with pytest.raises(InputError, match="there is no output 'z'; the model gives y"):
        s.run(["z"], {"x": X[:1]})
    with pytest.raises(InputError, match="output_names must be a list of names, not the text 'y'"):
        s.run("y", {"x": X[:1]})
    for feed in ([X[:1]], None):
        with pytest.raises(InputError, match=r"input_feed must map names to arrays, not (list|NoneType)"):
            s.run(None, feed)


def test_lists_get_the_inputs_type(options: SessionOptions) -> None:
    s = InferenceSession(convnet().SerializeToString(), options)
    np.testing.assert_array_equal(s.run(None, {"x": X[:1].tolist()})[0], s.run(None, {"x": X[:1]})[0])
    with pytest.raises(InputError, match="a list cannot be read as an array of float32"):
        s.run(None, {"x": [["a"]]})
    with pytest.raises(InputError, match="there is no input 'z'"):
        s.run(None, {"z": [1.0]})


def test_wrong_arguments(options: SessionOptions) -> None:
    model = convnet().SerializeToString()
    with pytest.raises(UsageError, match="takes a path or the bytes of a model, not NoneType"):
        InferenceSession(None)  # type: ignore[arg-type]
    for providers in ([3], [("CPUExecutionProvider",)], [("CPUExecutionProvider", 3)]):
        with pytest.raises(UsageError, match="a provider is a name, or a pair of a name and its options, not"):
            InferenceSession(model, options, providers)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="graph_optimization_level 'all' is not one of onnxruntime's"):
        InferenceSession(model, SessionOptions(graph_optimization_level="all"))
    with pytest.raises(UsageError, match=r"library ops\.so\n.*optdnn\.custom_op"):
        options.register_custom_ops_library("ops.so")
    with pytest.raises(UsageError, match=r"initializer 'w' cannot be replaced"):
        options.add_initializer("w", X)
    assert InferenceSession(model, options, "CPUExecutionProvider").get_providers() == ["CPUExecutionProvider"]
