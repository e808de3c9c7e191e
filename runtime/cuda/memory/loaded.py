"""Kernels and constants on a GPU, loaded once and shared by the contexts of an engine; and whether GPU and driver can run them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.errors import EngineError, RunError
from optdnn.runtime.cuda.allocator import DeviceMemory
from optdnn.runtime.cuda.compile.nvrtc import version
from optdnn.runtime.cuda.compile.recipes import cubins
from optdnn.runtime.cuda.device import Device, Function, check, driver, gpu_count
from optdnn.runtime.cuda.gpu_facts import capability_of
from optdnn.runtime.cuda.launches.plan import CudaStep, TensorMap
from optdnn.runtime.cuda.launches.steps import ParsedStep
from optdnn.runtime.cuda.launches.waits import check_room
from optdnn.runtime.cuda.libraries.calls import LibraryCall
from optdnn.runtime.cuda.memory.shared import Pool
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.steps.host import HOST

ALIGN = 256
_MAP_TYPES = {
    "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", "tfloat32": "TFLOAT32",
    "int8": "UINT8", "uint8": "UINT8", "float8_e4m3fn": "UINT8",
}  # fmt: skip
"""Element type of a tensor map -> the driver's type; tfloat32 is fp32 in memory and rounded when it is loaded."""


class Loaded:
    """Kernels and constants on the GPU."""

    def __init__(self, program: Program, steps: Sequence[ParsedStep], options: LoadOptions):
        if gpu_count() == 0:
            raise RunError(
                "there is no usable NVIDIA GPU on this machine",
                hint="run it in NumPy: optdnn run --simulate, optdnn.load(..., simulate=True)",
            )
        self.device = Device.open()
        for arch in sorted({k.arch for k in program.kernels}):
            check_arch(arch, self.device)
        check_room(steps, self.device.multiprocessors)
        built = program.meta.get("nvrtc") if options.trust_cubins and not options.recompile else None
        check_driver(str(built) if built else ".".join(map(str, version())), self.device)
        code = cubins(program, trust=options.trust_cubins, recompile=options.recompile, custom_ops=options.custom_ops)
        shared, cluster = [0] * len(code), [1] * len(code)
        for s in steps:
            if not isinstance(s, CudaStep) or isinstance(s.launch, LibraryCall):
                continue
            k = s.launch.kernel
            shared[k], cluster[k] = max(shared[k], s.launch.shared), max(cluster[k], s.launch.cluster)
        make = Function if options.pool is None else options.pool.function
        self.functions: list[Function] = [
            make(cubin, kernel.function, shared=shared[i], wide_cluster=cluster[i] > 8)
            for i, (cubin, kernel) in enumerate(zip(code, program.kernels, strict=True))
        ]
        self.context = check("cuCtxGetCurrent", driver().cuCtxGetCurrent())
        used = {i for s in program.steps if s.executor != HOST for i in s.inputs} | {i for _, i in program.outputs}
        if options.pool is not None:
            pool: Pool = options.pool
            held = {i: program.blobs[b.blob] for i, b in enumerate(program.buffers) if b.blob is not None and i in used}
            self.shared = {i: pool.constant(blob) for i, blob in held.items()}  # they live as long as these references
            self.constants = {i: c.pointer for i, c in self.shared.items()}
            return
        places, size = {}, 0
        for i, b in enumerate(program.buffers):
            if b.blob is not None and i in used:
                places[i] = size
                size += -(-(b.nbytes or 0) // ALIGN) * ALIGN
        hint = "build the engine for several GPUs, each with a part of the weights: --devices 2"
        self.weights = DeviceMemory(size, "the network's weights", hint)
        for i, offset in places.items():
            blob = program.buffers[i].blob
            assert blob is not None
            self.weights.upload(np.ascontiguousarray(program.blobs[blob]), offset)
        self.constants = {i: self.weights.pointer + offset for i, offset in places.items()}

    def activate(self) -> None:
        """Make the engine's context current on the calling thread."""
        check("cuCtxSetCurrent", driver().cuCtxSetCurrent(self.context))


def check_arch(arch: str, device: Device) -> None:
    """Raises EngineError if code for ``arch`` does not run on the device."""
    major, minor = capability_of(arch)
    same = device.capability == (major, minor) if arch.endswith("a") else (
        device.capability[0] == major and device.capability[1] >= minor)  # fmt: skip
    if not same:
        raise EngineError(
            f"the engine was built for {arch}; this GPU, {device.name}, is {device.arch}",
            hint=f"rebuild it: optdnn build MODEL --target cuda:{device.arch}",
        )


def check_driver(compiler: str, device: Device) -> None:
    """Raises EngineError if the driver's CUDA version is older than the compiler's ("13.0") for the engine's kernels: it would not
    load them. Within one major version it does."""
    major = int(compiler.partition(".")[0])
    if device.driver_version[0] < major:
        raise EngineError(
            f"the engine's kernels are for CUDA {compiler}; the driver here supports CUDA "
            f"{'.'.join(map(str, device.driver_version))}",
            hint="update the NVIDIA driver, or load with recompile=True (optdnn run --recompile) with the driver's own NVRTC",
        )


def encode(m: TensorMap[Any], pointer: int) -> bytes:
    """The tensor map at an address, for the kernel's parameters. Raises CudaError."""
    cu = driver()
    u32, u64, maps = cu.cuuint32_t, cu.cuuint64_t, "CU_TENSOR_MAP"
    kind = getattr(cu.CUtensorMapDataType, f"{maps}_DATA_TYPE_{_MAP_TYPES[m.dtype]}")
    swizzle = getattr(cu.CUtensorMapSwizzle, f"{maps}_SWIZZLE_{f'{m.swizzle}B' if m.swizzle else 'NONE'}")
    if m.corners:
        call, half = "cuTensorMapEncodeIm2col", len(m.corners) // 2
        own = [list(m.corners[:half]), list(m.corners[half:]), *m.box[:2], [u32(n) for n in m.steps]]
    else:
        call, own = "cuTensorMapEncodeTiled", [[u32(n) for n in m.box], [u32(1)] * len(m.shape)]
    result = getattr(cu, call)(
        kind, len(m.shape), pointer, [u64(n) for n in m.shape], [u64(n) for n in m.strides], *own,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    opaque = check(f"{call}(shape={list(m.shape)}, strides={list(m.strides)}, box={list(m.box)})", result).opaque
    return struct.pack("16Q", *[int(word) for word in opaque])
