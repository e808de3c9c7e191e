"""Attention that exporters write out becomes one op: ``softmax(scale * q k^T + mask) v`` per batch and head.

What is found is what is computed, whatever stands around it: the scale on q, on k, on both or on the scores, also one for each
head or query (Swin V2); masks and position biases (T5, Swin, DeBERTa's disentangled terms) added in any number, at any grouping
of the leading axes (Swin adds its window's mask in five dimensions), or written as a Where; heads as an axis of their own or
merged with the batch; keys and values repeated for groups of queries (Llama); softcap (Gemma 2); softmax in a wider type;
PyTorch's guard against rows without keys (``where(isnan(p), 0, p)``). Reshapes and transposes of heads stay outside as views of
the operands and the result. A constant mask that hides what lies ahead becomes ``is_causal``, one of zeros goes. Rotary
embeddings and projections are left to the operands.

A query whose every key is masked by -inf gives zeros, as ONNX Attention has it; without the guard, its decomposition gives NaN.
Where a constant mask does that, the decomposition stays; a mask that is computed is taken to leave every query a key.
Scaled dot-product attention: Vaswani et al. (2017); grouped queries: Ainslie et al. (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.rules.input_sizes import can_reshape, reshaped_to
from optdnn.passes.rules.shape import RESHAPES
from optdnn.passes.support.attention_mask import Bias, added, constant_sum, is_causal, refuse, rounded
from optdnn.passes.support.attention_scores import DEPTH, Scores, find_scores, one_number, staged
from optdnn.passes.support.facts import scalar as constant_scalar
from optdnn.passes.support.views import View, keeps_last_two, trace
from optdnn.types import Array, DType, Shape, is_float, normalize_axis


@dataclass(frozen=True)
class Operands:
    """What the new op is made of. Views give q (B, H, L, D), k (B, G, S, D), v (B, G, S, E)."""

    root: Op
    q: View
    k: View
    v: View
    lead: Shape
    attrs: AttentionAttrs
    biases: tuple[Bias, ...]
    constant: Array | None = field(compare=False)
    """The sum of all biases where they are constant and say more than ``attrs`` does."""
    known: bool
    """Whether all biases are constant."""
    keys: DimLike
    rows: tuple[tuple[str, Bias], ...] = ()
    """Factors that go onto the queries."""


class Attention(Rule):
    """MatMul, Softmax, MatMul and what stands between them."""

    name = "attention"
    kinds = frozenset({"MatMul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        weights = _weights(graph, op)
        if weights is None or isinstance(weights, Miss):
            return weights
        softmax, precision, inner, leads = weights
        if staged(op):
            return Miss("its product with the values has fused stages")
        scores = find_scores(graph, softmax.inputs[0], graph.type(op.value).dtype)
        if isinstance(scores, Miss):
            return scores
        found = _operands(graph, op, scores, (*leads, *scores.leads))
        if isinstance(found, Miss):
            return found
        guarded = any(step.kind == "Where" for step in inner)
        if found.constant is not None and not guarded and np.isneginf(found.constant).all(axis=-1).any():
            return Miss("its mask hides every key of a query, which gives NaN; attention would give zeros")
        ops = (op, *inner, softmax, *scores.ops, scores.product)
        open_end = _used_elsewhere(graph, ops)
        if open_end is not None:
            return open_end
        attrs = replace(found.attrs, softmax_precision=precision)
        return Match(ops, replace(found, attrs=attrs))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        found: Operands = match.data
        patch = Patch(graph, match.ops)
        inputs: list[Value | None] = [view.add_to(patch) for view in (found.q, found.k, found.v)]
        for kind, row in found.rows:
            inputs[0] = patch.add(kind, [inputs[0], added(patch, [row], found.lead, graph.type(row.value).dtype)])
        if found.constant is not None:
            dtype = graph.type(found.root.value).dtype
            inputs.append(patch.constant(rounded(found.constant, dtype), f"{found.root.outputs[0].name}.mask"))
        elif not found.known:
            inputs.append(added(patch, found.biases, found.lead, graph.type(found.root.value).dtype))
        y = patch.add("Attention", inputs, found.attrs)
        wanted = graph.type(found.root.value).dims
        patch.replace(found.root.value, reshaped_to(patch, y, wanted))
        return patch


class ValuesFirst(Rule):
    """``v p^T``, the weights transposed behind the values (EfficientViT), is ``(p v^T)^T``: what :class:`Attention` looks for."""

    name = "values_first"
    kinds = frozenset({"MatMul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        values, turned = op.inputs[:2]
        assert values is not None
        assert turned is not None
        transpose = graph.op(turned)
        weights = transpose.input(0)
        rank = graph.type(turned).rank
        if transpose.kind != "Transpose" or weights is None or rank is None or rank < 2 or staged(op):
            return None
        softmax = graph.op(weights)
        if graph.type(values).rank != rank or transpose.attrs.perm != _exchange(rank) or softmax.kind != "Softmax":
            return None
        if len(graph.uses(turned)) > 1 or len(graph.uses(weights)) > 1:
            return Miss(f"an inner value is used elsewhere: {softmax.outputs[0].name}")
        if isinstance(find_scores(graph, softmax.inputs[0], graph.type(op.value).dtype), Miss):
            return None
        return Match((transpose, op), (values, weights, rank))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        values, weights, rank = match.data
        patch, exchange = Patch(graph, match.ops), TransposeAttrs(_exchange(rank))
        product = patch.add("MatMul", [weights, patch.add("Transpose", [values], exchange)], match.ops[-1].attrs)
        patch.replace(match.ops[-1].value, patch.add("Transpose", [product], exchange))
        return patch


def _exchange(rank: int) -> tuple[int, ...]:
    """The permutation that exchanges the last two axes."""
    return (*range(rank - 2), rank - 1, rank - 2)


# ---------------------------------------------------------------- from the root to the softmax


def _weights(graph: Graph, root: Op) -> tuple[Op, DType | None, tuple[Op, ...], tuple[Shape, ...]] | Miss | None:
    """The softmax whose result ``root`` multiplies with the values: (softmax, wider dtype or None, ops between, leading axes)."""
    value = root.inputs[0]
    inner: list[Op] = []
    t = graph.type(root.value)
    assert value is not None
    leads: list[Shape] = []
    precision = None
    for _ in range(4):
        op = graph.op(value)
        shape = graph.type(value).shape
        if op.kind == "Softmax":
            if shape is None or normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
                return Miss("the softmax is not over the last axis")
            return op, precision, tuple(inner), (*leads, shape[:-2])
        if op.kind in RESHAPES:
            source = op.inputs[0]
            assert source is not None
            if not keeps_last_two(graph.type(source).shape, shape):
                return None
            leads.append(shape[:-2] if shape is not None else ())
            inner.append(op)
            value = source
        elif op.kind == "Cast" and op.inputs[0] is not None and _widens(graph, op.inputs[0], t.dtype):
            precision = graph.type(op.inputs[0]).dtype
            inner.append(op)
            value = op.inputs[0]
        elif op.kind == "Where":
            guarded = _guarded(graph, op)
            if guarded is None:
                if _is_softmax(graph, op):
                    return Miss("the weights are masked again behind the softmax")
                return None
            value, test = guarded
            inner += [op, test]
        else:
            return None
    return None


def _widens(graph: Graph, value: Value, dtype: DType) -> bool:
    own = graph.type(value).dtype
    return bool(is_float(own) and own.itemsize > dtype.itemsize)


def _guarded(graph: Graph, op: Op) -> tuple[Value, Op] | None:
    """PyTorch's ``where(isnan(p), 0, p)``: p and the test."""
    condition, zero, p = op.inputs
    assert condition is not None
    assert p is not None
    test = graph.op(condition)
    if test.kind == "IsNaN" and test.inputs[0] == p and constant_scalar(graph, zero) == 0.0:
        return p, test
    return None


