"""Convolutions: Conv, ConvTranspose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import PRODUCT_TOL, Attrs, Call, Cost, FusedAttrs, Result
from optdnn.ops.checks import agree, agree_all, elements, needs, require_length, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.ops.fused import fused_flops, product_flops, with_stages
from optdnn.ops.window import check_window, read_window
from optdnn.runtime.reference.conv import transpose_pads
from optdnn.runtime.reference.window import output_sizes, resolve_pads
from optdnn.types import Shape, TensorType, is_float


@dataclass(frozen=True)
class ConvGeometry(Attrs):
    """A convolution: one entry per spatial axis; ``pads`` holds the begins, then the ends.

    ``auto_pad`` is "NOTSET" (``pads`` count) or "SAME_UPPER"/"SAME_LOWER" while a spatial size it depends on is symbolic.
    """

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int = 1
    auto_pad: str = "NOTSET"


@dataclass(frozen=True)
class ConvAttrs(ConvGeometry, FusedAttrs):
    """Conv, with its stages."""


@dataclass(frozen=True)
class ConvTransposeAttrs(FusedAttrs):
    """ConvTranspose: as :class:`ConvAttrs`; ``output_padding`` extends the end of each axis.

    ``output_shape`` (spatial sizes) is kept, with the ``auto_pad`` that determines how to split the padding, only while the
    input's spatial sizes are symbolic; otherwise the import converts it to pads.
    """

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    output_padding: tuple[int, ...]
    group: int = 1
    output_shape: tuple[int, ...] = ()
    auto_pad: str = "NOTSET"


FEW_TAPS = 49
"""The most filter taps that one thread sums alone."""


def resolved(attrs: ConvAttrs, x: TensorType, w: TensorType) -> ConvAttrs:
    """``attrs`` with ``auto_pad`` converted to pads if the sizes in the operands' types allow it."""
    pads = resolve_pads(attrs.auto_pad, attrs.pads, x.dims[2:], w.dims[2:], attrs.strides, attrs.dilations)
    return attrs if pads is None else replace(attrs, pads=pads, auto_pad="NOTSET")


def resolved_transpose(attrs: ConvTransposeAttrs, x: TensorType, w: TensorType) -> ConvTransposeAttrs:
    """``attrs`` with ``output_shape`` converted to pads if the sizes in the operands' types allow it."""
    if not attrs.output_shape:
        return attrs
    geometry = zip(x.dims[2:], w.dims[2:], attrs.strides, attrs.dilations, attrs.output_padding, strict=True)
    totals = [_full(*g) - target for g, target in zip(geometry, attrs.output_shape, strict=True)]
    if not all(isinstance(t, int) for t in totals):
        return attrs
    pads, output_padding = _split(totals, attrs.output_padding, attrs.auto_pad)
    return replace(attrs, pads=pads, output_padding=output_padding, output_shape=(), auto_pad="NOTSET")


def of_one_channel(weight: Shape) -> bool:
    """Whether weights of this shape are one filter with one channel and few taps (ECA-Net): most of a tensor core's tile would be
    empty."""
    sizes = [n for n in weight if isinstance(n, int)]
    return weight[:2] == (1, 1) and len(sizes) == len(weight) and math.prod(sizes) <= FEW_TAPS


def _operands(call: Call) -> tuple[TensorType, TensorType]:
    """x and w, checked for rank, dtype and channels (the first two axes of w are checked by the callers)."""
    x, w = call.type(0), call.type(1)
    rank = len(w.dims)
    if rank < 3:
        raise ShapeError(f"{call.kind} weights {w} must have at least 3 dimensions")
    require_rank(x, rank, f"{call.kind} input (its weights are {w})")
    if not is_float(w.dtype):
        raise ShapeError(f"{call.kind} weights are {w}; they must be floating-point")
    if x.dtype != w.dtype:
        raise ShapeError(f"{call.kind} input {x} and weights {w} have different types")
    if call.attrs.group < 1:
        raise ShapeError(f"{call.kind} group is {call.attrs.group}")
    check_window(call.kind, rank - 2, call.attrs.strides, call.attrs.pads, call.attrs.dilations)
    return x, w


