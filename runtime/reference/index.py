"""NumPy kernels. Data movement: Concat, Split, Slice, Pad, Tile, Gather and its family, DepthToSpace, SpaceToDepth."""

from __future__ import annotations

from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {}
