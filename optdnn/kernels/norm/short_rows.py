"""The tactic of L2 norms of many short rows, generated: a few lanes of a warp share a row, which is read once, wherever it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.pointwise import CPP, body, broadcast, literal, merge, single
from optdnn.kernels.tactic import OwnTactic, Region, readers
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.types import BF16, FP16, FP32, TensorType, normalize_axis

THREADS = 256
ACCESS = 16
"""Bytes that a thread takes of a row."""
SLOTS = 3
"""Operands of a norm's meaning in front of those that stages read: input, scale and bias."""


class ShortRows(OwnTactic):
    """LpNormalization of order 2 over rows of 16 bytes to 512, with a pointwise operator on constants behind it (cosine attention
    multiplies the queries or keys of each head by its temperature)."""

    name = "short_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        shape, item = t.static_shape, t.dtype.itemsize
        if t.dtype not in (FP16, BF16, FP32) or op.attrs.p != 2:
            return "it is for the L2 norm of floats of 16 or 32 bits"
        if normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
            return "its rows are not along the last axis"
        lanes = shape[-1] * item // ACCESS
        if shape[-1] * item % ACCESS or lanes & (lanes - 1) or not 1 <= lanes <= 32:
            return f"rows of {shape[-1]} elements are not shared by a power of two of lanes"
        if not 0 < math.prod(shape) < 1 << 32:
            return "no rows, or more elements than it counts"
        places = [b.operand(op.inputs[0]), b.result(self._last(b, op)[0].value)]
        units = [(x.offset, *x.strides[:-1]) for x in places]
        if any(x.strides[-1] != 1 for x in places) or any(n * item % ACCESS for unit in units for n in unit):
            return "its rows do not lie in whole accesses of 16 bytes"
        return None

    @staticmethod
    def _last(b: Builder, op: Op) -> tuple[Op, list[Stage]]:
        """The operator that gives the result, and its stages: a pointwise one that reads the norm and constants, or the norm itself."""
        user, t = b.graph.sole_user(op.value), op.outputs[0].type
        if user is None or op.value in b.reserved or not user.definition.traits.pointwise or user.inputs[0] != op.value:
            return op, []
        others = [b.graph.constant_value(v) for v in user.inputs[1:]]
        if user.outputs[0].type != t or any(a is None or a.dtype != t.dtype for a in others):
            return op, []
        return user, list(user.attrs.epilogue if user.kind == "Pointwise" else single(user))

    def region(self, b: Builder, op: Op) -> Region:
        """The norm, and the pointwise operator behind it."""
        last, _ = self._last(b, op)
        return Region(op) if last is op else Region(op, after=(last,))

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """What reads the result: perhaps a pointwise operator."""
        return readers(graph, op)

    def place(self, b: Builder, op: Op) -> None:
        """The result of the last operator."""
        b.target(self._last(b, op)[0].value)

    def emit(self, b: Builder, op: Op, config: object) -> None:
        last, stages = self._last(b, op)
        x, out = b.operand(op.inputs[0]), b.target(last.value)
        extras = [b.operand(v) for v in last.inputs[1:]] if stages else []
        self._launch(b, op, last, stages, x, out, extras)

    def _launch(
        self, b: Builder, op: Op, last: Op, stages: Sequence[Stage], x: TensorView, out: TensorView, extras: Sequence[TensorView],
    ) -> None:  # fmt: skip
        names = ["y", "x", *(f"e{i}" for i in range(1, len(extras) + 1))]
        tensors = [out, x, *extras]
        spread = [broadcast(p, x.shape) for p in tensors]
        dims, strides = merge(x.shape[:-1], [s[:-1] for s in spread])
        rows = math.prod(dims)
        lanes = x.shape[-1] * x.dtype.itemsize // ACCESS
        parameters = Parameters().pointer(*names).u32(rows, *dims)
        for own, whole in zip(strides, spread, strict=True):
            parameters.i64(*own, whole[-1])
        text = _source(op.attrs.epsilon, stages, tensors, names, len(dims), lanes)
        launch = parameters.generated(b.arch, text, "short_rows", -(-rows // (THREADS // lanes)), THREADS)
        kind, attrs = op.kind, attrs_dict(op.attrs)
        reads: list[TensorView | None] = [x]
        if stages:
            moved = [replace(s, args=tuple(a if a is None or a < 1 else a + SLOTS - 1 for a in s.args)) for s in stages]
            attrs = {"norm": op.kind, **attrs, "epilogue": plain_stages(moved), "arity": SLOTS}
            kind, reads = "ActivatedNorm", [x, None, None, *extras]
        b.emit(last, launch, dict(zip(names, tensors, strict=True)), kind, attrs, reads, [out])


def _source(
    epsilon: float, stages: Sequence[Stage], tensors: Sequence[TensorView], names: Sequence[str], rank: int, lanes: int
) -> str:
    """The kernel: 16 bytes of a row for each thread, their squares added over the lanes of the row, and the stages."""
    t, dtype = "float", tensors[1].dtype
    c, width = CPP[dtype], ACCESS // dtype.itemsize
    lines, result, _ = body(stages, [TensorType(p.dtype, p.shape) for p in tensors[1:]])
    fields = [f"{'' if n == 'y' else 'const '}{c}* {n};" for n in names]
    fields += [f"u32 rows, dims[{rank}];", *(f"i64 s{n}[{rank}], step_{n};" for n in names)]
    loads = " ".join(f"const {t} v{n[1:]} = widen(p.{n}[b{n} + (first + j) * p.step_{n}]);" for n in names[2:])
    least = f"max_nan(sqrt(sum), {literal(epsilon, t)})" if epsilon else "sqrt(sum)"
    return f"""struct Params {{ {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({THREADS}) short_rows(const __grid_constant__ Params p) {{
    launch_dependents();
    wait_for_predecessor();
    const u32 row = blockIdx.x * {THREADS // lanes} + threadIdx.x / {lanes};
    const u32 first = threadIdx.x % {lanes} * {width};
    const bool live = row < p.rows;
    {" ".join(f"i64 b{n} = 0;" for n in names)}
    {{ {walk("q", "live ? row : 0", "dims", rank, [("b" + n, "s" + n) for n in names])} }}
    const Pack<{c}, {width}> x(p.x + bx + first);
    {t} sum = 0;
    #pragma unroll
    for (int j = 0; j < {width}; j++) sum += widen(x.lane[j]) * widen(x.lane[j]);
    #pragma unroll
    for (int m = {lanes // 2}; m; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    const {t} norm = {least}, factor = {t}(1) / (norm == 0 ? {t}(1) : norm);
    Pack<{c}, {width}> y;
    #pragma unroll
    for (int j = 0; j < {width}; j++) {{
        const {t} v0 = widen(x.lane[j]) * factor; {loads}
        {" ".join(lines)}
        y.lane[j] = narrow<{c}>({result});
    }}
    if (live) y.store(p.y + by + first);
}}
"""
