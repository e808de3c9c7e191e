"""Tactics of convolutions: Hopper's implicit GEMM first, the vectorized depthwise kernel, and a direct one that runs anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.runtime.cuda import conv as hopper
from optdnn.runtime.cuda.nvrtc import Recipe
from optdnn.tactics.cuda import conv_sm90
from optdnn.tactics.cuda.builder import Block, Builder, KernelSpec, Placed, channels_last, products, up
from optdnn.tactics.cuda.epilogue import Epilogue, plan_epilogue
from optdnn.tactics.cuda.pointwise import CPP, OPTIONS, copy, emit_pointwise
from optdnn.tactics.cuda.tactic import Rehearsed
from optdnn.tactics.cuda.views import cast_source
from optdnn.types import BF16, FP16, Array

FEW_CHANNELS = 4
"""A strided convolution of up to this many channels reads blocks of pixels as channels instead."""


def bias_of(b: Builder, op: Op, slot: int = 2) -> Array | None:
    """The constant bias operand in fp32, or None where it is absent."""
    value = op.input(slot)
    array = b.graph.constant_value(value)
    return None if array is None else array.astype(np.float32)


_Pair = tuple[int, int]


def planar(weight: Array, a: ConvAttrs) -> tuple[Array, _Pair, tuple[int, int, int, int], _Pair]:
    """Weights, strides, pads and dilations of a convolution over one or two axes as those of one over two."""
    (sh, sw), (dh, dw) = (1, *a.strides)[-2:], (1, *a.dilations)[-2:]
    if weight.ndim == 3:
        return weight[:, :, None], (1, sw), (0, a.pads[0], 0, a.pads[1]), (1, dw)
    top, left, bottom, right = a.pads
    return weight, (sh, sw), (top, left, bottom, right), (dh, dw)


def entering(b: Builder, op: Op) -> Placed:
    """Operand 0 with the operator's prologue applied, by a kernel of its own where there is one."""
    assert op.inputs[0] is not None
    x = b.operand(op.inputs[0])
    if not op.attrs.prologue:
        return x
    out = b.new(f"{op.outputs[0].name}.prologue", x.dtype, x.shape, channels_last(x.shape, up(x.shape[1], 8)))
    operands = [x, *(None if v is None else b.operand(v) for v in op.inputs[1:])]
    emit_pointwise(b, op, *only_used(op.attrs.prologue, operands), out)
    return out


def only_used(stages: Sequence[Stage], operands: Sequence[Placed | None]) -> tuple[list[Stage], list[Placed | None]]:
    """The stages with only those operands (and operand 0) that they read."""
    used = sorted({a for s in stages for a in s.args if a is not None and a > 0})
    slot = {0: 0, **{a: i + 1 for i, a in enumerate(used)}}
    moved = [replace(s, args=tuple(a if a is None or a < 0 else slot[a] for a in s.args)) for s in stages]
    return moved, [operands[0], *(operands[a] for a in used)]


def finish(b: Builder, op: Op, ep: Epilogue, between: Placed, target: Placed) -> None:
    """What the kernel left of the epilogue: from ``between`` to the place of the result."""
    if between is target:
        return
    if not ep.rest:
        copy(b, op, between, target)
    else:
        emit_pointwise(b, op, ep.rest, [between, *map(b.operand, ep.rest_operands)], target)


def with_pitch(b: Builder, op: Op, x: Placed, *, added: bool = False) -> Placed:
    """``x`` (logical NCHW) in a channels-last order that TMA can read: itself, or a copy (one for all who ask). ``added``: it is
    a residual, read as results are written."""
    if conv_sm90.storable(b, x) if added else conv_sm90.pitch_of(x) is not None:
        return x
    key = (x, ())
    if key not in b._copies:
        made = b.new(f"{op.outputs[0].name}.nhwc", x.dtype, x.shape, channels_last(x.shape, up(x.shape[1], 8)))
        copy(b, op, x, made)
        b._copies[key] = made
    return b._copies[key]


