"""Arrays of other libraries: their location, and arrays in host memory by DLPack, without a copy.

NumPy itself reads DLPack but knows neither bfloat16 nor the 8-bit floats. Here the capsule is read according to dlpack.h
(version 0.x, which every exporter gives to a consumer that does not ask for more). Results are NumPy arrays, which other
libraries also accept by ``from_dlpack`` (bfloat16 arrays as ``y.view(numpy.uint16)``).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency
from optdnn.types import DTYPES, Array, DType

CPU, CUDA, CUDA_HOST = 1, 2, 3
"""Device types of dlpack.h: kDLCPU, kDLCUDA, kDLCUDAHost. The host reads the memory of the first and the last."""
_KINDS: dict[tuple[int, int], str] = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "fp16", (2, 32): "fp32", (2, 64): "fp64", (4, 16): "bf16", (5, 64): "complex64", (5, 128): "complex128",
    (6, 8): "bool", (10, 8): "fp8_e4m3", (12, 8): "fp8_e5m2",
}  # fmt: skip
"""Type code and bits of DLDataType -> the name of the element type."""


class _Tensor(ctypes.Structure):
    """struct DLTensor"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Memory:
    """The exporter's memory in NumPy's array interface, kept alive with its capsule (whose destructor returns the memory)."""

    def __init__(self, capsule: Any, address: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]):
        self._capsule = capsule
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # we may not be allowed to write it
            "typestr": f"|V{dtype.itemsize}",
            "shape": shape,
            "strides": strides,
        }


def offers(value: Any) -> bool:
    """Whether a value supports DLPack."""
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def on_gpu(array: Any) -> bool:
    """Whether an array claims to be on a CUDA device."""
    if isinstance(array, np.ndarray):
        return False
    if hasattr(array, "__cuda_array_interface__"):
        return True
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == CUDA


def import_cupy(why: str) -> Any:
    """CuPy. Raises MissingDependency with the reason ``why``."""
    try:
        import cupy
    except ImportError as error:
        raise MissingDependency("cupy-cuda13x", "cuda", why) from error
    return cupy


def from_dlpack(value: Any) -> Array:
    """A read-only view of an array in host memory.

    Raises ValueError for memory elsewhere or an unsupported element type, and the errors of the exporter.
    """
    kind, _ = value.__dlpack_device__()
    if kind not in (CPU, CUDA_HOST):
        raise ValueError(f"it is on a device (DLPack's type {int(kind)}), not in host memory")
    capsule = value.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    name = _KINDS.get((tensor.code, tensor.bits))
    if name is None or tensor.lanes != 1:
        raise ValueError(f"its element type (DLPack's {tensor.code}, {tensor.bits} bits) is not supported")
    dtype, rank = DTYPES[name], tensor.ndim
    shape = tuple(tensor.shape[:rank])
    dense = tuple(int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(rank))
    strides = tuple(tensor.strides[:rank]) if tensor.strides else dense
    if 0 in shape:
        return np.empty(shape, dtype)
    address = (tensor.data or 0) + tensor.byte_offset
    memory = _Memory(capsule, address, dtype, shape, tuple(s * dtype.itemsize for s in strides))
    return np.asarray(memory).view(dtype)
