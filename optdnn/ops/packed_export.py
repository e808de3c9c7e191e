"""Packed weights as ONNX: ONNX Runtime's MatMulNBits and GatherBlockQuantized, and plain arithmetic for 8-bit values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ops.base import Unsupported
from optdnn.ops.exchange import Export
from optdnn.ops.packed_layout import PackedGatherAttrs, PackedMatMulAttrs, blocks_of, is_block, packed_rows
from optdnn.ops.restate import MICROSOFT
from optdnn.runtime.reference.packed import numbers_of
from optdnn.types import DTYPES, INT32, UINT8, Array, bits_of, is_float

_DOMAIN = MICROSOFT.rstrip(".")
_LARGEST_BLOCK = 256
"""ONNX Runtime's largest block."""
INT8_ROWS = 4
"""The accuracy level of MatMulNBits that allows rounding rows to int8. ONNX Runtime then uses a scale per block of a row."""
_PER_CHANNEL = 128
"""The block size for rows with a single scale."""


@dataclass(frozen=True)
class _Stored:
    """Packed weights in ONNX Runtime's form: [N, bytes of a row], [N, blocks], [N, blocks]."""

    weights: Array
    scales: Array
    zeros: Array | None
    block_size: int


def _constants(e: Export, names: Sequence[str]) -> tuple[Array, Array, Array | None]:
    """Weights, scales and zero points."""
    found = [e.value(n) if n else None for n in (*names, "")[:3]]
    weights, scales, zeros = found
    if weights is None or scales is None or (len(names) > 2 and names[2] and zeros is None):
        raise Unsupported("its packed weights are not constant")
    return weights, scales, zeros


def _stored(a: Any, given: tuple[Array, Array, Array | None]) -> _Stored:
    """In ONNX Runtime's block sizes: a scale per channel is repeated for blocks of 128."""
    weights, scales, zeros = given
    if is_block(a.block_size) and a.block_size <= _LARGEST_BLOCK:
        return _Stored(weights, scales, zeros, a.block_size)
    if a.block_size < a.K:
        raise Unsupported(f"blocks of {a.block_size}; ONNX Runtime has at most {_LARGEST_BLOCK}")
    blocks = blocks_of(a.K, _PER_CHANNEL)
    return _Stored(
        packed_rows(numbers_of(weights, a.code, a.K, a.block_size), _PER_CHANNEL),
        np.repeat(scales, blocks, axis=1),
        None if zeros is None else np.repeat(zeros, blocks, axis=1),
        _PER_CHANNEL,
    )


def _fits(zeros: Array, code: str) -> bool:
    """Whether zero points can be packed like the weights."""
    bits = bits_of(DTYPES[code])
    return zeros.dtype == UINT8 and (bits == 8 or not (zeros >> bits).any())


def _packed_zeros(zeros: Array, code: str) -> Array:
    return packed_rows(zeros.view(DTYPES[code]), zeros.shape[1])


