"""Means of constants, weighted by the softmax of short rows: the softmax and the product in one launch, with a generated kernel.

Detectors compute the sides of boxes so (distribution focal loss: Li et al., 2020). Each thread holds a row, which may lie anywhere.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.tactic import TakesBefore
from optdnn.ops.gemm import GemmAttrs
from optdnn.types import BF16, FP16, FP32, normalize_axis

THREADS = 128
LONGEST = 64
"""Most elements of a row: a thread holds all of them."""
ACCESS = 16
"""Most bytes of a load."""


class SoftmaxMean(TakesBefore):
    """A softmax over the last axis, of up to :data:`LONGEST` elements, and its product with a constant vector."""

    name = "softmax_mean"

    def refuse(self, b: Builder, op: Op) -> str | None:
        value = op.inputs[0]
        softmax = None if value is None else b.graph.op(value)
        if value is None or softmax is None or softmax.kind != "Softmax":
            return "its rows are not the result of a softmax"
        weights, shape = b.graph.constant_value(op.inputs[1]), b.graph.type(value).static_shape
        if weights is None or weights.shape != (shape[-1], 1) or op.attrs.prologue or op.attrs.epilogue:
            return "it is no product with one constant vector, without stages"
        if op.kind == "Gemm" and (op.attrs != GemmAttrs() or op.input(2) is not None):
            return "the product is also scaled, transposed or added to"
        if normalize_axis(softmax.attrs.axis, len(shape)) != len(shape) - 1:
            return "the softmax is not along the last axis"
        if value in b.reserved or b.graph.sole_user(value) is None:
            return "the softmax has other readers"
        types = {b.graph.type(softmax.inputs[0]).dtype, b.graph.type(value).dtype, op.outputs[0].type.dtype}  # type: ignore[arg-type]
        if len(types) > 1 or not types <= {FP16, BF16, FP32}:
            return "it is for floats of 16 or 32 bits, of one type"
        if not 0 < shape[-1] <= LONGEST:
            return f"a thread cannot hold a row of {shape[-1]} elements"
        if not 0 < math.prod(shape) < 1 << 32:
            return "no rows, or more elements than the kernel can count"
        return "the elements of a row lie apart" if b.operand(softmax.inputs[0]).strides[-1] != 1 else None

    def emit(self, b: Builder, op: Op, config: object) -> None:
        (softmax,) = self.neighbors(b.graph, op)
        weights = b.graph.constant_value(op.inputs[1])
        assert weights is not None
        x, y = b.operand(softmax.inputs[0]), b.target(op.value)
        numbers = b.constant(weights.astype(np.float32), f"{op.outputs[0].name}.numbers")
        dims, (own, to) = merge(x.shape[:-1], [x.strides[:-1], y.strides[:-1]])
        rows = math.prod(dims)
        parameters = Parameters().pointer("y", "x", "numbers").u32(rows).sizes(*dims).i64(*own, *to)
        launch = parameters.generated(b.arch, _source(x, len(dims)), "softmax_mean", -(-rows // THREADS), THREADS)
        covers = replace(op, src=op.src | softmax.src)
        b.emit(covers, launch, {"y": y, "x": x, "numbers": numbers}, "SoftmaxMean", {}, [x, numbers], [y])


def _width(x: TensorView) -> int:
    """Elements per load: all rows begin at multiples of them."""
    begins = (x.offset, x.shape[-1], *(s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1))
    return math.gcd(ACCESS // x.dtype.itemsize, *begins)


def _source(x: TensorView, rank: int) -> str:
    """The kernel for rows of ``x``, whose places follow from ``rank`` merged axes."""
    c, size, width = CPP[x.dtype], x.shape[-1], _width(x)
    exp = "expf" if x.dtype == FP32 else "__expf"
    return f"""struct Params {{
    {c}* y; const {c}* x; const float* numbers; u32 rows; Size dims[{rank}]; i64 sx[{rank}], sy[{rank}];
}};

extern "C" __global__ void __launch_bounds__({THREADS}) softmax_mean(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 row = blockIdx.x * {THREADS} + threadIdx.x;
    const bool live = row < p.rows;
    i64 bx = 0, by = 0;
    {{ {walk("q", "live ? row : 0", "dims", rank, [("bx", "sx"), ("by", "sy")])} }}
    wait_for_predecessor();
    if (!live) return;
    float v[{size}];
    #pragma unroll
    for (int j = 0; j < {size}; j += {width}) {{
        const Pack<{c}, {width}> part(p.x + bx + j);
        #pragma unroll
        for (int k = 0; k < {width}; k++) v[j + k] = widen(part.lane[k]);
    }}
    float most = v[0];
    #pragma unroll
    for (int j = 1; j < {size}; j++) most = fmaxf(most, v[j]);
    float total = 0, mean = 0;
    #pragma unroll
    for (int j = 0; j < {size}; j++) {{
        const float e = {exp}(v[j] - most);
        total += e;
        mean += e * p.numbers[j];
    }}
    p.y[by] = narrow<{c}>(mean / total);
}}
"""
