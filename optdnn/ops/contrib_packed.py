"""ONNX Runtime's MatMulNBits, MatMulBnb4 and GatherBlockQuantized: products with packed weights, and rows of packed tables.

Weights of integers stay in their stored form: only their shape changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit, needs, require_rank, required
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.ops.packed_export import INT8_ROWS
from optdnn.ops.packed_layout import (
    PackedGatherAttrs,
    PackedMatMulAttrs,
    blocks_of,
    check_block,
    is_block,
    packed_rows,
    row_bytes,
    unsigned,
)
from optdnn.ops.restate import refuse_attributes
from optdnn.types import (
    DTYPES,
    FP32,
    UINT8,
    Array,
    bits_of,
    is_float,
    unpacked,
)

CODE_OF_BITS = {2: "uint2", 4: "uint4", 8: "uint8"}


def code_of(bits: int) -> str:
    """The code of unsigned integers. Raises Unsupported for a width other than 2, 4 and 8 bits."""
    if bits not in CODE_OF_BITS:
        raise Unsupported(f"weights of {bits} bits: weights may have 2, 4 or 8 bits")
    return CODE_OF_BITS[bits]


def _shaped(e: Emit, x: Ref, shape: Sequence[int]) -> Ref:
    """``x`` with another shape: a constant directly, any other value by a Reshape."""
    if e.type(x).dims == tuple(shape):
        return x
    value = e.value(x)
    return emit(e, "Reshape", x, np.array(shape, np.int64)) if value is None else e.const(value.reshape(shape))


def _sized(node: NodeSpec, e: Emit, x: Ref, shape: tuple[int, ...], what: str) -> Ref:
    """``x`` as ``shape``. Raises ShapeError if the numbers of elements differ."""
    t = e.type(x)
    if not t.is_static or math.prod(t.static_shape) != math.prod(shape):
        raise ShapeError(f"{node.op_type} {what} {t} must hold {list(shape)}")
    return _shaped(e, x, shape)


def packed_zeros(
    node: NodeSpec, e: Emit, zero: Ref | None, code: str, scales: Ref, packed: tuple[int, int]
) -> Ref | None:
    """Zero points [N, blocks]: bytes, or floats of the scales' type. ``packed``: the shape of packed ones.

    Floats with integer values become bytes. Zero points that all equal the default are left out.
    Raises ShapeError for another type or size.
    """
    if zero is None:
        return None
    t, (rows, blocks), bits = e.type(zero), e.type(scales).static_shape, bits_of(DTYPES[code])
    if t.dtype != UINT8:
        if t.dtype != e.type(scales).dtype:
            raise ShapeError(f"{node.op_type} zero points are {t}; they must be uint8 or of the type of the scales")
        zero = _sized(node, e, zero, (rows, blocks), "zero points")
        floats = e.value(zero)
        whole = floats is not None and ((floats >= 0) & (floats < 1 << bits) & (floats == np.rint(floats))).all()
        return _bytes_or_default(e, floats.astype(UINT8), bits) if floats is not None and whole else zero
    given = e.value(_sized(node, e, zero, packed, "packed zero points"))
    if given is None:
        raise Unsupported("zero points that are not constant")
    if bits < 8:
        given = unpacked(given.reshape(-1), DTYPES[code], given.size * 8 // bits).view(UINT8).reshape(len(given), -1)
    return _bytes_or_default(e, np.ascontiguousarray(given[:, :blocks]), bits)


def _bytes_or_default(e: Emit, zeros: Array, bits: int) -> Ref | None:
    return None if (zeros == 1 << (bits - 1)).all() else e.const(zeros)


def matmul_n_bits(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """MatMulNBits: blocks along K, each with a scale. ``accuracy_level`` 4 allows rounding the rows to int8; others are ignored.

    With ``g_idx``, each number of K names its block (GPTQ in the order of activations): weights and data are brought into the
    order of the blocks."""
    refuse_attributes(node, "weight_prepacked")
    x, weights, scales = needs(node, 0, 1, 2)
    k, n, block = (int(required(node, name)) for name in ("K", "N", "block_size"))
    code = code_of(int(node.get("bits", 4)))
    if k < 1 or n < 1:
        raise ShapeError(f"MatMulNBits has K={k} and N={n}; both must be positive")
    if not is_block(block):
        check_block(block, -1, "MatMulNBits")
    if e.type(weights).dtype != UINT8:
        raise ShapeError(f"MatMulNBits weights are {e.type(weights)}; packed weights are uint8")
    blocks, row = blocks_of(k, block), row_bytes(code, k, block)
    weights = _sized(node, e, weights, (n, row), f"weights of {bits_of(DTYPES[code])} bits")
    scales = _sized(node, e, scales, (n, blocks), "scales")
    order = _order_of_blocks(node, e, k, block)
    if order is not None:
        weights = e.const(_reordered(e.value(weights), code, block, order))
        x = emit(e, "Gather", x, order, axis=len(e.type(x).dims) - 1)
    zero = packed_zeros(node, e, node.input(3), code, scales, (n, -(-blocks * bits_of(DTYPES[code]) // 8)))
    attrs = PackedMatMulAttrs(code, k, block, rounded_rows=int(node.get("accuracy_level", 0)) == INT8_ROWS)
    (y,) = e.op("PackedMatMul", [x, weights, scales, zero], attrs)
    if node.input(5) is None:
        return (y,)
    return (emit(e, "Add", y, _sized(node, e, node.inputs[5], (n,), "bias")),)


def _order_of_blocks(node: NodeSpec, e: Emit, k: int, block: int) -> Array | None:
    """The numbers of K in the order of their blocks, by the operand ``g_idx``; None if they already are in this order."""
    given = node.input(4)
    if given is None:
        return None
    groups = e.value(given)
    if groups is None:
        raise Unsupported("the operand g_idx, which is computed")
    if groups.size < k:
        raise ShapeError(f"MatMulNBits g_idx is {e.type(given)}; it must name the block of each of {k} numbers")
    groups, wanted = groups.reshape(-1)[:k].astype(np.int64), np.arange(k) // block
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], wanted):
        raise Unsupported(f"an operand g_idx whose blocks do not have {block} numbers each")
    return None if np.array_equal(groups, wanted) else order


def _reordered(weights: Array | None, code: str, block: int, order: Array) -> Array:
    """Packed weights whose numbers of K are in another order."""
    if weights is None:
        raise Unsupported("weights that are not constant, with the operand g_idx")
    dtype, numbers = DTYPES[code], weights
    if (bits := bits_of(dtype)) < 8:
        numbers = unpacked(weights.reshape(-1), dtype, weights.size * 8 // bits).reshape(len(weights), -1)
    return packed_rows(np.ascontiguousarray(numbers[:, order]), block)


_FP4 = (0.0, 5.208333333e-3, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BNB4_NUMBERS: Mapping[int, Array] = {0: np.array((*_FP4, *(-x for x in _FP4)), FP32), 1: np.array(_NF4, FP32)}
"""quant_type -> the numbers that the 16 codes stand for (bitsandbytes: FP4, and NF4 of Dettmers et al., "QLoRA", 2023)."""


def matmul_bnb4(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """MatMulBnb4: codes of 16 numbers, two in a byte, the first one in the high bits. Each block of the flattened matrix (N, K) has
    its largest absolute value as the scale. Kernels have no such codes: the weights become floats."""
    if not int(node.get("transB", 1)):
        raise Unsupported("transB=0")
    x, weights, scales = needs(node, 0, 1, 2)
    k, n, block, kind = (int(required(node, name)) for name in ("K", "N", "block_size", "quant_type"))
    if kind not in BNB4_NUMBERS:
        raise Unsupported(f"quant_type={kind}")
    if min(k, n, block) < 1:
        raise ShapeError(f"MatMulBnb4 has K={k}, N={n} and blocks of {block}; all must be positive")
    size = k * n
    codes = e.value(_sized(node, e, weights, (-(-size // 2),), "weights"))
    largest = e.value(_sized(node, e, scales, (-(-size // block),), "scales"))
    if codes is None or largest is None:
        raise Unsupported("weights that are not constant")
    if codes.dtype != UINT8:
        raise ShapeError(f"MatMulBnb4 weights are {e.type(weights)}; packed weights are uint8")
    pairs = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[:size]
    floats = BNB4_NUMBERS[kind][pairs] * np.repeat(largest.astype(FP32), block)[:size]
    return (emit(e, "MatMul", x, np.ascontiguousarray(floats.reshape(n, k).T).astype(e.type(x).dtype)),)


def gather_block_quantized(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """GatherBlockQuantized: rows of a packed table, gathered on the first axis and quantized along the last one."""
    data, indices, scales = needs(node, 0, 1, 2)
    t, s = e.type(data), e.type(scales)
    rank, block = len(t.dims), int(node.get("block_size", 128))
    if int(node.get("gather_axis", 0)) % max(rank, 1) or int(node.get("quantize_axis", 1)) % max(rank, 1) != rank - 1:
        raise Unsupported("axes other than the first to gather on and the last to quantize on")
    require_rank(t, 2, "GatherBlockQuantized data")
    require_rank(s, 2, "GatherBlockQuantized scales")
    if t.dtype != UINT8:
        return _gather_numbers(node, e, data, indices, scales, block)
    if not is_block(block):
        check_block(block, -1, "GatherBlockQuantized")
    code = code_of(int(node.get("bits", 4)))
    rows, width = t.static_shape
    bits = bits_of(DTYPES[code])
    k = width * 8 // bits
    if s.dims != (rows, blocks_of(k, block)):
        raise ShapeError(f"GatherBlockQuantized scales {s} do not fit data {t} of {bits} bits in blocks of {block}")
    zero = packed_zeros(node, e, node.input(3), code, scales, (rows, -(-s.static_shape[1] * bits // 8)))
    if width != row_bytes(code, k, block):  # a partial last block is padded to a full one
        fill = np.array([0, 0, 0, row_bytes(code, k, block) - width], np.int64)
        data = emit(e, "Pad", data, fill, np.zeros((), UINT8))
    return e.op("PackedGather", [data, indices, scales, zero], PackedGatherAttrs(code, k, block, s.dtype))


def _gather_numbers(node: NodeSpec, e: Emit, data: Ref, indices: Ref, scales: Ref, block: int) -> Sequence[Ref]:
    """A table of 4-bit integers or narrow floats, one element each. The default zero point is 0."""
    numbers, s = e.value(data), e.type(scales)
    if numbers is None:
        raise Unsupported("a table of narrow numbers that is not constant")
    numbers, code = unsigned(numbers)
    rows, k = numbers.shape
    block = block or k
    check_block(block, k, "GatherBlockQuantized")
    if s.dims != (rows, blocks_of(k, block)):
        raise ShapeError(f"GatherBlockQuantized scales {s} do not fit data {e.type(data)} in blocks of {block}")
    zero: Any = None
    if not is_float(DTYPES[code]):
        zero = e.value(node.inputs[3]) if node.input(3) is not None else np.zeros(s.static_shape, e.type(data).dtype)
        if zero is None or zero.shape != s.dims or zero.dtype != e.type(data).dtype:
            raise ShapeError(
                "GatherBlockQuantized zero points must be constants of the data's type and the scales' shape"
            )
        zero = unsigned(zero)[0].view(UINT8)
    attrs = PackedGatherAttrs(code, k, block, s.dtype)
    return e.op("PackedGather", [packed_rows(numbers, block), indices, scales, zero], attrs)
