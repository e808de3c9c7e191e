"""ONNX tensors as NumPy arrays: every check precedes the allocation that it protects.

Source: onnx.proto, TensorProto and SparseTensorProto. Raw data is little-endian by definition.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import SparseTensorProto, TensorProto

from optdnn.errors import ModelError
from optdnn.importers.external_data import ExternalData
from optdnn.limits import SPARSE_BYTES, TENSOR_BYTES, Limit
from optdnn.ops.base import Unsupported
from optdnn.types import INT64, ONNX_TYPES, Array, DType, bits_of, packed_bytes, unpacked

# For each type: the repeated field that holds the elements if raw_data does not, the field's dtype, and the number of its
# entries per element. Types narrower than 32 bits are stored as bit patterns in int32_data.
_FIELDS: dict[int, tuple[str, Any, int]] = {
    TensorProto.FLOAT: ("float_data", np.float32, 1),
    TensorProto.COMPLEX64: ("float_data", np.float32, 2),
    TensorProto.DOUBLE: ("double_data", np.float64, 1),
    TensorProto.COMPLEX128: ("double_data", np.float64, 2),
    TensorProto.INT64: ("int64_data", np.int64, 1),
    TensorProto.UINT64: ("uint64_data", np.uint64, 1),
    TensorProto.UINT32: ("uint64_data", np.uint64, 1),
}
_NARROW = ("int32_data", np.int32, 1)


def element_type(code: int) -> DType:
    """The dtype of a TensorProto.DataType. Raises Unsupported for strings."""
    dtype = ONNX_TYPES.get(code)
    if dtype is None:
        names = {v: k for k, v in TensorProto.DataType.items()}
        raise Unsupported(f"element type {names.get(code, code)} is not supported")
    return dtype


def element_count(dims: Sequence[int], itemsize: int, where: str, limit: Limit = TENSOR_BYTES) -> int:
    """Number of elements; raises ModelError for a negative dimension or a tensor beyond ``limit``, which counts bytes."""
    count, extent = 1, itemsize
    for d in dims:
        if d < 0:
            raise ModelError(f"{where} has the negative dimension {d}")
        count *= d
        extent *= d or 1
    if extent > limit.value:
        size = f"{extent / (1 << 30):.3g} GiB"
        raise ModelError(f"{where} is declared as {list(dims)}, which takes {size}", hint=limit.hint)
    return count


def to_array(t: TensorProto, external: ExternalData, model: str) -> Array:
    """The value of a tensor, read-only if it shares memory with the file.

    Raises ModelError if data and shape disagree, Unsupported for element types that optdnn does not store.
    """
    where = f"{model}: tensor {t.name!r}"
    dtype = element_type(t.data_type)
    dims = tuple(t.dims)
    if t.HasField("segment"):
        raise Unsupported("tensors stored in segments are not supported")
    count = element_count(dims, dtype.itemsize, where)
    nbytes = packed_bytes(dtype, count)
    if t.data_location == TensorProto.EXTERNAL:
        entries = {e.key: e.value for e in t.external_data}
        return _from_bytes(external.read(t.name, entries, nbytes), dtype, count).reshape(dims)
    raw = t.raw_data
    if raw:
        if len(raw) != nbytes:
            raise ModelError(f"{where} is declared as {list(dims)} ({nbytes} bytes) but holds {len(raw)} bytes")
        return _from_bytes(np.frombuffer(raw, np.uint8), dtype, count).reshape(dims)
    name, field_dtype, parts = _FIELDS.get(t.data_type, _NARROW)
    field = getattr(t, name)
    if bits_of(dtype) in (2, 4):  # an entry is a byte of packed elements
        if len(field) != nbytes:
            raise ModelError(f"{where} is declared as {list(dims)} ({nbytes} bytes) but holds {len(field)}")
        return unpacked(np.fromiter(field, np.int32, nbytes).astype(np.uint8), dtype, count).reshape(dims)
    if len(field) != count * parts:
        raise ModelError(
            f"{where} is declared as {list(dims)} ({count} elements) but holds {len(field) // parts}",
            hint="the file is truncated, or its weights were stripped",
        )
    values = np.fromiter(field, field_dtype, len(field))
    if dtype.kind in "iu" and values.dtype != dtype and values.size:
        info = np.iinfo(dtype)
        if values.min() < info.min or values.max() > info.max:
            odd = values[(values < info.min) | (values > info.max)][0]
            raise ModelError(f"{where} holds {odd}, which is no {dtype.name}: its elements are {info.min} … {info.max}")
    return _from_field(values, dtype).reshape(dims)


def _from_bytes(data: Array, dtype: DType, count: int) -> Array:
    """Little-endian bytes as ``count`` native elements; copied only when packed, misaligned or on a big-endian machine."""
    if bits_of(dtype) < 8:
        return unpacked(data, dtype, count)
    if dtype.kind == "b":
        return np.not_equal(data, 0)  # a bool must be 0 or 1 in memory
    if sys.byteorder == "big" and dtype.itemsize > 1:
        parts = 2 if dtype.kind == "c" else 1
        swapped = data.reshape(-1, parts, dtype.itemsize // parts)[..., ::-1]
        return np.ascontiguousarray(swapped).reshape(-1).view(dtype)
    if data.size and data.ctypes.data % dtype.alignment:
        data = data.copy()
    return data.view(dtype)


def _from_field(values: Array, dtype: DType) -> Array:
    if values.dtype == dtype:
        return values
    if dtype.kind == "c":
        return values.view(dtype)
    if dtype.kind == "b":
        return np.not_equal(values, 0)
    if dtype.kind in "iu":
        return values.astype(dtype)
    bits: Array = values.astype(np.uint16 if dtype.itemsize == 2 else np.uint8)  # fp16, bf16, fp8, fp6: bit patterns
    if bits_of(dtype) == 6:
        bits = bits & np.uint8(0x3F)
    return bits.view(dtype)


def sparse_to_array(t: SparseTensorProto, external: ExternalData, model: str) -> Array:
    """A sparse tensor as a dense array. ``indices`` are linear ([NNZ]) or one coordinate per axis ([NNZ, rank])."""
    where = f"{model}: sparse tensor {t.values.name!r}"
    dims = tuple(t.dims)
    values = to_array(t.values, external, model)
    indices = to_array(t.indices, external, model)
    count = element_count(dims, values.dtype.itemsize, where, SPARSE_BYTES)
    if values.ndim != 1 or indices.dtype != INT64 or indices.shape not in ((values.size,), (values.size, len(dims))):
        raise ModelError(
            f"{where} has {list(values.shape)} values and {list(indices.shape)} indices for shape {list(dims)}"
        )
    bounds = np.asarray(dims if indices.ndim == 2 else count)
    if np.any(indices < 0) or np.any(indices >= bounds):
        raise ModelError(f"{where} has an index outside of its shape {list(dims)}")
    dense = np.zeros(dims, values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return dense
