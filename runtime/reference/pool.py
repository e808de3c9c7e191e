"""NumPy kernels. Pooling: MaxPool, AveragePool, LpPool and their global forms."""

from __future__ import annotations

from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {}