def _is_softmax(graph: Graph, op: Op) -> bool:
    return any(v is not None and graph.op(v).kind == "Softmax" for v in op.inputs)


# ---------------------------------------------------------------- operands


def _used_elsewhere(graph: Graph, ops: Sequence[Op]) -> Miss | None:
    """A Miss where anything but the matched ops sees a value between the product of keys and the result."""
    own = {op.id for op in ops}
    for op in ops[1:]:
        for user in graph.users(op.value):
            if user.kind == "Output":
                return Miss(f"an inner value is an output of the network: {op.outputs[0].name}")
            if user.id not in own:
                return Miss(f"an inner value is used elsewhere: {op.outputs[0].name}, by {user.name}")
    return None


def _operands(graph: Graph, root: Op, scores: Scores, leads: Sequence[Shape]) -> Operands | Miss:
    (left, right), values = scores.product.inputs[:2], root.inputs[1]
    assert left is not None
    assert right is not None
    assert values is not None
    left, a = _unscaled(graph, left)
    right, b = _unscaled(graph, right)
    scale = scores.factor * a * b
    if not 0 < scale < float("inf"):
        return Miss(f"the scores are multiplied by {scale:g}; a scale is positive")
    views = [trace(graph, v) for v in (left, right, values)]
    if any(v is None for v in views):
        return Miss("the rank of an operand is unknown")
    q, k, v = (view for view in views if view is not None)
    k = k.swap_last()
    k, more = _scaled_view(graph, k)
    q, extra = _scaled_view(graph, q)
    scale *= more * extra
    if not 0 < scale < float("inf"):
        return Miss(f"the scores are multiplied by {scale:g}; a scale is positive")
    lead = _lead(leads, q)
    fitted: list[View] = []
    for view, name, shared in ((q, "queries", False), (k, "keys", True), (v, "values", True)):
        fit = _fit(graph, view, lead, shared)
        if fit is None or not fit.expressible:
            shown = ", ".join(map(str, view.shape))
            return Miss(
                f"the {name} [{shown}] do not have the leading axes of the scores, [{', '.join(map(str, lead))}]"
            )
        fitted.append(fit)
    q, k, v = fitted
    if k.shape[1] != v.shape[1]:  # only one of them is shared by groups of heads
        k, v = (_fit(graph, x, lead, False) for x in (k, v))  # type: ignore[assignment]
        if k is None or v is None:
            return Miss("keys and values have different heads")
    y = (*lead, q.shape[2], v.shape[3])
    wanted = graph.type(root.value).dims
    if wanted != y and not can_reshape(graph, y, wanted):
        return Miss("no target can express how the result is regrouped")
    rows, keys = q.shape[2], k.shape[2]
    for bias, columns in (*((b, keys) for b in scores.biases), *((row, 1) for _, row in scores.rows)):
        reason = refuse(graph, bias, lead, columns, graph.type(root.value).dtype)
        if reason is not None:
            return Miss(reason)
    attrs = AttentionAttrs(scale=_written(scale, q.shape[3]), softcap=scores.softcap)
    constant = constant_sum(graph, scores.biases, lead)
    known = constant is not None or not scores.biases
    if constant is not None:
        if not constant.any():
            constant = None
        elif is_causal(constant, rows, keys):
            attrs, constant = replace(attrs, is_causal=True), None
    return Operands(root, q, k, v, lead, attrs, scores.biases, constant, known, keys, scores.rows)


