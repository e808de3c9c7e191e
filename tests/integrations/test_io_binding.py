"""IOBinding: onnxruntime's calls for arrays in the caller's memory."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from support.onnxnet import convnet

import optdnn
from optdnn.errors import InputError, UsageError
from optdnn.integrations.io_binding import BoundValue, IOBinding
from optdnn.integrations.onnxruntime import InferenceSession, SessionOptions
from optdnn.types import TensorSpec

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def session() -> InferenceSession:
    return InferenceSession(convnet(batch="n").SerializeToString(), SessionOptions(intra_op_num_threads=1))


@pytest.fixture
def want(session: InferenceSession) -> Any:
    return session.run(None, {"x": X})[0]


def test_it_behaves_like_onnxruntimes(session: InferenceSession) -> None:
    ort = pytest.importorskip("onnxruntime")
    theirs = ort.InferenceSession(convnet(batch="n").SerializeToString(), providers=["CPUExecutionProvider"])
    found = []
    for s in (session, theirs):
        binding = s.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y")
        binding.synchronize_inputs()
        s.run_with_iobinding(binding)
        binding.synchronize_outputs()
        (value,) = binding.get_outputs()
        found.append((value.shape(), value.data_type(), value.device_name()))
        np.testing.assert_array_equal(value.numpy(), binding.copy_outputs_to_cpu()[0])
        np.testing.assert_allclose(value.numpy(), theirs.run(None, {"x": X})[0], rtol=1e-4, atol=1e-5)
    assert found[0] == found[1]


def test_a_bound_array_is_read_and_written_in_place(session: InferenceSession, want: Any) -> None:
    x, y = X.copy(), np.empty_like(want)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, TensorProto.FLOAT, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, want)
    assert binding.get_outputs()[0].data_ptr() == y.ctypes.data
    x[:] = 2 * X
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, session.run(None, {"x": 2 * X})[0])


def test_ort_values(session: InferenceSession, want: Any) -> None:
    ort = pytest.importorskip("onnxruntime")
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(X))
    target = ort.OrtValue.ortvalue_from_shape_and_type(list(want.shape), np.float32)
    binding.bind_ortvalue_output("y", target)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(target.numpy(), want)
    again = session.io_binding()
    again.bind_ortvalue_input("x", BoundValue(X))
    again.bind_output("y")
    session.run_with_iobinding(again)
    np.testing.assert_array_equal(again.copy_outputs_to_cpu()[0], want)


def test_only_bound_outputs_are_given() -> None:
    model = onnx_of_two()
    s = InferenceSession(model, SessionOptions(intra_op_num_threads=1))
    binding = s.io_binding()
    binding.bind_cpu_input("x", np.ones((2,), np.float32))
    binding.bind_output("b")
    binding.bind_output("a")
    s.run_with_iobinding(binding)
    assert [a.tolist() for a in binding.copy_outputs_to_cpu()] == [[3, 3], [2, 2]]
    binding.clear_binding_outputs()
    binding.bind_output("a")
    s.run_with_iobinding(binding)
    assert [a.tolist() for a in binding.copy_outputs_to_cpu()] == [[2, 2]]
    binding.clear_binding_inputs()
    with pytest.raises(InputError, match="input 'x' is missing"):
        s.run_with_iobinding(binding)


def onnx_of_two() -> bytes:
    import onnx

    text = """
    <ir_version: 10, opset_import: ["": 21]>
    two (float[2] x) => (float[2] a, float[2] b) {
        a = Add(x, x)
        b = Add(a, x)
    }
    """
    made: bytes = onnx.parser.parse_model(text).SerializeToString()
    return made


def test_refusals(session: InferenceSession, want: Any) -> None:
    binding = session.io_binding()
    with pytest.raises(InputError, match="no output is bound"):
        session.run_with_iobinding(binding)
    with pytest.raises(InputError, match=r"there is no input 'z'\n  hint: there are x"):
        binding.bind_cpu_input("z", X)
    with pytest.raises(InputError, match="there is no output 'z'"):
        binding.bind_output("z")
    with pytest.raises(UsageError, match="needs an element_type and a shape"):
        binding.bind_output("y", buffer_ptr=1)
    with pytest.raises(UsageError, match=r"for target cpu, so memory of a GPU cannot be bound"):
        binding.bind_output("y", "cuda")
    for device, number in (("dml", 0), ("cuda", 1)):
        with pytest.raises(UsageError, match=f"device '{device}' {number} cannot be bound"):
            binding.bind_output("y", device, number)
    with pytest.raises(UsageError, match="'x' is bound to a ndarray, not to an OrtValue"):
        binding.bind_ortvalue_input("x", X)
    with pytest.raises(UsageError, match="the binding is a dict, not one of this session"):
        session.run_with_iobinding({})  # type: ignore[arg-type]
    binding.bind_cpu_input("x", X.astype(np.float64))
    binding.bind_output("y")
    with pytest.raises(InputError, match="input 'x' is fp64; the engine takes fp32"):
        session.run_with_iobinding(binding)
    small = np.empty((1, 5), np.float32)
    binding.bind_cpu_input("x", X)
    binding.bind_output("y", "cpu", 0, np.float32, small.shape, small.ctypes.data)
    with pytest.raises(InputError, match=r"the buffer for output 'y' has shape \[1, 5\]"):
        session.run_with_iobinding(binding)


class OnGpu:
    """An array that claims to be on a GPU."""

    def __init__(self, array: Any):
        self.array = np.array(array)
        self.shape, self.dtype, self.__cuda_array_interface__ = self.array.shape, self.array.dtype, {}

    def get(self) -> Any:
        return self.array.copy()


class Doubles:
    """An engine y = 2 x that takes arrays in one place, and gives results there."""

    inputs = (TensorSpec("x", np.dtype(np.float32), (2,)),)
    outputs = (TensorSpec("y", np.dtype(np.float32), (2,)),)
    target = "cuda:sm_90a"

    def run(self, feeds: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
        kinds = {type(a) for a in (*feeds.values(), *out.values())}
        assert len(kinds) == 1, "arrays in one place only"
        if kinds == {OnGpu}:
            result = out.get("y") or OnGpu(np.zeros(2, np.float32))
            result.array[...] = 2 * feeds["x"].array
            return {"y": result}
        y = out.get("y", np.empty(2, np.float32))
        y[...] = 2 * feeds["x"]
        return {"y": y}


@pytest.mark.parametrize("given", ["cpu", "cuda"])
@pytest.mark.parametrize("wanted", ["cpu", "cuda", "buffer"])
def test_arrays_in_two_places_are_copied(monkeypatch: pytest.MonkeyPatch, given: str, wanted: str) -> None:
    waited: list[bool] = []

    class Null(nullcontext[None]):
        def synchronize(self) -> None:
            waited.append(True)

    cupy = SimpleNamespace(asarray=OnGpu, cuda=SimpleNamespace(Stream=SimpleNamespace(null=Null())))
    monkeypatch.setattr("optdnn.integrations.io_binding.import_cupy", lambda why: cupy)
    binding = IOBinding(Doubles())  # type: ignore[arg-type]
    x, y = np.array([1, 2], np.float32), np.zeros(2, np.float32)
    binding.bind_ortvalue_input("x", BoundValue(OnGpu(x) if given == "cuda" else x))
    if wanted == "buffer":
        binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    else:
        binding.bind_output("y", wanted)
    binding.run()
    assert binding.copy_outputs_to_cpu()[0].tolist() == [2, 4]
    assert binding.get_outputs()[0].device_name() == ("cuda" if wanted == "cuda" else "cpu")
    assert y.tolist() == ([2, 4] if wanted == "buffer" else [0, 0])
    assert waited == [True] * ("cuda" in (given, wanted))
    if wanted == "buffer" and given == "cuda":
        binding.bind_output("y", "cpu", 0, np.float32, (1,), y.ctypes.data)
        with pytest.raises(InputError, match=r"bound to a buffer fp32\[1\]; the result is fp32\[2\]"):
            binding.run()


@pytest.mark.gpu
def test_memory_of_a_gpu() -> None:
    import cupy

    engine = optdnn.build(convnet(), target="cuda", tactics="heuristic")
    want = engine.run({"x": X[:1]})["y"]
    given, out = cupy.asarray(X[:1]), cupy.empty(want.shape, np.float32)
    binding = IOBinding(engine)
    binding.bind_input("x", "cuda", 0, np.float32, given.shape, given.data.ptr)
    binding.bind_output("y", "cuda", 0, np.float32, out.shape, out.data.ptr)
    binding.run()
    np.testing.assert_array_equal(out.get(), want)
    assert (binding.get_outputs()[0].device_name(), binding.get_outputs()[0].data_ptr()) == ("cuda", out.data.ptr)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], want)

    host = np.empty(want.shape, np.float32)  # from the GPU to the host
    binding.bind_output("y", "cpu", 0, np.float32, host.shape, host.ctypes.data)
    binding.run()
    np.testing.assert_array_equal(host, want)
    binding.bind_output("y")
    binding.run()
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], want)

    binding.bind_cpu_input("x", X[:1])  # and from the host to the GPU
    binding.bind_output("y", "cuda")
    binding.run()
    assert binding.get_outputs()[0].device_name() == "cuda"
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], want)

    binding.bind_cpu_input("x", X[:1] * 2)  # all in host memory
    binding.bind_output("y")
    binding.run()
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], engine.run({"x": X[:1] * 2})["y"])
