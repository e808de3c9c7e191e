"""ONNX Runtime's quantized operators (QLinear… and others) as ONNX's own between dequantization and quantization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.checks import emit, needs, required
from optdnn.ops.contrib_images import channels_first, channels_last
from optdnn.ops.contrib_moe import mixture_of_experts, quantized_mixture
from optdnn.ops.contrib_packed import gather_block_quantized, matmul_bnb4, matmul_n_bits
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.restate import MICROSOFT, as_standard, standard
from optdnn.types import FP32


def _dequantized(e: Emit, x: Ref, scale: Ref, zero: Ref | None) -> Ref:
    return emit(e, "DequantizeLinear", x, scale, zero, axis=0)


def _quantized(e: Emit, y: Ref, scale: Ref, zero: Ref | None, like: Ref) -> Ref:
    dtype = e.type(like).dtype if zero is None else e.type(zero).dtype
    return emit(e, "QuantizeLinear", y, scale, zero, axis=0, output_dtype=dtype)


def _qlinear(count: int, write: Callable[[NodeSpec, Emit, list[Ref]], Ref]) -> FromOnnx:
    """Operands are triples (value, scale, zero point); the operator runs on floats between dequantization and quantization."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        floats = []
        for i in range(count):
            x, scale = needs(node, 3 * i, 3 * i + 1)
            floats.append(_dequantized(e, x, scale, node.input(3 * i + 2)))
        (scale,) = needs(node, 3 * count)
        y = write(node, e, floats)
        return (_quantized(e, y, scale, node.input(3 * count + 1), node.inputs[0]),)

    return from_onnx


def _binary(kind: str) -> FromOnnx:
    return _qlinear(2, lambda node, e, xs: emit(e, kind, *xs))


def _laid(node: NodeSpec, e: Emit, xs: list[Ref], write: Callable[[Ref], Ref]) -> Ref:
    """``write`` applied to one operand; channels are on the last axis if the node says so."""
    (x,) = xs
    return channels_last(e, write(channels_first(e, x))) if node.get("channels_last", 0) else write(x)


def _pooled(node: NodeSpec, e: Emit, xs: list[Ref]) -> Ref:
    return _laid(node, e, xs, lambda x: emit(e, "GlobalAveragePool", x))


def _average_pooled(node: NodeSpec, e: Emit, xs: list[Ref]) -> Ref:
    own = {k: v for k, v in node.attrs.items() if k != "channels_last"}
    return _laid(node, e, xs, lambda x: as_standard("AveragePool", node, e, inputs=(x,), attrs=own)[0])


def _softmaxed(node: NodeSpec, e: Emit, xs: list[Ref]) -> Ref:
    own = {k: v for k, v in node.attrs.items() if k == "axis"}
    return as_standard("Softmax", node, e, opset=int(required(node, "opset")), inputs=tuple(xs), attrs=own)[0]


