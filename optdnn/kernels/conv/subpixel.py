"""Transposed convolutions as ordinary ones of the same input, whose output channels are blocks of the result's pixels:
geometry, weights, and the kernel that scatters the blocks (Shi et al., "Real-time single image and video
super-resolution using an efficient sub-pixel convolutional neural network", 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import broadcast
from optdnn.kernels.pool.window import channel_vector_width, finishing, position, spatial3
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import Array

THREADS = 128


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a transposed convolution, as an axis of an ordinary convolution of stride 1.

    Result ``y`` is place ``(y + crop) % stride`` of block ``(y + crop) // stride``. There are ``blocks`` blocks. Each block reads
    ``taps`` neighbors (``dilation`` apart) of the input after ``pads`` (begin and end; negative: pixels that are not read).
    """

    stride: int
    taps: int
    dilation: int
    pads: tuple[int, int]
    blocks: int
    crop: int

    @classmethod
    def of(cls, size: int, out: int, kernel: int, stride: int, dilation: int, pad: int) -> Axis:
        """``size``: of the input; ``out``: of the result; ``pad``: pixels that are cut off at the result's begin.

        Tap ``k`` carries input ``i`` to ``i * stride + k * dilation - pad``.
        """
        if stride == 1:
            reach = (kernel - 1) * dilation
            return cls(1, kernel, dilation, (reach - pad, out - size + pad), out, 0)
        taps = (kernel - 1) * dilation // stride + 1
        first, last = pad // stride, (out - 1 + pad) // stride
        return cls(stride, taps, 1, (taps - 1 - first, last + 1 - size), last + 1 - first, pad % stride)

    def tap(self, k: int, dilation: int) -> tuple[int, int]:
        """The place in a block, and the tap, of weight ``k`` of a kernel with this dilation."""
        if self.stride == 1:
            return 0, self.taps - 1 - k
        block, place = divmod(k * dilation, self.stride)
        return place, self.taps - 1 - block


def block_weights(weight: Array, axes: tuple[Axis, Axis], dilations: Sequence[int]) -> Array:
    """ConvTranspose's IOHW weights -> OIHW weights of the convolution, with filters ``(place_h * stride_w + place_w) *
    O + o``. Every weight appears once; the rest is zero. Keeps the dtype."""
    inside, outside, kernel_h, kernel_w = weight.shape
    high, wide = axes
    packed = np.zeros((high.stride, wide.stride, outside, inside, high.taps, wide.taps), weight.dtype)
    for r in range(kernel_h):
        for s in range(kernel_w):
            (place_h, tap_h), (place_w, tap_w) = high.tap(r, dilations[0]), wide.tap(s, dilations[1])
            packed[place_h, place_w, :, :, tap_h, tap_w] = weight[:, :, r, s].T
    return packed.reshape(-1, inside, high.taps, wide.taps)


def emit_depth_to_space(
    b: Builder,
    op: Op,
    x: TensorView,
    out: TensorView,
    axes: tuple[Axis, Axis],
    stages: Sequence[Stage],
    operands: Sequence[TensorView | None],
) -> None:
    """Add the launch that scatters blocks of pixels (channels-last NCHW, in the order of :func:`block_weights`) and
    applies the stages, which read ``operands`` (by slot, from 1 on). ``out`` may have one or two spatial axes."""
    y5 = spatial3(out)
    channels = out.shape[1]
    high, wide = axes
    # The channels of a place as a feature map: an access must not cross places.
    place = x.view((x.shape[0], channels, *x.shape[2:]), x.strides)
    vec = channel_vector_width([place, out])
    t, u = CPP[x.dtype], CPP[out.dtype]
    used = sorted({a for s in stages for a in s.args if a is not None and a > 0})
    extra = {a: p for a in used if (p := operands[a]) is not None}
    finish = finishing(stages, extra, len(operands), out)
    fields = "".join(f"const {CPP[p.dtype]}* e{a}; " for a, p in extra.items())
    steps = "".join(f"i64 es{a}[5]; " for a in extra)
    if vec > 1:
        load, store = f"const Pack<{t}, {vec}> v(at);", f"Pack<{u}, {vec}> r;"
        each, done = f"const float value = widen(v.lane[j]); {finish} r.lane[j] = stored;", "r.store(y);"
    else:
        load, store = "", ""
        each, done = f"const float value = widen(*at); {finish} *y = stored;", ""
    text = f"""struct Params {{ const {t}* x; {u}* y; {fields}u32 count; i64 xs[3], ys[5]; {steps}}};

extern "C" __global__ void __launch_bounds__({THREADS}) depth_to_space(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    {position(y5, vec)}
    const int row = (h + {high.crop}) / {high.stride}, column = (w + {wide.crop}) / {wide.stride};
    const int place = (h + {high.crop}) % {high.stride} * {wide.stride} + (w + {wide.crop}) % {wide.stride};
    wait_for_predecessor();
    if (index >= p.count) return;
    const {t}* at = p.x + n * p.xs[0] + row * p.xs[1] + column * p.xs[2] + place * {channels} + c;
    {u}* y = p.y + n * p.ys[0] + c * p.ys[1] + d * p.ys[2] + h * p.ys[3] + w * p.ys[4];
    {load}
    {store}
    for (int j = 0; j < {vec}; j++) {{ {each} }}
    {done}
}}
"""
    count = y5.size // vec
    placed = {"x": x, "y": out, **{f"e{a}": p for a, p in extra.items()}}
    parameters = Parameters().pointer(*placed).u32(count).i64(x.strides[0], *x.strides[2:4], *y5.strides)
    for p in extra.values():
        parameters.i64(*spatial3(out.view(out.shape, broadcast(p, out.shape))).strides)
    launch = parameters.generated(b.arch, text, "depth_to_space", -(-count // THREADS), THREADS)
    rank = len(out.shape) - 2
    attrs = {
        "blocks": (high.stride, wide.stride), "crops": (high.crop, wide.crop), "sizes": out.shape[2:], "channels": channels,
        "prologue": (), "epilogue": plain_stages(stages), "arity": 1,
    }  # fmt: skip
    assert rank in (1, 2)
    b.emit(op, launch, placed, "BlocksToSpace", attrs, [x, *operands[1:]], [out])
