"""NumPy kernels. Pointwise operators of several operands: arithmetic, comparison, logic, Where, Clip; and Cast."""

from __future__ import annotations

from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {}
