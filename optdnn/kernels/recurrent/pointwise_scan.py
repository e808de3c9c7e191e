"""PointwiseScan on one generated kernel: a thread per element loops over the steps, with the states in registers.

Steps depend on each other only through registers. Operands are therefore loaded :data:`AHEAD` steps at a time, while the steps before are
computed. A step takes the latency of its arithmetic, not the latency of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optdnn.errors import InternalError
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, EXPRESSIONS, arithmetic, body
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, broadcast, merge
from optdnn.kernels.tactic import Tactic
from optdnn.ops.fused import plain_attrs
from optdnn.ops.pointwise_scan import PointwiseScanAttrs
from optdnn.types import TensorType

THREADS = 64
"""Threads of a block: few, so that a few hundred channels occupy several multiprocessors."""
AHEAD = 8
"""Number of steps for which operands are loaded together."""
POINTS_LIMIT = 1 << 31
"""Bound of the elements of a step: coordinates are computed from a 32-bit index."""
RESIDENT = 1024
"""Threads per multiprocessor up to which more threads do not slow a step down."""
LAUNCH, STEP, STAGE = 1.5e-6, 2e-8, 8e-9
"""Predicted seconds of a launch, of a step without its stages, and of a stage (the latency of its arithmetic; casts take none)."""


class PointwiseScanKernel(Tactic):
    """Any recurrence of pointwise steps, with any strides."""

    name = "pointwise_scan"

    def refuse(self, b: Builder, op: Op) -> str | None:
        missing = sorted({s.kind for s in op.attrs.stages} - EXPRESSIONS.keys())
        if missing:
            return f"there is no expression for {', '.join(missing)}"
        many = math.prod(_shape(op)) >= POINTS_LIMIT
        return "it has more elements than a kernel can count" if many else None

    def seconds(self, b: Builder, op: Op) -> float | None:
        types = [*(o.type for o in op.outputs), *(b.graph.type(v) for v in op.inputs if v is not None)]
        moved = sum(math.prod(t.static_shape) * t.dtype.itemsize for t in types)
        rounds = max(1.0, math.prod(_shape(op)) / (b.gpu.multiprocessors * RESIDENT))
        each: float = STEP + STAGE * sum(s.kind != "Cast" for s in op.attrs.stages)
        steps: int = op.attrs.steps
        return LAUNCH + max(steps * each * rounds, moved / b.gpu.bandwidth / 0.6)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        a, shape = op.attrs, _shape(op)
        operands = [b.operand(v) for v in op.inputs]
        results = [b.target(v) for v in op.values]
        if 0 in (*shape, a.steps):
            return
        first, last = a.states, a.states + len(a.axes)
        parts = [*operands[:first], *map(_at_start, operands[first:last], a.axes, a.starts, a.views), *operands[last:]]
        rows = [_first_row(x, a, port) for port, x in enumerate(results)]
        dims, strides = merge(shape, [x.strides for x in rows] + [broadcast(x, shape) for x in parts])
        if len(dims) > STRIDES_LIMIT:
            raise InternalError(f"{op.kind} {op.name!r} has {len(dims)} axes that cannot be merged")
        placed = {f"out{k}": x for k, x in enumerate(rows)} | {f"in{k}": x for k, x in enumerate(parts)}
        count, sign = math.prod(dims), -1 if a.backward else 1
        parameters = Parameters().pointer(*placed).u32(count, a.steps).sizes(*dims)
        for own in strides:
            parameters.i64(*own)
        for x, axis in zip((*results, *operands[first:last]), (*a.result_axes, *a.axes), strict=True):
            parameters.i64(sign * x.strides[axis])
        text = _source(a, rows, parts, len(dims), strides)
        launch = parameters.generated(b.arch, text, "pointwise_scan", -(-count // THREADS), THREADS)
        b.emit(op, launch, placed, op.kind, plain_attrs(op.definition, a), operands, results)


def _shape(op: Op) -> tuple[int, ...]:
    """The shape of a result at one step."""
    shape, axis = op.outputs[0].type.static_shape, op.attrs.result_axes[0]
    return (*shape[:axis], *((1,) if op.attrs.result_kept[0] else ()), *shape[axis + 1 :])


def _at_start(x: TensorView, axis: int, start: int, view: Sequence[int]) -> TensorView:
    """The view of a sequence at the first step."""
    shape = tuple(1 if i < 0 else x.shape[i] for i in view)
    return x.view(shape, tuple(0 if i < 0 else x.strides[i] for i in view), start * x.strides[axis])


def _first_row(x: TensorView, attrs: PointwiseScanAttrs, port: int) -> TensorView:
    """The view of a result at the first step: its last row if the scan goes backward."""
    axis, kept = attrs.result_axes[port], attrs.result_kept[port]
    shape = (*x.shape[:axis], *((1,) if kept else ()), *x.shape[axis + 1 :])
    strides = (*x.strides[:axis], *((0,) if kept else ()), *x.strides[axis + 1 :])
    return x.view(shape, strides, (attrs.steps - 1) * x.strides[axis] if attrs.backward else 0)


def _source(
    attrs: PointwiseScanAttrs, rows: Sequence[TensorView], parts: Sequence[TensorView], rank: int, strides: Sequence[Sequence[int]]
) -> str:  # fmt: skip
    """The kernel's text. Tensors are ``out0``, …, ``in0``, …; ``o_in0`` is an offset, ``s_in0`` are strides, ``w_in0`` is the stride of a
    step."""
    sequences = range(attrs.states, attrs.states + len(attrs.axes))
    named = [f"out{k}" for k in range(len(rows))] + [f"in{k}" for k in range(len(parts))]
    fields = [f"{'const ' if k >= len(rows) else ''}{CPP[x.dtype]}* {named[k]};" for k, x in enumerate((*rows, *parts))]
    fields += [f"u32 count, steps; Size dims[{rank}];", *(f"i64 s_{n}[{rank}];" for n in named)]
    fields += [f"i64 w_{n};" for n in (*named[: len(rows)], *(f"in{k}" for k in sequences))]
    walk = ["u32 rest = i, k;", *(f"i64 o_{n} = 0;" for n in named)]
    moving = [n for n, own in zip(named, strides, strict=True) if any(own)]
    for d in reversed(range(rank)):
        walk.append(f"k = rest % p.dims[{d}]; rest /= p.dims[{d}];" if d else "k = rest;")
        walk.append(" ".join(f"o_{n} += k * p.s_{n}[{d}];" for n in moving))
    ahead = AHEAD if len(sequences) <= 4 else AHEAD // 2
    for k, x in enumerate(parts):
        if k in sequences:
            walk.append(f"{CPP[x.dtype]} next{k}[{ahead}], now{k}[{ahead}];")
        else:
            walk.append(f"{'' if k < attrs.states else 'const '}{arithmetic(x.dtype)} v{k} = widen(p.in{k}[o_in{k}]);")
    load = _each("t", ahead, [f"next{k}[j] = p.in{k}[o_in{k} + (t + j) * p.w_in{k}];" for k in sequences])
    take = _each("at", ahead, [f"now{k}[j] = next{k}[j];" for k in sequences])
    newline = "\n    "
    return f"""struct Params {{
    {newline.join(fields)}
}};

