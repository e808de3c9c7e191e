"""GPUs that plans are made for when there is none at hand, one of each architecture: what a block may have, and how many
multiprocessors a grid fills.

Our cost models are fitted to an H200 (:func:`optdnn.runtime.cuda.conv_cost.h200`). For the others these figures bound what is
proposed and count waves; the seconds predicted there rank the configurations of one kernel, no more.
"""

from __future__ import annotations

from optdnn.errors import InternalError
from optdnn.runtime.cuda.conv_cost import h200
from optdnn.runtime.cuda.device import Device

_BEFORE_HOPPER = {
    "sm_80": Device(0, "NVIDIA A100", (8, 0), 108, 166912, 167936, 40 << 20, (13, 0)),
    "sm_86": Device(0, "NVIDIA A40", (8, 6), 84, 101376, 102400, 6 << 20, (13, 0)),
    "sm_87": Device(0, "NVIDIA Jetson AGX Orin", (8, 7), 16, 166912, 167936, 4 << 20, (13, 0)),
    "sm_89": Device(0, "NVIDIA L40S", (8, 9), 142, 101376, 102400, 96 << 20, (13, 0)),
}
ARCHS = (*_BEFORE_HOPPER, "sm_90", "sm_90a")
"""Architectures that kernels which need nothing of Hopper are compiled for in tests."""


def launches_early(arch: str) -> bool:
    """Whether a launch may ask to begin before the one in front of it ends (programmatic dependent launch, from Hopper on)."""
    number = arch.removeprefix("sm_").rstrip("af")
    return number.isdigit() and int(number) >= 90


def no_gpu(arch: str) -> str | None:
    """Why there are no figures of an architecture, or None."""
    return None if arch in ARCHS else f"it is compiled for {', '.join(ARCHS)}, not {arch}"


def gpu_of(arch: str) -> Device:
    """A GPU of this architecture, of :data:`ARCHS`."""
    if (why := no_gpu(arch)) is not None:
        raise InternalError(why)
    return _BEFORE_HOPPER.get(arch) or h200()
