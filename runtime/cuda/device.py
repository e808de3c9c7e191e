"""Devices, modules, and launches with attributes, through ``cuda.bindings.driver``.

CuPy (or any other library that uses the primary context) owns the memory; this module launches the kernels that NVRTC
compiled, with features that array libraries lack: clusters, programmatic dependent launch, tensor maps.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda.gpu_facts import GpuFacts, arch_of, named, of_arch, of_attributes
from optdnn.target_name import TargetName


class CudaError(RunError):
    """The CUDA driver refused a call. ``code`` is its name, such as ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, call: str, code: str, text: str):
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


@cache
def driver() -> ModuleType:
    """``cuda.bindings.driver``, initialized. Raises MissingDependency, or CudaError if there is no usable driver or GPU."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingDependency("cuda-bindings", "cuda", "to run on an NVIDIA GPU") from error
    try:
        result = module.cuInit(0)
    except RuntimeError as error:
        raise CudaError("cuInit", "NO_DRIVER", f"the NVIDIA driver's library cannot be loaded: {error}") from error
    if result[0] != module.CUresult.CUDA_SUCCESS:
        raise CudaError("cuInit", result[0].name, "no usable NVIDIA driver or GPU")
    return module


def check(call: str, result: tuple[Any, ...]) -> Any:
    """Unwrap a driver call's ``(status, *values)``. Raises CudaError."""
    status, *values = result
    module = driver()
    if status != module.CUresult.CUDA_SUCCESS:
        _, text = module.cuGetErrorString(status)
        raise CudaError(call, status.name, text.decode() if text else "unknown error")
    return values[0] if len(values) == 1 else tuple(values) if values else None


def gpu_count() -> int:
    """The number of GPUs: 0 without a driver. Raises MissingDependency."""
    try:
        return int(check("cuDeviceGetCount", driver().cuDeviceGetCount()))
    except CudaError:
        return 0


def read_facts(index: int = 0) -> GpuFacts:
    """The facts of GPU ``index``. Creates no context, unlike :meth:`Device.open`. Raises CudaError, MissingDependency."""
    cu = driver()
    handle = check("cuDeviceGet", cu.cuDeviceGet(index))
    name = check("cuDeviceGetName", cu.cuDeviceGetName(256, handle)).split(b"\0")[0].decode()
    return of_attributes(name, lambda attribute: device_attribute(attribute, index))


def device_attribute(name: str, index: int) -> int:
    """The attribute ``CU_DEVICE_ATTRIBUTE_<name>`` of GPU ``index``. Creates no context. Raises CudaError, MissingDependency."""
    cu = driver()
    handle = check("cuDeviceGet", cu.cuDeviceGet(index))
    key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(key, handle)))


def facts_for(target: TargetName) -> GpuFacts:
    """The facts of the GPU that a build for ``target`` plans for: the named GPU; otherwise this machine's GPU if it has the
    architecture; otherwise the architecture's default. Creates no context. Raises InternalError if there is none."""
    if target.gpu:
        return named(target.gpu)
    here = _facts_here()
    return here if here is not None and here.arch == target.arch else of_arch(target.arch)


def differs_here(target: TargetName) -> str | None:
    """How this machine's GPU differs from the target's; None if times measured here are valid for the target.

    Raises CudaError, MissingDependency if there is no GPU.
    """
    here, meant = read_facts(), facts_for(target)
    if (here.arch, here.multiprocessors) == (meant.arch, meant.multiprocessors):
        return None
    return f"this GPU is {here.name} ({here.arch}, {here.multiprocessors} multiprocessors), not {target.gpu or target.arch}"


@cache
def _facts_here() -> GpuFacts | None:
    try:
        return read_facts()
    except (MissingDependency, CudaError):
        return None


_chosen = 0
"""The index of the GPU that this process uses."""


def choose(index: int) -> None:
    """Make :meth:`Device.open` open GPU ``index``: a process that is one rank of several uses its own GPU."""
    global _chosen
    _chosen = index


