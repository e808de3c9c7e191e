"""Convolutions and matrix products in true fp32: tiles of multiply-adds on scalar units (``conv_fp32.cu``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from optdnn.errors import InternalError
from optdnn.ir.epilogue import plan_epilogue, summed_dtype
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, channels_last
from optdnn.kernels.conv import fp32_kernel as fp32
from optdnn.kernels.conv.fused import (
    Convolution,
    ConvolutionKernel,
    bias_row,
    conv_attrs,
    result_place,
    stage_operands,
)
from optdnn.kernels.conv.hopper import FEW_CHANNELS, bias_of, entering, has_computed_bias, image, planar
from optdnn.kernels.conv.hopper_launch import blocks
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.gemm.hopper import MatrixProduct, product_refusal
from optdnn.kernels.pointwise.pointwise import copied_later
from optdnn.kernels.tactic import Offer
from optdnn.ops.conv import resolved
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import FP32

FEW_FILTERS = 8
"""Least filters of a group. With fewer, most of a tile would be padding."""


@lru_cache(maxsize=1024)
def _offers(problem: fp32.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations, the best predicted first. Every tile sums a result in the order of K; blocks that share K sum
    parts of it."""
    found = fp32.candidates(problem, gpu)
    return tuple(Offer(c, fp32.estimate(problem, c, gpu), c.split == 1) for c in found)


def _offered(problem: fp32.Problem, config: fp32.Config, gpu: GpuFacts) -> Offer:
    """The offer of a configuration that was chosen before, without ranking the others. Raises InternalError if it cannot run the
    problem."""
    if (why := fp32.refuse(problem, config, gpu.arch)) is not None:
        raise InternalError(f"the chosen configuration {config} cannot run it: {why}")
    return Offer(config, fp32.estimate(problem, config, gpu), config.split == 1)


def _strides(x: TensorView) -> fp32.Strides:
    """Strides of a feature map NCHW; 0 for axes of size 1."""
    n, _, h, w = (s if size > 1 else 0 for size, s in zip(x.shape, x.strides, strict=True))
    return fp32.Strides(n, h, w)


def storable(x: TensorView) -> bool:
    """Whether the kernel can write the NCHW tensor, or read it as a residual: its channels are contiguous."""
    return x.shape[1] == 1 or x.strides[1] == 1


def problem_of(c: Convolution) -> fp32.Problem:
    """The kernel's problem."""
    x, weight = c.feed.x, c.feed.weight
    batch, channels, height, width = x.shape
    plane = x.strides[1] if channels > 1 else 1
    aligned = all(p.offset % 4 == 0 for p in (c.out, c.residual) if p is not None)
    return fp32.Problem(
        batch, height, width, channels, len(weight), weight.shape[2:], _strides(x), _strides(c.out), *c.feed.geometry,
        c.feed.bands, (("bias",), *c.ep.rendered), plane, _strides(c.residual) if c.residual is not None else None, aligned,
        c.scatter,
    )  # fmt: skip


class TiledKernel(ConvolutionKernel):
    """Convolutions in true fp32 on images of any strides (``out`` and ``residual``: with contiguous channels)."""

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> fp32.Problem:
        return problem_of(c)

    def offers(self, problem: fp32.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def named(self, b: Builder, op: Op, name: str) -> Offer | None:
        """The offer of the configuration ``name``, without ranking the others."""
        config = fp32.Config.read(name)
        return None if config is None else _offered(self.problem(b, op), config, b.gpu)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: fp32.Problem, config: fp32.Config) -> None:
        emit_fp32(b, op, c, problem, config)

    def stored(self, b: Builder, x: TensorView) -> bool:
        return storable(x)


