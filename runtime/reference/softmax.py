"""NumPy kernels. Softmax, LogSoftmax, Hardmax."""

from __future__ import annotations

from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {}
