"""CumSum and CumProd over long axes, generated: a block of threads walks a line, in pieces of a few neighbouring elements each."""

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

THREADS, PIECE = 256, 4
LONG = 128
"""Elements of an axis from which on a block walks it: fewer are for one thread."""
FEW = 16384
"""Lines up to which a block walks each: more of them fill the GPU with a thread for each."""
COMBINED = {"CumSum": ("{T}(0)", "{a} + {b}"), "CumProd": ("{T}(1)", "{a} * {b}")}
"""Kind -> what a line begins with, and how two parts of it combine."""


class BlockScan(Tactic):
    """CumSum and CumProd over a known, long axis: one block of threads for each line. Sums are added up in another order than one
    after the other, the same in each run."""

    name = "scan_block"

    def refuse(self, b: Builder, op: Op) -> str | None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        known, t = b.graph.known(op.input(1)), op.outputs[0].type
        if known is None:
            return "its axis is not known when the engine is built"
        if t.dtype not in CPP:
            return f"there is no arithmetic on {t.dtype.name}"
        shape = t.static_shape
        if not shape:
            return "a scalar has no axis"
        length = shape[normalize_axis(int(known.reshape(-1)[0]), len(shape))]
        if length < LONG:
            return f"an axis of {length} elements is too short for a block"
        if length >= 1 << 30:
            return "its lines have more elements than the kernel counts"
        lines = math.prod(shape) // length
        return f"{lines} lines are enough for a thread each" if lines > FEW else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        x, axis, out, a = b.operand(op.inputs[0]), b.operand(op.inputs[1]), b.target(op.value), op.attrs
        known = b.graph.known(op.input(1))
        assert known is not None
        along, t = normalize_axis(int(known.reshape(-1)[0]), len(out.shape)), arithmetic(x.dtype)
        kept = [i for i in range(len(x.shape)) if i != along]
        dims, (so, sx) = merge([x.shape[i] for i in kept], [[s.strides[i] for i in kept] for s in (out, x)])
        lines, length = math.prod(dims), x.shape[along]
        if not out.size:
            return
        first, combine = COMBINED[op.kind]
        head = (
            f"struct Params {{ const {CPP[x.dtype]}* x; {CPP[out.dtype]}* y; u32 dims[{len(dims)}]; "
            f"i64 so[{len(dims)}], sx[{len(dims)}], step, step_out; }};\n"
        )
        text = head + _TEXT.format(
            T=t, Y=CPP[out.dtype], length=length, threads=THREADS, piece=PIECE, first=first.format(T=t),
            walk=walk("q", "blockIdx.x", "dims", len(dims), [("from", "sx"), ("to", "so")]),
            at=f"{length - 1} - i" if a.reverse else "i", early=int(a.exclusive),
            grown=combine.format(a="sum", b="v[k]"), before=combine.format(a="other", b="parts[threadIdx.x]"),
            own=combine.format(a="carry", b="ahead"), next=combine.format(a="carry", b=f"parts[{THREADS - 1}]"),
            further=combine.format(a="acc", b="v[k]"),
        )  # fmt: skip
        parameters = Parameters().pointer("x", "y").u32(*dims).i64(*so, *sx, x.strides[along], out.strides[along])
        launch = parameters.generated(b.arch, text, "scan", lines, THREADS)
        b.emit(op, launch, {"x": x, "y": out}, op.kind, attrs_dict(a), [x, axis], [out])


_TEXT = """
extern "C" __global__ void __launch_bounds__({threads}) scan(const __grid_constant__ Params p) {{
    __shared__ {T} parts[{threads}];
    launch_dependents();
    wait_for_predecessor();
    i64 from = 0, to = 0;
    {walk}
    {T} carry = {first};
    for (int begin = 0; begin < {length}; begin += {threads} * {piece}) {{
        const int mine = begin + int(threadIdx.x) * {piece};
        {T} v[{piece}], sum = {first};
        #pragma unroll
        for (int k = 0; k < {piece}; k++) {{
            const int i = mine + k < {length} ? mine + k : {length} - 1;
            v[k] = widen(p.x[from + ({at}) * p.step]);
        }}
        #pragma unroll
        for (int k = 0; k < {piece}; k++) {{
            if (mine + k < {length}) sum = {grown};
        }}
        parts[threadIdx.x] = sum;
        __syncthreads();
        for (u32 distance = 1; distance < {threads}; distance *= 2) {{
            {T} other = {first};
            if (threadIdx.x >= distance) other = parts[threadIdx.x - distance];
            __syncthreads();
            if (threadIdx.x >= distance) parts[threadIdx.x] = {before};
            __syncthreads();
        }}
        {T} ahead = {first};
        if (threadIdx.x > 0) ahead = parts[threadIdx.x - 1];
        {T} acc = {own};
        #pragma unroll
        for (int k = 0; k < {piece}; k++) {{
            const int i = mine + k;
            if (i < {length}) {{
                const {T} old = acc;
                acc = {further};
                p.y[to + ({at}) * p.step_out] = narrow<{Y}>({early} ? old : acc);
            }}
        }}
        carry = {next};
        __syncthreads();
    }}
}}
"""
