"""Attention that exporters write out becomes one op: ``softmax(scale * q k^T + mask) v`` per batch and head.

The rule matches the computation in many forms:

- The scale is on q, on k, on both, or on the scores. It may differ for each head or query (Swin V2).
- Any number of masks and position biases is added (T5, Swin, DeBERTa's disentangled terms), or written as a Where. They may
  group the leading axes differently: Swin adds its window's mask in five dimensions.
- Heads are a separate axis, or merged with the batch. Keys and values may be repeated for groups of queries (Llama), or the heads
  of a group are rows of one matrix (JAX, and einsums whose keys and values have one head).
- Softcap (Gemma 2), softmax in a wider type, PyTorch's guard against rows without keys (``where(isnan(p), 0, p)``).
- Sinks (gpt-oss): a further column of the scores with a number per head, whose weights are dropped after the softmax.

Reshapes and transposes of heads stay outside as views of the operands and the result, and so do rotary embeddings and projections.
A constant mask that hides the future, or keys outside of a window, becomes ``is_causal`` and ``left_window_size`` or
``right_window_size``. A mask of zeros disappears.

If all keys of a query are masked by -inf, ONNX's Attention gives zeros. Without the guard, the decomposition gives NaN, so
an attention with such a constant mask is not fused. For a computed mask, the rule assumes that every query keeps a key.
Scaled dot-product attention: Vaswani et al. (2017); grouped queries: Ainslie et al. (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import SINKS, AttentionAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.factored_bias import factored_bias
from optdnn.passes.rules.given_attention import given_mask, repeated_heads
from optdnn.passes.rules.input_sizes import can_reshape, reshaped_to
from optdnn.passes.rules.merged_heads import heads_before_parts, merged_heads, split_items
from optdnn.passes.rules.normalized_keys import normalized_keys
from optdnn.passes.rules.ordered_features import ordered_features
from optdnn.passes.rules.ordered_heads import ordered_heads, ordered_results
from optdnn.passes.rules.shared_weights import shared_weights
from optdnn.passes.rules.summed_attention import summed_attention
from optdnn.passes.rules.turned_features import turned_features
from optdnn.passes.support.attention_mask import added, known_mask, refuse, rounded
from optdnn.passes.support.attention_scores import Scores, find_scores, has_stages, row_groups, scaled_view, unscaled
from optdnn.passes.support.attention_sinks import drops_last, find_sinks, per_head, sinks_operand
from optdnn.passes.support.facts import RESHAPES, exchange_last, operand, producer, shape_of
from optdnn.passes.support.facts import scalar as constant_scalar
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule, used_outside
from optdnn.passes.support.repeated_heads import unrepeated
from optdnn.passes.support.views import View, keeps_last_two, trace
from optdnn.types import Array, DType, Shape, is_float, normalize_axis
from optdnn.types import product as size_of


@dataclass(frozen=True)
class AttentionParts:
    """The parts of the new op. Views give q (B, H, L, D), k (B, G, S, D), v (B, G, S, E)."""

    q: View
    k: View
    v: View
    lead: Shape
    attrs: AttentionAttrs
    constant: Array | None = field(compare=False)
    """The sum of all biases that ``attrs`` does not express, if they are constant; else None."""
    known: bool
    """Whether all biases are constant."""


@rule("attention", {"MatMul"})
def written_attention(graph: Graph, op: Op) -> Match | Miss | None:
    """MatMul, Softmax, MatMul and the ops between them."""
    weights = _weights(graph, op)
    if weights is None or isinstance(weights, Miss):
        return weights
    softmax, inner = weights.softmax, weights.inner
    if has_stages(op):
        return Miss("its product with the values has fused stages")
    t = graph.type(op.value)
    sinks = find_sinks(graph, softmax, t.dtype) if weights.sunk else None
    if isinstance(sinks, Miss):
        return sinks
    found = find_scores(graph, softmax.inputs[0] if sinks is None else sinks.scores, t.dtype)
    scores = found if isinstance(found, Miss) else _masked_again(found, weights.masks)
    if isinstance(scores, Miss):
        return scores
    if scores.groups != weights.groups:
        return Miss("the rows of its two products belong to different heads")
    leads = (*weights.leads, *scores.leads)
    if scores.groups != 1:  # (batch, groups, heads of a group): a shape in between has all three
        batch, *heads = weights.leads[-1]
        leads = ((batch, size_of(heads)),)
    parts = _parts(graph, op, scores, leads, sunk=weights.sunk)
    if isinstance(parts, Miss):
        return parts
    logits = None if sinks is None else per_head(graph, sinks, parts.lead)
    if isinstance(logits, Miss):
        return logits
    guarded = sinks is not None or any(step.kind == "Where" for step in inner)
    if parts.constant is not None and not guarded and np.isneginf(parts.constant).all(axis=-1).any():
        return Miss("its mask hides every key of a query, which gives NaN; attention would give zeros")
    ops = (op, *inner, softmax, *(() if sinks is None else sinks.ops), *scores.ops, scores.product)
    miss = used_outside(graph, dict.fromkeys(o.id for o in ops), op.id)
    if miss is not None:
        return miss
    attrs = replace(parts.attrs, softmax_precision=weights.precision)

    def build(patch: Patch) -> Value:
        inputs: list[Value | None] = [view.add_to(patch) for view in (parts.q, parts.k, parts.v)]
        for kind, row in scores.rows:
            factors = added(patch, [row], parts.lead, graph.type(row.value).dtype)
            inputs[0] = patch.add(kind, [inputs[0], factors])
        if parts.constant is not None:
            inputs.append(patch.constant(rounded(parts.constant, t.dtype), f"{op.outputs[0].name}.mask"))
        elif not parts.known:
            inputs.append(added(patch, scores.biases, parts.lead, t.dtype))
        if logits is not None:
            inputs += [None] * (SINKS - len(inputs))
            inputs.append(sinks_operand(patch, logits, parts.lead[1], f"{op.outputs[0].name}.sinks"))
        return reshaped_to(patch, patch.add("Attention", inputs, attrs), t.dims)

    return Match(ops, build)


@pattern_rule(
    "values_first", node("MatMul", Var("values"), node("Transpose", node("Softmax", name="softmax"), name="transpose"))
)
def values_first(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``v p^T``, the values times the transposed weights (EfficientViT), is ``(p v^T)^T``, as :data:`written_attention` has it."""
    values, transpose, softmax = found["values"], found["transpose"], found["softmax"]
    rank = graph.type(transpose.value).rank
    if rank is None or rank < 2 or has_stages(root):
        return None
    if graph.type(values).rank != rank or transpose.attrs.perm != exchange_last(rank):
        return None
    if len(graph.uses(transpose.value)) > 1 or len(graph.uses(softmax.value)) > 1:
        return Miss(f"an inner value is used elsewhere: {softmax.outputs[0].name}")
    if isinstance(find_scores(graph, softmax.inputs[0], graph.type(root.value).dtype), Miss):
        return None
    exchange = TransposeAttrs(exchange_last(rank))

    def build(patch: Patch) -> Value:
        product = patch.add("MatMul", [softmax.value, patch.add("Transpose", [values], exchange)], root.attrs)
        return patch.add("Transpose", [product], exchange)

    return Match((root, transpose), build)