def export_packed_matmul(a: PackedMatMulAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """MatMulNBits; for 8-bit values also arithmetic on the weights before a MatMul.

    In that form OpenVINO multiplies by 8-bit weights, and ONNX Runtime converts them to floats when it loads the network. Its
    MatMulNBits for 8 bits unpacks the weights in every run.
    """
    x, given = inputs[0], _constants(e, inputs[1:])
    weights, scales, zeros = given
    if a.block_rows > 1:
        repeated = [None if v is None else np.repeat(v, a.block_rows, axis=0)[: len(weights)] for v in (scales, zeros)]
        assert repeated[0] is not None
        given = (weights, repeated[0], repeated[1])
    if bits_of(DTYPES[a.code]) == 8:
        return _product_of_bytes(a, x, given, e)
    if is_float(DTYPES[a.code]):
        raise Unsupported(f"products with packed {a.code}")
    dtype, stored = e.type(x).dtype, _stored(a, given)
    n, blocks = stored.scales.shape
    operands = [
        x,
        e.const(stored.weights.reshape(n, blocks, -1), "packed"),
        e.const(stored.scales.astype(dtype), "scales"),
    ]
    if stored.zeros is not None:
        fits = _fits(stored.zeros, a.code)
        operands.append(e.const(_packed_zeros(stored.zeros, a.code) if fits else stored.zeros.astype(dtype), "zeros"))
    sizes = {"K": a.K, "N": n, "bits": bits_of(DTYPES[a.code]), "block_size": stored.block_size}
    if a.rounded_rows:
        sizes["accuracy_level"] = INT8_ROWS
    return e.node("MatMulNBits", operands, domain=_DOMAIN, **sizes)


def _product_of_bytes(
    a: PackedMatMulAttrs, x: str, given: tuple[Array, Array, Array | None], e: Export
) -> Sequence[str]:
    weights, scales, zeros = given
    dtype, (rows, blocks) = e.type(x).dtype, scales.shape
    by_block = weights.reshape(rows, blocks, -1) if blocks > 1 else np.ascontiguousarray(weights[:, : a.K])
    one = (rows, blocks, 1) if blocks > 1 else (rows, 1)
    numbers = e.const(by_block, "packed")
    if is_float(DTYPES[a.code]):
        table = np.arange(256, dtype=UINT8).view(DTYPES[a.code]).astype(dtype)
        (where,) = e.node("Cast", [numbers], to=INT32)
        (w,) = e.node("Gather", [e.const(table, "values"), where], axis=0)
    else:
        (w,) = e.node("Cast", [numbers], to=dtype)
        if zeros is None:
            zero = e.const(np.asarray(128, dtype), "zero")
        elif zeros.dtype == UINT8:
            (zero,) = e.node("Cast", [e.const(zeros.reshape(one), "zeros")], to=dtype)
        else:
            zero = e.const(zeros.reshape(one).astype(dtype), "zeros")
        (w,) = e.node("Sub", [w, zero])
    (w,) = e.node("Mul", [w, e.const(scales.reshape(one).astype(dtype), "scales")])
    if blocks > 1:
        (w,) = e.node("Reshape", [w, e.const(np.array([rows, blocks * a.block_size]), "shape")])
    if blocks > 1 and blocks * a.block_size != a.K:
        ends = [e.const(np.array([v]), "bound") for v in (0, a.K, 1)]
        (w,) = e.node("Slice", [w, *ends])
    (turned,) = e.node("Transpose", [w], perm=(1, 0))
    return e.node("MatMul", [x, turned])


def export_packed_gather(a: PackedGatherAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """GatherBlockQuantized of bytes, with zero points."""
    if is_float(DTYPES[a.code]):
        raise Unsupported("packed rows of floats")
    stored = _stored(a, _constants(e, (inputs[0], *inputs[2:])))
    zeros = stored.zeros
    if zeros is None:
        zeros = np.full(stored.scales.shape, 1 << (bits_of(DTYPES[a.code]) - 1), UINT8)
    if not _fits(zeros, a.code):
        raise Unsupported("packed rows with float zero points")
    rows, row = len(stored.weights), -(-a.K * bits_of(DTYPES[a.code]) // 8)
    if stored.weights.shape[1] == row:  # stored like a product's: a table shared with a head is stored once
        table = e.const(stored.weights.reshape(rows, stored.scales.shape[1], -1), "packed")
        (table,) = e.node("Reshape", [table, e.const(np.array([rows, row]), "shape")])
    else:
        table = e.const(np.ascontiguousarray(stored.weights[:, :row]), "packed")
    operands = [
        table,
        inputs[1],
        e.const(stored.scales.astype(a.output_dtype), "scales"),
        e.const(_packed_zeros(zeros, a.code), "zeros"),
    ]
    sizes = {"bits": bits_of(DTYPES[a.code]), "block_size": stored.block_size, "gather_axis": 0, "quantize_axis": 1}
    return e.node("GatherBlockQuantized", operands, domain=_DOMAIN, **sizes)
