"""The one table of operator kinds, and of the ONNX operators that import through them."""

from __future__ import annotations

from optdnn.ops import (
    binary,
    conv,
    create,
    fused,
    gather,
    gemm,
    index,
    layout,
    norm,
    pool,
    reduce,
    resize,
    rnn,
    shape,
    softmax,
    unary,
)
from optdnn.ops.base import FromOnnx, OpDef

_DEFS: tuple[OpDef, ...] = (
    *binary.DEFS,
    *conv.DEFS,
    *create.DEFS,
    *fused.DEFS,
    *gather.DEFS,
    *gemm.DEFS,
    *index.DEFS,
    *layout.DEFS,
    *norm.DEFS,
    *pool.DEFS,
    *reduce.DEFS,
    *resize.DEFS,
    *rnn.DEFS,
    *shape.DEFS,
    *softmax.DEFS,
    *unary.DEFS,
)

OPDEFS: dict[str, OpDef] = {d.kind: d for d in _DEFS}
"""Kind -> definition."""

IMPORTERS: dict[str, FromOnnx] = {op_type: fn for d in _DEFS for op_type, fn in d.onnx.items()}
"""ONNX operator ("Conv"; other domains as "com.microsoft.FusedMatMul") -> its import function."""

if len(OPDEFS) != len(_DEFS) or len(IMPORTERS) != sum(len(d.onnx) for d in _DEFS):
    raise AssertionError("an operator kind or ONNX operator is defined twice")
