"""Which NVIDIA GPUs the machine has, and their driver: by NVML (part of the driver), without starting CUDA."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from optdnn.runtime.program import Plain


@cache
def gpus() -> dict[str, Plain] | None:
    """``{"names": [...], "driver": "580.1"}``, or None where there is no driver (or NVML is absent)."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return facts(library)


def facts(library: Any) -> dict[str, Plain] | None:
    """The facts from NVML; None where it cannot be started."""
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