# ---------------------------------------------------------------- from the root to the softmax


@dataclass(frozen=True)
class Weights:
    """The path from the product with the values back to the softmax."""

    softmax: Op
    precision: DType | None
    """The dtype of the softmax where it is wider."""
    inner: tuple[Op, ...]
    leads: tuple[Shape, ...]
    masks: tuple[tuple[Value, bool], ...] = ()
    """Pairs (condition, value of the condition for which a weight stays); all other weights become 0."""
    sunk: bool = False
    """Whether the last weight of each row is dropped."""
    groups: DimLike = 1
    """Heads whose rows are one matrix in the product with the values: see :class:`Scores`."""


def _weights(graph: Graph, root: Op) -> Weights | Miss | None:
    """The softmax whose result ``root`` multiplies with the values, and the ops between."""
    value, dtype, precision = operand(root), graph.type(root.value).dtype, None
    inner: list[Op] = []
    leads: list[Shape] = []
    masks: list[tuple[Value, bool]] = []
    sunk = False
    groups: DimLike = 1
    for _ in range(4):
        op, shape = graph.op(value), shape_of(graph, value)
        if op.kind == "Softmax":
            if shape is None or normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
                return Miss("the softmax is not over the last axis")
            return Weights(op, precision, tuple(inner), (*leads, shape[:-2]), tuple(masks), sunk, groups)
        if op.kind == "Where":
            condition, zero, p = op.inputs
            test = producer(graph, condition, {"IsNaN"})  # PyTorch's where(isnan(p), 0, p)
            if test is not None and p is not None and test.inputs[0] == p and constant_scalar(graph, zero) == 0.0:
                inner += [op, test]
                value = p
                continue
            kept = [i for i in (1, 2) if constant_scalar(graph, op.inputs[3 - i]) == 0.0]
            if not kept or graph.type(operand(op, kept[0])).shape != shape:
                masked = any(producer(graph, v, {"Softmax"}) is not None for v in op.inputs)
                return Miss("the weights are masked again after the softmax") if masked else None
            masks.append((operand(op), kept[0] == 1))
            value = operand(op, kept[0])
        elif op.kind in RESHAPES and shape is not None and keeps_last_two(shape_of(graph, op.inputs[0]), shape):
            leads.append(shape[:-2])
            value = operand(op)
        elif (
            op.kind in RESHAPES
            and not inner
            and (found := row_groups(shape, shape_of(graph, op.inputs[0]))) is not None
        ):
            groups, value = found, operand(op)
        elif op.kind == "Slice" and not sunk and drops_last(graph, op):
            sunk, value = True, operand(op)
        elif op.kind == "Cast" and _widens(graph, operand(op), dtype):
            precision = graph.type(operand(op)).dtype
            value = operand(op)
        else:
            return None
        inner.append(op)
    return None