def emit_fp32(b: Builder, op: Op, c: Convolution, problem: fp32.Problem, config: fp32.Config) -> None:
    """Add the launch of a convolution."""
    x, weight, out = c.feed.x, c.feed.weight, c.out
    channels, name = problem.channels, op.outputs[0].name
    packed = b.kept.once(
        ("conv_fp32", problem.planar), [weight], lambda: fp32.pack_weights(weight, planar=problem.planar), final=True
    )
    operands = {"pixels": x, "weights": b.constant(packed, f"{name}.weights"), "output": out}
    operands["bias"] = bias_row(b, op, c.bias, fp32.weight_pitch(channels))
    if c.residual is not None:
        operands["residual"] = c.residual
    o, i, r, s = weight.shape
    pitch = packed.shape[1]
    order = (1, r * s * pitch, s * pitch, pitch) if problem.planar else (1, pitch, s * i * pitch, i * pitch)
    kind, attrs = "Conv", conv_attrs(c.feed.geometry, c.feed.bands, c.ep.stages)
    tail = stage_operands(b, c.ep, c.residual)
    reads = [x, operands["weights"].view((o, i, r, s), order), operands["bias"].view((channels,), (1,)), *tail]
    if c.scatter is not None:
        kind, attrs = "ConvBlocks", {**attrs, **blocks(c.scatter, out)}
    b.emit(op, fp32.launch(problem, config, b.gpu), operands, kind, attrs, reads, [out])


def refusal(b: Builder, op: Op) -> str | None:
    """Why the kernel does not support the architecture or the element type, or None."""
    if (why := no_kernels(b.arch)) is not None:
        return why
    if (dtype := summed_dtype(b.graph, op)) != FP32:
        return f"the kernel takes fp32, not {dtype.name}"
    return None


def too_large(b: Builder, op: Op) -> str | None:
    """Why 32-bit offsets do not cover the operand or the result, or None."""
    places = [b.operand(op.inputs[0]), *b.fixed(op.value)]
    spans = [sum((n - 1) * abs(s) for n, s in zip(p.shape, p.strides, strict=True)) for p in places]
    *rows, last = op.outputs[0].type.static_shape
    if max(*spans, math.prod(rows) * (last + 8)) < fp32.LARGEST:
        return None
    return "its tensors have more elements than 32-bit offsets can address"


class TiledConv(TiledKernel):
    """Convolutions of fp32 over one or two spatial axes, grouped or not."""

    name = "conv_fp32"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        weight = b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4):
            return "its weights are not constant, or not of one or two spatial axes"
        if has_computed_bias(b, op):
            return "its bias is not constant"
        if 0 in weight.shape:
            return "it has no channels"
        if op.attrs.group > 1 and weight.shape[0] // op.attrs.group < FEW_FILTERS:
            return f"a group of {weight.shape[0] // op.attrs.group} filters leaves most of a tile empty"
        return fp32.no_kernel(self.problem(b, op))

    def convolution(self, b: Builder, op: Op) -> Convolution:
        weight, source = b.weights(op), _plain_source(b, op)
        a = resolved(op.attrs, b.graph.type(op.inputs[0]), b.graph.type(op.inputs[1]))  # type: ignore[arg-type]
        ep, target, residual = plan_epilogue(b.graph, op, channel_axis=1), b.result(op.value), None
        x = image(entering(b, op) if source is None else b.source(source))
        if ep.residual is not None:
            added = b.source(ep.residual)
            if not storable(added):
                added = copied_later(b, op, added, "residual", channels_last(added.shape, added.shape[1]))
            residual = image(added)
        between = result_place(b, op, ep, target, storable(target), target.shape[1])
        feed = Feed(x, *planar(weight, a), bands=a.group)
        return Convolution((feed,), ep.added_to(bias_of(b, op)), ep, residual, image(between), between)


def _plain_source(b: Builder, op: Op) -> Value | None:
    """The few-channel image of a network before its change to channels-last, which the kernel does not need; None for
    other operands."""
    value: Value | None = op.inputs[0]
    assert value is not None
    source = b.graph.op(value)
    few = source.kind == "Layout" and b.graph.type(value).static_shape[1] <= FEW_CHANNELS
    return source.inputs[0] if few and not op.attrs.prologue else None


class TiledGemm(TiledKernel, MatrixProduct):
    """MatMul and Gemm of fp32 whose second operand is a constant matrix."""

    name = "gemm_fp32"
    aligned: ClassVar[bool] = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        return refusal(b, op) or product_refusal(b, op) or too_large(b, op)
