"""A picture's conversion to floats, its resize, its crop and the subtraction of its mean in one launch. Pixels outside of the crop
are never computed.

The launch is emitted at the conversion. A thread computes all channels of a pixel, so that it reads the bytes of the pixels under its
taps once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, row_major
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import ints
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.base import attrs_dict
from optdnn.runtime.reference import resize
from optdnn.types import BF16, FP16, FP32, UINT8, Array, normalize_axis

THREADS = 256
CHANNELS = 4
"""Most channels of a picture."""
IN_REGISTERS = 12
"""Most taps along a row for which a thread keeps places and weights in registers."""
_FROM, _TO = frozenset({UINT8, np.dtype(np.uint16)}), frozenset({FP16, BF16, FP32})


class _Following(NamedTuple):
    """The operators after a conversion: the resize, then optionally the crop and the addition of a constant per channel."""

    resize: Op
    crop: Op | None
    shift: Op | None

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self if op is not None)

    @property
    def value(self) -> Value:
        """The result that is stored."""
        return self.ops[-1].value


def _following(graph: Graph, op: Op) -> _Following | None:
    """The operators after a conversion, each the only reader of the one before; None if the first one is not a resize."""
    found = graph.sole_user(op.value)
    if found is None or found.kind != "Resize" or found.inputs[0] != op.value:
        return None
    crop = graph.sole_user(found.value)
    crop = crop if crop is not None and crop.kind == "Slice" else None
    last = (crop or found).value
    shift = graph.sole_user(last)
    return _Following(found, crop, shift if shift is not None and _shift_of(graph, shift, last) is not None else None)


def _shift_of(graph: Graph, op: Op, x: Value) -> Array | None:
    """The constant per channel that an addition adds to ``x``, fp32; None for other operators."""
    if op.kind != "Add" or x not in op.inputs or len(graph.type(x).static_shape) != 4:
        return None
    constant = graph.constant_value(op.inputs[1 - op.inputs.index(x)])
    channels = graph.type(x).static_shape[1]
    if (
        constant is None
        or constant.size not in (1, channels)
        or (constant.size > 1 and constant.shape[-3:] != (channels, 1, 1))
    ):
        return None
    return np.broadcast_to(constant.astype(np.float32).reshape(-1), (channels,))


class ResizedPicture(Tactic):
    """Cast of bytes, Resize along height and width by a filter, Slice, and Add of a constant per channel."""

    name = "picture"

    def refuse(self, b: Builder, op: Op) -> str | None:
        following = _following(b.graph, op)
        if following is None:
            return "the only reader of its result is not a resize"
        x, a = b.graph.type(_operand(op)), following.resize.attrs
        if x.dtype not in _FROM or op.outputs[0].type.dtype not in _TO:
            return "it does not convert bytes to floats"
        if len(x.static_shape) != 4 or x.static_shape[1] > CHANNELS:
            return f"it is for images of up to {CHANNELS} channels"
        if any(
            v is not None and b.graph.known(v) is None
            for o in following.ops[:2]
            for v in o.inputs[1:]
            if o.kind != "Add"
        ):
            return "sizes of the resize or the crop are not known when the engine is built"
        if a.mode == "nearest" or a.coordinate_transformation_mode == "tf_crop_and_resize":
            return "the resize does not interpolate, or takes a region"
        if 0 in following.resize.outputs[0].type.static_shape:
            return "the resize gives no pixels"
        if any(p.axis < 2 and p.out != p.size for p in _plans(b, following.resize, x.static_shape)):
            return "another axis than height and width is resized"
        return None if _window(b, following) is not None else "the crop takes every other pixel, or cuts off channels"

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The resize, the crop and the addition."""
        following = _following(graph, op)
        return () if following is None else following.ops

    def region(self, b: Builder, op: Op) -> Region:
        """The conversion and the operators after it."""
        following = _following(b.graph, op)
        assert following is not None
        return Region(op, after=following.ops)

    def place(self, b: Builder, op: Op) -> None:
        """Place the last result; the other results are not stored. If a convolution reads it, it is placed as planes in any layout of the
        graph: the stem kernel loads rows of planes, which suits few channels best."""
        following = _following(b.graph, op)
        assert following is not None
        reader = b.graph.sole_user(following.value)
        planes = reader is not None and reader.kind == "Conv"
        b.target(following.value, row_major(b.graph.type(following.value).static_shape) if planes else None)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        following = _following(b.graph, op)
        assert following is not None
        window = _window(b, following)
        assert window is not None
        x, out, a = b.operand(op.inputs[0]), b.target(following.value), following.resize.attrs
        placed, taps = {"x": x, "y": out}, {}
        for p in _plans(b, following.resize, x.shape):
            if p.axis < 2:
                continue
            at = resize.coordinates(p, a.coordinate_transformation_mode)
            index, weight = resize.taps(p, at, a.mode, a.antialias, a.cubic_coeff_a, a.exclude_outside)
            taken = slice(window[p.axis][0], sum(window[p.axis]))
            index, weight = _narrow(index[taken], weight[taken])
            name = "hw"[p.axis - 2]
            taps[name] = index.shape[1]
            label = op.outputs[0].name
            placed[f"{name}_index"] = b.constant(index.astype(np.int32), f"{label}.index{p.axis}")
            placed[f"{name}_weight"] = b.constant(weight.astype(np.float32), f"{label}.weight{p.axis}")
        shift = (
            None
            if following.shift is None
            else _shift_of(b.graph, following.shift, (following.crop or following.resize).value)
        )
        reads = [x]
        if shift is not None:
            placed["shift"] = b.constant(np.ascontiguousarray(shift), f"{op.outputs[0].name}.shift")
            reads.append(placed["shift"])
        text = _text(CPP[x.dtype], CPP[out.dtype], out.shape, taps["h"], taps["w"], shifted=shift is not None)
        count = out.shape[0] * out.shape[2] * out.shape[3]
        parameters = Parameters().pointer(*placed).u32(count).i64(*x.strides, *out.strides)
        launch = parameters.generated(b.arch, text, "picture", -(-count // THREADS), THREADS)
        sizes = tuple(following.resize.outputs[0].type.static_shape[2:])
        own = {
            k: v
            for k, v in attrs_dict(a).items()
            if k not in ("axes", "keep_aspect_ratio_policy", "extrapolation_value")
        }
        attrs = {**own, "sizes": sizes, "starts": (window[2][0], window[3][0]), "lengths": (window[2][1], window[3][1])}
        covered = op.src.union(*(o.src for o in following.ops))
        b.emit(replace(op, src=covered), launch, placed, "ResizedPicture", attrs, reads, [out])


def _operand(op: Op) -> Value:
    assert op.inputs[0] is not None
    return op.inputs[0]


def _plans(b: Builder, op: Op, shape: Sequence[int]) -> list[resize.AxisPlan]:
    """The resize plan of each axis."""
    a = op.attrs
    scales, sizes = (None if op.input(i) is None else np.asarray(b.graph.known(op.input(i))) for i in (2, 3))
    found = resize.plan(tuple(shape), None, scales, sizes, a.axes, a.keep_aspect_ratio_policy)
    whole = {p.axis: p for p in found}
    return [whole.get(k, resize.AxisPlan(k, n, n, 1.0, n)) for k, n in enumerate(shape)]


def _window(b: Builder, following: _Following) -> list[tuple[int, int]] | None:
    """First place and length of the crop along each axis; None unless it is a contiguous window of height and width."""
    shape = following.resize.outputs[0].type.static_shape
    window = [(0, n) for n in shape]
    if following.crop is None:
        return window
    starts, ends, axes, steps = (ints(b, following.crop, i) for i in range(1, 5))
    if starts is None or ends is None:
        return None
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        k = normalize_axis(axis, len(shape))
        taken = range(*slice(start, end, step).indices(shape[k]))
        if step != 1 or not taken or (k < 2 and len(taken) != shape[k]):
            return None
        window[k] = (taken.start, len(taken))
    return window


def _narrow(index: Array, weight: Array) -> tuple[Array, Array]:
    """The taps without leading and trailing taps that have weight 0 everywhere."""
    used = np.flatnonzero(weight.any(axis=0))
    kept = slice(used[0], used[-1] + 1)
    return np.ascontiguousarray(index[:, kept]), np.ascontiguousarray(weight[:, kept])


def _text(source: str, result: str, shape: Sequence[int], high: int, wide: int, *, shifted: bool) -> str:
    """The kernel's source. ``high`` and ``wide``: number of taps along a column and along a row."""
    _, channels, rows, columns = shape
    held = wide <= IN_REGISTERS
    load = f"""int at[{wide}];
    float weight[{wide}];
    for (int t = 0; t < {wide}; t++) {{ at[t] = p.w_index[column * {wide} + t]; weight[t] = p.w_weight[column * {wide} + t]; }}"""
    at, weight = (
        ("at[t]", "weight[t]") if held else (f"p.w_index[column * {wide} + t]", f"p.w_weight[column * {wide} + t]")
    )
    return f"""struct Params {{ const {source}* x; {result}* y; const int* h_index; const float* h_weight; const int* w_index; const float* w_weight;
    {"const float* shift; " if shifted else ""}u32 count; i64 sx[4], sy[4]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) picture(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    wait_for_predecessor();
    if (index >= p.count) return;
    const int column = index % {columns}u, row = index / {columns}u % {rows}u;
    const i64 image = index / {columns * rows}u;
    {load if held else ""}
    float sum[{channels}];
    for (int c = 0; c < {channels}; c++) {{ sum[c] = {"p.shift[c]" if shifted else "0"}; }}
    for (int s = 0; s < {high}; s++) {{
        const float down = p.h_weight[row * {high} + s];
        if (down == 0) continue;
        const i64 line = image * p.sx[0] + i64(p.h_index[row * {high} + s]) * p.sx[2];
        for (int t = 0; t < {wide}; t++) {{
            const float share = down * {weight};
            const i64 pixel = line + i64({at}) * p.sx[3];
            for (int c = 0; c < {channels}; c++) {{ sum[c] += share * float(widen(p.x[pixel + c * p.sx[1]])); }}
        }}
    }}
    const i64 to = image * p.sy[0] + row * p.sy[2] + column * p.sy[3];
    for (int c = 0; c < {channels}; c++) {{ p.y[to + c * p.sy[1]] = narrow<{result}>(sum[c]); }}
}}
"""
