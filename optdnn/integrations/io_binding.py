"""onnxruntime's ``IOBinding`` for engines: inputs and outputs in the caller's memory, in the host's or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from optdnn.errors import InputError, UsageError, did_you_mean
from optdnn.runtime.contexts.dlpack import import_cupy, on_gpu
from optdnn.runtime.engine import Engine
from optdnn.types import Array, DType, dtype_name

ONNX_NAMES = {
    "fp32": "float", "fp64": "double", "fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8e4m3fn",
    "fp8_e5m2": "float8e5m2", "fp8_e4m3fnuz": "float8e4m3fnuz", "fp8_e5m2fnuz": "float8e5m2fnuz", "fp8_e8m0": "float8e8m0",
    "fp6_e2m3": "float6e2m3", "fp6_e3m2": "float6e3m2", "fp4_e2m1": "float4e2m1",
}  # fmt: skip
"""Element type -> its name in onnxruntime's texts, if it differs."""


def tensor_type(dtype: DType) -> str:
    """onnxruntime's text for tensors of an element type: "tensor(float)"."""
    name = dtype_name(dtype)
    return f"tensor({ONNX_NAMES.get(name, name)})"


@dataclass(frozen=True)
class BoundValue:
    """An output of a run, with the methods of onnxruntime's ``OrtValue`` that read one. ``array`` is of NumPy or CuPy."""

    array: Any

    def numpy(self) -> Array:
        """The array; a copy of it in host memory, if it is on a GPU."""
        found: Array = self.array.get() if on_gpu(self.array) else self.array
        return found

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def data_type(self) -> str:
        return tensor_type(self.array.dtype)

    def device_name(self) -> str:
        return "cuda" if on_gpu(self.array) else "cpu"

    def data_ptr(self) -> int:
        return int(self.array.data.ptr if on_gpu(self.array) else self.array.ctypes.data)


@dataclass(frozen=True)
class _Place:
    """Where an output goes: a buffer, or (None) a fresh array in the host's memory or on a GPU."""

    on_gpu: bool
    buffer: Any = None


