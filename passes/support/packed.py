"""Finds the dequantized constant weights that can stay packed, and packs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.packed_layout import CODES, blocks_of, is_block, packed_rows, unsigned
from optdnn.passes.base import Miss
from optdnn.passes.support.facts import operand
from optdnn.types import DTYPES, INT8, UINT8, Array, bits_of, is_float

PACKABLE = frozenset({*(DTYPES[c] for c in CODES), *(DTYPES[n] for n in ("int2", "int4")), INT8})
"""Element types of weights that can be packed."""


@dataclass(frozen=True)
class Reader:
    """An op that will read packed weights as ``kind``: PackedMatMul or PackedGather. ``path``: the Transpose before it, if any."""

    op: Op
    kind: str
    path: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Packable:
    """A DequantizeLinear of constants whose readers can read the integers. ``transposed``: these are stored as [K, N]."""

    readers: tuple[Reader, ...]
    transposed: bool
    block_size: int


@dataclass(frozen=True)
class PackedArrays:
    """Packed weights: the operands and attributes of :mod:`optdnn.ops.packed_layout`."""

    weights: Array
    scales: Array
    zeros: Array | None
    code: str
    K: int
    block_size: int
    block_rows: int = 1


def packable(graph: Graph, op: Op) -> Packable | Miss | None:
    """The readers of a DequantizeLinear's weights, if all can read them packed; a Miss if one cannot.

    None if its operand is no constant matrix of a packable type, or no product or table reads it."""
    weights, scale = graph.constant_value(op.inputs[0]), graph.constant_value(operand(op, 1))
    if weights is None or weights.ndim != 2 or weights.dtype not in PACKABLE or 0 in weights.shape:
        return None
    if not any(user.kind in ("Gather", "Gemm", "MatMul", "Transpose") for user in graph.users(op.value)):
        return None
    if scale is None or (op.input(2) is not None and graph.constant_value(op.input(2)) is None):
        return Miss("its scales or zero points are not constant")
    readers: list[Reader] = []
    axes: set[int] = set()
    for user in graph.users(op.value):
        found = _readers(graph, op.value, user, ())
        if isinstance(found, Miss):
            return found
        for reader, axis in found:
            readers.append(reader)
            axes.add(axis)
    if len(axes) != 1:
        return Miss("its readers sum along different axes of it")
    (axis,) = axes
    block = _block_size(op, weights, scale, axis)
    return block if isinstance(block, Miss) else Packable(tuple(readers), axis == 0, block)


def _readers(graph: Graph, value: Value, user: Op, path: tuple[Op, ...]) -> list[tuple[Reader, int]] | Miss:
    """The readers at or after ``user``. With each comes the axis of the stored weights that a product sums over or that a table's
    row extends along."""
    transposed = bool(path)
    if user.kind == "Transpose" and not path:
        found: list[tuple[Reader, int]] = []
        for next_user in graph.users(user.value):
            more = _readers(graph, user.value, next_user, (user,))
            if isinstance(more, Miss):
                return more
            found += more
        return found
    if (
        user.kind in ("MatMul", "Gemm")
        and user.inputs[0] != value
        and user.input(1) == value
        and user.input(2) != value
    ):
        data = user.inputs[0]
        if data is not None and _of_integers(graph, data):
            return Miss(f"{user.name} is a product of integers, whose data are quantized, too")
        if user.attrs.prologue or user.attrs.epilogue:
            return Miss(f"{user.name} has fused stages")
        if user.kind == "Gemm" and (user.attrs.transA or user.attrs.alpha != 1.0 or user.attrs.beta != 1.0):
            return Miss(f"{user.name} is a Gemm with alpha, beta or a transposed A")
        across = user.kind == "Gemm" and user.attrs.transB
        return [(Reader(user, "PackedMatMul", path), 1 if across != transposed else 0)]
    if user.kind == "Gather" and user.inputs[0] == value and user.inputs[1] != value and user.attrs.axis == 0:
        return [(Reader(user, "PackedGather", path), 0 if transposed else 1)]
    return Miss(f"{user.name} ({user.kind}) needs the weights as floats")


def _of_integers(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is the result of a DequantizeLinear of computed integers."""
    op = graph.op(value)
    return op.kind == "DequantizeLinear" and graph.constant_value(op.inputs[0]) is None


def _block_size(op: Op, weights: Array, scale: Array, axis: int) -> int | Miss:
    """The number of weights along ``axis`` that share a scale, or a Miss if no packed form has these scales."""
    width = int(weights.shape[axis])
    if op.attrs.block_size:
        if op.attrs.axis % 2 != axis:
            return Miss("its blocks lie along the other axis than the one its readers sum over")
        if op.attrs.block_size >= width:
            return width
        if not is_block(op.attrs.block_size):
            return Miss(f"a block size of {op.attrs.block_size} is not a power of two of at least 16")
        return int(op.attrs.block_size)
    if scale.size > 1 and op.attrs.axis % 2 == axis:
        return Miss("each number of a row has its own scale")
    return width


def pack(
    op: Op, found: Packable, weights: Array, scale: Array, zeros: Array | None, kept: ConstantCache
) -> PackedArrays:
    """The packed weights of a DequantizeLinear. Without ``zeros``, zero points are 0."""

    def stored() -> Array:
        numbers, _ = unsigned(weights)
        return packed_rows(np.ascontiguousarray(numbers.T if found.transposed else numbers), found.block_size)

    _, code = unsigned(weights[:0])
    width, rows = weights.shape if found.transposed else weights.shape[::-1]
    shape = (rows, blocks_of(width, found.block_size))
    scales = _by_block(op, found, scale, shape)
    zero: Array | None = None
    if not is_float(weights.dtype):
        zero = unsigned(np.zeros((1, 1), weights.dtype) if zeros is None else zeros)[0].view(UINT8)
        zero = _by_block(op, found, zero, shape)
        zero = None if (zero == 1 << (bits_of(DTYPES[code]) - 1)).all() else zero
    block_rows = _shared_rows(scales) if is_float(weights.dtype) else 1
    return PackedArrays(
        kept.once(("packed", found.transposed, found.block_size), [weights], stored),
        np.ascontiguousarray(scales[::block_rows]),
        zero,
        code,
        width,
        found.block_size,
        block_rows,
    )


def _by_block(op: Op, found: Packable, parameter: Array, shape: tuple[int, int]) -> Array:
    """Scales or zero points with the shape [N, blocks]."""
    if parameter.size == 1:
        return np.full(shape, parameter.reshape(()), parameter.dtype)
    if op.attrs.block_size:
        return np.ascontiguousarray(parameter.T if found.transposed else parameter)
    return np.ascontiguousarray(np.broadcast_to(parameter.reshape(-1, 1), shape))


_SHARED = 128
"""The number of rows that share a scale in fp8 weights with blocks of 128 x 128."""


def _shared_rows(scales: Array) -> int:
    """128 if the rows of each group of 128 have the same scales, else 1."""
    rows = len(scales)
    if rows < _SHARED:
        return 1
    first = np.repeat(scales[::_SHARED], _SHARED, axis=0)[:rows]
    return _SHARED if np.array_equal(first, scales) else 1