def _masked_again(scores: Scores, masks: Sequence[tuple[Value, bool]]) -> Scores | Miss:
    """The scores, with masks marked as certain if the same conditions mask the weights again after the softmax (Keras)."""
    own = {(bias.condition, bias.keeps) for bias in scores.biases}
    if any(mask not in own for mask in masks):
        return Miss("the weights are masked again after the softmax, by something else than before it")
    biases = tuple(replace(b, certain=(b.condition, b.keeps) in masks) for b in scores.biases)
    return replace(scores, biases=biases)


def _widens(graph: Graph, value: Value, dtype: DType) -> bool:
    own = graph.type(value).dtype
    return bool(is_float(own) and own.itemsize > dtype.itemsize)


# ---------------------------------------------------------------- operands


def _parts(graph: Graph, root: Op, scores: Scores, leads: Sequence[Shape], *, sunk: bool) -> AttentionParts | Miss:
    first, second = (1, 0) if scores.exchanged else (0, 1)
    left, a = unscaled(graph, operand(scores.product, first))
    right, b = unscaled(graph, operand(scores.product, second))
    q, k, v = (trace(graph, value) for value in (left, right, operand(root, 1)))
    if q is None or k is None or v is None:
        return Miss("the rank of an operand is unknown")
    k, more = scaled_view(graph, k if scores.exchanged else k.swap_last())
    q, extra = scaled_view(graph, q.swap_last() if scores.exchanged else q)
    scale = scores.factor * a * b * more * extra
    if not 0 < scale < float("inf"):
        return Miss(f"the scores are multiplied by {scale:g}; a scale is positive")
    lead = _lead(leads, (q, k, v))
    if scores.groups != 1:
        q = q.reshape((*lead, graph.type(scores.ops[0].value).dims[-2], q.shape[-1]))
    fitted: list[View] = []
    repeated = (k, v)
    for view, name, shared in ((q, "queries", False), (k, "keys", True), (v, "values", True)):
        if scores.groups != 1 and len(view.shape) == 3:  # one head for all queries, without an axis
            view = view.reshape((view.shape[0], 1, *view.shape[1:]))
        grouped = scores.groups != 1 and shared and (*view.shape[:1], view.shape[1] * scores.groups) == lead
        fit = view if grouped else _fit(graph, view, lead, shared)
        if fit is None or not fit.expressible:
            shown = [", ".join(map(str, shape)) for shape in (view.shape, lead)]
            return Miss(f"the {name} [{shown[0]}] do not have the leading axes of the scores, [{shown[1]}]")
        fitted.append(fit)
    q, k, v = fitted
    if k.shape[1] != v.shape[1]:  # one of them alone is seen to be repeated (Falcon rotates repeated keys)
        k, v = (_fit(graph, x, lead, False) for x in repeated)
        if k is None or v is None or not (k.expressible and v.expressible):
            return Miss("keys and values have different heads")
    t = graph.type(root.value)
    y = (*lead, q.shape[2], v.shape[3])
    if t.dims != y and not can_reshape(graph, y, t.dims):
        return Miss("no target can express how the result is regrouped")
    rows, keys = q.shape[2], k.shape[2]
    for bias, columns in (*((b, keys) for b in scores.biases), *((row, 1) for _, row in scores.rows)):
        reason = refuse(graph, bias, lead, columns, t.dtype)
        if reason is not None:
            return Miss(reason)
    mask = known_mask(graph, scores.biases, lead, rows, keys, sunk=sunk)
    causal, before, after = (mask.sight if mask is not None else None) or (False, -1, -1)
    written = _written(scale, q.shape[3])
    attrs = AttentionAttrs(written, causal, scores.softcap, left_window_size=before, right_window_size=after)
    known = mask is not None or not scores.biases
    return AttentionParts(q, k, v, lead, attrs, None if mask is None else mask.rest, known)


