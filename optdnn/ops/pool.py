"""Pooling: MaxPool, AveragePool, LpPool and their global forms."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