extern "C" __global__ void __launch_bounds__({THREADS}) pointwise_scan(const __grid_constant__ Params p) {{
    launch_dependents();
    wait_for_predecessor();
    const u32 i = blockIdx.x * {THREADS} + threadIdx.x;
    if (i >= p.count) return;
    {newline.join(walk)}
    u32 t = 0;
    {load}
    for (u32 at = 0; at < p.steps; at += {ahead}) {{
        {take}
        t = at + {ahead};
        {load}
        {_each("at", ahead, _step(attrs, rows, parts))}
    }}
}}
"""


def _each(first: str, ahead: int, statements: Sequence[str]) -> str:
    """C++ of a loop that runs the statements for ``ahead`` steps from ``first`` on, as far as these steps exist."""
    inner = " ".join(statements)
    return (
        f"""#pragma unroll
    for (u32 j = 0; j < {ahead}; j++) {{ if ({first} + j < p.steps) {{ {inner} }} }}"""
        if statements
        else ""
    )


def _step(attrs: PointwiseScanAttrs, rows: Sequence[TensorView], parts: Sequence[TensorView]) -> list[str]:
    """The statements of one step."""

    def name(a: int) -> str:
        return f"v{a}" if a >= 0 else f"r{~a - 1}" if a < -1 else "v0"

    sequences = range(attrs.states, attrs.states + len(attrs.axes))
    given = [f"const {arithmetic(parts[k].dtype)} v{k} = widen(now{k}[j]);" for k in sequences]
    lines, _, _ = body(attrs.stages, [TensorType(x.dtype, x.shape) for x in parts])
    stores = [
        f"p.out{k}[o_out{k} + (at + j) * p.w_out{k}] = narrow<{CPP[x.dtype]}>({name(attrs.results[k])});"
        for k, x in enumerate(rows)
    ]
    following = [f"const {arithmetic(parts[k].dtype)} s{k} = {name(a)};" for k, a in enumerate(attrs.following)]
    return [*given, *lines, *stores, *following, *(f"v{k} = s{k};" for k in range(attrs.states))]
