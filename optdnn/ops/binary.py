"""Pointwise operators of several operands: arithmetic, comparison, logic, Where, Clip; and Cast."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
