"""Kinds of our own: Pointwise, a fused pointwise DAG."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
