"""Facts about the machine and the installed versions, stored with every measurement."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from optdnn.runtime.file.requires import cpu_flags
from optdnn.runtime.program import Plain

FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8", "sha_ni", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Processor features that matter to inference, as Linux names them (x86, then Arm)."""
PACKAGES = (
    "numpy", "ml_dtypes", "onnx", "networkx", "onnxruntime", "openvino", "torch", "cuda-bindings", "cupy-cuda13x",
    "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-cublas",
)  # fmt: skip


def machine() -> dict[str, Plain]:
    """Processor, cores that this process may use, features, memory in GiB, system, Python, and NVIDIA's GPUs with their driver, if
    there are any. None is an unknown fact."""
    info = _read("/proc/cpuinfo")
    flags = cpu_flags()
    memory = memory_bytes()
    return {
        "cpu": _field(info, "model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "cpu_quota": _cpu_quota(),
        "flags": None if flags is None else [f for f in FLAGS if f in flags],
        "virtual": None if flags is None else "hypervisor" in flags,
        "memory_gib": round(memory / 2**30, 1) if memory else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        **({"gpus": known["names"], "gpu_driver": known["driver"]} if (known := gpus()) else {}),
    }


@cache
def gpus() -> dict[str, Plain] | None:
    """``{"names": [...], "driver": "580.1"}``, or None without a driver (or without NVML)."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return gpu_facts(library)


def gpu_facts(library: Any) -> dict[str, Plain] | None:
    """The facts from NVML; None if it cannot be started."""
    if library.nvmlInit_v2():
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        names: list[Plain] = []
        for k in range(count.value):
            handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            readable = not library.nvmlDeviceGetHandleByIndex_v2(k, ctypes.byref(handle))
            if readable and not library.nvmlDeviceGetName(handle, name, len(name)):
                names.append(name.value.decode(errors="replace"))
        text = ctypes.create_string_buffer(80)
        driver = None if library.nvmlSystemGetDriverVersion(text, len(text)) else text.value.decode(errors="replace")
        return {"names": names, "driver": driver}
    finally:
        library.nvmlShutdown()


def versions() -> dict[str, str]:
    """Version of optdnn and of each package of PACKAGES that is installed."""
    # Not imported by name: that would tie the runtime to everything in the public API.
    own: str = sys.modules["optdnn"].__version__
    installed = {"optdnn": own, "python": platform.python_version()}
    return installed | {name: found for name in PACKAGES if (found := _version(name)) is not None}


@cache
def _version(name: str) -> str | None:
    """None: it is not installed. Looked up once: each look-up reads the folder of all installed packages."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def memory_bytes() -> int | None:
    """The machine's memory; None if it is not known."""
    found = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    return int(found[1]) * 1024 if found else None


def usable_cores() -> int:
    """Cores that this process is allowed to run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota() -> float | None:
    """CPU time that the control group allows, in cores, or None if it sets no limit."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _field(text: str, name: str) -> str | None:
    m = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return m[1].strip() if m else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
