"""The driver layer's messages if there is no driver, and its errors for refused calls."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from optdnn.errors import RunError
from optdnn.runtime.cuda import allocator, device
from optdnn.runtime.cuda.allocator import DeviceMemory
from optdnn.runtime.cuda.device import CudaError, Device
from optdnn.runtime.cuda.gpu_facts import of_arch


def test_without_a_driver_there_are_no_gpus_and_the_error_says_so() -> None:
    code = """
import sys, types
fake = types.ModuleType("cuda.bindings.driver")
def init(flags): raise RuntimeError("libcuda.so.1: cannot open shared object file")
fake.cuInit = init
sys.modules["cuda"] = types.ModuleType("cuda")
sys.modules["cuda.bindings"] = types.ModuleType("cuda.bindings")
sys.modules["cuda.bindings.driver"] = fake
from optdnn.runtime.cuda import device
assert device.gpu_count() == 0
try:
    device.Device.open()
except device.CudaError as error:
    assert "driver's library cannot be loaded" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_refused_call_names_itself_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    success, failure = SimpleNamespace(name="CUDA_SUCCESS"), SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
    fake: Any = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=success), cuGetErrorString=lambda status: (success, b"out of memory")
    )
    monkeypatch.setattr(device, "driver", lambda: fake)
    assert device.check("cuMemAlloc", (success, 7)) == 7
    assert device.check("cuFoo", (success, 1, 2)) == (1, 2)
    assert device.check("cuBar", (success,)) is None
    with pytest.raises(CudaError, match=r"cuMemAlloc: out of memory \(CUDA_ERROR_OUT_OF_MEMORY\)") as caught:
        device.check("cuMemAlloc", (failure, 0))
    assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY"
    assert isinstance(caught.value, RunError)


def test_memory_that_a_gpu_does_not_have_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(call: str, result: Any) -> Any:
        raise CudaError(call, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    monkeypatch.setattr(allocator, "driver", lambda: SimpleNamespace(cuMemAlloc=lambda size: (2, 0)))
    monkeypatch.setattr(allocator, "check", refused)
    with pytest.raises(RunError, match=r"the GPU has no room for a buffer: 2\.0 MB\n  hint: use a smaller batch"):
        DeviceMemory(2_000_000, "a buffer")
    with pytest.raises(RunError, match="hint: build it for several"):
        DeviceMemory(1, "weights", "build it for several")


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a")])
def test_the_architecture_of_a_device(capability: tuple[int, int], arch: str) -> None:
    fields = {**vars(of_arch("sm_90a")), "capability": capability}
    assert Device(**fields, index=0, driver_version=(13, 0)).arch == arch


def test_without_the_packages_the_error_names_the_pip_command() -> None:
    code = """
import sys
sys.modules["cuda.bindings"] = None
from optdnn.errors import MissingDependency
from optdnn.kernels.conv import cost, implicit_gemm, patch_kernel
from optdnn.runtime.cuda import device
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.launches import graphs
for call in (nvrtc.version, device.driver):
    try:
        call()
    except MissingDependency as error:
        assert "pip install 'optdnn[cuda]'" in str(error), error
    else:
        raise AssertionError(call)
assert not any(name.split(".")[0] in ("cupy", "torch", "onnx", "networkx") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
