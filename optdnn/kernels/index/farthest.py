"""FarthestPoints: a block for each cloud keeps its points and their distances in registers, and chooses one point after another.

Each choice takes one barrier: warps find their own best point by shuffles and store it, and every warp then finds the best of all.
"""

from __future__ import annotations

import math
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.index.index_kernel import needed, shape_at
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict
from optdnn.ops.farthest import block_of, fits

LAUNCH_S, CHOICE_S, WARP_S, COORDINATE_S = 2e-6, 0.07e-6, 0.0237e-6, 3e-9
"""Seconds of a launch, of a choice, of each warp in a choice (512 choices of 1,024 points 424 us, 128 of 512 points 60 us, H200), and of
each coordinate that a thread holds (an estimate)."""


class FarthestKernel(Tactic):
    """One launch for all choices."""

    name = "farthest"

    def refuse(self, b: Builder, op: Op) -> str | None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        _, points, size = shape_at(b, op, 0)
        if fits(points, size, needed(b, op, 0).dtype):
            return None
        return f"a block holds fewer points of {size} coordinates than {points}"

    def seconds(self, b: Builder, op: Op) -> float | None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        clouds, points, size = shape_at(b, op, 0)
        threads, count = block_of(points), op.attrs.count
        held, waves = -(-points // threads) * size, -(-clouds // b.gpu.multiprocessors)
        choice = CHOICE_S + threads / 32 * WARP_S + held * COORDINATE_S
        return float(LAUNCH_S + waves * count * choice)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        x, nearest, first = (needed(b, op, k) for k in range(3))
        out = b.target(op.value)
        clouds, points, size = x.shape
        threads = block_of(points)
        warps, t = threads // 32, arithmetic(x.dtype)
        text = _TEXT.format(
            t=t, point=CPP[x.dtype], index=CPP[first.dtype], out=CPP[out.dtype], threads=threads, warps=warps, shared=2 * warps,
            each=-(-points // threads), size=size, points=points, count=op.attrs.count,
            least=literal(-math.inf, t), of_warp=_best_of(32, t), of_block=_best_of(warps, t),
        )  # fmt: skip
        tensors = {"x": x, "nearest": nearest, "first": first, "y": out}
        parameters = Parameters().pointer(*tensors)
        parameters.i64(*x.strides, *nearest.strides, *first.strides, *out.strides)
        launch = parameters.generated(b.arch, text, "farthest", clouds, threads)
        b.emit(op, launch, tensors, op.kind, attrs_dict(op.attrs), [x, nearest, first], [out])


_TEXT = """struct Params {{
    const {point}* x; const {point}* nearest; const {index}* first; {out}* y;
    i64 sx[3], sn[2], sf[1], sy[2];
}};
extern "C" __global__ void __launch_bounds__({threads}) farthest(const __grid_constant__ Params p) {{
    __shared__ {t} values[{shared}];  // of a choice and of the next one: no warp may still read what another one writes
    __shared__ int places[{shared}];
    launch_dependents();
    const i64 cloud = blockIdx.x;
    {t} held[{each} * {size}], nearest[{each}];
    wait_for_predecessor();
    #pragma unroll
    for (int k = 0; k < {each}; k++) {{
        const int i = threadIdx.x + k * {threads}, at = i < {points} ? i : 0;
        nearest[k] = widen(p.nearest[cloud * p.sn[0] + at * p.sn[1]]);
        #pragma unroll
        for (int d = 0; d < {size}; d++) held[k * {size} + d] = widen(p.x[cloud * p.sx[0] + at * p.sx[1] + d * p.sx[2]]);
    }}
    int found = p.first[cloud * p.sf[0]];
    found += found < 0 ? {points} : 0;
    found = found < 0 ? 0 : found < {points} ? found : {points} - 1;
    for (int choice = 0; choice < {count}; choice++) {{
        {t} chosen[{size}];
        #pragma unroll
        for (int d = 0; d < {size}; d++) chosen[d] = widen(p.x[cloud * p.sx[0] + found * p.sx[1] + d * p.sx[2]]);
        {t} best = {least};
        found = {points} - 1;
        #pragma unroll
        for (int k = 0; k < {each}; k++) {{
            const int i = threadIdx.x + k * {threads};
            {t} distance = 0;
            #pragma unroll
            for (int d = 0; d < {size}; d++) {{
                const {t} way = held[k * {size} + d] - chosen[d];
                distance += way * way;
            }}
            nearest[k] = distance < nearest[k] ? distance : nearest[k];
            if (i < {points} && nearest[k] > best) {{ best = nearest[k]; found = i; }}
        }}
        {of_warp}
        const int from = choice % 2 * {warps};
        if (threadIdx.x % 32 == 0) {{ values[from + threadIdx.x / 32] = best; places[from + threadIdx.x / 32] = found; }}
        __syncthreads();
        best = values[from + threadIdx.x % {warps}];
        found = places[from + threadIdx.x % {warps}];
        {of_block}
        if (threadIdx.x == 0) p.y[cloud * p.sy[0] + choice * p.sy[1]] = found;
    }}
}}
"""


def _best_of(lanes: int, t: str) -> str:
    """C++: every lane gets the largest of the values ``best`` of so many lanes, and the first place ``found`` of it."""
    step = """{{ const {t} v = __shfl_xor_sync(0xffffffffu, best, {s}); const int i = __shfl_xor_sync(0xffffffffu, found, {s});
          if (v > best || (v == best && i < found)) {{ best = v; found = i; }} }}"""
    return "\n        ".join(step.format(t=t, s=1 << k) for k in reversed(range(lanes.bit_length() - 1)))