def image(x: Placed) -> Placed:
    """A 1-D or 2-D feature map as NCHW."""
    if len(x.shape) == 4:
        return x
    (n, c, w), (sn, sc, sw) = x.shape, x.strides
    return x.view((n, c, 1, w), (sn, sc, sw * w, sw))


class HopperConv(Rehearsed):
    """Ungrouped convolutions of 16-bit floats over one or two spatial axes."""

    name = "conv_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None:
            return "its weights are not constant"
        if weight.ndim not in (3, 4):
            return f"it has {weight.ndim - 2} spatial axes"
        if a.group != 1:
            return f"it has {a.group} groups"
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        if 0 in op.outputs[0].type.static_shape or 0 in weight.shape:
            return "it is empty"
        geometry = (weight.shape[2:], a.strides, a.pads, a.dilations)
        return conv_sm90.refuse(b.arch, products(b, op), [geometry])

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        assert weight is not None
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        bias = ep.added_to(bias_of(b, op))
        weight, strides, pads, dilations = planar(weight, a)
        feed = self.stem(b, op, weight, strides, pads, dilations)
        if feed is None:
            x = with_pitch(b, op, image(entering(b, op)))
            feed = conv_sm90.Feed(x, weight, strides, pads, dilations)
        target = b.target(op.value)
        out = image(target)
        feeds = [feed]
        joined = self._second(b, op, ep)
        if joined is not None:
            feeds.append(joined[0])
            if joined[1] is not None:
                bias = joined[1] if bias is None else bias + joined[1]
            op = replace(op, src=op.src | joined[2])
        residual = with_pitch(b, op, image(b.operand(ep.residual)), added=True) if ep.residual is not None else None
        between = target
        if ep.rest or not conv_sm90.storable(b, out):
            padded = channels_last(target.shape, up(out.shape[1], 8))
            between = b.new(f"{op.outputs[0].name}.conv", target.dtype, target.shape, padded)
        used = conv_sm90.emit_conv(b, op, feeds, bias, ep, residual, image(between), config)
        finish(b, op, ep, between, target)
        return used

    def _second(self, b: Builder, op: Op, ep: Epilogue) -> tuple[conv_sm90.Feed, Array | None, frozenset[str]] | None:
        """The convolution whose result is added first, as a second source of this one: one sum over both, nothing stored between.

        It must have no other user and no stages of its own. Its launch, emitted before, is then read by nobody and dropped.
        """
        if (
            ep.residual is None
            or not ep.stages
            or ep.rendered[0] != ("add",)
            or len(op.outputs[0].type.static_shape) != 4
        ):
            return None
        other = b.graph.op(ep.residual)
        plain = other.kind == "Conv" and not other.attrs.prologue and not other.attrs.epilogue
        if not plain or b.graph.sole_user(ep.residual) != op or self.refuse(b, other) is not None:
            return None
        weight = b.graph.constant_value(other.inputs[1])
        assert weight is not None
        assert other.inputs[0] is not None
        if weight.shape[1] <= FEW_CHANNELS:
            return None
        a = other.attrs
        ep.drop_residual()
        x = with_pitch(b, other, b.operand(other.inputs[0]))
        return conv_sm90.Feed(x, weight, a.strides, a.pads, a.dilations), bias_of(b, other), other.src

    @staticmethod
    def stem(
        b: Builder,
        op: Op,
        weight: Array,
        strides: tuple[int, ...],
        pads: tuple[int, ...],
        dilations: tuple[int, ...],
    ) -> conv_sm90.Feed | None:
        """A strided convolution of a few-channel image as one of stride 1 over blocks of pixels, the cast folded in."""
        few = weight.shape[1] <= FEW_CHANNELS and strides[0] == strides[1] > 1 and set(dilations) == {1}
        if not few or op.attrs.prologue or len(op.outputs[0].type.static_shape) != 4:
            return None
        assert op.inputs[0] is not None
        raw = b.operand(cast_source(b, op.inputs[0]))
        n, c, h, w = raw.shape
        source = hopper.Source(h, w, c, weight.shape[2:], strides, pads)  # type: ignore[arg-type]
        made = hopper.space_to_depth(source)
        shape = (n, made.channels, made.height, made.width)
        blocks = b.new(
            f"{op.outputs[0].name}.blocks", op.outputs[0].type.dtype, shape, channels_last(shape, made.channels)
        )
        emit_space_to_depth(b, op, raw, blocks, strides[0])
        return conv_sm90.Feed(
            blocks, hopper.space_to_depth_weights(source, weight), made.stride, made.padding, made.dilation
        )


