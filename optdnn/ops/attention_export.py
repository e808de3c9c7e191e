"""Attention, rotary embedding and the write into a key-value cache, written as older ONNX operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from optdnn.dim import Dim, DimLike
from optdnn.ops.base import Unsupported
from optdnn.ops.exchange import Export
from optdnn.types import INT64, DType

if TYPE_CHECKING:
    from optdnn.ops.attention import AttentionAttrs, RotaryAttrs, TensorScatterAttrs


class _Writer:
    """Short forms for the nodes of decompositions."""

    def __init__(self, e: Export):
        self.e = e

    def __call__(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        return self.e.node(op_type, inputs, **attrs)[0]

    def const(self, value: Any, dtype: Any = INT64) -> str:
        return self.e.const(np.asarray(value, dtype), "c")

    def axis_size(self, x: str, axis: int, dim: DimLike) -> str:
        """A size as a 1-D tensor."""
        if isinstance(dim, int):
            return self.const([dim])
        return self("Gather", self("Shape", x), self.const([axis]), axis=0)

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self("Unsqueeze", x, self.const(list(axes)))

    def range(self, stop: str) -> str:
        """0 … stop - 1 for a 1-D size."""
        value = self.e.value(stop)
        if value is not None:
            return self.const(np.arange(int(value[0])))
        scalar = self("Reshape", stop, self.e.const(np.zeros(0, np.int64), "c"))
        return self("Range", self.const(0), scalar, self.const(1))


def export_attention(a: AttentionAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """Attention as products, softmax and masks."""
    q, k, v, mask, past_key, past_value, lengths, sinks = [*inputs, *[""] * (8 - len(inputs))]
    w, dtype = _Writer(e), e.type(q).dtype
    _, heads, rows, size = e.type(q).dims
    shared, cols = e.type(k).dims[1:3]
    if not isinstance(size, int) or not isinstance(heads, int) or not isinstance(shared, int):
        raise Unsupported("Attention with symbolic heads or head size")
    offset = w.const([0])
    n_rows, n_cols = w.axis_size(q, 2, rows), w.axis_size(k, 2, cols)
    if past_key:
        offset = w.axis_size(past_key, 2, e.type(past_key).dims[2])
        n_cols = w("Add", offset, n_cols)
        k, v = w("Concat", past_key, k, axis=2), w("Concat", past_value, v, axis=2)
    elif lengths:
        offset = w("Sub", lengths, n_rows)
    bias = _export_bias(a, mask, lengths, offset, n_rows, n_cols, w, e, dtype)

    def regrouped(x: str, count: int) -> str:
        """A tensor of queries with ``count`` heads: those that share keys are rows of one product."""
        length = heads // count * rows if isinstance(rows, int) else -1
        return x if heads == shared else w("Reshape", x, w.const([0, count, length, 0]))

    root = w.const(np.sqrt(size**-0.5 if a.scale is None else a.scale), dtype)
    product = w("MatMul", w("Mul", regrouped(q, shared), root), w("Transpose", w("Mul", k, root), perm=(0, 1, 3, 2)))
    shown = scores = regrouped(product, heads)
    if a.softcap > 0:
        cap = w.const(a.softcap, dtype)
        scores = w("Mul", w("Tanh", w("Div", scores, cap)), cap)
    shown = scores if a.qk_matmul_output_mode == 1 else shown
    scores = w("Add", scores, bias) if bias else scores
    shown = scores if a.qk_matmul_output_mode == 2 else shown
    logits = _export_sinks(sinks, scores, w) if sinks else scores
    wide = a.softmax_precision is not None and a.softmax_precision != dtype
    p = w("Softmax", w("Cast", logits, to=a.softmax_precision) if wide else logits, axis=-1)
    p = w("Slice", p, *(w.const([at]) for at in (0, -1, -1))) if sinks else p
    p = w("Cast", p, to=dtype) if wide else p
    if bias:  # a query without keys
        top = w("ReduceMax", bias, w.const([-1]), keepdims=1)
        dead = w("Less", top, w.const(ml_dtypes.finfo(dtype).min, dtype))  # type: ignore[no-untyped-call]
        p = w("Where", dead, w.const(0, dtype), p)
    shown = p if a.qk_matmul_output_mode == 3 else shown
    y = regrouped(w("MatMul", regrouped(p, shared), v), heads)
    return [y, k, v, shown][:n_outputs]


def _export_sinks(sinks: str, scores: str, w: _Writer) -> str:
    """The scores (B, H, L, S) with the sinks (H) as a further column."""
    before = w("Gather", w("Shape", scores), w.const([0, 1, 2]), axis=0)
    column = w("Expand", w.unsqueeze(sinks, 0, 2, 3), w("Concat", before, w.const([1]), axis=0))
    return w("Concat", scores, column, axis=-1)


def _export_bias(
    a: AttentionAttrs,
    mask: str,
    lengths: str,
    offset: str,
    n_rows: str,
    n_cols: str,
    w: _Writer,
    e: Export,
    dtype: DType,
) -> str:
    """The addend of the scores: -inf for a key that is out of sight, and the mask. "" for none."""
    zero, low = w.const(0, dtype), w.const(-np.inf, dtype)
    sight = []
    if a.is_causal or a.left_window_size >= 0 or a.right_window_size >= 0:
        at = w("Add", w("Reshape", offset, w.const([-1, 1, 1, 1])), w.unsqueeze(w.range(n_rows), 1))
        behind = w("Sub", at, w.range(n_cols))
        if a.is_causal:
            sight.append(w("Less", w.const(-1), behind))
        if a.left_window_size >= 0:
            sight.append(w("Less", behind, w.const(a.left_window_size + 1)))
        if a.right_window_size >= 0:
            sight.append(w("Less", w.const(-a.right_window_size - 1), behind))
    if lengths:
        sight.append(w("Less", w.range(n_cols), w("Reshape", lengths, w.const([-1, 1, 1, 1]))))
    bias = ""
    for allowed in sight:
        part = w("Where", allowed, zero, low)
        bias = w("Add", bias, part) if bias else part
    if not mask:
        return bias
    t = e.type(mask)
    added = w("Where", mask, zero, low) if t.dtype.kind == "b" else mask
    present = t.dims[-1]
    known = e.value(n_cols)
    if known is None or isinstance(present, Dim) or int(known[0]) != present:
        missing = w("Sub", n_cols, w.axis_size(mask, len(t.dims) - 1, present))
        before = w.const([0] * (2 * len(t.dims) - 1))
        added = w("Pad", added, w("Concat", before, missing, axis=0), low)
    return w("Add", bias, added) if bias else added


def export_rotary(a: RotaryAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """RotaryEmbedding as slices and products."""
    x, cos, sin = inputs
    w, head = _Writer(e), e.type(x).dims[3]
    size = a.rotary_embedding_dim or head
    if not isinstance(size, int) or not isinstance(head, int):
        raise Unsupported("RotaryEmbedding of a symbolic head size")

    def part(start: int, stop: int, step: int = 1, of: str = x, axis: int = 3) -> str:
        return w("Slice", of, *(w.const([v]) for v in (start, stop, axis, step)))

    turned: list[str] = []
    parts = 1 if a.interleaved else a.parts
    for start in range(0, size, size // parts):
        stop, middle = start + size // parts, start + size // parts // 2
        halves = ((0, size, 2), (1, size, 2)) if a.interleaved else ((start, middle, 1), (middle, stop, 1))
        first, second = (part(*half) for half in halves)
        own = cos, sin
        if a.own_angles:
            angles = [[part(*half, of=v, axis=2) for half in halves] for v in own]
        else:
            angles = [[v if parts == 1 else part(start // 2, stop // 2, of=v, axis=2)] * 2 for v in own]
        (c, d), (s, t) = ([w.unsqueeze(v, 1) for v in both] for both in angles)
        real = w("Sub", w("Mul", c, first), w("Mul", s, second))
        imag = w("Add", w("Mul", t, first), w("Mul", d, second))
        if a.interleaved:
            pairs = w("Concat", w.unsqueeze(real, 4), w.unsqueeze(imag, 4), axis=4)
            turned = [w("Reshape", pairs, w.const([0, 0, 0, size]))]
        else:
            turned += [real, imag]
    rest = [part(size, head)] if size < head else []
    return [w("Concat", *turned, *rest, axis=3)]


def export_tensor_scatter(a: TensorScatterAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """TensorScatter as a ScatterElements at the same positions."""
    cache, update = inputs[:2]
    w, t = _Writer(e), e.type(update)
    rank = len(t.dims)
    axis = a.axis % rank
    at = w.unsqueeze(w.range(w.axis_size(update, axis, t.dims[axis])), 0)
    if len(inputs) > 2 and inputs[2]:
        start = inputs[2] if e.type(inputs[2]).dtype == INT64 else w("Cast", inputs[2], to=INT64)
        at = w("Add", w.unsqueeze(start, 1), at)
    if a.mode == "circular":
        at = w("Mod", at, w.axis_size(cache, axis, e.type(cache).dims[axis]))
    at = w.unsqueeze(at, *(i for i in range(1, rank) if i != axis))
    return [w("ScatterElements", cache, w("Expand", at, w("Shape", update)), update, axis=axis)]
