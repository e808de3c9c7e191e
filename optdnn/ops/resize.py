"""Resize and Upsample."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
