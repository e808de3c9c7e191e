"""The operators that regions of a lowered program contain, and the definition of a region."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.errors import InternalError
from optdnn.ops import attention, binary, conv, gemm, norm, quantized, rnn, softmax, unary
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.base import DEFAULT_TOL, NO_TRAITS, STEPS_TOL, Attrs, Call, Cost, Infer, Result, Tol, Traits
from optdnn.ops.checks import agree, agree_all, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import not_written
from optdnn.ops.fused import plain_attrs, product_cost, typed_attrs
from optdnn.ops.normalized_attention import NormalizedAttentionAttrs
from optdnn.types import FP32, TensorType

NO_ONNX = not_written("a region of a lowered program has no ONNX form")


def region(
    kind: str,
    infer: Infer,
    attrs: type[Attrs] = Attrs,
    *,
    cost: Callable[[Call, Result], Cost] = product_cost,
    tol: Tol = DEFAULT_TOL,
    traits: Traits = NO_TRAITS,
    arity: int | None = None,
) -> OpDef:
    """The definition of a kind that exists only in launches."""
    return OpDef(kind, infer, attrs, {}, NO_ONNX, cost=cost, tol=tol, traits=traits, arity=arity)


def _infer_attention(call: Call) -> Result:
    """Attention with masks that repeat along the batch; the batch size is a multiple of the number of masks."""
    q, mask = call.type(0), call.type(3)
    require_rank(mask, 4, "PeriodicAttention mask")
    agree(q.dims[0] % mask.dims[0], 0, f"PeriodicAttention masks {mask} do not repeat along the batch of {q}")
    tiled = mask.with_shape((q.dims[0], *mask.dims[1:]))
    return attention.infer_attention(replace(call, types=(*call.types[:3], tiled, *call.types[4:])))


PERIODIC_ATTENTION = region("PeriodicAttention", _infer_attention, AttentionAttrs)


@dataclass(frozen=True)
class CachedAttentionAttrs(Attrs):
    """See the fields of :class:`optdnn.ops.attention.AttentionAttrs` and :class:`optdnn.ops.attention.RotaryAttrs`."""

    scale: float | None = None
    softcap: float = 0.0
    left_window_size: int = -1
    interleaved: bool = False
    rotary_embedding_dim: int = 0


def _infer_cached_attention(call: Call) -> Result:
    """Attention of q (B, H, 1, D) over a cache (B, G, C, D); k and v (B, G, 1, D) are one new row of the cache.

    Operand 9: the sinks."""
    q, k, v, keys, values = (call.type(i) for i in (0, 1, 2, 7, 8))
    for new, cache, name in ((k, keys, "keys"), (v, values, "values")):
        require_rank(cache, 4, f"CachedAttention {name}")
        for axis in (0, 1, 3):
            agree(new.dims[axis], cache.dims[axis], f"CachedAttention {name} {cache} do not take {new}")
    types = (q, keys, values, *[None] * 4, *call.types[9:])
    (y,) = attention.infer_attention(replace(call, types=types, attrs=AttentionAttrs(), n_outputs=1)).types
    return Result((y, keys, values))


CACHED_ATTENTION = region("CachedAttention", _infer_cached_attention, CachedAttentionAttrs)


@dataclass(frozen=True)
class ChannelAttentionAttrs(Attrs):
    """``least``: the lower bounds of the norms that divide queries and keys; none: they are not normalized."""

    least: tuple[float, ...] = ()


def _infer_channel_attention(call: Call) -> Result:
    """Attention of q, k (B, H, C, N) and v, with a factor for each head's scores."""
    q, factors = call.type(0), call.type(3)
    agree(factors.dims[-1], q.dims[1], f"ChannelAttention factors {factors} are not of the heads of {q}")
    attention_call = replace(call, types=call.types[:3], attrs=AttentionAttrs(scale=1.0))
    return attention.infer_attention(attention_call)


CHANNEL_ATTENTION = region("ChannelAttention", _infer_channel_attention, ChannelAttentionAttrs)


@dataclass(frozen=True)
class ChannelSumsAttrs(Attrs):
    """``span``: the tokens of a part; the last part may have fewer."""

    span: int