class IOBinding:
    """The arrays of ``InferenceSession.run_with_iobinding``. Made by ``session.io_binding()``.

    Nothing is copied if all of them are in host memory, or all on the engine's GPU. If some are on the GPU, inputs in host memory
    are copied to it, and outputs that are bound to host memory are copied back.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, _Place] = {}
        self._results: dict[str, Any] = {}
        self._held: dict[str, Any] = {}  # the owners of memory that is bound by its address

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Read this NumPy array, in place, in each run."""
        self._inputs[self._known(name, "input")] = np.asarray(arr_on_cpu)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Read the memory at an address. It must stay valid as long as it is bound.

        ``element_type`` is a NumPy type, or a number of ``onnx.TensorProto``."""
        view = self._view(device_type, device_id)
        self._inputs[self._known(name, "input")] = view(element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Read the memory of an onnxruntime ``OrtValue``, or of a result of :meth:`get_outputs`."""
        self._inputs[self._known(name, "input")] = self._array_of(name, ortvalue)

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0,
        element_type: Any = None, shape: Sequence[int] | None = None, buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        """Write an output to the memory at an address; without an address, to a fresh array on that device."""
        view, buffer = self._view(device_type, device_id), None
        if buffer_ptr is not None:
            if element_type is None or shape is None:
                raise UsageError(f"the buffer of output {name!r} needs an element_type and a shape")
            buffer = view(element_type, shape, buffer_ptr)
        self._outputs[self._known(name, "output")] = _Place(view is _on_gpu, buffer)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Write an output to the memory of an onnxruntime ``OrtValue``."""
        buffer = self._array_of(name, ortvalue)
        self._outputs[self._known(name, "output")] = _Place(on_gpu(buffer), buffer)

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Does nothing: a run reads what the null stream has written."""

    def synchronize_outputs(self) -> None:
        """Does nothing: a run has ended when it returns."""

    def get_outputs(self) -> list[BoundValue]:
        """The outputs of the last run, in the order in which they were bound."""
        return [BoundValue(a) for a in self._results.values()]

    def copy_outputs_to_cpu(self) -> list[Array]:
        """The outputs of the last run in host memory, in the order in which they were bound."""
        return [value.numpy() for value in self.get_outputs()]

    def run(self) -> None:
        """Run once, and wait for the results. Raises InputError for arrays that do not fit, and if no output is bound."""
        if not self._outputs:
            raise InputError("no output is bound", hint="binding.bind_output(NAME) for each output that you need")
        places = [place.on_gpu for place in self._outputs.values()]
        gpu = any([*places, *map(on_gpu, self._inputs.values())])
        cupy = import_cupy("to bind memory of a GPU") if gpu else None
        with nullcontext() if cupy is None else cupy.cuda.Stream.null:
            feeds = {n: cupy.asarray(a) if cupy and not on_gpu(a) else a for n, a in self._inputs.items()}
            buffers = {n: p.buffer for n, p in self._outputs.items() if p.buffer is not None and p.on_gpu == gpu}
            results = self._engine.run(feeds, buffers)
            self._results = {n: _delivered(results[n], p) for n, p in self._outputs.items()}
            if cupy is not None:
                cupy.cuda.Stream.null.synchronize()

    def _known(self, name: str, kind: str) -> str:
        names = [s.name for s in (self._engine.inputs if kind == "input" else self._engine.outputs)]
        if name not in names:
            raise InputError(
                f"there is no {kind} {name!r}", hint=did_you_mean(str(name), names) or f"there are {', '.join(names)}"
            )
        return name

    def _view(self, device_type: str, device_id: int) -> Callable[[Any, Iterable[int], int], Any]:
        """The function that makes an array of memory on this device."""
        if device_type == "cpu":
            return _in_host_memory
        if device_type != "cuda" or device_id != 0:
            raise UsageError(
                f"device {device_type!r} {device_id} cannot be bound",
                hint="the devices are cpu and cuda, both number 0",
            )
        if not self._engine.target.startswith("cuda"):
            raise UsageError(
                f"the engine is for target {self._engine.target}, so memory of a GPU cannot be bound",
                hint='bind memory of the device "cpu", or use the provider CUDAExecutionProvider',
            )
        return _on_gpu

    def _array_of(self, name: str, value: Any) -> Any:
        """The memory of an ``OrtValue`` as an array."""
        if isinstance(value, BoundValue):
            return value.array
        if not hasattr(value, "data_ptr") or not hasattr(value, "element_type"):
            raise UsageError(f"{name!r} is bound to a {type(value).__name__}, not to an OrtValue")
        self._held[name] = value
        return self._view(value.device_name(), 0)(value.element_type(), value.shape(), value.data_ptr())


def _delivered(result: Any, place: _Place) -> Any:
    """A result at its place."""
    if place.on_gpu or not on_gpu(result):
        return result
    host = result.get()
    if place.buffer is None:
        return host
    if place.buffer.shape != host.shape or place.buffer.dtype != host.dtype:
        bound, given = (f"{dtype_name(a.dtype)}{list(a.shape)}" for a in (place.buffer, host))
        raise InputError(f"an output is bound to a buffer {bound}; the result is {given}")
    place.buffer[...] = host
    return place.buffer


def _type_of(element_type: Any) -> DType:
    if isinstance(element_type, int):
        from onnx.helper import tensor_dtype_to_np_dtype

        element_type = tensor_dtype_to_np_dtype(element_type)
    found: DType = np.dtype(element_type)
    return found


def _in_host_memory(element_type: Any, shape: Iterable[int], pointer: int) -> Array:
    dtype, sizes = _type_of(element_type), tuple(map(int, shape))
    if 0 in sizes:
        return np.empty(sizes, dtype)
    memory = (ctypes.c_byte * (prod(sizes) * dtype.itemsize)).from_address(int(pointer))
    found: Array = np.ctypeslib.as_array(memory).view(dtype).reshape(sizes)
    return found


def _on_gpu(element_type: Any, shape: Iterable[int], pointer: int) -> Any:
    cupy = import_cupy("to bind memory of a GPU")
    dtype, sizes = _type_of(element_type), tuple(map(int, shape))
    memory = cupy.cuda.UnownedMemory(int(pointer), prod(sizes) * dtype.itemsize, None, 0)
    return cupy.ndarray(sizes, dtype, cupy.cuda.MemoryPointer(memory, 0))
