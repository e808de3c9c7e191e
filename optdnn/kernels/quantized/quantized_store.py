"""A float result that is also, or only, stored in a narrower type: ``Narrow`` of ``narrow.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.kernels.launch import Parameters
from optdnn.ops.requantize import BOUNDS, QuantParams
from optdnn.runtime.cuda.gpu_facts import capability_of


@dataclass(frozen=True)
class QuantizedStore:
    """Stored = saturate(round(x * ``factor``) + ``zero``). ``low`` and ``high`` are the bounds before rounding."""

    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    zero: int = 0

    @classmethod
    def of(cls, to: QuantParams) -> QuantizedStore:
        """Quantizes as ``to`` does: the factor is the reciprocal of its scale, in fp32."""
        low, high = (float(bound - to.zero) for bound in BOUNDS[to.dtype])
        return cls(float(np.float32(1.0 / to.scale)), low, high, to.zero)

    def put(self, parameters: Parameters) -> None:
        """Append the fields of the kernel's ``Narrow`` structure."""
        parameters.f32(self.factor, self.low, self.high).i32(self.zero)


def narrow_kind(dtype: str) -> int:
    """The kernels' constant NARROW: 0 for no narrower result, 1 for 8-bit integers, 2 for fp8, 3 for fp16."""
    return 0 if not dtype else 3 if dtype == "float16" else 2 if dtype.startswith("float8") else 1


def no_conversion(dtype: str, arch: str) -> str | None:
    """Why an architecture has no instruction that rounds to an 8-bit type, or None."""
    if dtype.startswith("float8") and capability_of(arch) < (8, 9):
        return f"instructions that round to fp8 begin with sm_89: {arch} has none"
    return None
