"""The GPU's clocks, temperature and power during a measurement, through NVML (``libnvidia-ml``, part of the driver).

Nothing is ever set. Without NVML (containers may lack it) there is no monitor, and reports say so.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

from optdnn.runtime.cuda.device import CudaError, check, driver
from optdnn.runtime.program import Plain

_SM, _MEMORY = 1, 2
_REASONS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons for reasons that hold clocks down (idle, bit 0, does not count)."""


@dataclass(frozen=True)
class ClockSample:
    """One reading. Clocks in MHz, power in W, temperature in °C; None for an unknown figure."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    held_by: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Plain]:
        return {**asdict(self), "held_by": list(self.held_by)}


class Monitor:
    """Reads one GPU. Created by :meth:`open`."""

    def __init__(self, library: Any, handle: ctypes.c_void_p):
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, index: int = 0) -> Monitor | None:
        """The monitor of CUDA device ``index``, or None if NVML does not know it."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            cu = driver()
            device = check("cuDeviceGet", cu.cuDeviceGet(index))
            bus = check("cuDeviceGetPCIBusId", cu.cuDeviceGetPCIBusId(32, device)).split(b"\0")[0]
            handle = ctypes.c_void_p()
            # NVML numbers GPUs by their bus, CUDA in another order: both know the bus address.
            if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
                return None
        except (OSError, AttributeError, CudaError):
            return None
        return cls(library, handle)

    def sample(self) -> ClockSample:
        power = self._number("nvmlDeviceGetPowerUsage")
        mask = ctypes.c_ulonglong()
        read = getattr(self._library, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            self._library, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        failed = read is None or read(self._handle, ctypes.byref(mask))
        held = () if failed else tuple(text for bit, text in _REASONS.items() if mask.value & bit)
        return ClockSample(
            self._number("nvmlDeviceGetClockInfo", _SM),
            self._number("nvmlDeviceGetClockInfo", _MEMORY),
            None if power is None else power / 1e3,
            self._number("nvmlDeviceGetTemperature", 0),
            held,
        )

    def most(self) -> int | None:
        """The highest clock of the multiprocessors, in MHz."""
        return self._number("nvmlDeviceGetMaxClockInfo", _SM)

    def processes(self) -> int | None:
        """The number of processes that compute on the GPU."""
        count = ctypes.c_uint(0)
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        call = getattr(self._library, name, None)
        # With room for no entries, NVML returns their number (7: not enough room).
        return None if call is None or call(self._handle, ctypes.byref(count), None) not in (0, 7) else count.value

    def millijoules(self) -> int | None:
        """The energy that the GPU has used since the driver was loaded; None for a GPU without a counter."""
        value = ctypes.c_ulonglong()
        call = getattr(self._library, "nvmlDeviceGetTotalEnergyConsumption", None)
        return None if call is None or call(self._handle, ctypes.byref(value)) else value.value

    def _number(self, name: str, *which: int) -> int | None:
        value = ctypes.c_uint()
        call = getattr(self._library, name, None)
        return None if call is None or call(self._handle, *which, ctypes.byref(value)) else value.value