def _written(scale: float, size: DimLike) -> float | None:
    """None where the scale is the usual one, up to the rounding of an fp32 constant."""
    usual = size**-0.5 if isinstance(size, int) and size > 0 else 0.0
    return None if abs(scale - usual) <= 1e-12 * usual else scale


def _unscaled(graph: Graph, value: Value) -> tuple[Value, float]:
    """The value without multiplications by constants of one element, and what they amount to."""
    factor = 1.0
    for _ in range(DEPTH):
        op = graph.op(value)
        if op.kind not in ("Mul", "Div"):
            break
        for i in (0, 1) if op.kind == "Mul" else (0,):
            number, inner = one_number(graph, op.inputs[1 - i]), op.inputs[i]
            if number is not None and inner is not None and graph.type(inner).shape == graph.type(value).shape:
                factor, value = factor * (number if op.kind == "Mul" else 1.0 / number), inner
                break
        else:
            break
    return value, factor


def _scaled_view(graph: Graph, view: View) -> tuple[View, float]:
    """A view past scalings that stand behind its moves."""
    factor = 1.0
    for _ in range(DEPTH):
        base, number = _unscaled(graph, view.base)
        if base == view.base:
            break
        factor *= number
        inner = trace(graph, base)
        if inner is None:
            break
        for move in view.moves:
            inner = inner.reshape(move.shape) if move.perm is None else inner.transpose(move.perm)
        view = inner
    return view, factor


def _lead(leads: Sequence[Shape], q: View) -> Shape:
    """(batch, heads): as the scores have them somewhere, else as the queries had them, else all in one."""
    for lead in leads:
        if len(lead) == 2:
            return lead
    (lead, *_) = leads
    for move in reversed(q.moves[:-1]):
        heads = len(move.shape) == 4 and len(lead) == 1 and move.shape[-2:] == q.shape[-2:]
        if heads and move.shape[0] * move.shape[1] == lead[0]:
            return move.shape[:2]
    if len(lead) < 2:
        return (*lead, *(1,) * (2 - len(lead))) if lead else (1, 1)
    batch: DimLike = 1
    for d in lead[:-1]:
        batch = batch * d
    return (batch, lead[-1])


def _fit(graph: Graph, view: View, lead: Shape, shared: bool) -> View | None:
    """The view with (batch, heads) in front; with ``shared``, heads that are repeated copies count once."""
    tail = view.shape[-2:]
    own = view.shape[:-2]
    size: DimLike = 1
    for d in own:
        size = size * d
    if size == lead[0] * lead[1]:
        full = view.reshape((*lead, *tail))
        return (_unrepeated(graph, full) or full) if shared else full
    if shared and len(own) == 2 and own == (lead[0], 1):
        return view
    return None


def _unrepeated(graph: Graph, view: View) -> View | None:
    """(B, H, S, D) that repeats (B, G, S, D), each head H / G times in a row: the latter."""
    op = graph.op(view.base)
    source = op.inputs[0] if op.inputs else None
    if source is None or [m.perm for m in view.moves] != [None]:
        return None
    before, wide = graph.type(source).shape, view.before
    batch, _, *tail = view.shape
    if before is None or len(wide) != 5 or len(before) != 5 or wide[0] != batch or list(wide[3:]) != tail:
        return None
    if before[2] != 1 or before[:2] != wide[:2] or before[3:] != wide[3:]:
        return None
    copies = op.kind == "Concat" and isinstance(op.attrs, ConcatAttrs) and len(set(op.inputs)) == 1
    if op.kind != "Expand" and not (copies and normalize_axis(op.attrs.axis, 5) == 2):
        return None
    inner = trace(graph, source)
    return None if inner is None else inner.reshape((*before[:2], *before[3:]))


class FuseAttention(RulePass):
    """Roots are visited from the inputs on, so that an attention's operands have been fused before it."""

    name = "fuse_attention"
    rules = (ValuesFirst(), Attention())
