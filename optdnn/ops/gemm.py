"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from optdnn.ops.base import OpDef

DEFS: tuple[OpDef, ...] = ()