def _infer_channel_sums(call: Call) -> Result:
    """Parts (B, H, S, 2 + C, C) of q and k (B, H, C, N): in each the squares of q's channels, of k's channels, and q k^T."""
    a: ChannelSumsAttrs = call.attrs
    q, k = call.type(0), call.type(1)
    require_rank(q, 4, "ChannelSums queries")
    agree_all(q.dims, k.dims, f"ChannelSums keys {k} are not of the queries {q}")
    batch, heads, channels, tokens = q.dims
    return Result((TensorType(FP32, (batch, heads, -(-tokens // a.span), channels + 2, channels)),))


def _infer_channel_results(call: Call) -> Result:
    """Attention between channels, from these parts, on values (B, H, C, N), with a factor for each head's scores."""
    sums, v, factors = call.type(0), call.type(1), call.type(2)
    require_rank(sums, 5, "ChannelResults parts")
    what = f"ChannelResults parts {sums} are not of the values {v} and factors {factors}"
    agree_all((*sums.dims[:2], sums.dims[4], sums.dims[1]), (*v.dims[:3], factors.dims[-1]), what)
    return Result((v,))


CHANNEL_SUMS = region("ChannelSums", _infer_channel_sums, ChannelSumsAttrs, tol=STEPS_TOL)
CHANNEL_RESULTS = region("ChannelResults", _infer_channel_results, ChannelAttentionAttrs)


@dataclass(frozen=True)
class LinearSumsAttrs(Attrs):
    """``span``: the tokens of a part; the last part may have fewer. ``rectified``: negative elements of keys are replaced by 0."""

    span: int
    rectified: bool = False


def _infer_linear_sums(call: Call) -> Result:
    """Parts (B, H, S, 2 + C, C) of k and v (B, H, N, C): in each the sums of v's features, of k's features, and v^T k."""
    k, v = call.type(0), call.type(1)
    require_rank(k, 4, "LinearSums keys")
    agree_all(k.dims, v.dims, f"LinearSums values {v} are not of the keys {k}")
    batch, heads, tokens, features = k.dims
    return Result((TensorType(FP32, (batch, heads, -(-tokens // call.attrs.span), features + 2, features)),))


def _infer_linear_results(call: Call) -> Result:
    """Normalized linear attention of queries (B, H, N, C) from these parts."""
    sums, q = call.type(0), call.type(1)
    require_rank(sums, 5, "LinearResults parts")
    agree_all((*sums.dims[:2], sums.dims[4]), (*q.dims[:2], q.dims[3]), f"LinearResults parts {sums} are not of {q}")
    return Result((q,))


LINEAR_SUMS = region("LinearSums", _infer_linear_sums, LinearSumsAttrs, tol=STEPS_TOL)
LINEAR_RESULTS = region("LinearResults", _infer_linear_results, NormalizedAttentionAttrs, tol=STEPS_TOL)


def _infer_factored_attention(call: Call) -> Result:
    """Attention of q, k and v with a bias of two factors, (B, H, query rows, query columns, key rows or columns)."""
    q, k, rows, columns = call.type(0), call.type(1), call.type(3), call.type(4)
    for factor in (rows, columns):
        require_rank(factor, 5, "FactoredAttention factor")
        queries = (*factor.dims[:2], factor.dims[2] * factor.dims[3])
        agree_all(queries, q.dims[:3], f"FactoredAttention factor {factor} is not of the queries {q}")
    agree(
        rows.dims[4] * columns.dims[4],
        k.dims[2],
        f"FactoredAttention factors {rows}, {columns} are not of the keys {k}",
    )
    return attention.infer_attention(replace(call, types=call.types[:3]))


FACTORED_ATTENTION = region("FactoredAttention", _infer_factored_attention, AttentionAttrs)


@dataclass(frozen=True)
class RoundedAttentionAttrs(Attrs):
    """``scale``: the factor of the scores. ``scores``, ``weights``: step, least and largest integer of the grids that scores and
    weights are rounded to, before and after the softmax; (): scores are not rounded, and a mask may be added to them."""

    scale: float
    scores: tuple[float, ...]
    weights: tuple[float, ...]


ROUNDED_ATTENTION = region(
    "RoundedAttention",
    lambda call: attention.infer_attention(replace(call, attrs=AttentionAttrs(scale=call.attrs.scale))),
    RoundedAttentionAttrs,
)
_FAMILIES = (attention, binary, conv, gemm, norm, quantized, rnn, softmax, unary)
HELD: Mapping[str, OpDef] = {
    d.kind: d for d in (*(d for f in _FAMILIES for d in f.DEFS), PERIODIC_ATTENTION, ROUNDED_ATTENTION)
}
"""The kinds that a region may contain."""


def held(kind: str) -> OpDef:
    """The definition of an operator in a region."""
    try:
        return HELD[kind]
    except KeyError:
        raise InternalError(f"a region holds the unknown kind {kind!r}") from None


def infer_as(call: Call, kind: str, attrs: Attrs, types: Sequence[TensorType | None]) -> Result:
    """The inference result of an operator inside of ``call``'s region, for operands of these types."""
    return held(kind).infer(Call(kind, attrs, tuple(types), (None,) * len(types), 1, call.fresh))


def plain_held(kind: str, attrs: Attrs) -> dict[str, Any]:
    """The attributes of an operator in a region as a step holds them."""
    return plain_attrs(held(kind), attrs)


def held_attrs(kind: str, plain: Mapping[str, Any]) -> Attrs:
    """The inverse of :func:`plain_held`."""
    return typed_attrs(held(kind), plain)
