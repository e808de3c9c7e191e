"""Arrays on the GPU from other libraries: ``__cuda_array_interface__`` (CuPy, PyTorch, Numba, PyCUDA) and DLPack."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from optdnn.errors import InputError
from optdnn.runtime.contexts.dlpack import import_cupy, on_gpu
from optdnn.runtime.cuda.device import Device, driver
from optdnn.types import TensorSpec, dtype_name


def pointer_of(array: Any, spec: TensorSpec, what: str, *, writable: bool = False) -> int:
    """The address of a GPU array's first element.

    Raises InputError if it is not exactly ``spec``: dtype, shape, C-contiguous; ``what`` names it in messages.
    """
    try:
        table = None if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    except (AttributeError, TypeError, RuntimeError):
        table = _by_dlpack(array) if on_gpu(array) else None
    if table is None:
        raise InputError(
            f"{what} is in host memory; a device array is needed", hint="give all arrays on the GPU, or all as NumPy"
        )
    shape, given = tuple(table["shape"]), _dtype_of(array, table["typestr"])
    if shape != spec.shape or given != _name(spec.dtype):
        raise InputError(f"{what} is {given}{list(shape)}, not {spec}")
    strides = table.get("strides")
    if strides is not None:
        step = spec.dtype.itemsize
        for n, stride in zip(reversed(shape), reversed(strides), strict=True):
            if n > 1 and stride != step:
                raise InputError(f"{what} is not C-contiguous", hint="make it contiguous before the call")
            step *= n
    address, read_only = table["data"]
    if writable and read_only:
        raise InputError(f"{what} is read-only")
    return int(address or 0)


_name = lru_cache(maxsize=64)(dtype_name)


def _dtype_of(array: Any, typestr: str) -> str:
    """The name of an array's element type. NumPy has no bfloat16, and libraries name it in their own ways."""
    dtype = getattr(array, "dtype", None)
    if typestr[1] == "V" or (not isinstance(dtype, np.dtype) and "bfloat16" in str(dtype)):
        return "bf16"
    return _name(typestr)


def _by_dlpack(array: Any) -> Any:
    cupy = import_cupy("to take arrays by DLPack")
    return cupy.from_dlpack(array).__cuda_array_interface__


def stream_handle(stream: Any) -> int:
    """The handle of a stream: an int, or an object of CuPy (``ptr``), PyTorch (``cuda_stream``), Numba or ours (``handle``)."""
    if isinstance(stream, int):
        return stream
    for name in ("ptr", "cuda_stream", "handle"):
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    raise InputError(
        f"{type(stream).__name__} is not a CUDA stream", hint="give its handle as an int, or a CuPy or PyTorch stream"
    )


def check_pointer(pointer: int, device: Device, what: str) -> None:
    """Raise InputError if the driver knows that the memory is not on ``device``: an array may claim anything."""
    cu = driver()
    kinds = cu.CUpointer_attribute
    status, kind = cu.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    if status != cu.CUresult.CUDA_SUCCESS or int(kind) == int(cu.CUmemorytype.CU_MEMORYTYPE_HOST):
        raise InputError(f"{what} claims to be on a GPU; its address {pointer:#x} is not device memory")
    index = gpu_of(pointer)
    if index is not None and index != device.index:
        raise InputError(
            f"{what} is on GPU {index}; the engine runs on GPU {device.index} ({device.name})",
            hint="copy it there, or choose the GPU with CUDA_VISIBLE_DEVICES",
        )


def gpu_of(pointer: int) -> int | None:
    """The GPU that contains the memory; None if the driver does not know it.

    The driver's own library is asked: cuda.bindings returns 0 for every pointer (NVIDIA/cuda-python, issue 2928)."""
    index = ctypes.c_int()
    kind = int(driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    failed = _library().cuPointerGetAttribute(ctypes.byref(index), kind, ctypes.c_ulonglong(pointer))
    return None if failed else index.value


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


DEFAULT_STREAMS = (0, 1, 2)
"""Handles of the null stream, and of its variants for the calling thread."""


def check_stream(handle: int, context: Any) -> None:
    """Raises InputError for a stream of another GPU (or context) than ``context``."""
    cu = driver()
    if handle in DEFAULT_STREAMS:
        return
    status, owner = cu.cuStreamGetCtx(handle)
    if status != cu.CUresult.CUDA_SUCCESS or int(owner) != int(context):
        raise InputError("the stream is not one of the GPU that the engine runs on", hint="make it on that GPU")
