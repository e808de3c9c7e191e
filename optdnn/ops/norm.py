"""Normalizations: BatchNormalization, InstanceNormalization, GroupNormalization, LayerNormalization, LRN, and the like."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