@dataclass(frozen=True)
class Device(GpuFacts):
    """One GPU of this machine, and its facts."""

    index: int
    driver_version: tuple[int, int]

    @classmethod
    def open(cls, index: int | None = None) -> Device:
        """Query GPU ``index`` (None: the chosen one, or 0) and make its primary context current on this thread."""
        index = _chosen if index is None else index
        cu = driver()
        handle = check("cuDeviceGet", cu.cuDeviceGet(index))
        context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(handle))
        check("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))
        version = int(check("cuDriverGetVersion", cu.cuDriverGetVersion()))
        return cls(**vars(read_facts(index)), index=index, driver_version=(version // 1000, version % 1000 // 10))

    @property
    def place(self) -> str:
        """The PCI bus id, which identifies the GPU even if other GPUs are hidden from this process."""
        cu = driver()
        handle = check("cuDeviceGet", cu.cuDeviceGet(self.index))
        bus_id: bytes = check("cuDeviceGetPCIBusId", cu.cuDeviceGetPCIBusId(32, handle))
        return bus_id.split(b"\0")[0].decode()


def arch_here() -> str:
    """The architecture of the first GPU. Creates no context, unlike :meth:`Device.open`. Raises CudaError, MissingDependency."""
    return arch_of(*(device_attribute(f"COMPUTE_CAPABILITY_{part}", 0) for part in ("MAJOR", "MINOR")))


ALL_SHARED = frozenset({"packed_digits"})
"""Kernels that use all of L1 as shared memory: they read nothing twice through L1, and the blocks of the next launch begin while
theirs run. Other kernels become slower: products of few rows with 16-bit weights read rows through L1."""


class Function:
    """A kernel of a loaded cubin. Keeps its module alive; unloading happens when the last function goes."""

    def __init__(self, cubin: bytes, name: str, *, shared: int = 0, wide_cluster: bool = False):
        cu = driver()
        self.name = name
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin))
        self.handle = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, name.encode()))
        self._shared, self._wide = 48 * 1024, False
        if name in ALL_SHARED:
            key = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self.handle, key, 100))
        self.allow(shared, wide_cluster)

    def allow(self, shared: int, wide_cluster: bool) -> None:
        """Allow launches with this many bytes of dynamic shared memory, and clusters of more than 8 blocks; never less than
        before."""
        cu = driver()
        attribute = cu.CUfunction_attribute
        if shared > self._shared:
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self.handle, key, shared))
            self._shared = shared
        if wide_cluster and not self._wide:
            key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self.handle, key, 1))
            self._wide = True


class Launch:
    """One kernel launch with its parameters, ready to be enqueued (or captured) any number of times.

    ``parameters`` are the raw bytes of each kernel parameter in order. ``cluster`` counts blocks per cluster along x;
    ``dependent`` asks for programmatic dependent launch: the kernel may start before its predecessor in the stream ends, and
    must execute ``griddepcontrol.wait`` before it accesses data that the predecessor writes or reads. ``cooperative``: all
    blocks are on the GPU at once.
    """

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: int,
        parameters: Sequence[bytes],
        *,
        shared: int = 0,
        cluster: int = 1,
        dependent: bool = True,
        cooperative: bool = False,
        label: str = "",
    ):
        cu = driver()
        self.function, self.grid, self.block, self.shared, self.cluster = function, grid, block, shared, cluster
        self.label = label or function.name
        self._buffers = [ctypes.create_string_buffer(value, len(value)) for value in parameters]
        self._pointers = (ctypes.c_void_p * len(parameters))(*[ctypes.addressof(buffer) for buffer in self._buffers])
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        attributes = []
        if cluster > 1:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
            attributes.append(attribute)
        if cooperative:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if dependent:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config, self._attributes, self.dependent = config, len(attributes), dependent

    @property
    def parameters_address(self) -> int:
        """Address of the array of the parameters' addresses, in the driver's form; valid as long as this object lives."""
        return ctypes.addressof(self._pointers)

    def enqueue(self, stream: int, *, early: bool = True) -> None:
        """Launch on the stream with this handle (an int, as array libraries expose it). Not ``early``: only after all its
        dependencies have ended, even if it is a dependent launch."""
        cu = driver()
        self._config.hStream = cu.CUstream(stream)
        self._config.numAttrs = self._attributes - (self.dependent and not early)  # "dependent" is the last
        result = cu.cuLaunchKernelEx(self._config, self.function.handle, self.parameters_address, 0)
        check(f"cuLaunchKernelEx of {self.label}", result)
