"""Linear attention: each token decays a matrix per head, corrects it, and reads it. The state replaces a cache of keys and values.

With the state S (K, V), the token's decay g (in log space), rate b, query q, key k and value v:

    linear:       S = S + k v^T                                     (Katharopoulos et al., 2020)
    gated:        S = exp(g) S + k v^T                              (Yang et al., "Gated linear attention", 2024)
    delta:        S = S + b k (v - S^T k)^T                         (Yang et al., "DeltaNet", 2024)
    gated_delta:  S = exp(g) S + b k (v - exp(g) S^T k)^T           (Yang et al., "Gated delta networks", 2025)

and the output ``scale * S^T q``. A GPU computes it from products: see :mod:`optdnn.passes.linear_attentions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import STEPS_TOL, Attrs, Call, Cost, Result, Unsupported
from optdnn.ops.checks import agree, agree_all, extent, floating, needs, require_rank, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.ops.restate import MICROSOFT, refuse_attributes
from optdnn.types import TensorType, is_float

GATED = frozenset({"gated", "gated_delta"})
DELTA = frozenset({"delta", "gated_delta"})
RULES = GATED | DELTA | {"linear"}
PAST, DECAY, BETA = 3, 4, 5
"""Slots of the optional operands."""


@dataclass(frozen=True)
class LinearAttentionAttrs(Attrs):
    """``scale`` multiplies the output. Operands: query (B, T, Hq * K), key (B, T, Hk * K), value (B, T, H * V), and past state
    (B, H, K, V), decay (B, T, H) or (B, T, H * K), rate (B, T, H) or (B, T, 1). H is ``kv_num_heads``; Hk is H or Hq."""

    q_num_heads: int
    kv_num_heads: int
    scale: float
    update_rule: str = "gated_delta"


def _width(t: TensorType, parts: int, what: str) -> DimLike:
    """The width of one of the ``parts`` of the last axis."""
    require_rank(t, 3, f"LinearAttention {what}")
    width = t.dims[2]
    if parts < 1 or (isinstance(width, int) and width % parts):
        raise ShapeError(f"LinearAttention: {parts} heads do not divide the width {width} of the {what}")
    return width // parts


def _infer(call: Call) -> Result:
    a, query, key, value = call.attrs, floating(call), call.type(1), call.type(2)
    size, deep = _width(query, a.q_num_heads, "query"), _width(value, a.kv_num_heads, "value")
    if a.update_rule not in RULES:
        raise ShapeError(f"LinearAttention has update_rule={a.update_rule!r}")
    more, less = max(a.q_num_heads, a.kv_num_heads), min(a.q_num_heads, a.kv_num_heads)
    keys = _heads_of(key, size)
    if more % less or (keys is not None and keys not in (a.q_num_heads, a.kv_num_heads)):
        raise ShapeError(
            f"LinearAttention of {a.q_num_heads} query heads, {a.kv_num_heads} value heads and a key {key}"
        )
    batch, length = query.dims[:2]
    for t in (key, value):
        batch = agree(batch, t.dims[0], "LinearAttention: the batch differs")
        length = agree(length, t.dims[1], "LinearAttention: the length differs")
    _check_gates(call, batch, length, size)
    state = TensorType(value.dtype, (batch, a.kv_num_heads, size, deep))
    if call.has(PAST):
        past = call.type(PAST)
        require_rank(past, 4, "LinearAttention past_state")
        if not is_float(past.dtype):
            raise ShapeError(f"LinearAttention past_state of {past}")
        agree_all(past.dims, state.dims, f"LinearAttention past_state {past}, {state} is due")
        state = past.with_shape(state.dims)
    return Result((value.with_shape((batch, length, deep * more)), state))


def _heads_of(t: TensorType, size: DimLike) -> int | None:
    """The number of heads of this size, if it is known."""
    require_rank(t, 3, "LinearAttention key")
    width = t.dims[2]
    return width // size if isinstance(width, int) and isinstance(size, int) and size and width % size == 0 else None


def _check_gates(call: Call, batch: DimLike, length: DimLike, size: DimLike) -> None:
    rule, heads = call.attrs.update_rule, call.attrs.kv_num_heads
    gates = (("decay", DECAY, rule in GATED, (heads, heads * size)), ("beta", BETA, rule in DELTA, (heads, 1)))
    for name, slot, needed, widths in gates:
        if call.has(slot) != needed:
            raise ShapeError(
                f"LinearAttention with update_rule={rule!r} and {'an' if call.has(slot) else 'no'} operand {name}"
            )
        if not needed:
            continue
        t = call.type(slot)
        require_rank(t, 3, f"LinearAttention {name}")
        agree(t.dims[0], batch, f"LinearAttention {name} {t}")
        agree(t.dims[1], length, f"LinearAttention {name} {t}")
        if isinstance(t.dims[2], int) and isinstance(size, int) and t.dims[2] not in widths:
            raise ShapeError(f"LinearAttention {name} {t}; its width must be one of {widths}")


def _cost(call: Call, result: Result) -> Cost:
    """Each token decays the state, reads it twice and adds to it."""
    tokens, state = result.types[0].dims[:2], result.types[1].dims[1:]
    return Cost(7 * extent(*tokens, *state))


def _import(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    refuse_attributes(node, "state_window")
    query, key, value = needs(node, 0, 1, 2)
    heads = int(required(node, "q_num_heads"))
    rule, scale = str(node.get("update_rule", "gated_delta")), float(node.get("scale", 0.0))
    size = _width(e.type(query), heads, "query")
    if not scale:
        if not isinstance(size, int) or not size:
            raise Unsupported("no scale, and heads of unknown size")
        scale = size**-0.5
    gates = [node.input(DECAY) if rule in GATED else None, node.input(BETA) if rule in DELTA else None]
    attrs = LinearAttentionAttrs(heads, int(required(node, "kv_num_heads")), scale, rule)
    return e.op("LinearAttention", [query, key, value, node.input(PAST), *gates], attrs, outputs=2)


def _export(a: LinearAttentionAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """ONNX Runtime's operator."""
    more = {
        "q_num_heads": a.q_num_heads,
        "kv_num_heads": a.kv_num_heads,
        "scale": a.scale,
        "update_rule": a.update_rule,
    }
    return e.node("LinearAttention", inputs, 2, domain=MICROSOFT.rstrip("."), **more)[:n_outputs]


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "LinearAttention",
        _infer,
        LinearAttentionAttrs,
        {MICROSOFT + "LinearAttention": _import},
        _export,
        cost=_cost,
        tol=STEPS_TOL,
    ),
)
