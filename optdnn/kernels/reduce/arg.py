"""Generated kernels of ArgMax and ArgMin: a thread, or a block of threads, walks the axis of one output element."""

from __future__ import annotations

import math
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict
from optdnn.types import normalize_axis

THREADS = 128
BLOCK = 1024
LOADS = 8
"""Elements that a thread of a block loads before it compares them."""
LONG = 512
"""From this number of elements on, a block walks an axis."""
FEW = 4096
"""Up to this number of outputs, a block also walks an axis with elements that are not adjacent."""


class ArgExtreme(Tactic):
    """The position of the extreme element, with one thread per output element. The first NaN counts as extreme, like in NumPy."""

    name = "arg"

    def refuse(self, b: Builder, op: Op) -> str | None:
        (x,) = op.inputs
        return "a scalar has no axis" if x is None or not b.graph.type(x).dims else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        _emit(b, op, 1)


class ArgBlock(ArgExtreme):
    """The same for long axes, with one block per output element."""

    name = "arg_block"

    def refuse(self, b: Builder, op: Op) -> str | None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        if (why := super().refuse(b, op)) is not None:
            return why
        shape = op.inputs[0] and b.graph.type(op.inputs[0]).static_shape
        assert shape
        axis = normalize_axis(op.attrs.axis, len(shape))
        if shape[axis] < LONG:
            return f"an axis of {shape[axis]} elements is too short for a block"
        if math.prod(shape[axis + 1 :]) > 1 and math.prod(shape) // shape[axis] > FEW:
            return "one thread per output is enough: loads of neighboring threads coalesce"
        return None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        _emit(b, op, BLOCK)


def beats(better: str, sooner: str, v: str, i: str, best: str, found: str) -> str:
    """C++: whether element ``i`` of value ``v`` beats element ``found`` of value ``best``. The first NaN beats all others.

    ``better`` compares values, and ``sooner`` the places of equal ones: ">" or "<"."""
    less = f"{v} != {v} || {v} {better} {best} || ({v} == {best} && {i} {sooner} {found})"
    return f"{best} == {best} ? {less} : {v} != {v} && {i} {sooner} {found}"


def _emit(b: Builder, op: Op, threads: int) -> None:
    """Emits the launch with ``threads`` threads per output element."""
    x, out, a = b.operand(op.inputs[0]), b.target(op.value), op.attrs
    axis = normalize_axis(a.axis, len(x.shape))
    kept = [i for i in range(len(x.shape)) if i != axis]
    place = [out.strides[i] for i in kept] if a.keepdims else list(out.strides)
    dims, (sx, so) = merge([x.shape[i] for i in kept], [[x.strides[i] for i in kept], place])
    count, t = math.prod(dims), arithmetic(x.dtype)
    if not out.size:
        return
    better, sooner = ">" if op.kind == "ArgMax" else "<", ">" if a.select_last_index else "<"

    mine, other = ("values[threadIdx.x]", "places[threadIdx.x]"), ("values[next]", "places[next]")
    head = f"""struct Params {{ const {CPP[x.dtype]}* x; {CPP[out.dtype]}* y; u32 count; Size dims[{len(dims)}]; i64 so[{len(dims)}], sx[{len(dims)}], step; }};
"""
    text = head + (_THREAD if threads == 1 else _BLOCK).format(
        type=t, length=x.shape[axis], walk=walk("q", "index", "dims", len(dims), [("from", "sx"), ("to", "so")]),
        threads=THREADS if threads == 1 else threads, better=beats(better, sooner, "v", "i", "best", "found"),
        better_next=beats(better, sooner, *other, *mine),
        better_chunk=beats(better, sooner, "v[k]", "i", "best", "found"),
        loads=LOADS,
    )  # fmt: skip
    grid = -(-count // THREADS) if threads == 1 else count
    parameters = Parameters().pointer("x", "y").u32(count).sizes(*dims).i64(*so, *sx, x.strides[axis])
    launch = parameters.generated(b.arch, text, "arg", grid, THREADS if threads == 1 else threads)
    b.emit(op, launch, {"x": x, "y": out}, op.kind, attrs_dict(a), [x], [out])


_THREAD = """
extern "C" __global__ void __launch_bounds__({threads}) arg(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * {threads} + threadIdx.x;
    i64 from = 0, to = 0;
    {walk}
    wait_for_predecessor();
    if (index >= p.count) return;
    {type} best = widen(p.x[from]);
    int found = 0;
    for (int i = 1; i < {length}; i++) {{
        const {type} v = widen(p.x[from + i * p.step]);
        if ({better}) {{ best = v; found = i; }}
    }}
    p.y[to] = found;
}}
"""
_BLOCK = """
extern "C" __global__ void __launch_bounds__({threads}) arg(const __grid_constant__ Params p) {{
    __shared__ {type} values[{threads}];
    __shared__ int places[{threads}];
    launch_dependents();
    const u32 index = blockIdx.x;
    i64 from = 0, to = 0;
    {walk}
    wait_for_predecessor();
    {type} best = 0;
    int found = -1;
    for (int begin = threadIdx.x; begin < {length}; begin += {threads} * {loads}) {{
        {type} v[{loads}];
        #pragma unroll
        for (int k = 0; k < {loads}; k++) {{
            const int i = begin + k * {threads};
            v[k] = widen(p.x[from + (i < {length} ? i : begin) * p.step]);
        }}
        #pragma unroll
        for (int k = 0; k < {loads}; k++) {{
            const int i = begin + k * {threads};
            if (i < {length} && (found < 0 || ({better_chunk}))) {{ best = v[k]; found = i; }}
        }}
    }}
    values[threadIdx.x] = best;
    places[threadIdx.x] = found;
    for (u32 half = {threads} / 2; half; half /= 2) {{  // threads without an element are the last ones
        __syncthreads();
        const u32 next = threadIdx.x + half;
        if (threadIdx.x < half && places[next] >= 0 && ({better_next})) {{
            values[threadIdx.x] = values[next];
            places[threadIdx.x] = places[next];
        }}
    }}
    if (threadIdx.x == 0) p.y[to] = places[0];
}}
"""
