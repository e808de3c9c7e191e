"""PyTorch on a GPU: tensors as inputs and outputs by DLPack without a copy, compiled modules, torch.compile by the backend's
name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import optdnn
from optdnn.integrations.pytorch import compile_backend
from optdnn.runtime.cuda.usable import why_not

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]


def _module(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 8)]
    return torch.nn.Sequential(*layers, *head).to("cuda", dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_module_of_the_gpu_and_tensors_by_dlpack(dtype: Any) -> None:
    cupy = pytest.importorskip("cupy")
    net, x = _module(dtype), torch.randn(4, 3, 16, 16, device="cuda", dtype=dtype)
    precision = "fp32" if dtype == torch.float32 else "fp16"
    engine = optdnn.from_torch(
        net, x, input_names=["x"], shapes={"x": "1..4..8x3x16x16"}, target="cuda", precision=precision
    )
    for n in (4, 2):
        given = torch.randn(n, 3, 16, 16, device="cuda", dtype=dtype)
        (y,) = engine.run({"x": given}).values()
        assert isinstance(y, cupy.ndarray)
        back = torch.from_dlpack(y)
        assert back.data_ptr() == y.data.ptr  # the same memory
        with torch.no_grad():
            torch.testing.assert_close(back, net(given), rtol=2e-2, atol=2e-3)
    out = torch.empty(4, 8, device="cuda", dtype=dtype)
    context: Any = engine.context()
    name = engine.outputs[0].name
    assert context.run({"x": x}, out={name: out})[name] is out  # torch's own memory is written
    with torch.no_grad():
        torch.testing.assert_close(out, net(x), rtol=2e-2, atol=2e-3)


def test_torch_compile_on_the_gpu() -> None:
    net, x = _module(), torch.randn(2, 3, 16, 16, device="cuda")
    backend: Any = "optdnn" if "optdnn" in torch.compiler.list_backends() else compile_backend
    compiled = torch.compile(net, backend=backend, options={"target": "cuda"})
    with torch.inference_mode():
        for given in (x, x[:1], x + 1):
            got = compiled(given)
            assert got.device.type == "cuda"
            torch.testing.assert_close(got, net(given), rtol=1e-2, atol=1e-3)


def test_arrays_of_torch_on_the_host_are_taken_too() -> None:
    net, x = _module().cpu(), torch.randn(2, 3, 16, 16)
    engine = optdnn.from_torch(net, x, input_names=["x"], target="cuda")
    (y,) = engine.run({"x": x}).values()
    assert isinstance(y, np.ndarray)
    with torch.no_grad():
        np.testing.assert_allclose(y, net(x).numpy(), rtol=1e-2, atol=1e-3)
