"""ONNX Runtime's image operators, most with channels on the last axis, as compositions of ONNX's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs, require_rank, required
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.restate import MICROSOFT, as_standard


def channels_first(e: Emit, x: Ref) -> Ref:
    rank = len(e.type(x).dims)
    return emit(e, "Transpose", x, perm=(0, rank - 1, *range(1, rank - 1)))


def channels_last(e: Emit, x: Ref) -> Ref:
    rank = len(e.type(x).dims)
    return emit(e, "Transpose", x, perm=(0, *range(2, rank), 1))


def _nhwc(write: Callable[[NodeSpec, Emit, Ref], Ref]) -> FromOnnx:
    """An operator with channels on the last axis of operand 0 and of the result."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        (x,) = needs(node, 0)
        return (channels_last(e, write(node, e, channels_first(e, x))),)

    return from_onnx


def _convolved(node: NodeSpec, e: Emit, x: Ref) -> Ref:
    """NhwcConv: the weights have their channels on the last axis, too."""
    (w,) = needs(node, 1)
    return as_standard("Conv", node, e, inputs=(x, channels_first(e, w), node.input(2)))[0]


def _fused_convolved(node: NodeSpec, e: Emit, x: Ref) -> Ref:
    """NhwcFusedConv: weights as in ONNX; the added tensor has channels on the last axis."""
    added = node.input(3)
    operands = (x, node.inputs[1], node.input(2), None if added is None else channels_first(e, added))
    fused = e.importer(MICROSOFT + "FusedConv")
    return fused(_with_inputs(node, operands), e)[0]


def _with_inputs(node: NodeSpec, inputs: tuple[Ref | None, ...]) -> NodeSpec:
    return NodeSpec(node.op_type, node.domain, node.opset, node.name, inputs, node.outputs, node.attrs)


def _pooled(node: NodeSpec, e: Emit, x: Ref) -> Ref:
    return as_standard("MaxPool", node, e, inputs=(x,))[0]


def _quantized_convolution(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """QLinearConv as in ONNX; with ``channels_last`` 1, channels are on the last axis."""
    own = {k: v for k, v in node.attrs.items() if k != "channels_last"}
    if not node.get("channels_last", 0):
        return as_standard("QLinearConv", node, e, attrs=own)
    (x,) = needs(node, 0)
    operands = (channels_first(e, x), *node.inputs[1:])
    return (channels_last(e, as_standard("QLinearConv", node, e, inputs=operands, attrs=own)[0]),)


# ---------------------------------------------------------------- groups


def _group_norm(node: NodeSpec, e: Emit, x: Ref) -> Ref:
    """GroupNorm of x, with its activation."""
    last = bool(node.get("channels_last", 1))
    gamma, beta = needs(node, 1, 2)
    activation = int(node.get("activation", 0))
    if activation not in (0, 1):
        raise Unsupported(f"activation={activation}")
    given, kept = e.type(x).dtype, e.type(gamma).dtype
    if given != kept:  # parameters of fp32 beside fp16
        x = emit(e, "Cast", x, to=kept)
    y = emit(
        e,
        "GroupNormalization",
        channels_first(e, x) if last else x,
        gamma,
        beta,
        epsilon=float(node.get("epsilon", 1e-5)),
        num_groups=int(required(node, "groups")),
    )
    if given != kept:
        y = emit(e, "Cast", y, to=given)
    if activation:
        y = emit(e, "Swish", y, alpha=1.0)
    return channels_last(e, y) if last else y


def _group_normalized(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    (x,) = needs(node, 0)
    return (_group_norm(node, e, x),)


def _skip_group_normalized(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """SkipGroupNorm: the norm of x + skip (+ bias); the skip may be one row of channels per image. Output 1 is the sum."""
    x, skip = needs(node, 0, 3)
    last = bool(node.get("channels_last", 1))
    rank = len(e.type(x).dims)
    if len(e.type(skip).dims) == 2:
        axes = range(1, rank - 1) if last else range(2, rank)
        skip = emit(e, "Unsqueeze", skip, np.array(axes))
    total = emit(e, "Add", x, skip)
    bias = node.input(4)
    if bias is not None:
        if not last:
            bias = emit(e, "Unsqueeze", bias, np.arange(1, rank - 1))
        total = emit(e, "Add", total, bias)
    return (_group_norm(node, e, total), total)[: len(node.outputs)]


def _grid_sample(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    require_rank(e.type(needs(node, 0)[0]), 4, "GridSample images")
    return as_standard("GridSample", node, e, opset=16)


def _mean_of_quantized(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, scale, y_scale = needs(node, 0, 1, 3)
    axes = node.ints("axes")
    if axes is None:
        raise ShapeError("QLinearReduceMean needs axes")
    floats = emit(e, "DequantizeLinear", x, scale, node.input(2), axis=0)
    y = emit(e, "ReduceMean", floats, np.asarray(axes, np.int64), keepdims=bool(node.get("keepdims", 1)))
    dtype = e.type(x).dtype
    return (emit(e, "QuantizeLinear", y, y_scale, node.input(4), axis=0, output_dtype=dtype),)


def _where_of_quantized(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    condition, x, x_scale, y, y_scale, z_scale = needs(node, 0, 1, 2, 4, 5, 7)
    left = emit(e, "DequantizeLinear", x, x_scale, node.input(3), axis=0)
    right = emit(e, "DequantizeLinear", y, y_scale, node.input(6), axis=0)
    chosen = emit(e, "Where", condition, left, right)
    return (emit(e, "QuantizeLinear", chosen, z_scale, node.input(8), axis=0, output_dtype=e.type(x).dtype),)


IMAGES: dict[str, FromOnnx] = {
    MICROSOFT + "NhwcConv": _nhwc(_convolved),
    MICROSOFT + "NhwcFusedConv": _nhwc(_fused_convolved),
    MICROSOFT + "NhwcMaxPool": _nhwc(_pooled),
    MICROSOFT + "QLinearConv": _quantized_convolution,
    MICROSOFT + "GroupNorm": _group_normalized,
    MICROSOFT + "SkipGroupNorm": _skip_group_normalized,
    MICROSOFT + "GridSample": _grid_sample,
    MICROSOFT + "QLinearReduceMean": _mean_of_quantized,
    MICROSOFT + "QLinearWhere": _where_of_quantized,
}
"""Operator -> import function."""
