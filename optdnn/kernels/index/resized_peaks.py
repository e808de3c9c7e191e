"""ResizedPeaks on one generated kernel: a block resizes one channel of one image, row by row, and keeps only the largest element.

A warp combines the source rows of a resized row in shared memory, then its lanes take the pixels. Positions are quotients of integers,
so that their whole part is exact for any size. Nothing of the resized image is written to memory.
"""

from __future__ import annotations

import math
from typing import Any

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.index.index_kernel import needed
from optdnn.kernels.index.sampling import LAUNCH
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.reduce.arg import beats
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict
from optdnn.ops.resized_peaks import TAPS, ResizedPeaksAttrs
from optdnn.runtime.reference.resized_peaks import MOST_PIXELS

WARPS = 8
THREADS = 32 * WARPS
MOST_COLUMNS = 512
"""Most columns of a source image: each warp keeps one row of it in shared memory."""
SIDE = 200
"""Rows and columns that the cost model assumes of a resized image."""
RATE = 5e11
"""Pixels of resized images per second, as the cost model assumes."""


class ResizedPeak(Tactic):
    """The largest element of each channel, with a block per channel of an image."""

    name = "resized_peaks"

    def refuse(self, b: Builder, op: Op) -> str | None:
        shape = needed(b, op, 0).shape
        if 0 in shape:
            return "it has no elements"
        columns = shape[3]
        return f"an image of {columns} columns is too wide for shared memory" if columns > MOST_COLUMNS else None

    def seconds(self, b: Builder, op: Op) -> float | None:
        return LAUNCH + math.prod(op.outputs[0].type.static_shape) * SIDE * SIDE / RATE

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        x, sizes = (b.operand(v) for v in op.inputs)
        places, values = (b.target(Value(op.id, k)) for k in (0, 1))
        images, channels, height, width = x.shape
        t, a = arithmetic(x.dtype), op.attrs
        mine, other = ("found[threadIdx.x]", "at[threadIdx.x]"), ("found[next]", "at[next]")
        text = _TEXT.format(
            element=CPP[x.dtype], type=t, width=width, channels=channels, threads=THREADS, warps=WARPS, taps=TAPS[a.mode],
            most=MOST_PIXELS, nothing=literal(math.nan, t),
            rows=_taps(a, "y", "y", "tall", height, t), columns=_taps(a, "x", "c", "wide", width, t),
            better=beats(">", "<", "v", "i", "best", "place"), better_next=beats(">", "<", *other, *mine),
        )  # fmt: skip
        parameters = Parameters().pointer("x", "sizes", "places", "values")
        for view in (x, sizes, places, values):
            parameters.i64(*view.strides)
        launch = parameters.generated(b.arch, text, "peaks", images * channels, THREADS)
        placed = {"x": x, "sizes": sizes, "places": places, "values": values}
        b.emit(op, launch, placed, op.kind, attrs_dict(a), [x, sizes], [places, values])


_POSITIONS = {
    "half_pixel": ("(2 * {i} + 1) * {source} - {size}", "2 * {size}"),
    "pytorch_half_pixel": ("({size} > 1 ? (2 * {i} + 1) * {source} - {size} : 0)", "2 * {size}"),
    "align_corners": ("{i} * ({source} - 1)", "({size} > 1 ? {size} - 1 : 1)"),
    "asymmetric": ("{i} * {source}", "{size}"),
}
"""C++: the position of element ``i`` of ``size`` ones among the ``source`` ones, as a quotient."""

_WEIGHTS = {
    "linear": ("1 - {p}", "{p}"),
    "cubic": (
        "(({a} * (1 + {p}) - 5 * {a}) * (1 + {p}) + 8 * {a}) * (1 + {p}) - 4 * {a}",
        "(({a} + 2) * {p} - ({a} + 3)) * {p} * {p} + 1",
        "(({a} + 2) * (1 - {p}) - ({a} + 3)) * (1 - {p}) * (1 - {p}) + 1",
        "(({a} * (2 - {p}) - 5 * {a}) * (2 - {p}) + 8 * {a}) * (2 - {p}) - 4 * {a}",
    ),
}
"""C++: the weights of the taps of a position with the fraction ``p``."""


