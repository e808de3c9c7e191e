"""Names of targets, as in ``--target`` and in engine files: ``cpu``, ``cuda:sm_90a``, ``cuda:h200`` and so on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from optdnn.errors import UsageError, did_you_mean

HOPPER = "sm_90a"
"""The architecture of the programs that ``simulate`` runs."""
FAMILIES = ("cpu", "reference", "simulate", "cuda")
BUILDABLE = ("sm_90a", "sm_121", "sm_120", "sm_110", "sm_103", "sm_100", "sm_89", "sm_87", "sm_86", "sm_80")
"""Architectures that a build may name."""
GPUS: Mapping[str, str] = {
    **dict.fromkeys(("h200", "h100", "h100-pcie"), HOPPER),
    **dict.fromkeys(("a100", "a100-80gb"), "sm_80"),
    **dict.fromkeys(("a40", "a10", "rtx-3090"), "sm_86"),
    "orin": "sm_87",
    **dict.fromkeys(("l40s", "l4", "rtx-4090"), "sm_89"),
    "b200": "sm_100",
    "b300": "sm_103",
    "thor": "sm_110",
    **dict.fromkeys(("rtx-5090", "rtx-pro-6000"), "sm_120"),
    "gb10": "sm_121",
}
"""GPUs that a build may name, and their architectures. Their facts: :data:`optdnn.runtime.cuda.gpu_facts.NAMED`."""
TARGETS = ("auto", *FAMILIES, *(f"cuda:{name}" for name in (*BUILDABLE, *GPUS)))
"""The values of a build's option ``target``. ``cuda`` is the GPU of this machine, ``auto`` that GPU if it is usable, else cpu."""
_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")


@dataclass(frozen=True)
class TargetName:
    """A target's name, parsed. ``arch`` is the architecture of its kernels: Hopper's for ``simulate``, "" without kernels or for
    the GPU of this machine. ``gpu`` is one of :data:`GPUS`, "" if the name contains no GPU."""

    family: str
    arch: str = ""
    gpu: str = ""

    @classmethod
    def parse(cls, text: str) -> TargetName:
        """Read a name; "" names no target. An architecture need not be one of :data:`BUILDABLE`.

        Raises UsageError for an unknown family or text that is not an architecture.
        """
        return _parsed(text)

    def __str__(self) -> str:
        return f"cuda:{self.gpu or self.arch}" if self.family == "cuda" and self.arch else self.family

    @property
    def on_gpu(self) -> bool:
        """Whether its programs are launches of GPU kernels: ``cuda``, and ``simulate``, which runs them in NumPy."""
        return self.family in ("cuda", "simulate")

    @property
    def simulated(self) -> bool:
        return self.family == "simulate"

    @property
    def machine(self) -> TargetName:
        """The target whose passes and kernels this target uses: Hopper's for ``simulate``."""
        return TargetName("cuda", HOPPER) if self.simulated else self


@lru_cache(maxsize=64)
def _parsed(text: str) -> TargetName:
    if text in ("", "auto", "cpu", "reference", "cuda"):
        return TargetName(text)
    if text == "simulate":
        return TargetName(text, HOPPER)
    family, _, machine = text.partition(":")
    if family == "cuda" and machine in GPUS:
        return TargetName(family, GPUS[machine], machine)
    if family == "cuda" and _ARCH.fullmatch(machine):
        return TargetName(family, machine)
    machines = (*BUILDABLE, *GPUS)
    hint = did_you_mean(text, FAMILIES) if family != "cuda" or not machine else did_you_mean(machine, machines)
    if family == "cuda" and machine and hint is not None:
        hint = hint.replace("'", "'cuda:", 1)
    if text == "gpu":
        hint = "the GPU of this machine is --target cuda"
    if family == "cuda" and machine.isdecimal():
        hint = f"a target names no device: --target cuda, and CUDA_VISIBLE_DEVICES={machine} chooses the GPU"
    raise UsageError(
        f"target {text!r} is not one of auto, {', '.join(FAMILIES)} or cuda:MACHINE",
        hint=hint or f"MACHINE is one of {', '.join(machines)}",
    )
