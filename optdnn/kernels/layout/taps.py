"""Resize and Pad as one generated kernel: each axis has a table of places and weights that is known when the engine is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.tap_forms import ThreadWork, thread_work
from optdnn.kernels.layout.tap_tables import AxisTable, Taps
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.pointwise import AHEAD

THREADS = 256


def emit_taps(
    b: Builder, op: Op, x: TensorView, out: TensorView, tables: Sequence[AxisTable], fill: float, *, kind: str, attrs: dict[str, Any],
    reads: Sequence[TensorView | None],
) -> None:  # fmt: skip
    """Emits ``out[o] = sum over taps of (product of weights) * x[indices]`` over the axes of ``tables``; the other axes are copied."""
    if not out.size:
        return
    taps = Taps(x, out, {table.axis: table for table in tables}, fill)
    work = thread_work(b, taps)
    fields, arguments = _constants(b, op, taps, {} if work.table is None else {work.table.axis: work.table})
    placed = {"x": x, "y": out, **{f"a{i}": a for i, a in enumerate(arguments)}}
    count = math.prod(-(-n // work.wide.get(i, 1)) for i, n in enumerate(out.shape))
    parameters = Parameters().pointer(*placed).u32(count).i64(*(x.strides or (0,)), *(out.strides or (0,)))
    blocks = -(-count // (THREADS * work.ahead))
    launch = parameters.generated(b.arch, _source(taps, work, fields), "taps", blocks, THREADS)
    b.emit(op, launch, placed, kind, attrs, reads, [out])


def _constants(b: Builder, op: Op, taps: Taps, others: Mapping[int, AxisTable]) -> tuple[list[str], list[TensorView]]:
    """The kernel's parameter fields of the tables, and their constants. ``others``: tables that replace those of their axes."""
    fields, arguments = [], []
    name, t = op.outputs[0].name, taps.accumulator
    for i, table in sorted({**taps.tables, **others}.items()):
        arguments.append(b.constant(np.ascontiguousarray(table.index.astype(np.int32)), f"{name}.index{i}"))
        fields.append(f"const int* n{i};")
        if table.weight is not None:
            weight = table.weight.astype(np.float64 if t == "double" else np.float32)
            arguments.append(b.constant(np.ascontiguousarray(weight), f"{name}.weight{i}"))
            fields.append(f"const {t}* f{i};")
    return fields, arguments


def _source(taps: Taps, work: ThreadWork, fields: Sequence[str]) -> str:
    """The kernel's text: a thread computes its place in the result, sums, and stores."""
    x, out = CPP[taps.x.dtype], CPP[taps.out.dtype]
    rank = max(len(taps.out.shape), 1)
    split = ["u32 rest = index;"]
    for i in taps.order:
        n = taps.out.shape[i]
        wide = work.wide.get(i, 1)
        split.append(
            f"const int o{i} = rest % {-(-n // wide)}u{f' * {wide}' if wide > 1 else ''}; rest /= {-(-n // wide)}u;"
        )
    inside = f"""const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    {" ".join(split)}
    wait_for_predecessor();
    if (index >= p.count) return;
    {work.text}"""
    if work.later:
        places = f"#pragma unroll\n    for (int u = 0; u < {AHEAD}; u++)"
        inside = f"""const u32 first = blockIdx.x * {THREADS * AHEAD} + threadIdx.x;
    {work.kept}
    wait_for_predecessor();
    {places} {{
        const u32 index = first + u * {THREADS} < p.count ? first + u * {THREADS} : p.count - 1;
        {" ".join(split)}
        {work.text}
    }}
    {places} {{
        if (first + u * {THREADS} >= p.count) break;
        {work.later}
    }}"""
    return f"""struct Params {{ const {x}* x; {out}* y; {" ".join(fields)} u32 count; i64 sx[{rank}], sy[{rank}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) taps(const __grid_constant__ Params p) {{
    launch_dependents();
    {inside}
}}
"""
