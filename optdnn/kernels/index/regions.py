"""Operators of detectors and segmenters over coordinates: MaxRoiPool, deformable convolution, pooling with indices, Col2Im."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import (
    IndexKernel,
    coordinates,
    emit_index_kernel,
    needed,
    operand_at,
    operands_of,
)
from optdnn.kernels.layout.views import ints
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.reduce.reduce import limits
from optdnn.types import is_float


def _max_roi_pool(b: Builder, op: Op) -> None:
    x, rois, out, a = needed(b, op, 0), needed(b, op, 1), b.target(op.value), op.attrs
    t, scale = arithmetic(x.dtype), literal(a.spatial_scale, "double")
    lines = ["const i64 image = i64(widen(p.r[at_r(o0, 0)]));"]
    for axis, at, column, size, bins in zip("yx", ("o2", "o3"), (2, 1), x.shape[2:], a.pooled_shape, strict=True):
        for name, place in (("first", column), ("last", column + 2)):
            lines.append(
                f"const double {name}_place_{axis} = double(widen(p.r[at_r(o0, {place})])) * {scale}; const double {name}_{axis} = "
                f"{name}_place_{axis} < 0 ? -floor(0.5 - {name}_place_{axis}) : floor({name}_place_{axis} + 0.5);"
            )
        lines.append(
            f"const double extent_{axis} = last_{axis} - first_{axis} + 1; "
            f"const float step_{axis} = float(extent_{axis} < 1 ? 1.0 : extent_{axis}) / float({bins}); "
            f"const double low_{axis} = first_{axis} + double(floor(float({at}) * step_{axis})); "
            f"const double high_{axis} = first_{axis} + double(ceil(float({at} + 1) * step_{axis})); "
            f"const i64 begin_{axis} = i64(low_{axis} < 0 ? 0.0 : low_{axis} > {size} ? double({size}) : low_{axis}); "
            f"const i64 end_{axis} = i64(high_{axis} < 0 ? 0.0 : high_{axis} > {size} ? double({size}) : high_{axis});"
        )
    loops = "".join(f"for (i64 i_{k} = begin_{k}; i_{k} < end_{k}; i_{k}++) {{ " for k in "yx")
    text = " ".join([*lines, f"{t} acc = {limits(t)[0]}; bool any = false;", loops])
    text += " acc = max_nan(acc, widen(p.x[at_x(image, o1, i_y, i_x)])); any = true; }}"
    text += f" p.y[at_y({coordinates(4)})] = narrow<{CPP[out.dtype]}>(any ? acc : {t}(0));"
    emit_index_kernel(b, op, out.shape, {"x": x, "r": rois}, {"y": out}, text, reads=operands_of(b, op))


def _deform_conv(b: Builder, op: Op) -> None:
    x, w, offset, bias, mask = (operand_at(b, op, i) for i in range(5))
    assert x is not None
    assert w is not None
    assert offset is not None
    out, a, t = b.target(op.value), op.attrs, arithmetic(x.dtype)
    (m, per_group, kh, kw), (_, channels, height, width) = w.shape, x.shape
    scaled = f"* {t}(widen(p.m[at_m(o0, tap, o2, o3)]))" if mask is not None else ""
    start = f"{t}(widen(p.b[at_b(o1)]))" if bias is not None else f"{t}(0)"
    lines = f"""{t} acc = {start};
        for (i64 c = 0; c < {per_group}; c++) {{
            const i64 channel = o1 / {m // a.group} * {per_group} + c, part = channel / {channels // a.offset_group};
            for (i64 i = 0; i < {kh}; i++) for (i64 j = 0; j < {kw}; j++) {{
                const i64 tap = (part * {kh} + i) * {kw} + j;
                const {t} y = {t}(widen(p.o[at_o(o0, 2 * tap, o2, o3)])) + {t}(i * {a.dilations[0]} + o2 * {a.strides[0]} - {a.pads[0]});
                const {t} x = {t}(widen(p.o[at_o(o0, 2 * tap + 1, o2, o3)])) + {t}(j * {a.dilations[1]} + o3 * {a.strides[1]} - {a.pads[1]});
                const i64 top = i64(floor(y)), left = i64(floor(x));
                {t} sum = 0;
                for (int dy = 0; dy < 2; dy++) for (int dx = 0; dx < 2; dx++) {{
                    const i64 yy = top + dy, xx = left + dx;
                    if (yy < 0 || yy >= {height} || xx < 0 || xx >= {width}) continue;
                    sum += {t}(widen(p.x[at_x(o0, channel, yy, xx)])) * ((1 - fabs(y - {t}(yy))) * (1 - fabs(x - {t}(xx))));
                }}
                acc += {t}(widen(p.w[at_w(o1, c, i, j)])) * (sum {scaled});
            }}
        }}
        p.y[at_y(o0, o1, o2, o3)] = narrow<{CPP[out.dtype]}>(acc);"""
    tensors: dict[str, TensorView | None] = {"x": x, "w": w, "o": offset, "b": bias, "m": mask}
    emit_index_kernel(b, op, out.shape, tensors, {"y": out}, lines, reads=operands_of(b, op))


def _pool_with_indices(b: Builder, op: Op) -> None:
    x, out, where, a = needed(b, op, 0), b.target(op.value), b.target(Value(op.id, 1)), op.attrs
    t, rank, spatial = arithmetic(x.dtype), len(x.shape) - 2, x.shape[2:]
    weights = np.ones(rank, np.int64)
    order = range(1, rank) if a.storage_order else range(rank - 2, -1, -1)
    for k in order:
        weights[k] = weights[k - 1] * spatial[k - 1] if a.storage_order else weights[k + 1] * spatial[k + 1]
    loops, inside = [], []
    for k in range(rank):
        loops.append(f"for (i64 k{k} = 0; k{k} < {a.kernel_shape[k]}; k{k}++) {{ ")
        loops.append(f"const i64 i{k} = o{2 + k} * {a.strides[k]} + k{k} * {a.dilations[k]} - {a.pads[k]};")
        inside.append(f"i{k} >= 0 && i{k} < {spatial[k]}")
    at = ", ".join(["o0", "o1", *(f"i{k}" for k in range(rank))])
    flat = " + ".join(f"i{k} * {weights[k]}" for k in range(rank))
    lines = f"""{t} best = {limits(t)[0]};
        i64 found = -1;
        {" ".join(loops)}
        if ({" && ".join(inside)}) {{
            const {t} v = widen(p.x[at_x({at})]);
            if (v > best || found < 0) {{ best = v; found = (o0 * {x.shape[1]} + o1) * {math.prod(spatial)} + {flat}; }}
        }} {"}" * rank}
        p.y[at_y({coordinates(rank + 2)})] = narrow<{CPP[out.dtype]}>(best);
        p.i[at_i({coordinates(rank + 2)})] = found;"""
    emit_index_kernel(b, op, out.shape, {"x": x}, {"y": out, "i": where}, lines, reads=operands_of(b, op))


def _col2im(b: Builder, op: Op) -> None:
    x, out, a = needed(b, op, 0), b.target(op.value), op.attrs
    image, block = ints(b, op, 1) or [], ints(b, op, 2) or []
    rank, t = len(image), arithmetic(x.dtype)
    steps = [
        (image[k] + a.pads[k] + a.pads[rank + k] - a.dilations[k] * (block[k] - 1) - 1) // a.strides[k] + 1
        for k in range(rank)
    ]
    loops = []
    for k in range(rank):
        loops.append(
            f"for (i64 k{k} = 0; k{k} < {block[k]}; k{k}++) {{ const i64 r{k} = o{2 + k} + {a.pads[k]} - k{k} * {a.dilations[k]}; "
            f"if (r{k} < 0 || r{k} % {a.strides[k]} || r{k} / {a.strides[k]} >= {steps[k]}) continue;"
        )
    row, column = "o1", "0"
    for k in range(rank):
        row, column = f"({row} * {block[k]} + k{k})", f"({column} * {steps[k]} + r{k} / {a.strides[k]})"
    lines = f"""{t} acc = 0;
        {" ".join(loops)} acc += {t}(widen(p.x[at_x(o0, {row}, {column})])); {"}" * rank}
        p.y[at_y({coordinates(rank + 2)})] = narrow<{CPP[out.dtype]}>(acc);"""
    emit_index_kernel(b, op, out.shape, {"x": x}, {"y": out}, lines, reads=operands_of(b, op))


def _limits(b: Builder, op: Op) -> str | None:
    """Why the tactic cannot run an operator of known types, or None."""
    if op.kind == "MaxPool" and (len(op.outputs) < 2 or op.attrs.auto_pad != "NOTSET"):
        return "it is for pooling with indices and explicit pads"
    if op.kind == "DeformConv":
        dtype = next(b.graph.type(v).dtype for v in op.inputs if v is not None)
        if not is_float(dtype):
            return f"it does not interpolate {dtype.name}"
    if op.kind == "Col2Im" and any(b.graph.known(v) is None for v in op.inputs[1:]):
        return "its image and block are not known when the engine is built"
    return None


REGIONS: dict[str, Callable[[Builder, Op], None]] = {
    "MaxRoiPool": _max_roi_pool, "DeformConv": _deform_conv, "MaxPool": _pool_with_indices, "Col2Im": _col2im,
}  # fmt: skip
"""Kind -> the function that emits it."""

TACTIC = IndexKernel(REGIONS, _limits)
