"""The operators before a strided convolution of a few-channel image: one launch makes blocks of pixels, cast and normalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.ir.epilogue import channel_vector
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import cast_source
from optdnn.kernels.pointwise.expressions import CPP, literal

BYTES = frozenset({"uint8", "int8"})
"""Integers that every floating type holds exactly, so that a cast of them is exact."""


@dataclass(frozen=True)
class ChannelAffine:
    """``x * factor + shift`` per channel. An empty tuple: no multiplication, or no addition."""

    factors: tuple[float, ...] = ()
    shifts: tuple[float, ...] = ()

    def render(self) -> str:
        """C++ that applies it to ``v`` of ``channel``."""
        parts = [("*", self.factors), ("+", self.shifts)]
        return " ".join(f"v = v {sign} ({_chosen(numbers)});" for sign, numbers in parts if numbers)


def _chosen(numbers: Sequence[float]) -> str:
    """C++ of a channel's number as a chain of choices. It costs nothing if the channel is a compile-time constant, and
    no memory access otherwise."""
    *rest, last = [literal(x, "float") for x in numbers]
    return "".join(f"channel == {i} ? {x} : " for i, x in enumerate(rest)) + last


def channel_affine(b: Builder, op: Op) -> ChannelAffine | None:
    """The operator's prologue as a multiplication and an addition per channel (either may be absent); None if it is more."""
    stages = op.attrs.prologue
    shape = b.graph.type(op.inputs[0]).static_shape  # type: ignore[arg-type]
    found: dict[str, tuple[float, ...]] = {}
    for k, stage in enumerate(stages):
        others = [a for a in stage.args if a != -(k + 1)]
        kind = {"Mul": "factors", "Add": "shifts"}.get(stage.kind)
        if kind is None or kind in found or (kind == "factors" and found) or len(stage.args) != 2 or len(others) != 1:
            return None
        array = b.graph.constant_value(op.inputs[others[0]]) if others[0] is not None and others[0] >= 0 else None
        vector = None if array is None else channel_vector(array, shape, 1)
        if vector is None:
            return None
        found[kind] = tuple(float(x) for x in vector)
    return ChannelAffine(**found)


def pixel_source(b: Builder, value: Value | None) -> Value:
    """The origin of the pixels before changes of layout, casts to a narrower floating type, and casts of 8-bit integers."""
    value = cast_source(b, value)
    op = b.graph.op(value)
    stored = op.kind == "Cast" and op.id not in b.joined
    if stored and op.inputs[0] is not None and b.graph.type(op.inputs[0]).dtype.name in BYTES:
        return cast_source(b, op.inputs[0])
    return value


def emit_space_to_depth(
    b: Builder, op: Op, x: TensorView, out: TensorView, size: int, normalization: ChannelAffine | None
) -> None:
    """Add the launch that moves blocks of ``size`` x ``size`` pixels into channels and normalizes them (padding stays
    0). It has one thread per output pixel if the rows of a block are single accesses, else one per 16 bytes of a
    pixel."""
    normalization = normalization or ChannelAffine()
    n, c, h, w = x.shape
    _, lanes, high, wide = out.shape
    t, u, some = CPP[x.dtype], CPP[out.dtype], 16 // out.dtype.itemsize
    outer = [s for s, k in zip((x.strides[0], x.strides[1], x.strides[2]), (n, c, h), strict=True) if k > 1]
    whole = x.strides[3] == 1 and w % size == 0 and x.offset % size == 0 and all(s % size == 0 for s in outer)
    if whole and size in (2, 4) and size * x.dtype.itemsize <= 16 and lanes <= 64:
        per, body = 1, _by_pixels(t, u, some, c, size, lanes)
    else:
        per, body = lanes // some, _by_vectors(u, some, c, size)
    text = f"""struct Params {{ const {t}* x; {u}* y; i64 sn, sc, sh, sw; int n, h, w; }};

DEVICE float normalized(float v, int channel) {{ {normalization.render()} return v; }}

extern "C" __global__ void __launch_bounds__(128) space_to_depth(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * 128 + threadIdx.x, part = index % {per}u, pixel = index / {per}u;
    const int column = pixel % {wide}u, row = pixel / {wide}u % {high}u, image = pixel / {wide * high}u;
    wait_for_predecessor();
    if (image >= p.n) return;
    {body}
}}
"""
    parameters = Parameters().pointer("x", "y").i64(*x.strides).i32(n, h, w)
    launch = parameters.generated(b.arch, text, "space_to_depth", -(-n * high * wide * per // 128), 128)
    attrs = {"block": size, "lanes": lanes, "factors": normalization.factors, "shifts": normalization.shifts}
    b.emit(op, launch, {"x": x, "y": out}, "SpaceToDepthImage", attrs, [x], [out])


def _by_pixels(t: str, u: str, some: int, c: int, size: int, lanes: int) -> str:
    """C++ of a thread that computes all ``lanes`` channels of an output pixel, ``some`` at a time."""
    return f"""Pack<{u}, {some}> y[{lanes // some}];
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
                const bool inside = r < p.h && column * {size} + dx < p.w;
                y[lane / {some}].lane[lane % {some}] = narrow<{u}>(inside ? normalized(widen(v.lane[dx]), channel) : 0.0f);
            }}
        }}
    }}
    for (int i = 0; i < {lanes // some}; i++) y[i].store(p.y + i64(index) * {lanes} + i * {some});"""


def _by_vectors(u: str, some: int, c: int, size: int) -> str:
    """C++ of a thread that computes ``some`` channels of an output pixel."""
    return f"""Pack<{u}, {some}> y;
    #pragma unroll
    for (int i = 0; i < {some}; i++) {{
        const int lane = part * {some} + i, channel = lane % {c}, dx = lane / {c} % {size}, dy = lane / {c * size};
        const int r = row * {size} + dy, s = column * {size} + dx;
        float v = 0.0f;
        if (dy < {size} && r < p.h && s < p.w) v = normalized(widen(p.x[image * p.sn + channel * p.sc + r * p.sh + s * p.sw]), channel);
        y.lane[i] = narrow<{u}>(v);
    }}
    y.store(p.y + i64(index) * {some});"""