def _quantized_gemm(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """``alpha * a_scale * b_scale * (A' B' + C)`` with int32 C, quantized if there is an output scale."""
    a, a_scale, b, b_scale = needs(node, 0, 1, 3, 4)
    trans_a, trans_b = bool(node.get("transA", 0)), bool(node.get("transB", 0))
    alpha, c = float(node.get("alpha", 1.0)), node.input(6)
    left = _dequantized(e, a, a_scale, node.input(2))
    rank_axis = 0 if trans_b else 1
    per_column = e.type(b_scale).dims not in ((), (1,))
    right = emit(e, "DequantizeLinear", b, b_scale, node.input(5), axis=rank_axis if per_column else 0)
    bias = None
    if c is not None:
        one = emit(e, "Reshape", a_scale, np.array([], np.int64)) if e.type(a_scale).dims else a_scale
        other = (
            b_scale if per_column or not e.type(b_scale).dims else emit(e, "Reshape", b_scale, np.array([], np.int64))
        )
        step = emit(e, "Mul", emit(e, "Mul", one, other), np.asarray(alpha, np.float32))
        bias = emit(e, "DequantizeLinear", c, step, None, axis=max(len(e.type(c).dims) - 1, 0))
    y = emit(e, "Gemm", left, right, bias, alpha=alpha, transA=trans_a, transB=trans_b)
    y_scale = node.input(7)
    return (y if y_scale is None else _quantized(e, y, y_scale, node.input(8), a),)


def _qlinear_concat(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    scale, zero, *rest = node.inputs
    if len(rest) % 3 or not rest:
        raise ShapeError(f"QLinearConcat has {len(rest)} operands after its scale and zero point")
    floats = [_dequantized(e, *rest[i : i + 3]) for i in range(0, len(rest), 3)]
    y = emit(e, "Concat", *floats, axis=int(required(node, "axis")))
    return (_quantized(e, y, scale, zero, rest[0]),)


def _scaled_product(e: Emit, a: Ref, b: Ref, zeros: Sequence[Ref | None], scale: Ref, bias: Ref | None) -> Ref:
    y = emit(e, "Mul", emit(e, "Cast", emit(e, "MatMulInteger", a, b, *zeros), to=FP32), scale)
    return y if bias is None else emit(e, "Add", y, bias)


def _dynamic_quantize_matmul(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, b, b_scale = needs(node, 0, 1, 2)
    a, a_scale, a_zero = e.op("DynamicQuantizeLinear", [x], None, outputs=3)
    return (_scaled_product(e, a, b, [a_zero, node.input(3)], emit(e, "Mul", a_scale, b_scale), node.input(4)),)


def _matmul_integer_to_float(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    a, b, a_scale, b_scale = needs(node, 0, 1, 2, 3)
    scale = emit(e, "Mul", a_scale, b_scale)
    return (_scaled_product(e, a, b, [node.input(4), node.input(5)], scale, node.input(6)),)


def _dynamic_lstm(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """DynamicQuantizeLSTM: an LSTM with weights (directions, inputs, 4 hidden); its input stays float."""
    weights = []
    for i, at in ((1, 8), (2, 10)):
        w, scale, zero = needs(node, i, at, at + 1)
        if len(e.type(scale).dims) < 3:
            axes = np.array([1] if len(e.type(scale).dims) == 2 else [1, 2])
            scale, zero = (emit(e, "Unsqueeze", x, axes) for x in (scale, zero))
        apart = emit(e, "Sub", emit(e, "Cast", w, to=FP32), emit(e, "Cast", zero, to=FP32))
        weights.append(emit(e, "Transpose", emit(e, "Mul", apart, scale), perm=(0, 2, 1)))
    return as_standard("LSTM", node, e, inputs=(node.inputs[0], *weights, *node.inputs[3:8]))


QUANTIZED: dict[str, FromOnnx] = {
    MICROSOFT + "QuantizeLinear": standard("QuantizeLinear"),
    MICROSOFT + "DequantizeLinear": standard("DequantizeLinear"),
    MICROSOFT + "QLinearAdd": _binary("Add"),
    MICROSOFT + "QLinearMul": _binary("Mul"),
    MICROSOFT + "QLinearSigmoid": _qlinear(1, lambda node, e, xs: emit(e, "Sigmoid", *xs)),
    MICROSOFT + "QLinearSoftmax": _qlinear(1, _softmaxed),
    MICROSOFT + "QGemm": _quantized_gemm,
    MICROSOFT + "QLinearLeakyRelu": _qlinear(
        1, lambda node, e, xs: emit(e, "LeakyRelu", *xs, alpha=float(node.get("alpha", 0.01)))
    ),
    MICROSOFT + "QLinearGlobalAveragePool": _qlinear(1, _pooled),
    MICROSOFT + "QLinearAveragePool": _qlinear(1, _average_pooled),
    MICROSOFT + "QLinearConcat": _qlinear_concat,
    MICROSOFT + "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    MICROSOFT + "MatMulIntegerToFloat": _matmul_integer_to_float,
    MICROSOFT + "DynamicQuantizeLSTM": _dynamic_lstm,
    MICROSOFT + "MatMulBnb4": matmul_bnb4,
    MICROSOFT + "MatMulNBits": matmul_n_bits,
    MICROSOFT + "GatherBlockQuantized": gather_block_quantized,
    MICROSOFT + "MoE": mixture_of_experts,
    MICROSOFT + "QMoE": quantized_mixture,
}
"""Operator -> import function."""