def emit_space_to_depth(b: Builder, op: Op, x: Placed, out: Placed, size: int) -> None:
    """Blocks of ``size`` x ``size`` pixels into channels: one thread per output pixel where a block's rows are single accesses,
    else one per 16 bytes of it."""
    n, c, h, w = x.shape
    _, lanes, high, wide = out.shape
    t, u, some = CPP[x.dtype], CPP[out.dtype], 16 // out.dtype.itemsize
    outer = [s for s, k in zip((x.strides[0], x.strides[1], x.strides[2]), (n, c, h), strict=True) if k > 1]
    whole = x.strides[3] == 1 and w % size == 0 and x.offset % size == 0 and all(s % size == 0 for s in outer)
    if whole and size in (2, 4) and size * x.dtype.itemsize <= 16 and lanes <= 64:
        per, body = (
            1,
            f"""Pack<{u}, {some}> y[{lanes // some}];
    #pragma unroll
    for (int i = {c * size * size}; i < {lanes}; i++) y[i / {some}].lane[i % {some}] = narrow<{u}>(0.0f);
    #pragma unroll
    for (int channel = 0; channel < {c}; channel++) {{
        #pragma unroll
        for (int dy = 0; dy < {size}; dy++) {{
            const int r = row * {size} + dy;
            Pack<{t}, {size}> v;
            for (int dx = 0; dx < {size}; dx++) v.lane[dx] = narrow<{t}>(0.0f);
            if (r < p.h) v = Pack<{t}, {size}>(p.x + image * p.sn + channel * p.sc + r * p.sh + column * {size});
            #pragma unroll
            for (int dx = 0; dx < {size}; dx++) {{
                const int lane = (dy * {size} + dx) * {c} + channel;
                y[lane / {some}].lane[lane % {some}] = narrow<{u}>(widen(v.lane[dx]));
            }}
        }}
    }}
    for (int i = 0; i < {lanes // some}; i++) y[i].store(p.y + i64(index) * {lanes} + i * {some});""",
        )
    else:
        per, body = (
            lanes // some,
            f"""Pack<{u}, {some}> y;
    #pragma unroll
    for (int i = 0; i < {some}; i++) {{
        const int lane = part * {some} + i, channel = lane % {c}, dx = lane / {c} % {size}, dy = lane / {c * size};
        const int r = row * {size} + dy, s = column * {size} + dx;
        float v = 0.0f;
        if (dy < {size} && r < p.h && s < p.w) v = widen(p.x[image * p.sn + channel * p.sc + r * p.sh + s * p.sw]);
        y.lane[i] = narrow<{u}>(v);
    }}
    y.store(p.y + i64(index) * {some});""",
        )
    text = f"""struct Params {{ const {t}* x; {u}* y; i64 sn, sc, sh, sw; int n, h, w; }};

extern "C" __global__ void __launch_bounds__(128) space_to_depth(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * 128 + threadIdx.x, part = index % {per}u, pixel = index / {per}u;
    const int column = pixel % {wide}u, row = pixel / {wide}u % {high}u, image = pixel / {wide * high}u;
    wait_for_predecessor();
    if (image >= p.n) return;
    {body}
}}
"""
    block = Block().pointer(x).pointer(out).i64(*x.strides).i32(n, h, w)
    spec = KernelSpec(Recipe("general.cu", b.arch, {"generated.cuh": text}, OPTIONS), "space_to_depth")
    grid = (-(-n * high * wide * per // 128), 1, 1)
    attrs = {"block": size, "lanes": lanes}
    b.emit(op, spec, grid, 128, block, "SpaceToDepthImage", attrs, [x], [out])


def is_half(op: Op) -> bool:
    return op.outputs[0].type.dtype in (FP16, BF16)
