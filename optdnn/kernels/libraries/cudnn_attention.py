"""The tactic of attention by cuDNN's fused kernel: scores, an additive mask, causal order, grouped queries; 16-bit floats."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.attention import hopper as own
from optdnn.kernels.attention import operands
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.libraries.tactics import Called
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.ops.attention import LENGTHS, SINKS
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.cuda.libraries.calls import Attention, Operation
from optdnn.types import BF16, FP16


class CudnnAttention(Called):
    """Attention without a past, lengths, windows or softcap, and without readers of its weights."""

    name = "attention_cudnn"
    provider = "cudnn"
    most = 1

    def refuse(self, b: Builder, op: Op) -> str | None:
        a = op.attrs
        q, k, v = (b.graph.type(x) for x in op.inputs[:3] if x is not None)
        if q.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if (why := operands.several_types(b, op)) is not None:
            return why
        if a.softcap or a.left_window_size >= 0 or a.right_window_size >= 0:
            return "it does not support a softcap or windows"
        if any(op.input(i) is not None for i in (4, 5, LENGTHS, SINKS)):
            return "it does not support a past, lengths of samples or sinks"
        if any(operands.is_used(b, op, port) for port in (operands.KEYS, operands.VALUES, operands.WEIGHTS)):
            return "keys, values or weights are also outputs"
        size = q.static_shape[3]
        if v.static_shape[3] != size or size % 8 or size > 128:
            return f"heads of {size} features and values of {v.static_shape[3]} (equal ones, a multiple of 8 up to 128)"
        if any(0 in t.static_shape for t in (q, k, v)):
            return "it has nothing to do"
        if op.input(3) is not None and b.graph.type(op.inputs[3]).static_shape[-1] != k.static_shape[2]:  # type: ignore[arg-type]
            return "its mask has fewer columns than there are keys"
        return None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in the order that its reader wants."""
        operands.target_of(b, op)

    def _add(self, b: Builder, op: Op, rank: int) -> Operation:
        q, k, v = (
            b.made(operands.for_tma(b, op, b.operand(value), name))
            for value, name in zip(op.inputs[:3], ("queries", "keys", "values"), strict=True)
            if value is not None
        )
        target = operands.target_of(b, op)
        out = target if operands.fits_tma(target) else b.new(f"{op.outputs[0].name}.heads", target.dtype, target.shape)
        given = own.HopperAttention._mask(b, op, q)
        mask = None if given is None else b.made(given)  # cuDNN broadcasts it over heads and rows
        scale = op.attrs.scale
        operation = Attention(
            map_dtype(q.dtype), q.shape, k.shape, _strides(q), _strides(k), _strides(v), _strides(out),
            float(q.shape[3] ** -0.5 if scale is None else scale), bool(op.attrs.is_causal),
            () if mask is None else mask.shape, () if mask is None else _strides(mask),
        )  # fmt: skip
        named: dict[str, TensorView] = {"q": q, "k": k, "v": v, "out": out}
        if mask is not None:
            named["mask"] = mask
        attrs: dict[str, Any] = {**plain_attrs(op.definition, op.attrs), "softmax_precision": None}
        b.call(op, operation, named, "Attention", attrs, [q, k, v, mask], [out])
        if out is not target:
            copy(b, op, out, target)
        return operation


def _strides(x: TensorView) -> tuple[int, ...]:
    """Strides of ``x``, with dense strides on axes of one element: libraries do not accept stride 0."""
    dense, step = [], 1
    for n in reversed(x.shape):
        dense.append(step)
        step *= n
    return tuple(d if n == 1 else s for n, s, d in zip(x.shape, x.strides, reversed(dense), strict=True))
