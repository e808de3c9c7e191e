"""ArgMax and ArgMin, generated: one thread walks the axis of one output element."""

from __future__ import annotations

import math
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.pointwise import CPP, arithmetic
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict
from optdnn.types import normalize_axis

THREADS = 128


class ArgExtreme(Tactic):
    """The position of the extreme element; the first NaN is one, as in NumPy."""

    name = "arg"

    def refuse(self, b: Builder, op: Op) -> str | None:
        (x,) = op.inputs
        return "a scalar has no axis" if x is None or not b.graph.type(x).dims else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out, a = b.operand(op.inputs[0]), b.target(op.value), op.attrs
        axis = normalize_axis(a.axis, len(x.shape))
        kept = [i for i in range(len(x.shape)) if i != axis]
        place = [out.strides[i] for i in kept] if a.keepdims else list(out.strides)
        dims, (so, sx) = merge([x.shape[i] for i in kept], [place, [x.strides[i] for i in kept]])
        count, t = math.prod(dims), arithmetic(x.dtype)
        if not out.size:
            return
        better = ">" if op.kind == "ArgMax" else "<"
        equal = "=" if a.select_last_index else ""
        nan = f"v != v && (best == best{' || true' if a.select_last_index else ''})"
        text = f"""struct Params {{ const {CPP[x.dtype]}* x; {CPP[out.dtype]}* y; u32 count, dims[{len(dims)}]; i64 so[{len(dims)}], sx[{len(dims)}], step; }};

extern "C" __global__ void __launch_bounds__({THREADS}) arg(const __grid_constant__ Params p) {{
    launch_dependents();
    wait_for_predecessor();
    const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    if (index >= p.count) return;
    i64 from = 0, to = 0;
    {walk("q", "index", "dims", len(dims), [("from", "sx"), ("to", "so")])}
    {t} best = widen(p.x[from]);
    i64 found = 0;
    for (int i = 1; i < {x.shape[axis]}; i++) {{
        const {t} v = widen(p.x[from + i * p.step]);
        if ((best == best && v {better}{equal} best) || ({nan})) {{ best = v; found = i; }}
    }}
    p.y[to] = found;
}}
"""
        parameters = Parameters().pointer("x", "y").u32(count, *dims).i64(*so, *sx, x.strides[axis])
        launch = parameters.generated(b.arch, text, "arg", -(-count // THREADS), THREADS)
        b.emit(op, launch, {"x": x, "y": out}, op.kind, attrs_dict(a), [x], [out])
