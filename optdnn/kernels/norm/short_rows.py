"""The tactic of norms of many short rows, generated: a few lanes of a warp share a row, which is read once, wherever it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.pointwise import CPP, body, literal, single
from optdnn.kernels.pointwise.strides import broadcast, merge
from optdnn.kernels.tactic import Region, Tactic, readers
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.types import BF16, FP16, FP32, TensorType, normalize_axis

THREADS = 256
ACCESS = 16
"""Bytes that a thread takes of a row."""
SLOTS = 3
"""Operands of a norm's meaning in front of those that stages read: input, scale and bias."""


class ShortRows(Tactic):
    """L2, layer and RMS norms over rows of 16 bytes to 512, with a pointwise operator on constants after it (cosine attention
    multiplies the queries or keys of each head by its temperature)."""

    name = "short_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        shape, item = t.static_shape, t.dtype.itemsize
        if t.dtype not in (FP16, BF16, FP32) or (op.kind == "LpNormalization" and op.attrs.p != 2):
            return "it is for norms (L2, not L1) of floats of 16 or 32 bits"
        parameters = [v for v in op.inputs[1:] if v is not None]
        if any(b.graph.constant_value(v) is None or b.graph.type(v).static_shape != shape[-1:] for v in parameters):
            return "its scale and bias are not constant rows"
        if any(b.graph.uses(Value(op.id, port)) for port in range(1, len(op.outputs))):
            return "it does not keep the statistics"
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
        """The norm, and the pointwise operator after it."""
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
        given: list[TensorView | None] = [None, None]
        for k, value in enumerate(op.inputs[1:3]):
            array = b.graph.constant_value(value)
            given[k] = None if array is None else b.constant(array.astype(np.float32), f"{op.outputs[0].name}.norm{k}")
        parts = {name: p for name, p in zip(("scale", "bias"), given, strict=True) if p is not None}
        names = ["y", "x", *(f"e{i}" for i in range(1, len(extras) + 1))]
        tensors = [out, x, *extras]
        spread = [broadcast(p, x.shape) for p in tensors]
        dims, strides = merge(x.shape[:-1], [s[:-1] for s in spread])
        rows = math.prod(dims)
        lanes = x.shape[-1] * x.dtype.itemsize // ACCESS
        parameters = Parameters().pointer(*names, *parts).u32(rows, *dims)
        for own, whole in zip(strides, spread, strict=True):
            parameters.i64(*own, whole[-1])
        text = _source(op, list(parts), stages, tensors, names, len(dims), lanes)
        launch = parameters.generated(b.arch, text, "short_rows", -(-rows // (THREADS // lanes)), THREADS)
        kind, attrs = op.kind, attrs_dict(op.attrs)
        reads: list[TensorView | None] = [x, *parts.values()]
        if stages:
            moved = [replace(s, args=tuple(a if a is None or a < 1 else a + SLOTS - 1 for a in s.args)) for s in stages]
            attrs = {"norm": op.kind, **attrs, "epilogue": plain_stages(moved), "arity": SLOTS}
            kind, reads = "ActivatedNorm", [x, *given, *extras]
        b.emit(last, launch, dict(zip(names, tensors, strict=True)) | parts, kind, attrs, reads, [out])


def _total(name: str, term: str, width: int, lanes: int) -> str:
    """C++ that adds ``term`` of each ``v[j]`` over the lanes of a row."""
    return f"""float {name} = 0;
    #pragma unroll
    for (int j = 0; j < {width}; j++) {name} += {term};
    #pragma unroll
    for (int m = {lanes // 2}; m; m /= 2) {name} += __shfl_xor_sync(0xffffffffu, {name}, m);"""


def _statistics(op: Op, width: int, lanes: int, parts: Sequence[str]) -> tuple[str, str]:
    """C++ that computes the statistics of a row from ``v``, and that of a result from ``v[j]``."""
    squares, length = _total("squares", "v[j] * v[j]", width, lanes), width * lanes
    scale = " * p.scale[first + j]" if "scale" in parts else ""
    shift = " + p.bias[first + j]" if "bias" in parts else ""
    least, newline = literal(op.attrs.epsilon, "float"), "\n    "
    if op.kind == "LayerNormalization":
        squares = _total("squares", "(v[j] - mean) * (v[j] - mean)", width, lanes)
        mean = [_total("sum", "v[j]", width, lanes), f"const float mean = sum / {length};"]
        factor = f"const float factor = float(1) / sqrt(squares / {length} + {least});"
        return newline.join([*mean, squares, factor]), f"(v[j] - mean) * factor{scale}{shift}"
    if op.kind == "RMSNormalization":
        factor = f"const float factor = float(1) / sqrt(squares / {length} + {least});"
        return f"{squares}{newline}{factor}", f"v[j] * factor{scale}"
    bounded = f"max_nan(sqrt(squares), {least})" if op.attrs.epsilon else "sqrt(squares)"
    norm = f"const float norm = {bounded}, factor = float(1) / (norm == 0 ? float(1) : norm);"
    return f"{squares}{newline}{norm}", "v[j] * factor"


def _source(
    op: Op, parts: Sequence[str], stages: Sequence[Stage], tensors: Sequence[TensorView], names: Sequence[str], rank: int, lanes: int,
) -> str:  # fmt: skip
    """The kernel: 16 bytes of a row for each thread, sums over the lanes of the row, and the stages."""
    dtype = tensors[1].dtype
    c, width = CPP[dtype], ACCESS // dtype.itemsize
    lines, result, _ = body(stages, [TensorType(p.dtype, p.shape) for p in tensors[1:]])
    fields = [f"{'' if n == 'y' else 'const '}{c}* {n};" for n in names] + [f"const float* {n};" for n in parts]
    fields += [f"u32 rows, dims[{rank}];", *(f"i64 s{n}[{rank}], step_{n};" for n in names)]
    loads = " ".join(f"const float v{n[1:]} = widen(p.{n}[b{n} + (first + j) * p.step_{n}]);" for n in names[2:])
    statistics, value = _statistics(op, width, lanes, parts)
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
    float v[{width}];
    #pragma unroll
    for (int j = 0; j < {width}; j++) v[j] = widen(x.lane[j]);
    {statistics}
    Pack<{c}, {width}> y;
    #pragma unroll
    for (int j = 0; j < {width}; j++) {{
        const float v0 = {value}; {loads}
        {" ".join(lines)}
        y.lane[j] = narrow<{c}>({result});
    }}
    if (live) y.store(p.y + by + first);
}}
"""
