"""Data movement: Concat, Split, Slice, Pad, Tile, Gather and its family, DepthToSpace, SpaceToDepth."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