def _written(scale: float, size: DimLike) -> float | None:
    """The scale as attribute: None if it is the default, up to the rounding of an fp32 constant."""
    usual = size**-0.5 if isinstance(size, int) and size > 0 else 0.0
    return None if abs(scale - usual) <= 1e-12 * usual else scale


def _lead(leads: Sequence[Shape], operands: Sequence[View]) -> Shape:
    """(batch, heads): from the scores if they have both axes somewhere, else from an operand, else all in one axis."""
    for lead in leads:
        if len(lead) == 2:
            return lead
    (lead, *_) = leads
    for x in operands:
        for move in reversed(x.moves[:-1]):
            heads = len(move.shape) == 4 and len(lead) == 1 and move.shape[-2:] == x.shape[-2:]
            if heads and move.shape[0] * move.shape[1] == lead[0]:
                return move.shape[:2]
    if len(lead) < 2:
        return (*lead, *(1,) * (2 - len(lead)))
    return (size_of(lead[:-1]), lead[-1])


def _fit(graph: Graph, view: View, lead: Shape, shared: bool) -> View | None:
    """The view with leading axes (batch, heads), or None; with ``shared``, repeated heads count once."""
    own, tail = view.shape[:-2], view.shape[-2:]
    if size_of(own) == lead[0] * lead[1]:
        full = view.reshape((*lead, *tail))
        return (unrepeated(graph, full) or full) if shared else full
    if shared and len(own) == 2 and own == (lead[0], 1):
        return view
    return None


class FuseAttention(RulePass):
    """Roots are visited from the inputs on, so that the operands of an attention are fused before it."""

    name = "fuse_attention"
    rules = (
        factored_bias,
        shared_weights,
        values_first,
        written_attention,
        summed_attention,
        given_mask,
        repeated_heads,
        turned_features,
        normalized_keys,
        merged_heads,
        split_items,
        heads_before_parts,
        ordered_features,
        ordered_heads,
        ordered_results,
    )
