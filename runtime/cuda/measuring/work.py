"""The least work of a step (floating-point operations and bytes of global memory, from its meaning), and the limits of a GPU.

They give the step's roofline (Williams et al., 2009): no kernel for the step is faster than the longer of the two times, unless its
operands are already in L2, as weights of small networks are in replays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.runtime.cuda.device import Device, device_attribute
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TF32, CudaStep, OperandView
from optdnn.runtime.program import Program, Step
from optdnn.runtime.reference.arithmetic import MOVES, products_of
from optdnn.runtime.steps.attrs import attrs_from_plain
from optdnn.types import BF16, FP16, FP32, DType

TABLES = {"Gather": (0,), "GatherElements": (0,), "GatherND": (0,), "PackedGather": (0, 2, 3), "SelectedProduct": (1,)}
"""Operands that a kind reads in part: some rows of a large table, or the matrices that rows select."""


@dataclass(frozen=True)
class Work:
    """``flops`` (a multiply-add counts as two) on tensor cores with operands of ``dtype`` if ``matrix``, otherwise on scalar
    units; ``bytes``: each element that is read or written, counted once. ``rounded``: factors of fp32 are rounded to tf32;
    ``halves``: they are sums of two numbers of fp16."""

    flops: int
    bytes: int
    matrix: bool
    dtype: DType
    rounded: bool = False
    halves: bool = False


@dataclass(frozen=True)
class Ceilings:
    """A GPU's nominal limits: bytes per second, and operations per second of 16-bit matrix products and of fp32 arithmetic."""

    memory: float
    half: float
    single: float

    @classmethod
    def of(cls, device: Device) -> Ceilings:
        """From the device's clocks and widths. Raises CudaError."""
        clock, memory_clock, width = (
            device_attribute(name, device.index)
            for name in ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
        )
        cycles = clock * 1e3 * device.multiprocessors
        return cls(memory_clock * 1e3 * 2 * width / 8, cycles * device.matrix_ops, cycles * 256)

    @classmethod
    def nominal(cls, gpu: GpuFacts) -> Ceilings:
        """For predictions: at the clock under load."""
        cycles = gpu.clock * gpu.multiprocessors
        return cls(gpu.bandwidth, cycles * gpu.matrix_ops, cycles * 256)

    def seconds(self, work: Work) -> float:
        """The least time of a step's work. Tensor cores multiply tf32 at half the rate of 16-bit floats; a product of fp32 is three
        of fp16, three of tf32, or runs on scalar units."""
        rate = self.single
        if work.matrix and work.dtype in (FP16, BF16):
            rate = self.half
        elif work.matrix and work.dtype.itemsize == 1:
            rate = self.half * 2
        elif work.matrix and work.dtype == FP32:
            rate = self.half / (2 if work.rounded else 3 if work.halves else 6)
            rate = max(self.single, rate)
        return max(work.flops / rate, work.bytes / self.memory)


def work_of(step: Step, parsed: CudaStep, program: Program) -> Work:
    operands = (*step.inputs, *step.outputs)
    m = parsed.meaning

    def dtype(v: OperandView) -> DType:
        return program.buffers[operands[v.operand]].dtype

    seen = {(v.operand, v.offset, v.shape, v.strides): v for v in (*m.reads, *m.writes) if v is not None}
    moved = sum(_distinct(v) * dtype(v).itemsize for v in seen.values())
    out = next((v for v in m.writes if v is not None), None)
    tables = TABLES[m.kind] if m.kind in TABLES else m.attrs["rows"] if m.kind == "PointwiseOfRows" else ()
    read_in_part = [data for k in tables if k < len(m.reads) and (data := m.reads[k]) is not None]
    for data in read_in_part:
        if out is not None:
            # Elements that are read for an element of the result.
            each = data.shape[-1] if m.kind == "SelectedProduct" else 1
            moved -= max(0, _distinct(data) - _distinct(out) * each) * dtype(data).itemsize
    first = next((v for v in m.reads if v is not None), out)
    if m.kind in ("ImageConv", "PooledImageConv"):
        first = out  # its factors have the result's type
    kind = dtype(first) if first is not None else FP32
    shapes = [() if v is None else v.shape for v in m.reads]
    product = 0 if out is None else int(products_of(m.kind, shapes, out.shape, attrs_from_plain(dict(m.attrs))))
    if product:
        return Work(product, moved, True, kind, TF32 in m.attrs, m.kind == "WeightsInParts")
    stages = max(1, len(m.attrs.get("epilogue") or ()))
    size = max((math.prod(v.shape) for v in seen.values() if v not in read_in_part), default=0)
    return Work(0 if m.kind in MOVES else size * stages, moved, False, kind)


def _distinct(v: OperandView) -> int:
    """Number of distinct elements in a view: broadcast axes count once."""
    return math.prod(n for n, s in zip(v.shape, v.strides, strict=True) if s != 0)
