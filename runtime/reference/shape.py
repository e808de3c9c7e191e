"""NumPy kernels. Operators on shapes: Reshape, Flatten, Transpose, Squeeze, Expand, Shape, Range, Identity, and the like."""

from __future__ import annotations

from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {}
