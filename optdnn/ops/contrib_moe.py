"""ONNX Runtime's mixtures of experts, MoE and QMoE: every expert computes all rows, and rows are weighted by the router.

This is correct on every target and keeps packed weights packed. It is not fast: unselected experts compute, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs, require_rank
from optdnn.ops.contrib_packed import code_of
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.ops.packed_layout import PackedMatMulAttrs, blocks_of, check_block, row_bytes
from optdnn.ops.restate import refuse_attributes
from optdnn.types import DTYPES, UINT8, Array, bits_of, unpacked

Expert: TypeAlias = Callable[[int, Ref], Ref]
"""The linear layer of an expert, given its number: rows -> rows."""
Layers: TypeAlias = Callable[[int], tuple[Expert | None, Expert | None, Expert | None]]
"""Layers 1, 2 and 3, given the width of the rows."""


def _constant(node: NodeSpec, e: Emit, slot: int, what: str) -> Array | None:
    """A constant operand; None if it is absent. Raises Unsupported for a computed one."""
    ref = node.input(slot)
    if ref is None:
        return None
    value = e.value(ref)
    if value is None:
        raise Unsupported(f"{what} that are not constant")
    return value


def _of_floats(node: NodeSpec, e: Emit, weights: int, bias: int) -> Expert | None:
    w, b = _constant(node, e, weights, "weights of experts"), _constant(node, e, bias, "biases of experts")
    if w is None:
        return None
    if w.ndim != 3 or (b is not None and b.shape != w.shape[:2]):
        raise ShapeError(f"MoE weights {list(w.shape)} do not fit biases {None if b is None else list(b.shape)}")

    def layer(k: int, x: Ref) -> Ref:
        y = emit(e, "MatMul", x, np.ascontiguousarray(w[k].T))
        return y if b is None else emit(e, "Add", y, b[k])

    return layer


def _of_packed(node: NodeSpec, e: Emit, slots: tuple[int, int, int, int], depth: int) -> Expert | None:
    """``slots``: weights, scales, biases and zero points. ``depth``: the width of the rows that the layer reads."""
    names = ("weights", "scales", "biases", "zero points")
    w, s, b, z = (_constant(node, e, slot, f"{n} of experts") for slot, n in zip(slots, names, strict=True))
    if w is None:
        return None
    code, block = code_of(int(node.get("expert_weight_bits", 4))), int(node.get("block_size", 0)) or depth
    check_block(block, depth, "QMoE")
    bits, blocks = bits_of(DTYPES[code]), blocks_of(depth, block)
    if w.dtype != UINT8 or w.ndim != 3 or w.shape[2] != row_bytes(code, depth, block):
        raise ShapeError(
            f"QMoE weights {w.dtype}{list(w.shape)} are not {depth} numbers of {bits} bits in blocks of {block}"
        )
    if s is None or s.size != w.shape[0] * w.shape[1] * blocks:
        raise ShapeError(f"QMoE scales {None if s is None else list(s.shape)} do not fit weights {list(w.shape)}")
    scales = s.reshape(*w.shape[:2], blocks)
    zeros = None if z is None else _zeros(z, code, scales.shape)
    if b is not None and b.shape != w.shape[:2]:
        raise ShapeError(f"QMoE biases {list(b.shape)} do not fit weights {list(w.shape)}")

    def layer(k: int, x: Ref) -> Ref:
        zero = None if zeros is None else np.ascontiguousarray(zeros[k])
        operands = [x, w[k], np.ascontiguousarray(scales[k]), zero]
        (y,) = e.op("PackedMatMul", operands, PackedMatMulAttrs(code, depth, block))
        return y if b is None else emit(e, "Add", y, b[k])

    return layer


def _zeros(z: Array, code: str, shape: tuple[int, ...]) -> Array:
    """Zero points as bytes [experts, rows, blocks]. They are packed along blocks, or along rows if a row is one block."""
    bits, (experts, rows, blocks) = bits_of(DTYPES[code]), shape
    length, lines = (rows, experts) if blocks == 1 else (blocks, experts * rows)
    stored = -(-length * bits // 8)
    if z.dtype != UINT8 or z.size != lines * stored:
        raise ShapeError(f"QMoE zero points {z.dtype}{list(z.shape)} do not fit scales {list(shape)}")
    if bits == 8:
        return z.reshape(shape)
    numbers = unpacked(z.reshape(-1), DTYPES[code], z.size * 8 // bits).view(UINT8)
    return numbers.reshape(lines, -1)[:, :length].reshape(shape)


def _activated(node: NodeSpec, e: Emit, first: Ref, third: Ref | None) -> Ref:
    """The activation of layer 1, times layer 3 if there is one."""
    kind = str(node.get("activation_type", "relu"))
    if kind == "swiglu":
        return _swiglu(node, e, first, third)
    if kind == "relu":
        y = emit(e, "Relu", first)
    elif kind == "gelu":
        y = emit(e, "Gelu", first, approximate="tanh")
    elif kind == "silu":
        y = emit(e, "Swish", first, alpha=1.0)
    elif kind == "identity":
        y = first
    else:
        raise Unsupported(f"the activation {kind}")
    return y if third is None else emit(e, "Mul", y, third)


def _swiglu(node: NodeSpec, e: Emit, first: Ref, third: Ref | None) -> Ref:
    """``G * sigmoid(alpha * G) * (L + beta)``, both bounded by the limit; G and L are layers 1 and 3, or halves of layer 1."""
    fusion, dtype = int(node.get("swiglu_fusion", 0)), e.type(first).dtype
    if fusion == 0:
        if third is None:
            raise ShapeError("a swiglu that is not fused needs layer 3")
        gate, line = first, third
    elif fusion in (1, 2):
        width = e.type(first).dims[-1]
        if not isinstance(width, int) or width % 2:
            raise ShapeError(f"{e.type(first)} does not hold the two halves of a swiglu")
        half = width // 2
        where = np.arange(2 * half).reshape((half, 2) if fusion == 1 else (2, half))
        picked = where.T if fusion == 1 else where
        gate, line = (emit(e, "Gather", first, np.ascontiguousarray(p), axis=1) for p in picked)
    else:
        raise Unsupported(f"swiglu_fusion={fusion}")
    limit, beta = node.get("swiglu_limit"), float(node.get("activation_beta", 0.0))
    if limit is not None:
        low, high = (np.asarray(sign * float(limit), dtype) for sign in (-1, 1))
        gate, line = emit(e, "Min", gate, high), emit(e, "Clip", line, low, high)
    gate = emit(e, "Swish", gate, alpha=float(node.get("activation_alpha", 1.0)))
    return emit(e, "Mul", gate, line if beta == 0.0 else emit(e, "Add", line, np.asarray(beta, dtype)))


def _routed(node: NodeSpec, e: Emit, logits: Ref, experts: int, given: Ref | None) -> Ref:
    """The weight of each expert for each row, 0 for experts that are not among the first k: [rows, experts].

    The router's logits select; the weights are their softmax, or the ``given`` weights. The attribute
    ``normalize_routing_weights`` makes the weights of a row add up to 1 (ONNX Runtime's QMoE for the CPU always does).
    """
    k, dtype = int(node.get("k", 1)), e.type(logits).dtype
    if not 1 <= k <= experts:
        raise ShapeError(f"{node.op_type} selects {k} of {experts} experts")
    weights, last, zero = given, np.array([-1]), np.zeros((), dtype)
    if weights is None:
        weights = emit(e, "Softmax", logits, axis=-1)
    elif e.type(weights).dims != e.type(logits).dims:
        raise ShapeError(f"{node.op_type} router_weights {e.type(weights)} are not of the shape of {e.type(logits)}")
    top = e.definition("TopK").attrs(axis=-1)  # type: ignore[call-arg]
    _, which = e.op("TopK", [logits, np.array([k])], top, outputs=2)
    hit = emit(e, "Equal", emit(e, "Unsqueeze", which, last), np.arange(experts))  # [rows, k, experts]
    spread = emit(e, "Where", hit, emit(e, "Unsqueeze", weights, np.array([1])), zero)
    selected = emit(e, "ReduceSum", spread, np.array([1]), keepdims=False)
    if not node.get("normalize_routing_weights", 0):
        return selected
    total = emit(e, "ReduceSum", selected, last, keepdims=True)
    return emit(e, "Where", emit(e, "Equal", total, zero), zero, emit(e, "Div", selected, total))


def _mixture(node: NodeSpec, e: Emit, layers: Layers, router_weights: Ref | None = None) -> Ref:
    refuse_attributes(node, "use_sparse_mixer")
    x, logits = needs(node, 0, 1)
    require_rank(e.type(logits), 2, f"{node.op_type} router_probs")
    experts, width = e.type(logits).dims[1], e.type(x).dims[-1]
    if not isinstance(experts, int) or not isinstance(width, int):
        raise Unsupported("an unknown number of experts, or rows of an unknown width")
    first, second, third = layers(width)
    if first is None or second is None:
        raise ShapeError(f"{node.op_type} needs the weights of layers 1 and 2")
    rows = x if len(e.type(x).dims) == 2 else emit(e, "Reshape", x, np.array([-1, width]))
    weights, dtype = _routed(node, e, logits, experts, router_weights), e.type(x).dtype
    total: Ref | None = None
    for k in range(experts):
        inner = _activated(node, e, first(k, rows), None if third is None else third(k, rows))
        own = emit(e, "Gather", weights, np.array([k]), axis=1)
        # An expert that is not selected contributes 0, whatever it computes.
        zero = np.zeros((), dtype)
        part = emit(e, "Where", emit(e, "Greater", own, zero), emit(e, "Mul", second(k, inner), own), zero)
        total = part if total is None else emit(e, "Add", total, part)
    assert total is not None
    return total if rows is x else emit(e, "Reshape", total, emit(e, "Shape", x))


def mixture_of_experts(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """MoE: experts with float weights, [experts, outputs, inputs]."""
    return (
        _mixture(
            node, e, lambda width: (_of_floats(node, e, 2, 3), _of_floats(node, e, 4, 5), _of_floats(node, e, 6, 7))
        ),
    )


def quantized_mixture(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """QMoE: experts with packed weights, by block or by channel, in the format of ONNX Runtime's CPU kernels."""
    if node.get("quant_type", "int") != "int":
        raise Unsupported(f"quant_type={node.get('quant_type')}")
    if int(node.get("weights_prepacked", -1)) == 1:
        raise Unsupported("weights_prepacked=1")

    def layers(width: int) -> tuple[Expert | None, Expert | None, Expert | None]:
        bits = int(node.get("expert_weight_bits", 4))
        inner = int(e.type(needs(node, 5)[0]).static_shape[-1]) * 8 // bits
        return (
            _of_packed(node, e, (2, 3, 4, 11), width),
            _of_packed(node, e, (5, 6, 7, 12), inner),
            _of_packed(node, e, (8, 9, 10, 13), width),
        )

    return (_mixture(node, e, layers, node.input(14)),)
