"""Operators on shapes: Reshape, Flatten, Transpose, Squeeze, Expand, Shape, Range, Identity, and the like."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
