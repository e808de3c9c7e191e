"""NumPy kernels. Normalizations: BatchNormalization, InstanceNormalization, GroupNormalization, LayerNormalization, LRN, and the like."""

from __future__ import annotations

from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {}