def _taps(a: ResizedPeaksAttrs, axis: str, i: str, size: str, source: int, number: str) -> str:
    """C++ that computes the taps of element ``i`` of an axis: their places ``at_axis[k]`` and weights ``w_axis[k]``."""
    whole, per = (e.format(i=i, size=size, source=source) for e in _POSITIONS[a.coordinate_transformation_mode])
    weights = [w.format(p=f"part_{axis}", a=literal(a.cubic_coeff_a, number)) for w in _WEIGHTS[a.mode]]
    lines = [
        f"const i64 whole_{axis} = {whole}, per_{axis} = {per};",
        f"const i64 base_{axis} = (whole_{axis} >= 0 ? whole_{axis} : whole_{axis} - per_{axis} + 1) / per_{axis};",
        f"const {number} part_{axis} = {number}(whole_{axis} - base_{axis} * per_{axis}) / {number}(per_{axis});",
        f"{number} w_{axis}[{len(weights)}]; i64 at_{axis}[{len(weights)}];",
    ]
    for k, weight in enumerate(weights):
        place = f"base_{axis} + {k - len(weights) // 2 + 1}"
        lines.append(f"w_{axis}[{k}] = {weight};")
        lines.append(f"at_{axis}[{k}] = {place} < 0 ? i64(0) : {place} < {source} ? {place} : i64({source - 1});")
    return " ".join(lines)


_TEXT = """struct Params {{
    const {element}* x; const i64* sizes; i64* places; {element}* values;
    i64 sx[4], ss[2], sp[2], sv[2];
}};
extern "C" __global__ void __launch_bounds__({threads}) peaks(const __grid_constant__ Params p) {{
    __shared__ {type} rows[{warps} * {width}];
    __shared__ {type} found[{threads}];
    __shared__ i64 at[{threads}];
    launch_dependents();
    const i64 image = blockIdx.x / {channels}, channel = blockIdx.x % {channels};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_predecessor();
    const i64 from = image * p.sx[0] + channel * p.sx[1];
    const i64 tall = p.sizes[image * p.ss[0]], wide = p.sizes[image * p.ss[0] + p.ss[1]];
    const i64 last = tall > 0 && tall <= {most} && wide > 0 && wide <= {most} ? tall : i64(0);
    {type} best = {nothing};
    i64 place = -1;
    for (i64 top = 0; top < last; top += {warps}) {{
        const i64 y = top + warp;
        {rows}
        for (int c = lane; c < {width}; c += 32) {{
            {type} sum = 0;
            #pragma unroll
            for (int k = 0; k < {taps}; k++) sum += w_y[k] * {type}(widen(p.x[from + at_y[k] * p.sx[2] + c * p.sx[3]]));
            rows[warp * {width} + c] = sum;
        }}
        __syncthreads();
        for (i64 c = lane; y < last && c < wide; c += 32) {{
            {columns}
            {type} v = 0;
            #pragma unroll
            for (int k = 0; k < {taps}; k++) v += w_x[k] * rows[warp * {width} + at_x[k]];
            const i64 i = y * wide + c;
            if (place < 0 || ({better})) {{ best = v; place = i; }}
        }}
        __syncthreads();
    }}
    found[threadIdx.x] = best;
    at[threadIdx.x] = place;
    for (u32 half = {threads} / 2; half; half /= 2) {{
        __syncthreads();
        const u32 next = threadIdx.x + half;
        if (threadIdx.x < half && at[next] >= 0 && (at[threadIdx.x] < 0 || ({better_next}))) {{
            found[threadIdx.x] = found[next];
            at[threadIdx.x] = at[next];
        }}
    }}
    if (threadIdx.x == 0) {{
        p.places[image * p.sp[0] + channel * p.sp[1]] = at[0] < 0 ? i64(0) : at[0];
        p.values[image * p.sv[0] + channel * p.sv[1]] = narrow<{element}>(found[0]);
    }}
}}
"""
