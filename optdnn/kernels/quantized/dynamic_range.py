"""The range of a tensor that is quantized in the same run, and its scale and zero point, in one launch.

Each block finds the minimum and maximum of its part. The last block to finish merges the parts and computes scale and zero point like
ONNX's DynamicQuantizeLinear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.walks import batched, walk
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import merge, vector
from optdnn.kernels.pool.window import load_channels
from optdnn.kernels.reduce.grid import BATCH_S, LAUNCH_S, RATE
from optdnn.kernels.reduce.parts import MERGE_S
from optdnn.kernels.reduce.reduce import MOST_ELEMENTS
from optdnn.kernels.tactic import Offer, ProblemTactic
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import FP32, INT32

THREADS = 1024
AHEAD = 4
"""Loads of a thread that are in flight at once."""
WARP = 32


@dataclass(frozen=True)
class Problem:
    """A tensor as ``accesses`` accesses of ``bytes`` bytes each."""

    accesses: int
    bytes: int


@dataclass(frozen=True, order=True)
class Config:
    """``parts``: number of blocks that share the tensor."""

    parts: int

    def __str__(self) -> str:
        return f"dr{self.parts}"


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of a dependent launch."""
    waves = math.ceil(config.parts / (gpu.multiprocessors * (2048 // THREADS)))
    batches = math.ceil(problem.accesses / config.parts / (THREADS * AHEAD))
    of_multiprocessors = problem.accesses * problem.bytes / min(config.parts, gpu.multiprocessors) / RATE
    return LAUNCH_S + (MERGE_S if config.parts > 1 else 0.0) + max(waves * batches * BATCH_S, of_multiprocessors)


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. No part is empty."""
    most = math.ceil(problem.accesses / THREADS)
    asked = {1, *(min(most, turns * gpu.multiprocessors) for turns in (1, 2, 4)), min(most, 32)}
    found = {Config(-(-problem.accesses // -(-problem.accesses // parts))) for parts in asked}
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), c))


def _space(x: TensorView) -> tuple[list[int], list[int], int]:
    """The merged axes of a tensor in accesses, their strides, and the elements of an access."""
    dims, (strides,) = merge(x.shape, [x.strides])
    lanes = vector([x], dims, [strides])
    return [*dims[:-1], dims[-1] // lanes], [*strides[:-1], strides[-1] * lanes], lanes


def _problem(x: TensorView) -> Problem:
    """The kernel's problem for ``x``."""
    dims, _, lanes = _space(x)
    return Problem(math.prod(dims), lanes * x.dtype.itemsize)


class DynamicRange(ProblemTactic):
    """Float tensors with any strides. Minimum and maximum do not depend on the order."""

    name = "dynamic_range"

    def refuse(self, b: Builder, op: Op) -> str | None:
        count = b.source(op.inputs[0]).size
        if count == 0:
            return "it has no elements"
        return "it reads more elements than a kernel counts" if count >= MOST_ELEMENTS else None

    def problem(self, b: Builder, op: Op) -> Problem:
        return _problem(b.source(op.inputs[0]))

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return [Offer(c, estimate(problem, c, gpu)) for c in candidates(problem, gpu)]

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        emit_range(b, op, b.operand(op.inputs[0]), b.target(op.value), b.target(Value(op.id, 1)), config)


def best(x: TensorView, gpu: GpuFacts) -> Config:
    """The configuration that is predicted to be fastest."""
    return candidates(_problem(x), gpu)[0]


def emit_range(b: Builder, op: Op, x: TensorView, scale: TensorView, zero: TensorView, config: Config) -> None:
    """Add the launch that computes scale (fp32) and zero point (uint8) of ``x``."""
    dims, strides, lanes = _space(x)
    parts = -(-math.prod(dims) // -(-math.prod(dims) // config.parts))  # a recorded choice may assume narrower accesses
    operands, scratch, kept = {"x": x, "scale": scale, "zero": zero}, [], []
    if parts > 1:
        name = op.outputs[0].name
        scratch = [b.new(f"{name}.parts", FP32, (parts, 2))]
        kept = [b.new(f"{name}.arrived", INT32, (1,))]
        operands |= {"parts": scratch[0], "arrived": kept[0]}
    parameters = Parameters().pointer(*operands).sizes(*dims).i64(*strides)
    launch = parameters.generated(b.arch, _kernel(x, dims, lanes, parts), "dynamic_range", parts, THREADS)
    b.emit(op, launch, operands, "DynamicRange", {}, [x], [scale, zero], scratch=scratch, kept=kept)


def _joined(count: int) -> str:
    """C++ that combines the ranges of ``count`` neighboring threads."""
    pair = (
        "low = min_nan(low, __shfl_xor_sync(~0u, low, half)); high = max_nan(high, __shfl_xor_sync(~0u, high, half));"
    )
    return f"for (int half = {count // 2}; half; half /= 2) {{ {pair} }}"


def _of_block() -> str:
    """C++ that combines the ranges of all threads of a block."""
    warps = THREADS // WARP
    return f"""{_joined(WARP)}
    if (lane % {WARP} == 0) {{ lows[lane / {WARP}] = low; highs[lane / {WARP}] = high; }}
    __syncthreads();
    low = lows[lane % {warps}]; high = highs[lane % {warps}];
    {_joined(warps)}"""


def _kernel(x: TensorView, dims: Sequence[int], lanes: int, parts: int) -> str:
    """The kernel's text."""
    count = math.prod(dims)
    chunk = -(-count // parts)

    def load(at: str, k: int) -> str:
        way = walk("r", at, "dims", len(dims), [(f"o{k}", "sx")])
        return f"i64 o{k} = 0; {{ {way} }} {load_channels(CPP[x.dtype], lanes, f'p.x + o{k}', f'found{k}')}"

    def use(k: int) -> str:
        value = f"const float v = float(widen(found{k}.lane[j]));"
        return f"for (int j = 0; j < {lanes}; j++) {{ {value} low = min_nan(low, v); high = max_nan(high, v); }}"

    shared, merged = "", ""
    if parts > 1:
        shared = " float* parts; u32* arrived;"
        merged = f"""
    if (lane == 0) {{ p.parts[blockIdx.x * 2] = low; p.parts[blockIdx.x * 2 + 1] = high; }}
    if (!arrives_last(p.arrived, {parts}u)) return;
    low = 0.0f; high = 0.0f;
    for (u32 k = lane; k < {parts}u; k += {THREADS}) {{ low = min_nan(low, p.parts[k * 2]); high = max_nan(high, p.parts[k * 2 + 1]); }}
    {_of_block()}"""
    return f"""struct Params {{ const {CPP[x.dtype]}* x; float* scale; u8* zero;{shared} Size dims[{len(dims)}]; i64 sx[{len(dims)}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) dynamic_range(const __grid_constant__ Params p) {{
    __shared__ float lows[{THREADS // WARP}];
    __shared__ float highs[{THREADS // WARP}];
    launch_dependents();
    wait_for_predecessor();
    const u32 lane = threadIdx.x, begin = blockIdx.x * {chunk}u, end = begin + {chunk}u < {count}u ? begin + {chunk}u : {count}u;
    float low = 0.0f, high = 0.0f;
    {batched(THREADS, AHEAD, load, use)}
    {_of_block()}{merged}
    if (lane == 0) {{
        float scale = (high - low) / 255.0f;
        scale = scale > 0.0f ? scale : 1.0f;
        p.scale[0] = scale;
        p.zero[0] = u8(rint(min_nan(max_nan(-low / scale, 0.0f), 255.0f)));
    }}
}}
"""
