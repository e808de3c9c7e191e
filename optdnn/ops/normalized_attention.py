"""Normalized linear attention (Katharopoulos et al., "Transformers are RNNs", 2020).

Weights are products of queries and keys, without a softmax. The sum over the tokens is therefore computed once, for all queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import STEPS_TOL, Attrs, Call, Cost, Result
from optdnn.ops.checks import agree, agree_all, elements, extent, floating, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export


@dataclass(frozen=True)
class NormalizedAttentionAttrs(Attrs):
    """``scale * q (k^T v) / (q (k^T 1) + epsilon)``. ``rectified``: negative elements of q and k are replaced by 0 first."""

    epsilon: float = 0.0
    scale: float = 1.0
    rectified: bool = False


def _infer(call: Call) -> Result:
    """Queries (B, H, L, D), keys (B, H, N, D) and values (B, H, N, E) give (B, H, L, E)."""
    q, k, v = floating(call), call.type(1), call.type(2)
    for t, name in ((q, "queries"), (k, "keys"), (v, "values")):
        require_rank(t, 4, f"NormalizedLinearAttention {name}")
    what = f"NormalizedLinearAttention of queries {q}, keys {k} and values {v}"
    agree_all((*k.dims[:2], k.dims[2]), v.dims[:3], what)
    agree_all(q.dims[:2], k.dims[:2], what)
    agree(q.dims[3], k.dims[3], what)
    if call.attrs.epsilon < 0:
        raise ShapeError(f"{what} with an epsilon of {call.attrs.epsilon:g}")
    return Result((q.with_shape((*q.dims[:3], v.dims[3])),))


def _cost(call: Call, result: Result) -> Cost:
    q, k, v = (call.type(i) for i in range(3))
    products = (elements(q) + elements(k)) * (extent(v.dims[3]) + 1)
    return Cost(2 * products + 2 * elements(result.types[0]))


def _export(a: NormalizedAttentionAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """Products, a sum and a division."""
    q, k, v = inputs[:3]
    t = e.type(q)
    if a.rectified:
        q, k = (e.node("Relu", [x])[0] for x in (q, k))
    (turned,) = e.node("Transpose", [k], perm=[0, 1, 3, 2])
    (total,) = e.node("ReduceSum", [turned, e.const(np.array([3]), "axes")], keepdims=1)
    (divisor,) = e.node("MatMul", [q, total])
    if a.epsilon:
        (divisor,) = e.node("Add", [divisor, e.const(np.asarray(a.epsilon).astype(t.dtype), "epsilon")])
    (y,) = e.node("MatMul", [q, e.node("MatMul", [turned, v])[0]])
    if a.scale != 1.0:
        (y,) = e.node("Mul", [y, e.const(np.asarray(a.scale).astype(t.dtype), "scale")])
    return e.node("Div", [y, divisor])


DEFS: tuple[OpDef, ...] = (
    OpDef("NormalizedLinearAttention", _infer, NormalizedAttentionAttrs, {}, _export, cost=_cost, tol=STEPS_TOL),
)