def _check_bias(call: Call, channels: DimLike) -> None:
    if call.has(2):
        bias = call.type(2)
        require_rank(bias, 1, f"{call.kind} bias")
        agree(bias.dims[0], channels, f"{call.kind} bias length and output channels differ")


def infer_conv(call: Call) -> Result:
    x, w = _operands(call)
    a: ConvAttrs = call.attrs
    n, c, *spatial = x.dims
    m, per_group, *kernel = w.dims
    agree(c, per_group * a.group, f"Conv input has {c} channels, weights {w} in {a.group} groups need another number")
    agree(m % a.group, 0, f"Conv has {m} output channels, which {a.group} groups do not divide")
    _check_bias(call, m)
    sizes = output_sizes(a.auto_pad, a.pads, spatial, kernel, a.strides, a.dilations)
    return Result((TensorType(w.dtype, (n, m, *sizes)),))


def _infer_conv_transpose(call: Call) -> Result:
    x, w = _operands(call)
    a: ConvTransposeAttrs = call.attrs
    n, c, *spatial = x.dims
    c_w, per_group, *kernel = w.dims
    rank = len(kernel)
    require_length(a.output_padding, rank, "ConvTranspose output_padding")
    agree(c, c_w, f"ConvTranspose input has {c} channels, weights {w} need another number")
    agree(c % a.group, 0, f"ConvTranspose has {c} input channels, which {a.group} groups do not divide")
    m = per_group * a.group
    _check_bias(call, m)
    if a.output_shape:
        require_length(a.output_shape, rank, "ConvTranspose output_shape")
        return Result((TensorType(w.dtype, (n, m, *a.output_shape)),))
    sizes = [
        _full(spatial[i], kernel[i], a.strides[i], a.dilations[i], a.output_padding[i]) - a.pads[i] - a.pads[rank + i]
        for i in range(rank)
    ]
    if any(isinstance(s, int) and s <= 0 for s in sizes):
        raise ShapeError(f"ConvTranspose pads {a.pads} leave nothing of the output: {sizes}")
    return Result((TensorType(w.dtype, (n, m, *sizes)),))


def _full(size: DimLike, kernel: DimLike, stride: int, dilation: int, output_padding: int) -> DimLike:
    """Size of a transposed convolution's output before its pads are cut off."""
    return (size - 1) * stride + output_padding + (kernel - 1) * dilation + 1


def _check_kernel_shape(node: NodeSpec, kernel: Sequence[DimLike]) -> None:
    given = node.ints("kernel_shape")
    if given is not None:
        require_length(given, len(kernel), f"{node.op_type} kernel_shape")
        agree_all(given, kernel, f"{node.op_type} kernel_shape {given} contradicts its weights")


def operand_types(node: NodeSpec, e: Emit, weights: int = 1) -> tuple[TensorType, TensorType]:
    """Types of the input and of the weights, which are in operand slot ``weights``."""
    tx, tw = map(e.type, needs(node, 0, weights))
    if len(tw.dims) < 3:
        raise ShapeError(f"{node.op_type} weights {tw} must have at least 3 dimensions")
    require_rank(tx, len(tw.dims), f"{node.op_type} input (its weights are {tw})")
    return tx, tw


