"""Requirements of some tests on the machine. Without them, these tests are skipped with the reason."""

from __future__ import annotations

import pytest

from optdnn.errors import MissingDependency, OptdnnError
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.device import Device, gpu_count
from optdnn.runtime.file.requires import bytes_saturate


def needs_nvrtc() -> None:
    """Skip a test marked ``nvrtc`` where kernels cannot be compiled."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings: pip install 'optdnn[cuda]'")
    try:
        nvrtc.version()
    except MissingDependency as error:
        pytest.skip(str(error))


def needs_libraries() -> None:
    """Skip a test, or a module, that builds for the target ``cpu`` where its libraries are not installed."""
    for name in ("onnxruntime", "openvino"):
        pytest.importorskip(name, reason="the cpu extra is not installed")


def needs_exact_bytes() -> None:
    """Skip a test that compares with 8-bit products of a library, if the processor saturates their sums."""
    if bytes_saturate():
        pytest.skip("ONNX Runtime's own sums of 8-bit products saturate on this processor")


def without_gpu(expression: str) -> bool:
    """Whether tests marked ``gpu`` are left out: the ``expression`` of -m does not select them, and no GPU can be used."""
    if "gpu" in expression.replace("not gpu", ""):
        return False
    try:
        return gpu_count() == 0
    except MissingDependency:
        return True


def is_for_gpus(*nodes: object) -> bool:
    """Whether a test function, or its class or module, is marked ``gpu`` or ``hopper``."""
    found = [getattr(node, "pytestmark", []) for node in nodes]
    marks = [mark for own in found for mark in (own if isinstance(own, list) else [own])]
    return any(mark.name in ("gpu", "hopper") for mark in marks)


def why_no_hopper() -> str | None:
    """Why engines for Hopper (sm_90a) cannot run here, or None."""
    try:
        if gpu_count() == 0:
            return "no NVIDIA GPU"
        if Device.open().capability[0] != 9:
            return "these engines are for Hopper (sm_90a)"
    except OptdnnError as error:
        return str(error)
    return None
