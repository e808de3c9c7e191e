"""Rows of packed tables as floats: a thread per element. The layout is defined in :mod:`optdnn.ops.packed_layout`."""

from __future__ import annotations

from dataclasses import replace

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.index.index_kernel import (
    coordinates,
    emit_index_kernel,
    needed,
    operand_at,
    operands_of,
    wide,
)
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.ops.packed_layout import blocks_of
from optdnn.types import DTYPES, DType, bits_of, is_float


def packed_rows(b: Builder, op: Op) -> None:
    """Emit a PackedGather. An index out of range reads the nearest row; a run refuses such indices."""
    weights, indices, scales, zeros = (*(needed(b, op, i) for i in range(3)), operand_at(b, op, 3))
    out, a = b.target(op.value), op.attrs
    assert weights is not None
    assert indices is not None
    assert scales is not None
    rows, last, code = weights.shape[0], len(out.shape) - 1, DTYPES[a.code]
    bits, t = bits_of(code), wide(out.dtype)
    per_byte = 8 // bits
    block_bytes = weights.shape[1] // blocks_of(a.K, a.block_size)
    zero = "0" if is_float(code) else f"{1 << (bits - 1)}" if zeros is None else f"{t}(widen(p.z[at_z(row, block)]))"
    at = f"p.w[at_w(row, block * {block_bytes} + within / {per_byte})]"
    number = f"(u32({at}) >> u32(within % {per_byte} * {bits})) & {(1 << bits) - 1}"
    if bits == 8 and is_float(code):
        weights, number = replace(weights, dtype=code), f"widen({at})"
    lines = f"""i64 row = i64(p.i[at_i({coordinates(last)})]);
        row = row < 0 ? row + {rows} : row;
        row = row < 0 ? 0 : row >= {rows} ? {rows - 1} : row;
        const i64 block = o{last} / {a.block_size}, within = o{last} % {a.block_size};
        const {"float" if bits == 8 and is_float(code) else "u32"} number = {number};
        const {t} scale = {t}(widen(p.s[at_s(row, block)]));
        p.y[at_y({coordinates(last + 1)})] = narrow<{CPP[out.dtype]}>(({_value(code, t)} - {zero}) * scale);"""
    tensors = {"w": weights, "i": indices, "s": scales, "z": zeros}
    emit_index_kernel(b, op, out.shape, tensors, {"y": out}, lines, reads=operands_of(b, op))


def _value(code: DType, t: str) -> str:
    """C++ of the value of the code ``number``, in the type ``t``."""
    if code != DTYPES["fp4_e2m1"]:
        return f"{t}(number)"
    size = f"(number % 8 < 2 ? {t}(number % 8) / 2 : {t}((2 + number % 2) << (number % 8 / 2)) / 4)"
    return f"(number < 8 ? {size} : -{size})"