def _import_conv(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, w = operand_types(node, e)
    kernel = w.dims[2:]
    _check_kernel_shape(node, kernel)
    win = read_window(node, len(kernel), x.dims[2:], kernel)
    return e.op("Conv", node.inputs, ConvAttrs(**vars(win), group=int(node.get("group", 1))))


def _import_conv_transpose(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, w = operand_types(node, e)
    kernel = w.dims[2:]
    rank = len(kernel)
    _check_kernel_shape(node, kernel)
    auto_pad = str(node.get("auto_pad", "NOTSET")) or "NOTSET"
    # For a transposed convolution SAME_* has another meaning (output = input * stride): resolved below.
    plain = replace(node, attrs={k: v for k, v in node.attrs.items() if k != "auto_pad" or v == "VALID"})
    win = read_window(plain, rank, None, kernel)
    pads, out_pad = win.pads, node.ints("output_padding") or (0,) * rank
    require_length(out_pad, rank, "ConvTranspose output_padding")
    target = node.ints("output_shape") or ()
    if len(target) == rank + 2:  # some exporters include batch and channels
        target = target[2:]
    if not target and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # The total, full - size * stride, does not depend on the size.
        totals = [
            _full(1, kernel[i], win.strides[i], win.dilations[i], out_pad[i]) - win.strides[i] for i in range(rank)
        ]
        pads, out_pad = _split(totals, out_pad, auto_pad)
    if target:
        require_length(target, rank, "ConvTranspose output_shape")
    attrs = ConvTransposeAttrs(
        win.strides,
        pads,
        win.dilations,
        out_pad,
        int(node.get("group", 1)),
        target,
        auto_pad if target else "NOTSET",
    )
    attrs = resolved_transpose(attrs, x, w)
    return e.op("ConvTranspose", node.inputs, attrs)


def _split(
    totals: Sequence[DimLike], output_padding: Sequence[int], auto_pad: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pads and output padding for total paddings; a negative total extends the output instead."""
    each, extra = [], []
    for total, more in zip(totals, output_padding, strict=True):
        if not isinstance(total, int):
            raise ShapeError("ConvTranspose with auto_pad needs a kernel of known size")
        each.append(transpose_pads(max(total, 0), auto_pad))
        extra.append(more + max(-total, 0))
    return tuple(b for b, _ in each) + tuple(a for _, a in each), tuple(extra)


def _cost_conv(call: Call, result: Result) -> Cost:
    bias = elements(result.types[0]) if call.has(2) else 0.0
    return Cost(product_flops(call, result) + bias + fused_flops(call, result))


def window_attrs(a: ConvGeometry | ConvTransposeAttrs, w: TensorType) -> dict[str, Any]:
    """ONNX's attributes of a convolution with weights ``w``."""
    out: dict[str, Any] = {"strides": a.strides, "dilations": a.dilations, "group": a.group}
    if w.is_static:
        out["kernel_shape"] = w.static_shape[2:]
    return {**out, "pads": a.pads} if a.auto_pad == "NOTSET" else {**out, "auto_pad": a.auto_pad}


def _export_conv(attrs: ConvAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    return e.node("Conv", inputs, **window_attrs(attrs, e.type(inputs[1])))


def _export_conv_transpose(
    attrs: ConvTransposeAttrs, inputs: Sequence[str], n_outputs: int, e: Export
) -> Sequence[str]:
    more: dict[str, Any] = {"output_padding": attrs.output_padding}
    if attrs.output_shape:
        more["output_shape"] = attrs.output_shape
    return e.node("ConvTranspose", inputs, **{**window_attrs(attrs, e.type(inputs[1])), **more})


# A sum of K products in fp32 is off by about sqrt(K) roundoffs of its largest partial sum; K reaches some 10^4.

DEFS: tuple[OpDef, ...] = (
    OpDef(
        "Conv",
        with_stages(infer_conv),
        ConvAttrs,
        _import_conv,
        _export_conv,
        cost=_cost_conv,
        tol=PRODUCT_TOL,
        arity=3,
    ),
    OpDef(
        "ConvTranspose",
        with_stages(_infer_conv_transpose),
        ConvTransposeAttrs,
        _import_conv_transpose,
        _export_conv_transpose,
        cost=_cost_conv,
        tol=PRODUCT_TOL,
        arity=3,
    ),
)
